"""Define the wire form of OpenAI's chat completions."""

from collections.abc import Mapping

from baar_jax.llms.history import (
  Turn,
  check_objects,
  read_content,
  read_message,
  write_arguments,
)
from baar_jax.llms.provider import Endpoint, read_json
from baar_serve.forms.wire import WireForm


class ChatCompletions(WireForm):
  """OpenAI's chat completions."""

  path = "chat/completions"
  history = "messages"
  opening = ("tools", "functions", "response_format")
  limits = ("max_completion_tokens", "max_tokens")
  unpriced = ("audio",)
  endings = ("[DONE]",)

  def write_request(self, body: Mapping, endpoint: Endpoint) -> dict:
    """Write a request for a model; a streamed request also asks for the usage."""
    request = {**body}
    request.pop("session_id", None)
    if body.get("stream"):
      options = body.get("stream_options") or {}
      request["stream_options"] = options | {"include_usage": True}
    return super().write_request(request, endpoint)

  def read_entry(self, entry: Mapping) -> list[Turn]:
    """Read a message."""
    return [read_message(entry)]

  def read_reply(self, answer: Mapping) -> Turn:
    """Read the message of the first choice."""
    choices = check_objects(answer.get("choices"), "choices")
    if not choices:
      return Turn("assistant", "")
    message = choices[0].get("message")
    return read_message({"role": "assistant"} | check_objects([message], "message")[0])

  def collect(self, answer: dict, event: Mapping) -> None:
    """Add a chunk to the message of the first choice."""
    choices = answer.setdefault("choices", [{"message": {"content": ""}}])
    message = choices[0]["message"]
    for choice in event.get("choices") or ():
      if choice.get("index", 0) == 0:
        delta = choice.get("delta") or {}
        message["content"] += read_content(delta.get("content"))
        message["content"] += delta.get("refusal") or ""
        parts = [*(delta.get("tool_calls") or ())]
        if delta.get("function_call"):
          parts.append({"function": delta["function_call"]})
        for part in parts:
          _extend_call(message.setdefault("tool_calls", []), part)

  def is_hidden(self, event: Mapping, body: Mapping) -> bool:
    """Tell whether an event has the usage, and the client has not asked for it."""
    options = body.get("stream_options") or {}
    is_usage = event.get("usage") is not None and not event.get("choices")
    return is_usage and not options.get("include_usage")


def _extend_call(calls: list[dict], part: Mapping) -> None:
  """Add a part of a streamed tool call to the calls of its message.

  A call begins at a new index. Some models give one index, or none, to all calls; then
  a name with another id begins a call, and so does a name after a whole call.
  """
  fields = part.get("function") or part.get("custom") or {}
  name = fields.get("name") or ""
  arguments = write_arguments(fields.get("arguments") or fields.get("input"))
  index = part.get("index")
  same = [call for call in calls if index in (None, call["index"])]
  if not same or name and _is_next(same[-1], part.get("id"), name, arguments):
    function = {"name": "", "arguments": ""}
    same = [{"index": index, "id": part.get("id"), "function": function}]
    calls += same
  function = same[-1]["function"]
  function["name"] = function["name"] or name
  function["arguments"] += arguments


def _is_next(call: dict, id_: str | None, name: str, arguments: str) -> bool:
  """Tell whether a part with a name begins the call after this one."""
  if id_ and call["id"]:
    return id_ != call["id"]
  function = call["function"]
  if not function["arguments"] or not arguments:
    return function["name"] not in ("", name)
  return read_json(function["arguments"]) is not None


FORM = ChatCompletions()
