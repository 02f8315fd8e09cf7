"""Define the wire form of OpenAI's Responses."""

import json
from collections.abc import Mapping

from baar_jax.llms.wire import (
  ToolCall,
  Turn,
  WireForm,
  check_objects,
  check_text,
  read_content,
)

# Fields of a tool call's item that are no arguments. The arguments of most calls are in
# one field, and those of built-in tools in other fields.
ENVELOPE = ("id", "type", "status", "call_id", "name", "namespace")
# Most responses and items that are remembered.
MOST_ITEMS = 300


def read_item(item: Mapping) -> Turn | None:
  """Read an item of a conversation.

  Returns:
    The turn; None for an item without text, such as reasoning.

  Raises:
    ValueError: a field of the item has another type.
  """
  kind = check_text(item.get("type") or "message")
  if kind == "message":
    return Turn(check_text(item.get("role")), read_content(item.get("content")))
  if kind.endswith("_output"):
    output = item.get("output")
    if isinstance(output, dict):
      output = json.dumps(output)
    return Turn("tool", read_content(output))
  if not kind.endswith("_call"):
    return None
  arguments = item.get("arguments", item.get("input"))
  if not isinstance(arguments, str):
    fields = {name: item[name] for name in item if name not in ENVELOPE}
    arguments = json.dumps(fields)
  name = check_text(item.get("name") or kind)
  return Turn("assistant", "", (ToolCall(name, check_text(arguments)),))


def read_items(items: object) -> list[Turn]:
  """Read the items of a conversation. Consecutive items of a reply are one turn."""
  turns = []
  for item in check_objects(items, "input"):
    turn = read_item(item)
    if turn is None:
      continue
    if turn.role == "assistant" and turns and turns[-1].role == "assistant":
      last = turns.pop()
      text = "\n".join(filter(None, (last.text, turn.text)))
      turn = Turn("assistant", text, last.calls + turn.calls)
    turns.append(turn)
  return turns


class Responses(WireForm):
  """OpenAI's Responses."""

  path = "responses"
  history = "input"
  opening = ("instructions", "tools", "text")
  limits = ("max_output_tokens",)
  endings = (
    "response.completed",
    "response.incomplete",
    "response.failed",
    "response.cancelled",
  )

  def read_turns(self, body: Mapping) -> list[Turn]:
    """Read the instructions and the items of a request."""
    turns = []
    if body.get("instructions"):
      turns.append(Turn("system", check_text(body["instructions"])))
    given = body.get("input")
    if isinstance(given, str):
      given = [{"role": "user", "content": given}]
    items = read_items(given)
    if not items:
      raise ValueError("input must have at least one message")
    return turns + items

  def read_reply(self, answer: Mapping) -> Turn:
    """Read the items of an answer as one turn."""
    turns = read_items(answer.get("output"))
    return turns[0] if turns else Turn("assistant", "")

  def collect(self, answer: dict, event: Mapping) -> None:
    """Take the whole answer from the last event."""
    if event.get("type") in self.endings:
      answer |= event.get("response") or {}

  def write_failure(self, error: dict, status: int) -> dict:
    """Write the event of a stream that breaks off with an error."""
    return {**error, "type": "error", "sequence_number": 0, "error": error}


class UnknownItem(ValueError):
  """Report a reference to a response or an item that is not remembered."""


class Items:
  """Remember the items of the newest responses, to which later calls may refer."""

  def __init__(self) -> None:
    """Start without items."""
    self._items: dict[tuple[str, str], list] = {}

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
    given = body["input"]
    if isinstance(given, str):
      given = [{"role": "user", "content": given}]
    self._items[client, str(answer.get("id"))] = [*given, *output]
    for item in output:
      if isinstance(item, dict):
        self._items[client, str(item.get("id"))] = [item]
    while len(self._items) > MOST_ITEMS:
      self._items.pop(next(iter(self._items)))

  def resolve(self, client: str, body: dict) -> None:
    """Replace the references of a request by the items.

    Raises:
      UnknownItem: a response or an item is not remembered.
    """
    for field in ("conversation", "prompt", "background"):
      if body.get(field):
        # Only the provider knows what such a call costs.
        raise UnknownItem(f"This server refuses {field}. Send the whole history.")
    given = body.get("input")
    earlier = body.pop("previous_response_id", None)
    items = [*self._find(client, earlier)] if earlier else []
    if isinstance(given, str) and items:
      given = [{"role": "user", "content": given}]
    if not isinstance(given, list):
      return
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
      problem = f"This server does not have the response or item {str(id_)[:80]}"
      raise UnknownItem(f"{problem}. Set store: false, and send the whole history.")
    return items


FORM = Responses()
