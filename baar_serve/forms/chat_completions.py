"""Define the wire form of OpenAI's chat completions."""

from collections.abc import Mapping

from baar_jax.llms.history import Turn, check_objects, read_message
from baar_jax.llms.provider import Endpoint
from baar_serve.forms.wire import WireForm

# Most tool calls of a reply that are read.
MOST_CALLS = 1000


class ChatCompletions(WireForm):
  """OpenAI's chat completions."""

  path = "chat/completions"
  history = "messages"
  opening = ("tools", "functions", "response_format")
  limits = ("max_completion_tokens", "max_tokens")
  unpriced = ("audio",)
  endings = ("[DONE]",)
  # LiteLLM, and so aider and mini-swe-agent, repeat a call after most other statuses.
  last_status = 404

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
        message["content"] += delta.get("content") or ""
        for part in delta.get("tool_calls") or ():
          _extend_call(message.setdefault("tool_calls", []), part)

  def is_hidden(self, event: Mapping, body: Mapping) -> bool:
    """Tell whether an event has the usage, and the client has not asked for it."""
    options = body.get("stream_options") or {}
    is_usage = event.get("usage") is not None and not event.get("choices")
    return is_usage and not options.get("include_usage")


def _extend_call(calls: list[dict], part: Mapping) -> None:
  """Add a part of a streamed tool call to the calls of its message."""
  index = min(part.get("index") or 0, MOST_CALLS)
  while len(calls) <= index:
    calls.append({"function": {"name": "", "arguments": ""}})
  for source in ("function", "custom"):
    fields = part.get(source) or {}
    function = calls[index]["function"]
    function["name"] += fields.get("name") or ""
    function["arguments"] += fields.get("arguments") or fields.get("input") or ""


FORM = ChatCompletions()
