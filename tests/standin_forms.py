"""Write the answers of a stand-in model in each wire form, as its specification says.

A stream is cut out of the whole answer, so both say the same.
"""

import json
import re
from collections.abc import Iterable
from typing import NamedTuple

Event = tuple[str, dict]
# No text of a prompt, or not the same text in each request.
UNREAD = {"role", "type", "id", "status", "cache_control"}


class Reply(NamedTuple):
  """A model's turn.

  Attributes:
    text: may be empty.
    calls: name and arguments of each tool call; text as arguments is the input of a
      custom tool, which only responses have.
  """

  text: str
  calls: Iterable[tuple[str, dict | str]] = ()


def text_of(value) -> str:
  """Join the texts of a part of a prompt."""
  if isinstance(value, dict):
    value = [part for name, part in value.items() if name not in UNREAD]
  if isinstance(value, list):
    return "".join(map(text_of, value))
  return str(value or "")


def prompt_of(request: dict) -> list:
  """Return the parts of a request's prompt in order, in any form."""
  parts = [request[name] for name in ("instructions", "system") if request.get(name)]
  turns = request.get("input") or request["messages"]
  return parts + (turns if isinstance(turns, list) else [turns])


def words(text: str) -> list[str]:
  return re.findall(r"\s*\S+|\s+", text)


class Chat:
  """OpenAI's chat completions."""

  last = "data: [DONE]\n\n"

  def usage(self, billed: dict) -> dict:
    return dict(
      prompt_tokens=billed["prompt_tokens"],
      completion_tokens=billed["completion_tokens"],
      prompt_tokens_details={"cached_tokens": billed["cached"]},
      total_tokens=billed["prompt_tokens"] + billed["completion_tokens"],
    )

  def body(self, model: str, reply: Reply, number: int) -> dict:
    message = dict(role="assistant", content=reply.text)
    calls = []
    for place, (name, arguments) in enumerate(reply.calls):
      function = dict(name=name, arguments=json.dumps(arguments))
      call_id = f"call_{number}_{place}"
      calls.append(dict(id=call_id, type="function", function=function))
    if calls:
      message["tool_calls"] = calls
    reason = "tool_calls" if calls else "stop"
    choice = dict(index=0, finish_reason=reason, message=message)
    head = dict(id=f"c{number}", object="chat.completion", created=1)
    return head | dict(model=model, choices=[choice])

  def events(self, body: dict) -> Iterable[Event]:
    chunk = body | {"object": "chat.completion.chunk"}
    del chunk["usage"]
    choice = body["choices"][0]
    deltas = [dict(role="assistant", content="")]
    deltas += [{"content": word} for word in words(choice["message"]["content"])]
    for index, call in enumerate(choice["message"].get("tool_calls", ())):
      deltas.append({"tool_calls": [call | {"index": index}]})
    for delta in deltas:
      part = dict(index=0, delta=delta, finish_reason=None)
      yield "", chunk | {"choices": [part]}
    end = dict(index=0, delta={}, finish_reason=choice["finish_reason"])
    yield "", chunk | {"choices": [end]}
    if body["usage"]:
      yield "", chunk | dict(choices=[], usage=body["usage"])

  def error(self, status: str, code: str, message: str) -> dict:
    return {"error": dict(message=message, type="x", code=code or None)}


class Responses(Chat):
  """OpenAI's responses."""

  last = ""

  def usage(self, billed: dict) -> dict:
    return dict(
      input_tokens=billed["prompt_tokens"],
      input_tokens_details={"cached_tokens": billed["cached"]},
      output_tokens=billed["completion_tokens"],
      output_tokens_details={"reasoning_tokens": 0},
      total_tokens=billed["prompt_tokens"] + billed["completion_tokens"],
    )

  def body(self, model: str, reply: Reply, number: int) -> dict:
    output = []
    if reply.text:
      part = dict(type="output_text", text=reply.text)
      message = dict(id=f"msg_{number}", type="message", role="assistant")
      output.append(message | {"content": [part]})
    for place, (name, arguments) in enumerate(reply.calls):
      item = dict(id=f"fc_{number}_{place}", call_id=f"call_{number}_{place}")
      if isinstance(arguments, str):
        item |= dict(type="custom_tool_call", input=arguments)
      else:
        item |= dict(type="function_call", arguments=json.dumps(arguments))
      output.append(item | {"name": name})
    head = dict(id=f"resp_{number}", object="response", status="completed")
    return head | dict(model=model, output=output)

  def events(self, body: dict) -> Iterable[Event]:
    """Leave out most events, because only the last one has what a client needs."""
    yield self.event("created", response=body | dict(output=[], usage=None))
    for index, item in enumerate(body["output"]):
      yield self.event("output_item.done", output_index=index, item=item)
    yield self.event("completed", response=body)

  def event(self, name: str, **fields) -> Event:
    name = f"response.{name}"
    return name, {"type": name} | fields


class Messages:
  """Anthropic's messages."""

  last = ""

  def usage(self, billed: dict) -> dict:
    return dict(
      input_tokens=billed["prompt_tokens"] - billed["cached"],
      cache_read_input_tokens=billed["cached"],
      output_tokens=billed["completion_tokens"],
    )

  def body(self, model: str, reply: Reply, number: int) -> dict:
    content = [dict(type="text", text=reply.text)] if reply.text else []
    for place, (name, arguments) in enumerate(reply.calls):
      call = dict(type="tool_use", id=f"toolu_{number}_{place}")
      content.append(call | dict(name=name, input=arguments))
    return dict(
      id=f"msg_{number}",
      type="message",
      role="assistant",
      model=model,
      content=content,
      stop_reason="tool_use" if reply.calls else "end_turn",
      stop_sequence=None,
    )

  def events(self, body: dict) -> Iterable[Event]:
    for name, fields in self._events(body):
      yield name, {"type": name} | fields

  def _events(self, body):
    usage = body["usage"]
    begun = usage and usage | {"output_tokens": 1}
    start = body | dict(content=[], stop_reason=None, usage=begun)
    yield "message_start", {"message": start}
    for index, block in enumerate(body["content"]):
      place = {"index": index}
      kind = "text_delta"
      field = "text"
      text = block.get("text")
      empty = block | {"text": ""}
      if block["type"] == "tool_use":
        kind = "input_json_delta"
        field = "partial_json"
        text = json.dumps(block["input"])
        empty = block | {"input": {}}
      yield "content_block_start", place | {"content_block": empty}
      for word in words(text):
        yield "content_block_delta", place | {"delta": {"type": kind, field: word}}
      yield "content_block_stop", place
    end = dict(stop_reason=body["stop_reason"], stop_sequence=None)
    yield "message_delta", dict(delta=end, usage=usage)
    yield "message_stop", {}

  def error(self, status: str, code: str, message: str) -> dict:
    return dict(type="error", error=dict(type=code or "x", message=message))


FORMS = {"chat/completions": Chat(), "responses": Responses(), "messages": Messages()}
