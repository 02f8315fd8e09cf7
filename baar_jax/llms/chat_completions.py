"""Write requests and read answers in OpenAI's chat-completions protocol."""

import json
from collections.abc import AsyncIterator
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms.wire import Complaint, Endpoint, WireForm, read_json

LIMITS = ("max_tokens", "max_completion_tokens")
# Providers' service tiers that cost the list price or less. The prices of all other
# tiers count as unknown.
TIERS = (None, "auto", "batch", "default", "flex", "on_demand", "standard")
# A number of tokens that an answer reports. More than 10 million in one call are
# implausible, so they are refused.
Count = Annotated[int, Field(ge=0, le=10**7)]


class Counts(BaseModel):
  """The numbers of tokens in the usage that OpenAI, LiteLLM and DeepSeek report."""

  model_config = {"strict": True}
  prompt_tokens: Annotated[Count, Field(gt=0)]
  completion_tokens: Count
  total_tokens: Count = 0
  cached_tokens: Count = 0
  prompt_cache_hit_tokens: Count = 0
  prompt_cache_miss_tokens: Count = 0
  cache_write_tokens: Count = 0
  cache_creation_tokens: Count = 0


def read_counts(fields: dict) -> Usage:
  """Read the counts of tokens in a `usage` object.

  If the total exceeds prompt plus completion, the excess counts as completion, because
  some providers report reasoning tokens only in the total.

  Args:
    fields: the `usage` of an answer.

  Raises:
    ValueError: a count is missing, is not a count, or contradicts another count.
    AttributeError: `fields` or its details are not a JSON object.
  """
  reported = {}
  for section in (fields, fields.get("prompt_tokens_details") or {}):
    reported |= {name: count for name, count in section.items() if count is not None}
  try:
    counts = Counts.model_validate(reported)
  except ValidationError:
    raise ValueError(
      "The usage must have prompt_tokens and completion_tokens, and each count must be "
      "a whole number from 0 to 10,000,000. Correct the usage."
    ) from None
  prompt = counts.prompt_tokens
  hits = counts.prompt_cache_hit_tokens
  cached = max(counts.cached_tokens, hits)
  written = max(counts.cache_write_tokens, counts.cache_creation_tokens)
  minimum = prompt + counts.completion_tokens
  total = reported.get("total_tokens", minimum)
  misses = reported.get("prompt_cache_miss_tokens", prompt - hits)
  if cached + written > prompt or total < minimum or misses != prompt - hits:
    raise ValueError(
      "The counts of the usage disagree: cached and written tokens must fit into the "
      "prompt, prompt and completion into the total. Correct the usage."
    )
  return Usage(prompt, cached, total - prompt, written)


def read_usage(fields: dict) -> Usage | None:
  """Read the usage of an answer or of a stream's chunk.

  Returns:
    The usage; None if it is missing or impossible.
  """
  try:
    return read_counts(fields.get("usage"))
  except (ValueError, AttributeError):
    return None


def list_headers(endpoint: Endpoint, key: str) -> dict[str, str]:
  """Make the request headers that carry the key, and for OpenAI also the account.

  Args:
    endpoint: the address of the model.
    key: the key for this address.

  Returns:
    The value of each header, by its name in lower case.
  """
  headers = {}
  if endpoint.is_openai:
    import openai

    # OpenAI's client makes headers from the environment variables OPENAI_ORG_ID,
    # OPENAI_CUSTOM_HEADERS and similar ones.
    for name, value in openai.AsyncOpenAI(api_key=key).default_headers.items():
      if isinstance(value, str):
        headers[name.lower()] = value
  headers["authorization"] = f"Bearer {key}"
  return headers


def write_request(body: dict, endpoint: Endpoint, config: ModelsConfig) -> dict:
  """Write a request for a model.

  A request without a limit on the tokens of a reply gets the configured limit. A
  streamed request also asks for the usage.

  Args:
    body: the caller's request, as a chat completion; its model is replaced.
    endpoint: the model's name and address.
    config: the settings, with the limit on the tokens of a reply.
  """
  request = body | {"model": endpoint.model}
  request.pop("session_id", None)
  if not any(map(body.get, LIMITS)):
    request[config.token_limit_field] = config.max_completion_tokens
  if body.get("stream"):
    options = body.get("stream_options") or {}
    request["stream_options"] = options | {"include_usage": True}
  if endpoint.is_openai:
    request.setdefault("service_tier", "default")
  return request


def read_answer(body: bytes) -> dict:
  """Read an answer as a chat completion; {} if it cannot be read.

  If any JSON object in the answer has the same key twice, the usage could be ambiguous.
  The usage is then set to None, which means that the answer cannot be priced.
  """
  has_repeated_key = []

  def read_object(pairs: list[tuple[str, object]]) -> dict:
    """Read an object of the JSON text, and note whether a key occurs twice."""
    fields = dict(pairs)
    has_repeated_key.append(len(fields) < len(pairs))
    return fields

  try:
    text = body.decode("utf-8-sig", errors="replace")
    fields = json.loads(text, object_pairs_hook=read_object)
  except (ValueError, RecursionError):
    return {}
  if not isinstance(fields, dict):
    return {}
  return fields | {"usage": None} if any(has_repeated_key) else fields


def read_error(text: str) -> Complaint:
  """Read the message, type and code in the body of an HTTP error.

  A field that is missing in the body is "" in the result.
  """
  fields = read_json(text) or {}
  error = fields.get("error", fields)
  if not isinstance(error, dict):
    error = {}
  return Complaint(
    message=str(error.get("message") or ""),
    type=str(error.get("type") or ""),
    code=str(error.get("code") or ""),
  )


async def read_chunks(events: AsyncIterator[str]) -> AsyncIterator[dict]:
  """Read the chunks of a stream, up to its end mark.

  Args:
    events: the data of each event of the stream.

  Yields:
    Chunks of a chat completion.

  Raises:
    ConnectionError: an event is an error, or is not a JSON object.
  """
  async for data in events:
    if data.strip() == "[DONE]":
      return
    chunk = read_json(data)
    if chunk is None or "error" in chunk:
      raise ConnectionError("the stream has an event that is not a chunk")
    yield chunk


FORM = WireForm(
  path="chat/completions",
  limits=LIMITS,
  headers=list_headers,
  write=write_request,
  read_answer=read_answer,
  read_error=read_error,
  read_chunks=read_chunks,
)
