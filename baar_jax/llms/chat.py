"""Ask API models for the agents' replies, and account for the calls.

The openai SDK makes the requests. Its retries are off, because each attempt has a
reservation and a record of its own here. An attempt costs what the usage in its answer
says. An attempt with an unknown outcome (a time-out, a connection lost after the
request was sent, an unreadable answer) counts at its worst case. An answer with an HTTP
status of 3xx, 4xx or 5xx counts as free, except the statuses in `provider.UNKNOWN`.
"""

import asyncio
import codecs
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Coroutine

import httpx2
import openai

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import (
  FAILED,
  PRESUMED,
  REPLY,
  RETRY,
  Call,
  Reply,
  Reserve,
  Task,
  Usage,
)
from baar_jax.llms.history import Agent, Messages, NoAnswer
from baar_jax.llms.prices import COSTLIEST_TIER, ROUNDING, PricedModel
from baar_jax.llms.provider import (
  LOST,
  UNREADABLE,
  ImpossibleUsage,
  Meter,
  Outcome,
  backoff_s,
  endpoints,
  explain,
  open_http,
  read_refusal,
)
from baar_jax.store import Calls

# A model's chat template is assumed to add at most this number of tokens to a message.
TOKENS_PER_MESSAGE = 16
# The headers that providers other than OpenAI get. The SDK adds others, some of which
# name the user's account at OpenAI. The last one makes it return an answer's bytes.
HEADERS = (
  "accept",
  "accept-encoding",
  "authorization",
  "connection",
  "content-length",
  "content-type",
  "host",
  "user-agent",
  "x-stainless-raw-response",
)


async def drop_headers(request: httpx2.Request) -> None:
  """Remove all headers from a request that are not in `HEADERS`."""
  for name in {*request.headers} - {*HEADERS}:
    del request.headers[name]


class ChatPair:
  """The configured models, called at their providers' endpoints.

  Attributes:
    calls: the recorded calls of this process.
    stopping: event that is set when the run is being stopped. No attempt is made from
      then on.
  """

  def __init__(self, config: ModelsConfig, calls: Calls):
    """Prepare the models; no connection is opened yet.

    Raises:
      ValueError: a key is missing.
    """
    self.names = config.names
    self.calls = calls
    self.stopping = threading.Event()
    # Attempts run in an event loop, because it can cancel them. The thread that asks
    # for a reply waits meanwhile.
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._loop.run_forever, daemon=True).start()
    models = range(len(self.names))
    self.models = [ChatModel(self, config, index, index) for index in models]

  def start(
    self, env: Env, task: Task, seed: int, reserve: Reserve
  ) -> list["ChatAgent"]:
    """Start one agent for each model in an episode."""
    models = self.models[: len(self.names)]
    return [ChatAgent(model, task, seed, reserve) for model in models]

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Reserve], "ChatAgent"]:
    """Prepare the judge, the model that a zero-shot router asks.

    Args:
      config: the configuration of this model.

    Returns:
      A function that starts an agent for a task, a seed and the episode's `reserve`.
    """
    judge = ChatModel(self, config, 0, len(self.names))
    self.models.append(judge)
    return functools.partial(ChatAgent, judge)

  def run(self, attempt: Coroutine[None, None, Outcome]) -> Outcome:
    """Run an attempt in the event loop, and wait for its outcome.

    If the run is stopped meanwhile, the attempt is presumed to have been billed.
    """
    try:
      return asyncio.run_coroutine_threadsafe(attempt, self._loop).result()
    except concurrent.futures.CancelledError:
      return Outcome(PRESUMED, "did not answer before the run was stopped")

  def stop(self) -> None:
    """Cancel all attempts in flight, and make no new ones."""
    self.stopping.set()
    for task in asyncio.all_tasks(self._loop):
      self._loop.call_soon_threadsafe(task.cancel)

  def close(self) -> None:
    """Close the connections, the event loop and the file of calls."""
    # Each closed model leaves the list. So a second call of close() finds none, and
    # does not wait for the stopped event loop.
    while self.models:
      self.run(self.models.pop().client.close())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self.calls.close()


