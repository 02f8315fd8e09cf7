"""What an attempt at a chat completion came to: read from an endpoint's answer or its refusal."""

import contextlib
import dataclasses
import email.utils
import json
import time

import openai

from baar_jax.episode import Usage
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY, RETRY
from baar_jax.llms.endpoints import NO_KEY, Endpoint
from baar_jax.llms.prices import Price

RETRIED = (408, 409, 429)  # and all from 500 on
UNKNOWN = (408, 502, 504, 524)  # lost behind the endpoint: the model may have been at work
# The HTTP library's names of what goes wrong before a request has left.
NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")
NOT_SENT += ("LocalProtocolError", "UnsupportedProtocol")
LONGEST_COMPLAINT = 200  # characters of an endpoint's message in an error


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of one attempt."""

  text: str | None = None  # None if there is no usable reply, for the reason in `problem`
  usage: Usage | None = None  # None where the endpoint reported none
  problem: str = ""
  unknown: bool = False  # whether it may have been billed without a report
  fatal: bool = False  # asking again cannot help, nor can asking anything else
  hopeless: bool = False  # asking this again cannot help
  wait_s: float = 0.0  # seconds that the endpoint asks to wait before the next attempt

  @property
  def kind(self) -> str:
    """How the attempt is recorded; see `calls`."""
    if self.text is not None:
      return REPLY
    if self.usage is not None:
      return RETRY
    return PRESUMED if self.unknown else FAILED


def read_failure(error: Exception) -> Outcome:
  """The outcome of an attempt without an answer: a time-out or an error of the connection."""
  wrapped = isinstance(error, openai.APIConnectionError)
  cause = type(error.__cause__ if wrapped else error).__name__
  return Outcome(problem=f"did not answer ({cause})", unknown=cause not in NOT_SENT)


def read_refusal(error: openai.APIStatusError, endpoint: Endpoint, key: str) -> Outcome:
  """The outcome that a status of 400 and above tells of; the key is never repeated."""
  status, complaint = error.status_code, error.message
  if key != NO_KEY:
    complaint = complaint.replace(key, "***")
  complaint = " ".join(complaint.split())[:LONGEST_COMPLAINT]
  too_long = status < 500 and "context length" in error.response.text.lower()
  if too_long or error.code == "context_length_exceeded":
    return Outcome(problem=f"takes no conversation this long: {complaint}", hopeless=True)
  if status == 400 and error.code == "content_filter":
    return Outcome(problem=f"takes no conversation like this: {complaint}", hopeless=True)
  if error.code == "insufficient_quota":
    return Outcome(problem="answered 429: this account's quota is used up", fatal=True)
  if status in RETRIED or status >= 500:
    wait_s = retry_after_s(error.response.headers.get("retry-after", ""))
    return Outcome(problem=f"answered {status}", unknown=status in UNKNOWN, wait_s=wait_s)
  variable = endpoint.variable or "a variable that --config.models.key_variables names"
  if status in (401, 403):  # the endpoint's message may quote a part of the key
    return Outcome(problem=f"answered {status}: check the key in {variable}", fatal=True)
  problem = f"answered {status}: {complaint}; see --config.models (its key is in {variable})"
  return Outcome(problem=problem, fatal=True)


def read_answer(body: bytes | str, price: Price) -> Outcome:
  """The outcome that a response's body tells of."""
  try:
    fields = json.loads(body)
  except (ValueError, RecursionError):
    fields = None
  if not isinstance(fields, dict) or not fields.keys() & {"choices", "usage"}:
    return Outcome(problem="sent an answer that cannot be read", unknown=True)
  try:
    usage = read_usage(fields["usage"])
    price.cost_usd(usage)
  except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
    problem = "sent an answer whose usage is missing or impossible, so that it cannot be priced"
    return Outcome(problem=problem, unknown=True, fatal=True)
  try:
    choice = fields["choices"][0]
    text, cut = read_text(choice["message"].get("content")), choice.get("finish_reason") == "length"
  except (KeyError, IndexError, TypeError, AttributeError):
    text, cut = "", False
  if text.strip():
    return Outcome(text, usage)
  if cut:  # all tokens went into reasoning, as they would again: the agent's mistake
    return Outcome("", usage)
  return Outcome(usage=usage, problem="sent an answer without content")


def read_text(content: str | list[dict] | None) -> str:
  """The text of a message's content, which some send in parts; "" if it has none."""
  if isinstance(content, list):
    content = "".join(part["text"] for part in content if part.get("type") == "text")
  if not isinstance(content, str):
    return ""
  return content.encode(errors="replace").decode()  # half a pair of surrogates is no text


def read_usage(fields: dict) -> Usage:
  """Usage as endpoints report it; the total and the parts of the prompt are optional.

  What the total counts beyond prompt and completion is billed as completion: some report the
  tokens of a model's reasoning so.
  """
  details = fields.get("prompt_tokens_details") or {}
  prompt, completion = int(fields["prompt_tokens"]), int(fields["completion_tokens"])
  return Usage(
    prompt_tokens=prompt,
    cached_tokens=int(details.get("cached_tokens") or 0),
    completion_tokens=max(completion, int(fields.get("total_tokens") or 0) - prompt),
    cache_write_tokens=int(details.get("cache_write_tokens") or 0),
  )


def retry_after_s(header: str) -> float:
  """Seconds that a Retry-After header asks to wait: a number, or the date until when."""
  with contextlib.suppress(ValueError):
    return max(0.0, float(header))
  try:
    return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
  except (ValueError, OverflowError):
    return 0.0
