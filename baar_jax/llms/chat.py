"""API models of runs: agents that ask an endpoint, and the books of their calls.

An attempt is billed by the usage that its answer reports. If its outcome is unknown (a
time-out, a connection lost after the request was sent, an answer that cannot be read),
it is presumed to have cost its worst case. Refusals are free (4xx and 5xx other than
`wire.UNKNOWN`).
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
from collections.abc import Callable, Coroutine, Iterator

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env
from baar_jax.episode import Call, Reply, Task
from baar_jax.llms.agent import Agent, Hold, Messages, NoAnswer
from baar_jax.llms.calls import Calls
from baar_jax.llms.chat_completions import TIERS, read_usage
from baar_jax.llms.client import Client, ask, run_in_thread
from baar_jax.llms.pair import Pair
from baar_jax.llms.wire import FAILED, PRESUMED, REPLY, RETRY, UNREADABLE, Outcome

# A chat template puts at most this number around a message; a byte is a token at most.
TOKENS_PER_MESSAGE = 16
ROUNDING = 1e-9  # by which two sums of the same dollars may differ, as a share of them


class ChatPair(Pair):
  """The models of the configuration at their endpoints."""

  def __init__(self, config: ModelsConfig, calls: Calls):
    """Open no connection yet. Raises ValueError if a price or a key is missing."""
    self.names = config.names
    self.calls = calls
    self.stopping = threading.Event()
    # Attempts run in an event loop, which can end them at any time; threads wait.
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._loop.run_forever, daemon=True).start()
    models = range(len(self.names))
    self.models = [ChatModel(self, config, index, index) for index in models]
    self.prices = tuple(model.price for model in self.models)

  def start(self, env: Env, task: Task, seed: int, hold: Hold) -> list["ChatAgent"]:
    models = self.models[: len(self.names)]
    return [ChatAgent(model, task, seed, hold) for model in models]

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Hold], "ChatAgent"]:
    judge = ChatModel(self, config, 0, len(self.names))
    self.models.append(judge)
    return functools.partial(ChatAgent, judge)

  def run(self, attempt: Coroutine[None, None, Outcome]) -> Outcome:
    """Run an attempt in the event loop, and wait for its outcome."""
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
      self.run(self.models.pop().http.aclose())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self.calls.close()


class ChatModel(Client):
  """A model that acts or judges; shared by all episodes and their threads."""

  def __init__(self, pair: ChatPair, config: ModelsConfig, place: int, index: int):
    """Take the configuration's model at `place`; its calls are recorded as `index`."""
    super().__init__(config, place)
    self.pair = pair
    self.index = index
    self.where = f"{self.name} at {self.endpoint.host}"
    self.slots = threading.BoundedSemaphore(config.concurrency)
    if problem := self.find_failure():
      stopped = f"{self.where} {problem}, which ended the last run"
      print(f"{stopped}: once more ends this one", file=sys.stderr)

  def find_failure(self) -> str:
    """Find the problem that the last `max_failures` attempts share, else ""."""
    return self.pair.calls.find_failure(self.index, self.config.max_failures)

  def hash(self, messages: Messages, task_id: str, seed: int, step: int) -> str:
    """Hash all that a reply depends on, and the trial that it is for."""
    sampling = (self.config.temperature, self.config.max_completion_tokens)
    parts = (self.name, self.endpoint.base_url, sampling, messages, task_id, seed, step)
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

  async def try_reply(self, body: dict) -> Outcome:
    """Make one attempt at a reply; it has no time once the run is being stopped."""
    limit_s = 0.0 if self.pair.stopping.is_set() else self.config.timeout_s
    answer = await self.send(body, limit_s)
    return answer if isinstance(answer, Outcome) else read_reply(answer)


def read_reply(fields: dict) -> Outcome:
  """Read the reply in an answer."""
  if not fields.keys() & {"choices", "usage"}:
    return UNREADABLE
  text = ""
  is_cut = is_refused = False
  with contextlib.suppress(LookupError, TypeError, AttributeError):
    choice = fields["choices"][0]
    message = choice["message"]
    reason = choice.get("finish_reason")
    content = message.get("content") or ""
    # Half a pair of surrogates is no text.
    text = content.encode(errors="replace").decode()
    is_cut = reason == "length"
    is_refused = bool(message.get("refusal")) or reason == "content_filter"
  usage = read_usage(fields)
  if usage is None or text.strip() and not usage.completion_tokens:
    problem = (
      "sent an answer whose usage is missing or impossible, so that it cannot be priced"
    )
    return Outcome(PRESUMED, problem, fatal=True)
  if fields.get("service_tier") not in TIERS:
    return Outcome(
      PRESUMED, "answered from a service tier whose price is not known", fatal=True
    )
  if text.strip() or is_cut:  # without a text all tokens went into reasoning
    return Outcome(REPLY, text=text, usage=usage)
  problem = (
    "refused this conversation" if is_refused else "sent an answer without content"
  )
  return Outcome(RETRY, problem, usage=usage, hopeless=is_refused)