class ChatModel(PricedModel):
  """One API model at its provider's endpoint; the threads of all episodes share it.

  Attributes:
    pair: the models of the run, with the recorded calls.
    config: the configuration of the models.
    config_index: the model's index in `config`.
    index: the model's index in recorded calls.
    endpoint: the model's name and address.
    is_tier_known: whether answers come from a service tier of known price: OpenAI is
      asked for one, private endpoints have none, and others show it by an answer.
    where: the model's name and host, for messages.
    client: the SDK's client of the endpoint.
  """

  def __init__(
    self, pair: ChatPair, config: ModelsConfig, config_index: int, index: int
  ):
    """Prepare a model.

    Args:
      pair: the models of the run.
      config: the configuration of the models.
      config_index: the model's index in `config`.
      index: the model's index in recorded calls. A judge comes after the other models.

    Raises:
      ValueError: the key is missing, or a proxy cannot be used.
    """
    self.pair = pair
    self.config = config
    self.config_index = config_index
    self.index = index
    self.endpoint = endpoints(config)[config_index]
    self.is_tier_known = self.endpoint.is_private or self.endpoint.is_openai
    self.where = f"{self.endpoint.model} at {self.endpoint.host}"
    self._key = self.endpoint.key()
    hooks = () if self.endpoint.is_openai else (drop_headers,)
    http = open_http(config.timeout_s, *hooks)
    self.client = openai.AsyncOpenAI(
      api_key=self._key,
      base_url=self.endpoint.base_url,
      # The SDK would send a key of OPENAI_CUSTOM_HEADERS in place of `api_key`.
      default_headers={"authorization": f"Bearer {self._key}"},
      http_client=http,
      max_retries=0,
      timeout=http.timeout,
    )

  def hash(self, messages: Messages, task_id: str, seed: int, step: int) -> str:
    """Hash a request: the model, its address, the sampling, the messages, the trial.

    Two requests with the same hash share one recorded reply.

    Args:
      messages: the prompt.
      task_id: the task of the trial.
      seed: the seed of the trial.
      step: index of the episode's step.
    """
    endpoint = self.endpoint
    config = self.config
    sampling = (
      config.temperature,
      config.max_completion_tokens,
      config.reasoning_effort,
    )
    trial = (messages, task_id, seed, step)
    basis = (endpoint.model, endpoint.base_url, sampling, *trial)
    return hashlib.sha256(json.dumps(basis).encode()).hexdigest()

  def bound_usd(self, prompt_tokens: int) -> float:
    """Compute the worst case of one attempt, in dollars.

    Args:
      prompt_tokens: an upper bound on the tokens of the prompt.
    """
    reply_tokens = self.config.max_completion_tokens
    usd = self.worst_case_usd(prompt_tokens, reply_tokens)
    return usd if self.is_tier_known else COSTLIEST_TIER * usd

  async def attempt(self, messages: Messages, seed: int) -> Outcome:
    """Make one attempt at a reply.

    While the run is being stopped, the attempt times out at once.
    """
    config = self.config
    request = {
      "model": self.endpoint.model,
      "messages": messages,
      "temperature": config.temperature,
      "reasoning_effort": config.reasoning_effort or openai.omit,
      "seed": seed,
      config.token_limit_field: config.max_completion_tokens,
    }
    if self.endpoint.is_openai:
      request["service_tier"] = "default"
    create = self.client.chat.completions.with_raw_response.create
    limit_s = 0.0 if self.pair.stopping.is_set() else config.timeout_s
    try:
      async with asyncio.timeout(limit_s):
        answer = await create(**request)
    except openai.APIStatusError as error:
      response = error.response
      status = response.status_code
      return read_refusal(status, response.content, response.headers, self._key)
    except openai.APIConnectionError as error:
      if not isinstance(error.__cause__, LOST):
        raise  # The library wraps every exception of sending; this is a bug of ours.
      return explain(error.__cause__)
    except LOST as failure:
      return explain(failure)
    return self.read_answer(answer.content)

  def read_answer(self, content: bytes) -> Outcome:
    """Read the outcome of an attempt from the bytes of a provider's answer."""
    meter = Meter()
    fields = meter.read(content.removeprefix(codecs.BOM_UTF8)) or {}
    if not fields.keys() & {"choices", "usage"}:
      return UNREADABLE
    try:
      usage = self.price.read_usage(meter)
    except ImpossibleUsage as error:
      problem = f"sent an answer that cannot be priced. {error}".rstrip(".")
      return Outcome(PRESUMED, problem, fatal=True)
    return read_reply(fields, usage)

  def settle(
    self,
    number: int,
    outcome: Outcome,
    usd: float,
    bound_usd: float,
    reply: Reply | None,
  ) -> None:
    """Record the outcome and the cost of an attempt.

    Args:
      number: the recorded call of the attempt.
      outcome: the outcome of the attempt.
      usd: the billed dollars of the attempt.
      bound_usd: the worst case of the attempt.
      reply: the reply; None if the attempt failed.

    Raises:
      ValueError: the endpoint would refuse every call, its answers cannot be priced, or
        it billed more than the worst case.
    """
    if outcome.kind in (REPLY, RETRY):
      self.is_tier_known = True
    self.pair.calls.end(number, outcome.kind, usd, reply)
    if usd > bound_usd * (1 + ROUNDING):
      raise ValueError(
        f"{self.where} billed ${usd:.6f}, above the worst case of ${bound_usd:.6f}. "
        "Set --config.models.token_limit_field to the field by which this endpoint "
        "limits a reply, then run the same command again."
      )
    if outcome.fatal:
      raise ValueError(
        f"{self.where} {outcome.problem}. Every call would end like this. Correct the "
        "settings --config.models of this model, then run the same command again."
      )


