"""Define the protocol that all wire forms have in common."""

from collections.abc import Callable, Mapping, Sequence

from baar_jax.llms.history import (
  REASONING_TYPES,
  Turn,
  check_objects,
  read_content,
)
from baar_jax.llms.provider import Endpoint


class WireForm:
  """A protocol in which clients call this program, and in which it calls models.

  No form is translated to another one: a call reaches the model in the form of its
  client. Each subclass is in a file of its own.

  Attributes:
    path: path of requests, below a base URL that ends with the version.
    history: field of a request that has the messages.
    opening: fields of a request that a model reads before the messages. If one of them
      changes, the model's prompt cache no longer fits.
    system: field of a request that has the system text; "" if it is in the messages.
    limits: fields of a request that limit the tokens of a reply.
    text_type: type of a part of a message that is a text.
    no_tool: value of the field `tool_choice` that forbids calls of tools.
    unpriced: fields of a request whose effect on the cost only the provider knows.
    counts_beside: whether `input_tokens` leaves out the tokens of prompt caches.
    endings: types or texts of the events that end a stream.
    read_entry: reads an entry of a request's messages; reasoning has no turn.
    read_reply: reads the model's reply in a whole answer. Both raise ValueError if a
      field has another type.
    collect: adds an event of a stream to the whole answer that `read_reply` reads.
  """

  path: str
  history: str
  system = ""
  opening: tuple[str, ...]
  limits: tuple[str, ...]
  text_type = "text"
  no_tool: str | dict = "none"
  unpriced: tuple[str, ...] = ()
  counts_beside = False
  endings: tuple[str, ...]
  read_entry: Callable[[Mapping], list[Turn]]
  read_reply: Callable[[Mapping], Turn]
  collect: Callable[[dict, Mapping], None]

  def list_headers(self, endpoint: Endpoint, key: str) -> dict[str, str]:
    """Make the request headers that carry the key.

    Args:
      endpoint: the address of the model.
      key: the key for this address.

    Returns:
      The value of each header, by its name in lower case.
    """
    return {"authorization": f"Bearer {key}"}

  def limit_reply(self, request: dict, tokens: int, field: str) -> dict:
    """Return a copy of a request that limits the tokens of the reply.

    Args:
      tokens: the limit, which replaces a higher one.
      field: the field for a request without a limit, if this form has it.
    """
    names = [name for name in self.limits if request.get(name)]
    if not names:
      names = [field if field in self.limits else self.limits[0]]
    limited = {**request}
    for name in names:
      limited[name] = min(tokens, request.get(name) or tokens)
    return limited

  def write_request(self, body: Mapping, endpoint: Endpoint) -> dict:
    """Write a request for a model.

    Args:
      body: the caller's request; its model is replaced.
      endpoint: the model's name and address.
    """
    request = {**body, "model": endpoint.model}
    if endpoint.is_openai:
      request.setdefault("service_tier", "default")
    return request

  def add_note(self, body: Mapping, note: str) -> dict | None:
    """Return a copy of a body whose newest entry ends with a note.

    Returns:
      The copy; None if that entry is a reply or has no text.
    """
    *entries, newest = body[self.history]
    field = "output" if "output" in newest else "content"
    text = newest.get(field)
    if newest.get("role") == "assistant":
      return None
    if isinstance(text, str):
      text = f"{text}\n\n{note}"
    elif isinstance(text, list):
      text = [*text, {"type": self.text_type, "text": note}]
    else:
      return None
    return {**body, self.history: [*entries, {**newest, field: text}]}

  def forbid_tools(self, request: dict) -> dict:
    """Return a copy of a request in which the model may call none of the tools."""
    choice = {}
    if request.get("tools"):
      choice["tool_choice"] = self.no_tool
    if request.get("functions"):
      choice["function_call"] = "none"
    return request | choice

  def read_turns(self, body: Mapping) -> list[Turn]:
    """Read the system text and the messages of a request.

    Raises:
      ValueError: a message has a wrong field, or there is no message.
    """
    turns = []
    for entry in check_objects(body.get(self.history), self.history):
      turns += self.read_entry(entry)
    if not turns:
      raise ValueError(f"{self.history} must have at least one message")
    if body.get(self.system):
      turns.insert(0, Turn("system", read_content(body[self.system])))
    return turns

  def is_hidden(self, event: Mapping, body: Mapping) -> bool:
    """Tell whether the client has not asked for an event of its stream."""
    return False

  def write_error(self, error: dict) -> dict:
    """Write the body of an error.

    Args:
      error: the error in OpenAI's form: message, type, code and further fields.
    """
    return {"error": error}

  def write_failure(self, error: dict) -> dict:
    """Write the event of a stream that breaks off with an error."""
    return self.write_error(error)


# Names of fields that hold reasoning, and settings of reasoning.
REASONING_FIELDS = (
  "encrypted_content",
  "extra_content",
  "include",
  "provider_specific_fields",
  "reasoning",
  "reasoning_details",
  "reasoning_effort",
  "thinking",
  "thinking_blocks",
)
# An item of Responses that has an id is refused without its reasoning.
ITEM_TYPES = ("message", "function_call", "custom_tool_call")
# Fields whose contents belong to tools.
ARGUMENTS = ("arguments", "tools")


def drop_reasoning(value: object) -> object:
  """Return a copy of a JSON value without reasoning, and without settings of it."""
  if isinstance(value, list):
    return [
      drop_reasoning(part)
      for part in value
      if not (isinstance(part, dict) and part.get("type") in REASONING_TYPES)
    ]
  if not isinstance(value, dict):
    return value
  dropped = [*REASONING_FIELDS]
  if value.get("type") in ITEM_TYPES:
    dropped.append("id")
  kept = {}
  for name, part in value.items():
    is_argument = name in ARGUMENTS or name == "input" and isinstance(part, dict)
    if name not in dropped:
      kept[name] = part if is_argument else drop_reasoning(part)
  return kept


def pick_headers(headers: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
  """Return the headers of these names, as far as there are any."""
  return {name: headers[name] for name in names if name in headers}
