"""API models over chat completions: OpenAI, or any endpoint that speaks its protocol.

An attempt is billed by the usage that its answer reports. One whose outcome is unknown (a time-out,
a connection lost after the request was sent, an answer that cannot be read) is presumed to have
cost the most that it can. Refusals (4xx and 5xx other than `endpoints.UNKNOWN`) are free.
"""

import dataclasses
import functools
import hashlib
import json
import random
import sys
import threading
import time
from collections.abc import Callable

import httpx2
import openai

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import Call, Reply, Task
from baar_jax.llms.agent import Agent, Hold, Messages, NoAnswer, Pair
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY, RETRY, Calls
from baar_jax.llms.client import Network, open_client
from baar_jax.llms.endpoints import (
  DEAREST_TIER,
  NOT_SENT,
  Outcome,
  endpoints,
  read_answer,
  read_refusal,
)
from baar_jax.llms.prices import prices_of

BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 30.0
TOKENS_PER_MESSAGE = 16  # most that a chat template puts around one; a byte is a token at most
ROUNDING = 1e-9  # by which two ways to add up the same dollars may differ, as a share of them


class ChatPair(Pair):
  """The models of the configuration at their endpoints."""

  kind = "chat"

  def __init__(self, config: ModelsConfig, calls: Calls):
    """Opens no connection yet. Raises ValueError if a price or a key is missing."""
    self.names, self.prices = config.names, prices_of(config.names, config.prices)
    self.calls, self.stopping = calls, threading.Event()
    self.sleep = self.stopping.wait
    self.models = [ChatModel(self, config, i) for i in range(len(self.names))]

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ChatAgent"]:
    return [ChatAgent(model, task, seed, hold) for model in self.models[: len(self.names)]]

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Hold], "ChatAgent"]:
    self.models.append(ChatModel(self, config, 0, recorded_as=len(self.names)))
    return functools.partial(ChatAgent, self.models[-1])

  def stop(self) -> None:
    self.stopping.set()

  def close(self) -> None:
    for model in self.models:
      model.client.close()
    self.calls.close()


