"""Learn from a model's refusals which settings of a request it does not take.

This program chooses the model, so a client cannot know which settings that model takes.
What changes the question itself, such as messages and tools, is never left out.
"""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from baar_jax.llms.history import hash_text
from baar_jax.llms.provider import Outcome
from baar_serve.forms.wire import ARGUMENTS, WireForm, drop_reasoning

# Fields that are part of the question, or of what this program reads in the answer.
KEPT = (
  *("model", "messages", "input", "system", "instructions", "prompt", "n", "stream"),
  *("previous_response_id", "tools", "functions", "tool_choice", "function_call"),
  *("response_format", "format", "stop", "stop_sequences"),
)
# Words of a refusal that say that the model never takes a field.
NEVER = re.compile(
  "unsupported|n.t support|not permitted|not allowed|unknown|unrecogni|extra|unexpected"
)
# Words of a refusal of a limit on the reply, and of one that is too low.
LIMIT = re.compile(r"max\w*tokens|maximum|n_predict|completion|output|context length")
TOO_LOW = re.compile("least|minimum|greater|>=")
# Words about reasoning in the messages, which another model has signed or encrypted.
SIGNED = re.compile(r"signature|encrypted|redacted|reasoning|thinking")


# A lower number in a refusal is no limit, but a status or a number of tokens.
LEAST_LIMIT = 1000


# What a model may demand beside tool calls of another model, and what it accepts in its
# place: a blank, and the value that Google documents for such calls.
DEMANDED = {
  "reasoning_content": " ",
  "thought_signature": "skip_thought_signature_validator",
}
# The ids of tool calls that models accept, by the model's name; the first row counts,
# and "" accepts all.
CALL_IDS = {
  "mistral|ministral|codestral|devstral|magistral|pixtral": "[A-Za-z0-9]{9}",
  "claude": "[A-Za-z0-9_-]{1,64}",
  r"gpt|\bo\d": ".{1,40}",
  "": "",
}
# The field that may forbid all tools; without it, the tools go too.
CHOICE = "tool_choice"
ID_FIELDS = ("tool_call_id", "tool_use_id", "call_id")


class Change(NamedTuple):
  """A change of a request that a refusal asks for.

  Attributes:
    field: the refused field, such as "temperature" or "output_config.effort"; "" is
      all reasoning in the request.
    value: what takes its place: the highest limit on the reply, the name of the field
      that takes the value, what is added (`DEMANDED`), or None for nothing.
    is_lasting: whether the model refuses the field in every request.
  """

  field: str
  value: int | str | None = None
  is_lasting: bool = False

  def apply(self, request: dict) -> dict:
    """Return a changed copy of a request; equal if the request lacks the field."""
    if self.field == CHOICE:
      return {name: request[name] for name in request if name not in (CHOICE, "tools")}
    if not self.field:
      return drop_edits(drop_reasoning(request))
    if self.field in DEMANDED:
      return add_demanded(request, self.field)
    name, _, part = self.field.partition(".")
    changed = {**request}
    value = changed.pop(name, None)
    if value is None:
      return changed
    if isinstance(self.value, int):
      changed[name] = min(value, self.value)
    elif self.value:
      changed[self.value] = value
    elif part:
      # A later request may have another type of value there, which the model judges.
      rest = value
      if isinstance(value, dict):
        rest = {key: value[key] for key in value if key != part}
      changed |= {name: rest} if rest else {}
    return drop_edits(changed) if name == "thinking" else changed


def drop_edits(request: dict) -> dict:
  """Return a request without the edits of the context that need `thinking`."""
  context = request.get("context_management")
  if not isinstance(context, dict) or not isinstance(context.get("edits"), list):
    return request
  rest = [edit for edit in context["edits"] if "thinking" not in str(edit)]
  if rest:
    return request | {"context_management": context | {"edits": rest}}
  return {name: request[name] for name in request if name != "context_management"}


