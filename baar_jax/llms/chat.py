"""API models over chat completions: OpenAI, or any endpoint that speaks its protocol.

An attempt is billed by the usage that its answer reports. One whose outcome is unknown (a time-out,
a connection lost after the request was sent, an answer that cannot be read) is presumed to have
cost the most that it can. Refusals (4xx and 5xx other than `endpoints.UNKNOWN`) are free.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx2
import openai

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import Call, Reply, Task
from baar_jax.llms import endpoints
from baar_jax.llms.agent import Agent, Hold, Messages, NoAnswer, Pair
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY, RETRY, Calls
from baar_jax.llms.endpoints import Outcome
from baar_jax.llms.prices import prices_of

TOKENS_PER_MESSAGE = 16  # most that a chat template puts around one; a byte is a token at most
LOST = OSError, httpx2.RequestError  # in place of a whole answer; time-outs are of the first kind
ROUNDING = 1e-9  # by which two ways to add up the same dollars may differ, as a share of them


class ChatPair(Pair):
  """The models of the configuration at their endpoints."""

  def __init__(self, config: ModelsConfig, calls: Calls):
    """Opens no connection yet. Raises ValueError if a price or a key is missing."""
    self.names, self.prices = config.names, prices_of(config.names, config.prices)
    self.calls, self.stopping = calls, threading.Event()
    # Attempts run in an event loop, which can end them at any point; worker threads wait for them.
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._loop.run_forever, daemon=True).start()
    self.models = [ChatModel(self, config, i, i) for i in range(len(self.names))]

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ChatAgent"]:
    return [ChatAgent(model, task, seed, hold) for model in self.models[: len(self.names)]]

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Hold], "ChatAgent"]:
    self.models.append(ChatModel(self, config, 0, len(self.names)))
    return functools.partial(ChatAgent, self.models[-1])

  def run(self, attempt: Coroutine) -> Outcome:
    """What an attempt comes to."""
    try:
      return asyncio.run_coroutine_threadsafe(attempt, self._loop).result()
    except concurrent.futures.CancelledError:
      return Outcome(PRESUMED, "did not answer before the run was stopped")

  def stop(self) -> None:
    self.stopping.set()
    for task in asyncio.all_tasks(self._loop):
      self._loop.call_soon_threadsafe(task.cancel)

  def close(self) -> None:
    while self.models:  # once: a loop that has been stopped would be waited for
      self.run(self.models.pop().client.aclose())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self.calls.close()


@dataclasses.dataclass
class Stream:
  """An answer whose bytes are still to come, as they were sent: nothing is unpacked."""

  response: httpx2.Response
  until_s: float  # by the loop's clock

  async def read(self) -> AsyncIterator[bytes]:
    """Its bytes as they come. Raises one of LOST where they are late, break off or are too many."""
    parts, size = self.response.aiter_raw(), 0
    while size <= endpoints.MOST_BYTES:
      async with asyncio.timeout_at(self.until_s):
        part = await anext(parts, None)
      if part is None:
        return
      size += len(part)
      yield part
    raise httpx2.ReadError("too many bytes")


class Model:
  """One model at its endpoint, to which requests are sent."""

  def __init__(self, config: ModelsConfig, place: int):
    """Takes the configuration's model at `place`. Raises ValueError without its price or key."""
    self.endpoint, self.config = endpoints.endpoints(config)[place], config
    self.name, self._key = self.endpoint.model, self.endpoint.key()
    self.price = prices_of(config.names, config.prices)[place]
    headers = httpx2.Headers()
    if self.endpoint.openai:  # what it reads from OPENAI_ORG_ID, OPENAI_CUSTOM_HEADERS and the like
      account = openai.AsyncOpenAI(api_key=self._key).default_headers
      headers.update({name: value for name, value in account.items() if isinstance(value, str)})
    headers.update({"accept-encoding": "identity", "authorization": f"Bearer {self._key}"})
    headers["content-type"] = "application/json"
    self.client = openai.DefaultAsyncHttpxClient(
      base_url=self.endpoint.base_url,
      headers=headers,
      cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),  # no call tells of another one
      follow_redirects=False,
      timeout=httpx2.Timeout(None, connect=min(endpoints.CONNECT_S, config.timeout_s)),
    )

  async def send(self, body: dict, limit_s: float) -> bytes | Stream | Outcome:
    """One attempt: the body of its answer, or a stream where one was asked for, or what it comes to
    without an answer. It ends within `limit_s`; only a cancellation raises."""
    content = json.dumps(body)  # ASCII, whatever a client has sent
    request = self.client.build_request("POST", "chat/completions", content=content)
    until_s = asyncio.get_running_loop().time() + limit_s
    try:
      async with asyncio.timeout_at(until_s):
        response = await self.client.send(request, stream=True)
      stream, kind = Stream(response, until_s), response.headers.get("content-type", "")
      if response.is_success and body.get("stream") and kind.startswith("text/event-stream"):
        return stream
      async with contextlib.aclosing(response):
        answer = b"".join([part async for part in stream.read()])
    except LOST as failure:
      return endpoints.explain(failure)
    if response.is_success:
      return answer
    wait, text = response.headers.get("retry-after", ""), answer.decode(errors="replace")
    return endpoints.read_refusal(response.status_code, text, wait, self._key)


