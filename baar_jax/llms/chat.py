"""API models over chat completions: OpenAI, or any endpoint that speaks its protocol.

What is billed: an attempt is paid for by the usage that its answer reports. One whose outcome is
unknown (a time-out, a connection lost after the request was sent, an answer that cannot be read)
is presumed to have cost the most that it can, for budgets; nobody can say better. Refusals (4xx and
5xx other than UNKNOWN) are taken to be free, as providers have it.
"""

import dataclasses
import email.utils
import hashlib
import json
import random
import threading
import time
from collections.abc import Callable

import httpx2
import openai

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import Call, Task, Usage
from baar_jax.llms.agent import Agent, Hold, Judge, Messages, NoAnswer, Reply
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY, RETRY, Calls
from baar_jax.llms.endpoints import NO_KEY, Endpoint, endpoints
from baar_jax.llms.prices import Price, prices_of

RETRIED = (408, 409, 429)  # and all from 500 on
UNKNOWN = (408, 502, 504, 524)  # lost behind the endpoint: the model may have been at work
# The HTTP library's names of what goes wrong before a request has left.
NOT_SENT = ("ConnectError", "ConnectTimeout", "PoolTimeout", "ProxyError")
NOT_SENT += ("LocalProtocolError", "UnsupportedProtocol")
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
LONGEST_RETRY_AFTER_S = 300.0  # an endpoint that asks for more ends the run
TOKENS_PER_MESSAGE = 16  # most that a chat template puts around one; a byte is a token at most
LONGEST_COMPLAINT = 200  # characters of an endpoint's own words in an error
ROUNDING = 1e-9  # by which two ways to add up the same dollars may differ, as a share of them


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of one attempt.

  Attributes:
    text: the reply; None if there is no usable one, for the reason in `problem`.
    usage: as reported; None where nothing was.
    unknown: whether it may have been billed all the same.
    fatal: whether asking again cannot help, nor can asking anything else.
    hopeless: whether asking this again cannot help.
    wait_s: seconds that the endpoint asks to wait before the next attempt.
  """

  text: str | None = None
  usage: Usage | None = None
  problem: str = ""
  unknown: bool = False
  fatal: bool = False
  hopeless: bool = False
  wait_s: float = 0.0

  @property
  def kind(self) -> str:
    """What the attempt counts as; see `calls`."""
    if self.text is not None:
      return REPLY
    if self.usage is not None:
      return RETRY
    return PRESUMED if self.unknown else FAILED


class ChatPair:
  """The models of the configuration at their endpoints."""

  kind = "chat"

  def __init__(
    self,
    config: ModelsConfig,
    prices: tuple[Price, ...],
    calls: Calls,
    sleep: Callable[[float], object] | None = None,
    draw: Callable[[], float] = random.random,
  ):
    """Opens no connection yet.

    Args:
      sleep, draw: for tests: waits some seconds; draws from [0, 1).

    Raises:
      ValueError: a key is missing.
    """
    self.names, self.prices, self._calls = config.names, prices, calls
    self._stopping = threading.Event()
    self._sleep, self._draw = sleep or self._stopping.wait, draw
    settings = calls, self._sleep, draw, self._stopping
    self._models = [
      ChatModel(i, endpoint, price, config, *settings)
      for i, (endpoint, price) in enumerate(zip(endpoints(config), prices))
    ]

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ChatAgent"]:
    del env
    return [ChatAgent(model, task, seed, hold) for model in self._models[: len(self.names)]]

  def judge(self, config: ModelsConfig) -> "ChatJudge":
    price = prices_of(config.names, config.prices)[0]
    settings = self._calls, self._sleep, self._draw, self._stopping
    # In the books of calls it comes after the pair.
    model = ChatModel(len(self.names), endpoints(config)[0], price, config, *settings)
    self._models.append(model)
    return ChatJudge(model)

  def stop(self) -> None:
    self._stopping.set()

  def close(self) -> None:
    for model in self._models:
      model.close()
    self._calls.close()


class ChatModel:
  """One model at its endpoint; shared by all episodes and their threads."""

  def __init__(
    self,
    index: int,
    endpoint: Endpoint,
    price: Price,
    config: ModelsConfig,
    calls: Calls,
    sleep: Callable[[float], object],
    draw: Callable[[], float],
    stopping: threading.Event,
  ):
    self.endpoint, self.price, self.config = endpoint, price, config
    self._index, self._calls, self._sleep, self._draw = index, calls, sleep, draw
    self._stopping = stopping
    self._slots = threading.BoundedSemaphore(config.concurrency)
    self._client = openai.OpenAI(
      base_url=endpoint.base_url, api_key=endpoint.key(), timeout=config.timeout_s, max_retries=0
    )
    if not endpoint.openai:  # the client has read them from the environment
      self._client.organization = self._client.project = None

  def close(self) -> None:
    self._client.close()

  def recorded(self, request: str) -> Reply | None:
    return self._calls.find(request) if self.config.record else None

  def request(self, messages: Messages, task_id: str, seed: int, step: int) -> str:
    """A hash of all that a reply depends on, and of which trial it is for."""
    c = self.config
    sampling = c.temperature, c.max_completion_tokens
    all_of_it = self.endpoint.model, self.endpoint.base_url, sampling, messages, task_id, seed, step
    return hashlib.sha256(json.dumps(all_of_it).encode()).hexdigest()

  def ask(self, messages: Messages, seed: int, request: str, bound_usd: float, hold: Hold) -> Reply:
    """A reply, after as many attempts as it takes and the configuration allows.

    Raises:
      NoAnswer: there was none.
      ValueError: the endpoint refuses calls like this one, cannot be priced, asks to wait for too
        long, or has billed more than the most.
      BudgetSpent, CapReached: the next attempt may cost more than is left.
    """
    start, lost = time.monotonic(), []
    where = f"{self.endpoint.model} at {self.endpoint.host}"
    for attempt in range(self.config.retries + 1):
      with self._slots, hold(bound_usd) as cost:
        if self._stopping.is_set():
          raise NoAnswer(f"{self.endpoint.model} was not asked: the run is being stopped")
        number = self._calls.begin(self._index, bound_usd, request)
        cost.usd = bound_usd  # also if whoever waits is interrupted
        outcome = self._attempt(messages, seed)
        cost.usd = self._cost_usd(outcome, bound_usd)
        usage, seconds = outcome.usage or Usage(0, 0, 0), time.monotonic() - start
        reply = None
        if outcome.kind == REPLY:
          reply = Reply(outcome.text, Call(self._index, usage, cost.usd, seconds), tuple(lost))
        elif outcome.kind != FAILED:
          lost.append(Call(self._index, usage, cost.usd, kind=outcome.kind))
        self._calls.end(number, outcome.kind, cost.usd, reply if self.config.record else None)
      if cost.usd > bound_usd * (1 + ROUNDING):
        raise ValueError(
          f"{where} billed {usage.prompt_tokens} prompt and {usage.completion_tokens} completion "
          f"tokens, ${cost.usd:.6f}, and ${bound_usd:.6f} was the most: it does not keep the limit "
          "of a reply's tokens or counts others; see --config.models.token_limit_field"
        )
      if reply:
        return reply
      if outcome.fatal:
        raise ValueError(f"{where} {outcome.problem}")
      if outcome.hopeless:
        break
      if outcome.wait_s > LONGEST_RETRY_AFTER_S:
        raise ValueError(
          f"{where} {outcome.problem} and asks to wait {outcome.wait_s:.0f} s: the same command "
          "goes on then"
        )
      if attempt < self.config.retries:
        backoff_s = min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + self._draw())
        self._sleep(outcome.wait_s + backoff_s)
    raise NoAnswer(f"{where} {outcome.problem} ({attempt + 1} attempts)")

  def _cost_usd(self, outcome: Outcome, bound_usd: float) -> float:
    if outcome.usage is not None:
      return self.price.cost_usd(outcome.usage)
    return bound_usd if outcome.kind == PRESUMED else 0.0

  def _attempt(self, messages: Messages, seed: int) -> Outcome:
    body = b""
    try:
      with self._client.chat.completions.with_streaming_response.create(
        model=self.endpoint.model,
        messages=messages,
        temperature=self.config.temperature,
        seed=seed,
        **{self.config.token_limit_field: self.config.max_completion_tokens},
      ) as response:
        until = time.monotonic() + self.config.timeout_s  # the client's own limit is for each part
        for part in response.iter_bytes():
          body += part
          if time.monotonic() > until:
            return Outcome(problem="did not end its answer in time", unknown=True)
    except openai.APIStatusError as error:
      return self._refused(error)
    except (openai.APIConnectionError, httpx2.RequestError) as error:  # time-outs are among them
      wrapped = isinstance(error, openai.APIConnectionError)
      cause = type(error.__cause__ if wrapped else error).__name__
      return Outcome(problem=f"did not answer ({cause})", unknown=cause not in NOT_SENT)
    return read_answer(body, self.price)

  def _refused(self, error: openai.APIStatusError) -> Outcome:
    status, said = error.status_code, error.message
    if self._client.api_key != NO_KEY:
      said = said.replace(self._client.api_key, "***")
    said = " ".join(said.split())[:LONGEST_COMPLAINT]
    too_long = status < 500 and "context length" in error.response.text.lower()
    if too_long or error.code == "context_length_exceeded":
      return Outcome(problem=f"takes no conversation this long: {said}", hopeless=True)
    if status == 400 and error.code == "content_filter":
      return Outcome(problem=f"takes no conversation like this: {said}", hopeless=True)
    if error.code == "insufficient_quota":
      return Outcome(problem="answered 429: this account's quota is used up", fatal=True)
    if status in RETRIED or status >= 500:
      wait_s = retry_after_s(error.response.headers.get("retry-after", ""))
      return Outcome(problem=f"answered {status}", unknown=status in UNKNOWN, wait_s=wait_s)
    variable = self.endpoint.variable or "a variable that --config.models.key_variables names"
    if status in (401, 403):  # what is said then may quote a part of the key
      return Outcome(problem=f"answered {status}: check the key in {variable}", fatal=True)
    problem = f"answered {status}: {said}; see --config.models (its key is in {variable})"
    return Outcome(problem=problem, fatal=True)


class ChatAgent(Agent):
  """One model during one episode."""

  def __init__(self, model: ChatModel, task: Task, seed: int, hold: Hold):
    self._model, self._task, self._seed, self._hold = model, task, seed, hold
    self._counted_messages = self._counted_tokens = 0  # of the last prompt that was counted for us

  def bound_usd(self, messages: Messages, step: int) -> float:
    """The dearest attempt: no token is shorter than a byte, and the reply's length is capped.

    A conversation only grows, so what this model has counted of it before need not be guessed.
    """
    new = messages[self._counted_messages :]
    new_bytes = sum(len(message["content"].encode()) + TOKENS_PER_MESSAGE for message in new)
    price = self._model.price
    prompt_usd = (self._counted_tokens + new_bytes) * price.dearest_input
    return (prompt_usd + self._model.config.max_completion_tokens * price.output) / 1e6

  def reply(self, messages: Messages, step: int) -> Reply:
    model = self._model
    request = model.request(messages, self._task.id, self._seed, step)
    reply = model.recorded(request)
    if reply is None:
      bound_usd = self.bound_usd(messages, step)
      reply = model.ask(messages, self._seed, request, bound_usd, self._hold)
    else:
      usd = sum(call.cost_usd for call in (*reply.lost, reply.call))
      with self._hold(usd, replayed=True) as cost:
        cost.usd = usd
    self._counted_messages, self._counted_tokens = len(messages), reply.call.usage.prompt_tokens
    return reply


class ChatJudge(Judge):
  """A model that is asked single questions."""

  def __init__(self, model: ChatModel):
    self.price, self._model = model.price, model

  def ask(self, messages: Messages, task: Task, seed: int, place: int, hold: Hold) -> Reply:
    return ChatAgent(self._model, task, seed, hold).reply(messages, place)


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
  if cut:  # it thought for too long, as it would again: the agent's mistake
    return Outcome("", usage)
  return Outcome(usage=usage, problem="sent an answer without content")


def read_text(content: str | list[dict] | None) -> str:
  """The text of a message's content, which some send in parts; "" if it has none.

  Raises:
    KeyError, TypeError, AttributeError: these are no parts.
  """
  if isinstance(content, list):
    content = "".join(part["text"] for part in content if part.get("type") == "text")
  if not isinstance(content, str):
    return ""
  return content.encode(errors="replace").decode()  # half a pair of surrogates is no text


def read_usage(fields: dict) -> Usage:
  """Usage as endpoints report it; the total and the parts of the prompt are optional.

  What the total counts beyond prompt and completion is billed as completion: some report the
  tokens of a model's reasoning so.

  Raises:
    KeyError, TypeError, ValueError, OverflowError: these are no counts.
  """
  parts = fields.get("prompt_tokens_details") or {}
  prompt, completion = int(fields["prompt_tokens"]), int(fields["completion_tokens"])
  return Usage(
    prompt_tokens=prompt,
    cached_tokens=int(parts.get("cached_tokens") or 0),
    completion_tokens=max(completion, int(fields.get("total_tokens") or 0) - prompt),
    cache_write_tokens=int(parts.get("cache_write_tokens") or 0),
  )


def retry_after_s(header: str) -> float:
  """Seconds that a Retry-After header asks to wait: a number, or the date until when."""
  try:
    return max(0.0, float(header))
  except ValueError:
    pass
  try:
    until = email.utils.parsedate_to_datetime(header)
    return max(0.0, until.timestamp() - time.time())
  except (ValueError, OverflowError):
    return 0.0