@dataclasses.dataclass
class ReplyBooks:
  """The books of one reply: the attempts at it in the run's file and budgets."""

  model: ChatModel
  hold: Hold
  body: dict
  request: str
  bound_usd: float
  lost: list[Call] = dataclasses.field(default_factory=list)
  start_s: float = dataclasses.field(default_factory=time.monotonic)
  has_others = False

  @contextlib.contextmanager
  def reserve(self) -> Iterator[None]:
    pair = self.model.pair
    with self.model.slots, self.hold(self.bound_usd) as self.cost:
      if pair.stopping.is_set():
        raise NoAnswer(f"{self.model.name} was not asked: the run is being stopped")
      self.number = pair.calls.begin(self.model.index, self.bound_usd, self.request)
      self.cost.usd = self.bound_usd  # also if whoever waits is interrupted
      yield

  async def attempt(self) -> Outcome:
    return self.model.pair.run(self.model.try_reply(self.body))

  def settle(self, outcome: Outcome) -> Reply | None:
    """Book an attempt.

    Raises:
      ValueError: the endpoint refuses calls like this one, cannot be priced, has billed
        more than the worst case, or has failed `max_failures` times in a row.
    """
    model = self.model
    kind = outcome.kind
    reply = problem = None
    if kind in (REPLY, RETRY):
      model.is_tier_known = True  # the answer told it
    if kind != PRESUMED:
      self.cost.usd = model.price.cost_usd(outcome.usage)  # a failed attempt has none
    usd = self.cost.usd
    if kind == REPLY:
      latency_s = time.monotonic() - self.start_s
      call = Call(model.index, outcome.usage, usd, latency_s)
      reply = Reply(outcome.text, call, tuple(self.lost))
    elif kind != FAILED:
      self.lost.append(Call(model.index, outcome.usage, usd, kind=kind))
    # A call that is cancelled with the run is no failure of the endpoint.
    if not model.pair.stopping.is_set():
      problem = outcome.problem.partition(":")[0]
    model.pair.calls.end(self.number, kind, usd, reply, problem)
    if usd > self.bound_usd * (1 + ROUNDING):
      most = f"billed ${usd:.6f}, and ${self.bound_usd:.6f} was the most"
      raise ValueError(f"{model.where} {most}; see --config.models.token_limit_field")
    if outcome.fatal:
      raise ValueError(f"{model.where} {outcome.problem}")
    if problem and model.find_failure():
      limit = f"--config.models.max_failures={model.config.max_failures}"
      raise ValueError(f"{model.where} {problem}, as often in a row as {limit} allows")
    return reply

  def refuse(self, outcome: Outcome, attempts: int) -> NoAnswer:
    return NoAnswer(f"{self.model.where} {outcome.problem} ({attempts} attempts)")

  async def prepare(self, outcome: Outcome, wait_s: float, is_last: bool) -> bool:
    self.model.pair.stopping.wait(wait_s)
    return False


@dataclasses.dataclass
class ChatAgent(Agent):
  """One model during one episode."""

  model: ChatModel
  task: Task
  seed: int
  hold: Hold
  # The last prompt, as it was billed.
  counted_messages: int = 0
  counted_tokens: int = 0

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the worst case: no token is shorter than a byte, and replies are capped.

    A conversation only grows, so the tokens that were billed before need no estimate.
    """
    tokens = self.counted_tokens
    for message in messages[self.counted_messages :]:
      tokens += len(message["content"].encode()) + TOKENS_PER_MESSAGE
    return self.model.bound_usd(tokens, self.model.write({}))

  def reply(self, messages: Messages, step: int) -> Reply:
    model = self.model
    config = model.config
    request = model.hash(messages, self.task.id, self.seed, step)
    if reply := model.pair.calls.find(request):
      usd = sum(call.cost_usd for call in reply.calls("act"))
      with self.hold(usd, replayed=True) as cost:
        cost.usd = usd
    else:
      bound_usd = self.bound_usd(messages, step)
      body = {
        "messages": messages,
        "temperature": config.temperature,
        "seed": self.seed,
      }
      books = ReplyBooks(model, self.hold, body, request, bound_usd)
      reply = run_in_thread(ask(books, config.retries))
    self.counted_messages = len(messages)
    self.counted_tokens = reply.call.usage.prompt_tokens
    return reply