class ChatModel(Model):
  """A model that acts or judges; shared by all episodes and their threads."""

  def __init__(self, pair: ChatPair, config: ModelsConfig, place: int, index: int):
    """Takes the configuration's model at `place`; its calls are recorded under the index."""
    super().__init__(config, place)
    self._pair, self._index, self.find = pair, index, pair.calls.find
    self._where = f"{self.name} at {self.endpoint.host}"
    self.tier_factor = 1.0 if self.endpoint.own or self.endpoint.openai else endpoints.DEAREST_TIER
    self._slots = threading.BoundedSemaphore(config.concurrency)
    if problem := pair.calls.find_failure(self._index, config.max_failures):
      stopped = f"{self._where} {problem}, which ended the last run"
      print(f"{stopped}: once more ends this one", file=sys.stderr)

  def request(self, messages: Messages, task_id: str, seed: int, step: int) -> str:
    """A hash of all that a reply depends on, and of which trial it is for."""
    sampling = self.config.temperature, self.config.max_completion_tokens
    parts = self.name, self.endpoint.base_url, sampling, messages, task_id, seed, step
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

  def ask(self, messages: Messages, seed: int, request: str, bound_usd: float, hold: Hold) -> Reply:
    """A reply, after as many attempts as it takes and the configuration allows.

    Raises what `Agent.reply` does, and ValueError if the endpoint refuses calls like this one,
    cannot be priced, has billed more than the most, or fails `max_failures` times in a row.
    """
    start, lost, calls = time.monotonic(), [], self._pair.calls
    for attempt in range(self.config.retries + 1):
      with self._slots, hold(bound_usd) as cost:
        if self._pair.stopping.is_set():
          raise NoAnswer(f"{self.name} was not asked: the run is being stopped")
        number = calls.begin(self._index, bound_usd, request)
        cost.usd = bound_usd  # also if whoever waits is interrupted
        outcome = self._pair.run(self._attempt(messages, seed))
        if outcome.kind in (REPLY, RETRY):
          self.tier_factor = 1.0  # the answer told its service tier
        if outcome.kind != PRESUMED:
          cost.usd = self.price.cost_usd(outcome.usage)  # a failed attempt has none
        reply = None
        if outcome.kind == REPLY:
          call = Call(self._index, outcome.usage, cost.usd, time.monotonic() - start)
          reply = Reply(outcome.text, call, tuple(lost))
        elif outcome.kind != FAILED:
          lost.append(Call(self._index, outcome.usage, cost.usd, kind=outcome.kind))
        # What is cancelled with the run is no failure of the endpoint.
        problem = None if self._pair.stopping.is_set() else outcome.problem.partition(":")[0]
        calls.end(number, outcome.kind, cost.usd, reply, problem)
      if cost.usd > bound_usd * (1 + ROUNDING):
        most = f"billed ${cost.usd:.6f}, and ${bound_usd:.6f} was the most"
        raise ValueError(f"{self._where} {most}; see --config.models.token_limit_field")
      if outcome.fatal:
        raise ValueError(f"{self._where} {outcome.problem}")
      if problem and calls.find_failure(self._index, self.config.max_failures):
        limit = f"--config.models.max_failures={self.config.max_failures}"
        raise ValueError(f"{self._where} {problem}, as often in a row as {limit} allows")
      if reply:
        return reply
      if outcome.hopeless or attempt == self.config.retries:
        break
      self._pair.stopping.wait(outcome.wait_s + endpoints.backoff_s(attempt))
    raise NoAnswer(f"{self._where} {outcome.problem} ({attempt + 1} attempts)")

  async def _attempt(self, messages: Messages, seed: int) -> Outcome:
    c, limit_s = self.config, 0.0 if self._pair.stopping.is_set() else self.config.timeout_s
    body = {"model": self.name, "messages": messages, "temperature": c.temperature}
    body |= {"seed": seed, c.token_limit_field: c.max_completion_tokens}
    body |= {"service_tier": "default"} if self.endpoint.openai else {}
    answer = await self.send(body, limit_s)
    return answer if isinstance(answer, Outcome) else endpoints.read_answer(answer)


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
    if reply := model.find(request):
      usd = sum(call.cost_usd for call in (*reply.lost, reply.call))
      with self._hold(usd, replayed=True) as cost:
        cost.usd = usd
    else:
      bound_usd = self.bound_usd(messages, step)
      reply = model.ask(messages, self._seed, request, bound_usd, self._hold)
    self._counted_messages, self._counted_tokens = len(messages), reply.call.usage.prompt_tokens
    return reply
