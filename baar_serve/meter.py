"""Price the answers of providers, also if their usage is split or contradictory."""

import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

from baar_jax.episode import Usage
from baar_jax.llms.prices import ROUNDING, Price, list_price
from baar_jax.llms.provider import TIERS, Meter

# Multiples of the list price, by the fields of an answer that tell them and by their
# values: service tiers, among them OpenAI's Fast and Ultrafast modes, and Anthropic's
# speed and geography. A value that is not listed counts as the costliest one.
MULTIPLES = {
  "service_tier": dict.fromkeys((*TIERS, "standard_only"), 1.0)
  | {"priority": 2.5, "fast": 2.5, "ultrafast": 6.0},
  "speed": {"standard": 1.0, "fast": 6.0},
  "inference_geo": {"global": 1.0, "not_available": 1.0, "us": 1.1},
}
# Multiples from this one on are upper bounds, because models differ.
LEAST_BOUND = 2.0
NO_USAGE = Usage(0, 0, 0)


class Bill(NamedTuple):
  """What an answer costs.

  Attributes:
    usage: its tokens; none if its usage is impossible.
    usd: its dollars.
    problem: what is wrong with them, as sentences; "" if nothing is.
  """

  usage: Usage
  usd: float
  problem: str


@dataclasses.dataclass
class AnswerMeter(Meter):
  """Collect the usage of an answer, and what it says of its price.

  Attributes:
    counts_beside: `WireForm.counts_beside` of the answer.
    is_hourly: whether the request asks for cache writes that live for an hour. Writes
      without a lifetime count as such.
    model: the name of the model that answered.
    parts: the usage of each part of an answer that has several, with the name of its
      model; "" is the model that answered.
    multiples: the highest multiple of the list price that each field has told.
    cut: the indices of the choices that their limit has cut.
    doubt: the reason why the price is uncertain; "" so far.
  """

  counts_beside: bool = False
  is_hourly: bool = False
  model: object = ""
  parts: list[tuple[str, "AnswerMeter"]] = dataclasses.field(default_factory=list)
  multiples: dict[str, float] = dataclasses.field(default_factory=dict)
  cut: set[int] = dataclasses.field(default_factory=set)
  doubt: str = ""

  def note_terms(self, fields: Mapping) -> None:
    """Note what the fields of an answer, or of its usage, say of its price."""
    for name, multiples in MULTIPLES.items():
      value = fields.get(name)
      if value is None:
        continue
      multiple = multiples.get(str(value), max(multiples.values()))
      self.multiples[name] = max(multiple, self.multiples.get(name, 1.0))
      if str(value) not in multiples or multiple >= LEAST_BOUND:
        self.doubt = f"The price of its {name} is not known."

  def note(self, holder: Mapping) -> None:
    """Note the usage of an object with all of its parts."""
    super().note(holder)
    self.model = holder.get("model") or self.model
    choices = holder.get("choices")
    for choice in choices if isinstance(choices, list) else ():
      if isinstance(choice, dict) and choice.get("finish_reason") == "length":
        self.cut.add(choice.get("index"))
    usage = holder.get("usage")
    if not isinstance(usage, dict):
      return
    entries = usage.get("iterations")
    if not isinstance(entries, list):
      return
    self.parts = []
    for entry in entries:
      part = AnswerMeter(counts_beside=self.counts_beside, is_hourly=self.is_hourly)
      if isinstance(entry, dict):
        part.note({**entry, "usage": entry})
      is_own = part.model in ("", self.model)
      self.parts.append(("" if is_own else str(part.model), part))

  def merge(self, counts: dict[str, int]) -> None:
    """Merge the counts of a later event, and add what it counts beside the prompt.

    A gateway may count cached tokens as input, and tell of them in a later event only.
    """
    old = self.counts
    newest = old | counts
    by_lifetime = newest.get("minutes", 0) + newest.get("hour", 0)
    written = newest.get("written", by_lifetime)
    if not counts.keys() & {"minutes", "hour"} and written != by_lifetime:
      # The lifetimes are those of an earlier part of the answer, or missing.
      is_hourly = self.is_hourly or old.get("hour")
      counts |= {"minutes": 0, "hour": written if is_hourly else 0}
    beside = newest.get("cached", 0) + written
    prompt = counts.get("prompt", 0)
    is_inside = old and (not prompt or prompt == old.get("prompt") >= beside)
    if self.counts_beside and not is_inside and "prompt" in newest:
      counts["prompt"] = prompt + beside
    super().merge(counts)

  def bill(self, price: Price, worst_case_usd: float, most_tokens: int = 0) -> Bill:
    """Compute the dollars of the answer.

    An impossible usage costs the worst case. A higher cost that the provider states
    counts as it is.

    Args:
      price: the price of the model that answered.
      worst_case_usd: the worst case of the call.
      most_tokens: the tokens of all choices together, if the limit cuts each of them.
    """
    problem = self.doubt
    try:
      usage = self.usage()
      usd = 0.0
      for model, part in self.parts:
        part_price = list_price(model) if model else price
        usd += part_price.cost_usd(part.usage())
      usd = max(usd, price.cost_usd(usage))
      if len(self.cut) > 1 and usage.completion_tokens < most_tokens:
        usd = worst_case_usd
        problem = "All choices are cut, and the usage does not count them all."
    except ValueError as error:
      usage = NO_USAGE
      usd = worst_case_usd
      problem = str(error)
    usd *= math.prod(self.multiples.values())
    if usd > worst_case_usd * (1 + ROUNDING):
      problem = problem or f"Its worst case was ${worst_case_usd:.6f}."
    if self.cost_usd > usd * (1 + ROUNDING):
      problem = f"The prices give ${usd:.6f}. Correct --config.models.prices."
      usd = self.cost_usd
    return Bill(usage, usd, problem)
