"""OpenAI's chat completions: requests, answers, usage, refusals and streams."""

import json
from collections.abc import AsyncIterator
from typing import Annotated

from pydantic import BaseModel, Field, ValidationError

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms.wire import Complaint, Endpoint, WireForm, read_json

LIMITS = ("max_tokens", "max_completion_tokens")
# Service tiers that cost the list price or less. The price of any other one is unknown.
TIERS = (None, "auto", "batch", "default", "flex", "on_demand", "standard")
# The most tokens of one call: no model reads or writes as many.
Count = Annotated[int, Field(ge=0, le=10**7)]


class Counts(BaseModel):
  """The counts of tokens that OpenAI, LiteLLM and DeepSeek report."""

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
  """Read the usage of an answer.

  A total above prompt and completion is billed as completion: some report reasoning so.

  Raises:
    ValueError: a count is missing, is no count, or disagrees with another one.
    AttributeError: a part is no object.
  """
  counts = {}
  for part in (fields, fields.get("prompt_tokens_details") or {}):
    counts |= {name: count for name, count in part.items() if count is not None}
  try:
    told = Counts.model_validate(counts)
  except ValidationError:
    raise ValueError("no count of tokens") from None
  prompt = told.prompt_tokens
  hits = told.prompt_cache_hit_tokens
  cached = max(told.cached_tokens, hits)
  written = max(told.cache_write_tokens, told.cache_creation_tokens)
  least = prompt + told.completion_tokens
  total = counts.get("total_tokens", least)
  misses = counts.get("prompt_cache_miss_tokens", prompt - hits)
  if cached + written > prompt or total < least or misses != prompt - hits:
    raise ValueError("counts that disagree")
  return Usage(prompt, cached, total - prompt, written)


def read_usage(fields: dict) -> Usage | None:
  """Read the usage of an answer or chunk; None if it is missing or impossible."""
  try:
    return read_counts(fields.get("usage"))
  except (ValueError, AttributeError):
    return None


def list_headers(endpoint: Endpoint, key: str) -> dict[str, str]:
  """List the headers of a key; at OpenAI's addresses also those of the account."""
  headers = {}
  if endpoint.is_openai:
    import openai  # It reads OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS and the like.

    for name, value in openai.AsyncOpenAI(api_key=key).default_headers.items():
      if isinstance(value, str):
        headers[name.lower()] = value
  headers["authorization"] = f"Bearer {key}"
  return headers


def write_request(body: dict, endpoint: Endpoint, config: ModelsConfig) -> dict:
  """Write a request for a model, with a limit of tokens; a stream tells its usage."""
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
  """Read an answer's object, {} if there is none. One with a key twice has no usage."""
  repeated = []

  def read_object(pairs: list[tuple[str, object]]) -> dict:
    fields = dict(pairs)
    repeated.append(len(fields) < len(pairs))
    return fields

  try:
    text = body.decode("utf-8-sig", errors="replace")
    fields = json.loads(text, object_pairs_hook=read_object)
  except (ValueError, RecursionError):
    return {}
  if not isinstance(fields, dict):
    return {}
  return fields | {"usage": None} if any(repeated) else fields


def read_error(text: str) -> Complaint:
  """Read a refusal's message, type and code; "" for each that is missing."""
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
  """Yield a stream's chunks up to its end mark. Raises ConnectionError for no chunk."""
  async for data in events:
    if data.strip() == "[DONE]":
      return
    chunk = read_json(data)
    if chunk is None or "error" in chunk:
      raise ConnectionError("no chunk")
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