def read_reply(fields: dict, usage: Usage) -> Outcome:
  """Read the outcome of an attempt (reply or problem) from a provider's answer.

  Args:
    fields: a chat completion.
    usage: the tokens of the answer.
  """
  text = ""
  is_cut = is_refused = False
  with contextlib.suppress(LookupError, TypeError, AttributeError):
    choice = fields["choices"][0]
    message = choice["message"]
    reason = choice.get("finish_reason")
    content = message.get("content") or ""
    # Half of a surrogate pair cannot be stored as UTF-8. It becomes a question mark.
    text = content.encode(errors="replace").decode()
    is_cut = reason == "length"
    is_refused = bool(message.get("refusal")) or reason == "content_filter"
  if text.strip() and not usage.completion_tokens:
    problem = "sent a text, but its usage has no tokens of a reply"
    return Outcome(PRESUMED, problem, fatal=True)
  # A reply that was cut before any text has used all its tokens for reasoning. It
  # counts as a usable reply.
  if text.strip() or is_cut:
    return Outcome(REPLY, text=text, usage=usage)
  return Outcome(
    RETRY,
    "refused this conversation" if is_refused else "sent an answer without content",
    usage=usage,
    hopeless=is_refused,
  )


@dataclasses.dataclass
class ChatAgent(Agent):
  """One API model during one episode.

  Attributes:
    counted: the messages of the last billed prompt.
    counted_tokens: number of tokens in the last billed prompt.
  """

  model: ChatModel
  task: Task
  seed: int
  reserve: Reserve
  counted: Messages = dataclasses.field(default_factory=list)
  counted_tokens: int = 0

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the worst case of one attempt at a reply, in dollars.

    The tokens of the last billed prompt are known. Any other message has at most one
    token per UTF-8 byte, plus `TOKENS_PER_MESSAGE`. The request limits the reply's
    tokens.
    """
    tokens = 0
    rest = messages
    if messages[: len(self.counted)] == self.counted:
      tokens = self.counted_tokens
      rest = messages[len(self.counted) :]
    for message in rest:
      tokens += len(message["content"].encode()) + TOKENS_PER_MESSAGE
    return self.model.bound_usd(tokens)

  def reply(self, messages: Messages, step: int) -> Reply:
    """Replay the recorded reply to the messages, or ask the model for a reply.

    A recorded reply is replayed only if the model, the sampling, the messages, the
    trial and the step are the same.
    """
    model = self.model
    request = model.hash(messages, self.task.id, self.seed, step)
    if reply := model.pair.calls.find(request):
      usd = sum(call.cost_usd for call in reply.calls("act"))
      with self.reserve(usd, replayed=True) as cost:
        cost.usd = usd
    else:
      draw = f"{self.task.id}|{self.seed}|{step}"
      reply = self.ask(messages, request, draw, self.bound_usd(messages, step))
    self.counted = [*messages]
    self.counted_tokens = reply.call.usage.prompt_tokens
    return reply

  def ask(self, messages: Messages, request: str, draw: str, bound_usd: float) -> Reply:
    """Repeat the attempts at a reply until one succeeds.

    Args:
      messages: the prompt.
      request: hash of the request.
      draw: names the random draw of the reply. Each attempt sends a seed of its own,
        so that an endpoint which heeds seeds does not repeat a reply without text.
      bound_usd: the worst case of one attempt.

    Raises:
      NoAnswer: every attempt failed, or the run is being stopped.
      ValueError: no call to this endpoint can succeed; see `ChatModel.settle`.
    """
    model = self.model
    stopping = model.pair.stopping
    start_s = time.monotonic()
    # Attempts that were billed, or may have been, without a usable reply.
    lost = []
    attempt = 0
    while True:
      with self.reserve(bound_usd) as cost:
        if stopping.is_set():
          raise NoAnswer(
            f"{model.endpoint.model} was not asked: the run is being stopped"
          )
        number = model.pair.calls.begin(model.index, bound_usd, request)
        # Until its outcome is known, the attempt costs its worst case. An interruption
        # leaves it so.
        cost.usd = bound_usd
        seed = zlib.crc32(f"{draw}|{attempt}".encode()) >> 1
        outcome = model.pair.run(model.attempt(messages, seed))
        if outcome.kind != PRESUMED:
          # The usage of an attempt that was not billed is 0 tokens, so it costs $0.
          usage = outcome.usage
          cost.usd = model.price.cost_usd(usage)
          if not model.config.prompt_cache:
            cost.billed_usd = cost.usd
            uncached = Usage(usage.prompt_tokens, 0, usage.completion_tokens)
            cost.usd = model.price.cost_usd(uncached)
        reply = None
        call = Call(
          model.index,
          outcome.usage,
          cost.usd,
          kind=outcome.kind,
          billed_usd=cost.billed_usd,
        )
        if outcome.kind == REPLY:
          latency_s = time.monotonic() - start_s
          call = dataclasses.replace(call, kind="act", latency_s=latency_s)
          reply = Reply(outcome.text, call, tuple(lost))
        elif outcome.kind != FAILED:
          lost.append(call)
        model.settle(number, outcome, call.spent_usd, bound_usd, reply)
      if reply:
        return reply
      if outcome.hopeless or attempt == model.config.retries:
        raise NoAnswer(f"{model.where} {outcome.problem} ({attempt + 1} attempts)")
      stopping.wait(outcome.wait_s + backoff_s(attempt))
      attempt += 1