class ChatModel:
  """One model at its endpoint; shared by all episodes and their threads."""

  def __init__(
    self, pair: ChatPair, config: ModelsConfig, place: int, recorded_as: int | None = None
  ):
    """Takes the configuration's model at `place`; its calls are recorded under that index."""
    self._pair, self._index = pair, place if recorded_as is None else recorded_as
    self._endpoint = endpoint = endpoints(config)[place]
    self._where = f"{endpoint.model} at {endpoint.host}"
    self.price = prices_of(config.names, config.prices)[place]
    self.config, self.find = config, pair.calls.find
    self.tier_factor = 1.0 if endpoint.own or endpoint.openai else DEAREST_TIER
    self._slots, self._lock = threading.BoundedSemaphore(config.concurrency), threading.Lock()
    self._failure, self._failures = pair.calls.find_stop(self._index), 0  # the same, in a row
    if self._failure:
      self._failures = config.max_failures - 1
      stopped = f"{self._where} {self._failure}, which ended the last run"
      print(f"{stopped}: once more ends this one", file=sys.stderr)
    self._network = Network(pair.stopping)
    self.client = open_client(endpoint, self._network)

  def request(self, messages: Messages, task_id: str, seed: int, step: int) -> str:
    """A hash of all that a reply depends on, and of which trial it is for."""
    c = self.config
    sampling, place = (c.temperature, c.max_completion_tokens), (task_id, seed, step)
    parts = self._endpoint.model, self._endpoint.base_url, sampling, messages, *place
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

  def ask(self, messages: Messages, seed: int, request: str, bound_usd: float, hold: Hold) -> Reply:
    """A reply, after as many attempts as it takes and the configuration allows.

    Raises what `Agent.reply` does, and ValueError if the endpoint refuses calls like this one,
    cannot be priced, asks to wait for too long, has billed more than the most, or fails on and on.
    """
    start, lost = time.monotonic(), []
    for attempt in range(self.config.retries + 1):
      with self._slots, hold(bound_usd) as cost:
        if self._pair.stopping.is_set():
          raise NoAnswer(f"{self._endpoint.model} was not asked: the run is being stopped")
        number = self._pair.calls.begin(self._index, bound_usd, request)
        cost.usd = bound_usd  # also if whoever waits is interrupted
        outcome = self._attempt(messages, seed)
        if outcome.kind in (REPLY, RETRY):
          self.tier_factor = 1.0  # the answer told its service tier
        if outcome.kind != PRESUMED:
          cost.usd = self.price.cost_usd(outcome.usage)  # a failed attempt has none
        usage, reply = outcome.usage, None
        if outcome.kind == REPLY:
          call = Call(self._index, usage, cost.usd, time.monotonic() - start)
          reply = Reply(outcome.text, call, tuple(lost))
        elif outcome.kind != FAILED:
          lost.append(Call(self._index, usage, cost.usd, kind=outcome.kind))
        self._pair.calls.end(number, outcome.kind, cost.usd, reply)
      if cost.usd > bound_usd * (1 + ROUNDING):
        self._stop(
          f"billed {usage.prompt_tokens} prompt and {usage.completion_tokens} completion tokens, "
          f"${cost.usd:.6f}, and ${bound_usd:.6f} was the most: it does not keep the limit of a "
          "reply's tokens or counts others; see --config.models.token_limit_field"
        )
      if outcome.fatal:
        self._stop(outcome.problem)
      if not self._pair.stopping.is_set():
        self._count_failures(outcome.problem.partition(":")[0])
      if reply:
        return reply
      if outcome.hopeless:
        break
      if attempt < self.config.retries:
        backoff_s = min(BACKOFF_S * 2**attempt, LONGEST_BACKOFF_S) * (0.5 + random.random())
        self._pair.sleep(outcome.wait_s + backoff_s)
    raise NoAnswer(f"{self._where} {outcome.problem} ({attempt + 1} attempts)")

  def _stop(self, problem: str, why: str = "") -> None:
    """Ends the run; the next one says so before it asks."""
    self._pair.calls.note_stop(self._index, problem)
    raise ValueError(f"{self._where} {problem}{why}")

  def _count_failures(self, problem: str) -> None:
    """Ends the run at the last failure of one kind in a row that is allowed; "" is a reply."""
    with self._lock:
      if problem != self._failure:
        self._failure, self._failures = problem, 0
        self._pair.calls.note_stop(self._index, "")
      self._failures += bool(problem)
      if self._failures >= self.config.max_failures:
        limit = f"--config.models.max_failures={self.config.max_failures}"
        self._stop(problem, f", as often in a row as {limit} allows")

  def _attempt(self, messages: Messages, seed: int) -> Outcome:
    self._network.begin(self.config.timeout_s)
    tier = {"service_tier": "default"} if self._endpoint.openai else {}
    try:
      with self.client.chat.completions.with_streaming_response.create(
        model=self._endpoint.model,
        messages=messages,
        temperature=self.config.temperature,
        seed=seed,
        **{self.config.token_limit_field: self.config.max_completion_tokens},
        **tier,
      ) as response:
        body = response.read()
    except openai.APIStatusError as error:
      body, response = error.body, error.response
      message = body.get("message") if isinstance(body, dict) else None
      complaint = message if isinstance(message, str) else response.text
      wait = response.headers.get("retry-after", "")
      said = error.status_code, error.code, complaint, wait
      return read_refusal(*said, self._endpoint, self.client.api_key)
    except (openai.APIConnectionError, httpx2.RequestError) as error:  # time-outs are among them
      cause = type(error.__cause__ or error).__name__
      kind = FAILED if cause in NOT_SENT else PRESUMED
      return Outcome(kind, f"did not answer ({cause})")
    return read_answer(body)


class ChatAgent(Agent):
  """One model during one episode."""

  def __init__(self, model: ChatModel, task: Task, seed: int, hold: Hold):
    self._model, self._task, self._seed, self._hold = model, task, seed, hold
    self._counted_messages = self._counted_tokens = 0  # of the last prompt, as it was billed

  def bound_usd(self, messages: Messages, step: int) -> float:
    """The dearest attempt: no token is shorter than a byte, and the reply's length is capped.

    A conversation only grows, so the tokens that were billed for its beginning need no estimate.
    """
    model, new = self._model, messages[self._counted_messages :]
    new_bytes = sum(len(message["content"].encode()) + TOKENS_PER_MESSAGE for message in new)
    prompt, completion = self._counted_tokens + new_bytes, model.config.max_completion_tokens
    return model.tier_factor * model.price.most_usd(prompt, completion)

  def reply(self, messages: Messages, step: int) -> Reply:
    model = self._model
    request = model.request(messages, self._task.id, self._seed, step)
    reply = model.find(request)
    if reply is None:
      bound_usd = self.bound_usd(messages, step)
      reply = model.ask(messages, self._seed, request, bound_usd, self._hold)
    else:
      # What the same reply costs today: prices may have been corrected since it was recorded.
      cost_usd = model.price.cost_usd(reply.call.usage)
      reply = dataclasses.replace(reply, call=dataclasses.replace(reply.call, cost_usd=cost_usd))
      usd = sum(call.cost_usd for call in (*reply.lost, reply.call))
      with self._hold(usd, replayed=True) as cost:
        cost.usd = usd
    self._counted_messages, self._counted_tokens = len(messages), reply.call.usage.prompt_tokens
    return reply