def add_demanded(request: Mapping, field: str) -> dict:
  """Add a field of `DEMANDED` to the messages with tool calls that lack it."""
  messages = []
  for message in request.get("messages", ()):
    calls = message.get("tool_calls")
    if calls and field == "reasoning_content":
      message = {field: DEMANDED[field]} | message
    elif calls:
      extra = {"extra_content": {"google": {field: DEMANDED[field]}}}
      message = {**message, "tool_calls": [extra | calls[0], *calls[1:]]}
    messages.append(message)
  return {**request, "messages": messages}


def fit_ids(value: object, pattern: str) -> object:
  """Return a copy of messages in which the ids of tool calls match a pattern.

  An id that does not match is replaced by nine digits of its hash, so a call and its
  result keep the same one.
  """
  if isinstance(value, list):
    return [fit_ids(part, pattern) for part in value]
  if not isinstance(value, dict):
    return value
  is_call = "function" in value or value.get("type") == "tool_use"
  fitted = {}
  for name, part in value.items():
    if name in ID_FIELDS or (name == "id" and is_call):
      if not re.fullmatch(pattern, str(part)):
        part = hash_text(str(part))[:9]
    elif name not in (*ARGUMENTS, "input"):
      part = fit_ids(part, pattern)
    fitted[name] = part
  return fitted


def list_settings(request: Mapping) -> Iterator[str]:
  """List the fields of a request that may be left out, and their own fields."""
  for name, value in request.items():
    if name not in KEPT and value is not None:
      yield name
      for part in value if isinstance(value, dict) else ():
        if part not in KEPT:
          yield f"{name}.{part}"


def find_change(
  refusal: Outcome, request: Mapping, form: WireForm, is_added: bool
) -> Change | None:
  """Find the change of a request that a refusal asks for; None if it names none.

  Args:
    refusal: the model's answer with the HTTP status 400 or 422.
    request: the request that it refused.
    form: its wire form.
    is_added: whether this program has added the limit on the reply, and no cap needs a
      lower one. Then it may be left out, for no reply of the model is longer.
  """
  words = f"{refusal.param} {refusal.message}".lower()
  for name in DEMANDED:
    if name in words.replace(" ", "_") and re.search("miss|must|require", words):
      return Change(name, DEMANDED[name], True)
  if request.get(CHOICE) == form.no_tool and CHOICE in words.replace(" ", "_"):
    return Change(CHOICE)
  is_lasting = bool(NEVER.search(words))
  limits = [name for name in form.limits if request.get(name)]
  if limits and LIMIT.search(words) and is_lasting:
    for other in form.limits:
      if limits[0] in words and other in words and not request.get(other):
        return Change(limits[0], other, is_lasting)
  elif limits and LIMIT.search(words) and not TOO_LOW.search(words):
    most = read_limit(words, request[limits[0]])
    if most:
      return Change(limits[0], most, not refusal.is_overflow)
    if is_added and re.search(r"\d{3}|context length", words):
      return Change(limits[0])
  if refusal.is_overflow:
    return None
  is_of_messages = f"{form.history}." in words or f"{form.history}[" in words
  if SIGNED.search(words) and (is_of_messages or "signature" in words):
    return Change("")
  settings = [name for name in list_settings(request) if name not in form.limits]
  for name in sorted(settings, key=len, reverse=True):
    # A message may name the last part alone.
    if re.search(rf"(?<![a-z_]){re.escape(name.split('.')[-1])}(?![a-z_])", words):
      return Change(name, None, is_lasting)
  return Change("") if SIGNED.search(words) else None


def read_limit(words: str, sent: int) -> int:
  """Read in a refusal how long a reply may be; 0 if no number below the limit is named.

  Args:
    words: the refusal.
    sent: the refused limit, in tokens.
  """
  difference = re.search(r"(\d+) - (\d+)", words)
  if difference:
    return int(difference[1]) - int(difference[2])
  numbers = {int(text) for text in re.findall(r"\d+", words.replace(",", ""))}
  for total in numbers:
    # Some name the window, the prompt, and what it has together with the limit.
    prompt = total - sent
    if prompt in numbers:
      return max(numbers - {sent, total}) - prompt
  most = max((x for x in numbers if LEAST_LIMIT <= x < sent), default=0)
  return most - (f"{most} (exclusive" in words)
