"""Define the wire form of OpenAI's Responses."""

import json
from collections.abc import Mapping, Sequence

from baar_jax.llms.history import (
  ToolCall,
  Turn,
  check_objects,
  check_text,
  read_content,
)
from baar_serve.forms.wire import WireForm

# Fields of a tool call's item that are no arguments. The arguments of most calls are in
# one field, and those of built-in tools in other fields.
ENVELOPE = ("id", "type", "status", "call_id", "name", "namespace")
# Most responses and items that are remembered, and the most characters of their JSON.
MOST_ITEMS = 1000
MOST_CHARS = 256 << 20


def join_replies(turns: Sequence[Turn]) -> list[Turn]:
  """Join the consecutive turns of a reply, which has an item for each part."""
  joined = []
  for turn in turns:
    if turn.role == "assistant" and joined and joined[-1].role == "assistant":
      last = joined.pop()
      text = "\n".join(filter(None, (last.text, turn.text)))
      turn = Turn("assistant", text, last.calls + turn.calls)
    joined.append(turn)
  return joined


def list_items(given: object) -> object:
  """Return the input of a request as items; a text is a message of the user."""
  if isinstance(given, str):
    return [{"role": "user", "content": given}]
  return given


class Responses(WireForm):
  """OpenAI's Responses."""

  path = "responses"
  history = "input"
  system = "instructions"
  opening = ("instructions", "tools", "text")
  limits = ("max_output_tokens",)
  text_type = "input_text"
  unpriced = ("conversation", "prompt", "background")
  endings = (
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
  )

  def read_turns(self, body: Mapping) -> list[Turn]:
    """Read the instructions and the items of a request."""
    items = list_items(body.get("input"))
    return join_replies(super().read_turns({**body, "input": items}))

  def read_entry(self, entry: Mapping) -> list[Turn]:
    """Read an item of a conversation."""
    kind = check_text(entry.get("type") or "message")
    if kind == "message":
      return [Turn(check_text(entry.get("role")), read_content(entry.get("content")))]
    if kind.endswith("_output"):
      output = entry.get("output")
      if isinstance(output, dict):
        output = json.dumps(output)
      return [Turn("tool", read_content(output))]
    if not kind.endswith("_call"):
      return []
    arguments = entry.get("arguments", entry.get("input"))
    if not isinstance(arguments, str):
      fields = {name: entry[name] for name in entry if name not in ENVELOPE}
      arguments = json.dumps(fields)
    name = check_text(entry.get("name") or kind)
    return [Turn("assistant", "", (ToolCall(name, check_text(arguments)),))]

  def read_reply(self, answer: Mapping) -> Turn:
    """Read the items of an answer as one turn."""
    turns = []
    for item in check_objects(answer.get("output"), "output"):
      turns += self.read_entry(item)
    return next(iter(join_replies(turns)), Turn("assistant", ""))

  def collect(self, answer: dict, event: Mapping) -> None:
    """Take the whole answer from the last event, or its items from those before."""
    kind = event.get("type")
    items = answer.setdefault("output", [])
    if kind == "response.output_item.done":
      items.append(event["item"])
    if kind in self.endings:
      answer |= event.get("response") or {}
      answer["output"] = answer["output"] or items

  def write_failure(self, error: dict) -> dict:
    """Write the event of a stream that breaks off with an error."""
    return {**error, "type": "error", "sequence_number": 0, "error": error}


class UnknownItem(ValueError):
  """Report a reference to a response or an item that is not remembered."""


class Items:
  """Remember the items of the newest responses, to which later calls may refer."""

  def __init__(self) -> None:
    """Start without items."""
    # As JSON, which takes less memory than objects and tells its size.
    self._items: dict[tuple[str, str], str] = {}

  def record(self, client: str, body: Mapping, answer: Mapping) -> None:
    """Remember the items of a response, unless the client sent store: false.

    Args:
      client: the name of the client's key.
      body: the client's request, without references.
      answer: the whole answer.
    """
    output = answer.get("output")
    if not isinstance(output, list) or body.get("store") is False:
      return
    given = list_items(body["input"])
    self._items[client, str(answer.get("id"))] = json.dumps([*given, *output])
    for item in output:
      if isinstance(item, dict):
        self._items[client, str(item.get("id"))] = json.dumps([item])
    texts = self._items.values()
    while len(texts) > MOST_ITEMS or sum(map(len, texts)) > MOST_CHARS:
      self._items.pop(next(iter(self._items)))

  def resolve(self, client: str, body: dict) -> None:
    """Replace the references of a request by the items.

    Raises:
      UnknownItem: a response or an item is not remembered.
    """
    given = body.get("input")
    earlier = body.pop("previous_response_id", None)
    if earlier:
      given = [{"type": "item_reference", "id": earlier}, *list_items(given or [])]
    if not isinstance(given, list):
      return
    items = []
    for item in given:
      if isinstance(item, dict) and item.get("type") == "item_reference":
        items.extend(self._find(client, item.get("id")))
      else:
        items.append(item)
    body["input"] = items

  def _find(self, client: str, id_: object) -> list:
    """Return the items of a response, or the item, with an id."""
    items = self._items.get((client, str(id_)))
    if items is None:
      raise UnknownItem(
        f"This server does not have the response or item {str(id_)[:80]}. "
        "Set store: false, and send the whole history."
      )
    return json.loads(items)


FORM = Responses()
