"""Define the wire form of Anthropic's Messages."""

import json
from collections.abc import Mapping

from baar_jax.llms.history import (
  REASONING_TYPES,
  ToolCall,
  Turn,
  check_objects,
  check_text,
  read_content,
)
from baar_jax.llms.provider import Endpoint
from baar_serve.forms.wire import WireForm


def read_blocks(role: str, content: object) -> list[Turn]:
  """Read the content of a message: its tool results, and then the rest.

  Raises:
    ValueError: a block has a wrong field.
  """
  if not isinstance(content, list):
    return [Turn(role, read_content(content))]
  turns = []
  rest = []
  calls = []
  for block in check_objects(content, "content"):
    kind = block.get("type")
    if kind == "tool_result":
      turns.append(Turn("tool", read_content(block.get("content"))))
    elif kind in ("tool_use", "server_tool_use"):
      arguments = json.dumps(block.get("input"))
      calls.append(ToolCall(check_text(block.get("name")), arguments))
    elif kind not in REASONING_TYPES:
      rest.append(block)
  if rest or calls or not turns:
    turns.append(Turn(role, read_content(rest), tuple(calls)))
  return turns


class Messages(WireForm):
  """Anthropic's Messages."""

  path = "messages"
  history = "messages"
  system = "system"
  opening = ("system", "tools", "tool_choice", "thinking")
  limits = ("max_tokens",)
  unpriced = ("speed", "inference_geo")
  no_tool = {"type": "none"}
  counts_beside = True
  endings = ("message_stop",)

  def list_headers(self, endpoint: Endpoint, key: str) -> dict[str, str]:
    """Make the request headers that carry the key, and the version.

    Anthropic reads the key in x-api-key. Some gateways read it in authorization.
    """
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    if not f".{endpoint.host}".endswith(".anthropic.com"):
      headers |= super().list_headers(endpoint, key)
    return headers

  def read_entry(self, entry: Mapping) -> list[Turn]:
    """Read a message."""
    return read_blocks(check_text(entry.get("role")), entry.get("content"))

  def read_reply(self, answer: Mapping) -> Turn:
    """Read the blocks of an answer."""
    blocks = check_objects(answer.get("content"), "content")
    for block in blocks:
      if "parts" in block:
        block["input"] = json.loads("".join(block.pop("parts")) or "{}")
    return read_blocks("assistant", blocks)[-1]

  def collect(self, answer: dict, event: Mapping) -> None:
    """Add an event to the blocks of the answer."""
    blocks = answer.setdefault("content", [])
    kind = event.get("type")
    if kind == "content_block_start":
      blocks.append({**event["content_block"], "index": event.get("index")})
    if kind == "content_block_delta":
      # Several blocks may be open, and some models give one index to all of them.
      index = event.get("index")
      block = [block for block in blocks if block["index"] == index][-1]
      delta = event["delta"]
      if delta.get("type") == "text_delta":
        block["text"] += delta["text"]
      if delta.get("type") == "input_json_delta":
        block.setdefault("parts", []).append(delta["partial_json"])

  def write_error(self, error: dict) -> dict:
    """Write the body of an error."""
    return {"type": "error", "error": error}


FORM = Messages()
