"""Read the usage that answers report, in every wire form, without trusting it."""

import dataclasses
import json
from collections.abc import Mapping

from baar_jax.episode import Usage

# Providers' service tiers that cost the list price or less. The prices of all other
# tiers count as unknown.
TIERS = ("auto", "batch", "default", "flex", "on_demand", "standard")
# The parts of a usage that have counts, too; and the names of the counts. Names with
# the same value are aliases, and must agree.
SECTIONS = (
  "prompt_tokens_details",
  "input_tokens_details",
  "completion_tokens_details",
  "output_tokens_details",
  "cache_creation",
  "cache_creation_token_details",
)
COUNTS = {
  "prompt_tokens": "prompt",
  "input_tokens": "prompt",
  "completion_tokens": "completion",
  "output_tokens": "completion",
  "total_tokens": "total",
  "reasoning_tokens": "reasoning",
  "thinking_tokens": "reasoning",
  "cached_tokens": "cached",
  "cache_read_tokens": "cached",
  "cache_read_input_tokens": "cached",
  "prompt_cache_hit_tokens": "cached",
  "prompt_cache_miss_tokens": "missed",
  "cache_write_tokens": "written",
  "cache_creation_tokens": "written",
  "cache_creation_input_tokens": "written",
  "ephemeral_5m_input_tokens": "minutes",
  "ephemeral_1h_input_tokens": "hour",
}
UNUSED = ("input_tokens", "output_tokens")
# More tokens in one call are implausible, so they are refused.
MOST_TOKENS = 10**7


class ImpossibleUsage(ValueError):
  """Report a usage that cannot be true, or that cannot be priced."""


@dataclasses.dataclass
class Meter:
  """Collect the usage of one answer from its JSON objects: the whole, or events.

  Attributes:
    counts: the newest counts, by the values of `COUNTS`.
    cost_usd: the dollars that the provider itself states; 0 without.
    problem: the reason why the usage is impossible; "" so far.
  """

  counts: dict[str, int] = dataclasses.field(default_factory=dict)
  cost_usd: float = 0.0
  problem: str = ""

  def read(self, text: str | bytes) -> dict | None:
    """Read a JSON object, and note the usage in it.

    Returns:
      The object; None if the text is not one.
    """
    fields = read_json(text)
    if fields is None:
      return None
    # The events of a stream may have the answer, and so the usage, in a field.
    for holder in (fields, fields.get("response"), fields.get("message")):
      if isinstance(holder, dict):
        self.note(holder)
    return fields

  def note(self, holder: Mapping) -> None:
    """Note the usage of an object, if it has one, and what it says of its price."""
    usage = holder.get("usage")
    if not isinstance(usage, dict):
      if usage is not None:
        self.problem = "it is no JSON object"
      usage = {}
    self.note_terms(holder)
    self.note_terms(usage)
    self.cost_usd = max(self.cost_usd, read_cost(usage))
    counts = {}
    self._collect(usage, counts)
    self.merge(counts)

  def note_terms(self, fields: Mapping) -> None:
    """Note the service tier among the fields of an answer or of its usage."""
    if fields.get("service_tier") not in (None, *TIERS):
      self.problem = "the price of the service tier is not known"

  def merge(self, counts: dict[str, int]) -> None:
    """Merge the counts of a later event into those of earlier ones.

    A later event may split the prompt in another way, but must not make it smaller. A
    zero leaves a count as it is.
    """
    for name in ("prompt", "completion"):
      count = counts.get(name, 0)
      old = self.counts.get(name, 0)
      if 0 < count < old:
        self.problem = "a count shrinks within a stream"
      if old:
        counts[name] = max(count, old)
    self.counts |= counts

  def _collect(self, section: Mapping, counts: dict[str, int]) -> None:
    """Collect the counts of a usage and of its details, by the values of `COUNTS`."""
    for name, count in section.items():
      # A gateway may send zeros under the names of another form.
      is_unused = count == 0 and name in UNUSED and "prompt_tokens" in section
      if count is None or is_unused:
        continue
      if name in SECTIONS and isinstance(count, dict):
        self._collect(count, counts)
        continue
      if name not in (*SECTIONS, *COUNTS):
        continue
      is_count = type(count) is int and 0 <= count <= MOST_TOKENS
      if name in SECTIONS or not is_count:
        self.problem = f"{name} is not a whole number from 0 to {MOST_TOKENS:,}"
      elif counts.setdefault(COUNTS[name], count) != count:
        self.problem = f"{name} disagrees with another name of the same count"

  def usage(self) -> Usage:
    """Compute the tokens of the answer.

    If the total exceeds prompt plus completion, the excess counts as completion,
    because some providers report reasoning only in the total.

    Raises:
      ImpossibleUsage: the usage is missing or impossible; the message is one line.
    """
    counts = self.counts
    prompt = counts.get("prompt", 0)
    cached = counts.get("cached", 0)
    hour = counts.get("hour", 0)
    by_lifetime = hour + counts.get("minutes", 0)
    written = counts.get("written", by_lifetime)
    misses = prompt - cached
    minimum = prompt + counts.get("completion", 0)
    total = counts.get("total", minimum)
    completion = total - prompt
    problem = self.problem
    if not prompt or "completion" not in counts:
      problem = problem or "it must have the tokens of the prompt and of the reply"
    is_split = by_lifetime in (0, written)
    is_fitting = cached + written <= prompt and misses == counts.get("missed", misses)
    is_whole = minimum <= total and counts.get("reasoning", 0) <= completion
    if not (is_split and is_fitting and is_whole):
      problem = problem or "the counts disagree: a part exceeds its whole"
    if problem:
      raise ImpossibleUsage(f"The usage is impossible: {problem}. Correct the usage.")
    return Usage(prompt, cached, completion, written, hour)


def read_cost(usage: Mapping) -> float:
  """Read the dollars that a provider states in a usage; 0 if it states none.

  Some state an object with the total, or, if the key is the user's own, 0 beside what
  the model's own provider charges.
  """
  cost = usage.get("cost")
  details = usage.get("cost_details")
  stated = [cost]
  if isinstance(cost, dict):
    stated.append(cost.get("total_cost"))
  if isinstance(details, dict):
    stated.append(details.get("upstream_inference_cost"))
  return max((x for x in stated if type(x) in (int, float)), default=0.0)


def read_json(text: str | bytes) -> dict | None:
  """Read a JSON object; return None if the text is none, or has NaN or infinities."""
  try:
    fields = json.loads(text)
    json.dumps(fields, allow_nan=False)
  except (ValueError, RecursionError):
    return None
  return fields if isinstance(fields, dict) else None
