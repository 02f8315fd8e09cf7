"""Ask API models for the agents' replies, and account for the calls.

An attempt costs what the usage in its answer says. An attempt with an unknown outcome
(a time-out, a connection lost after the request was sent, an unreadable answer) counts
at its worst case. An answer with an HTTP status of 4xx or 5xx counts as free, except
the statuses in `client.UNKNOWN`.
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
from baar_jax.episode import Call, Cost, Reply, Reserve, Task, Usage
from baar_jax.llms.history import Agent, Messages, NoAnswer
from baar_jax.llms.ledger import Calls
from baar_jax.llms.provider import FAILED, PRESUMED, REPLY, RETRY, UNREADABLE, Outcome
from baar_jax.llms.usage import ImpossibleUsage
from baar_serve.client import ROUNDING, Client, ask, run_in_thread
from baar_serve.forms.chat_completions import FORM

# A model's chat template is assumed to add at most this number of tokens to a message.
TOKENS_PER_MESSAGE = 16


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
      ValueError: a price or a key is missing.
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
    self.prices = tuple(model.price for model in self.models)

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
      self.run(self.models.pop().http.aclose())
    self._loop.call_soon_threadsafe(self._loop.stop)
    self.calls.close()


class ChatModel(Client):
  """One API model at its provider's endpoint; the threads of all episodes share it.

  Attributes:
    pair: the models of the run, with the recorded calls.
    index: the model's index in recorded calls.
    where: the model's name and host, for messages.
    slots: semaphore that limits the number of calls at a time.
  """

  def __init__(
    self, pair: ChatPair, config: ModelsConfig, config_index: int, index: int
  ):
    """Prepare a model, and warn if its repeated failures ended the last run.

    Args:
      pair: the models of the run.
      config: the configuration of the models.
      config_index: the model's index in `config`.
      index: the model's index in recorded calls. A judge comes after the other models.
    """
    super().__init__(config, config_index)
    self.pair = pair
    self.index = index
    self.where = f"{self.name} at {self.endpoint.host}"
    self.slots = threading.BoundedSemaphore(config.concurrency)
    if problem := self.find_repeated_problem():
      print(
        f"{self.where} {problem} in the last attempts of the last run, which therefore "
        "ended. One more such failure ends this run.",
        file=sys.stderr,
      )

  def find_repeated_problem(self) -> str:
    """Find the problem common to this model's last `max_failures` attempts, else ""."""
    return self.pair.calls.find_repeated_problem(self.index, self.config.max_failures)

  def hash(self, messages: Messages, task_id: str, seed: int, step: int) -> str:
    """Hash a request: the model, its address, the sampling, the messages, the trial.

    Two requests with the same hash share one recorded reply.

    Args:
      messages: the prompt.
      task_id: the task of the trial.
      seed: the seed of the trial.
      step: index of the episode's step.
    """
    sampling = (self.config.temperature, self.config.max_completion_tokens)
    basis = (self.name, self.endpoint.base_url, sampling, messages, task_id, seed, step)
    return hashlib.sha256(json.dumps(basis).encode()).hexdigest()

  async def try_reply(self, body: dict) -> Outcome:
    """Make one attempt at a reply.

    While the run is being stopped, the attempt times out at once.
    """
    limit_s = 0.0 if self.pair.stopping.is_set() else self.config.timeout_s
    config = self.config
    request = FORM.limit_reply(
      FORM.write_request(body, self.endpoint),
      config.max_completion_tokens,
      config.token_limit_field,
    )
    answer = await self.send(FORM, request, limit_s)
    if isinstance(answer, Outcome):
      return answer
    fields = answer.fields
    if not fields.keys() & {"choices", "usage"}:
      return UNREADABLE
    try:
      usage, _ = self.price_usage(answer.meter)
    except ImpossibleUsage as error:
      problem = f"sent an answer that cannot be priced. {error}".rstrip(".")
      return Outcome(PRESUMED, problem, fatal=True)
    return read_reply(fields, usage)


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
class ReplyBooks:
  """Account for the attempts at one reply, in the run's file and in its budgets.

  Attributes:
    model: the model that is asked.
    reserve_budgets: reserves dollars in the budgets of the episode and the run.
    body: the request, as a chat completion.
    request: hash of the request.
    bound_usd: the worst case of one attempt.
    cost: the cost of the current attempt.
    number: the recorded call of the current attempt.
    lost: earlier attempts that were billed, or may have been.
    start_s: time of the first attempt, on the monotonic clock.
  """

  model: ChatModel
  reserve_budgets: Reserve
  body: dict
  request: str
  bound_usd: float
  cost: Cost = dataclasses.field(default_factory=Cost)
  number: int = 0
  lost: list[Call] = dataclasses.field(default_factory=list)
  start_s: float = dataclasses.field(default_factory=time.monotonic)

  def list_successors(self, outcome: Outcome) -> tuple[()]:
    """Return no models, because no other model takes over."""
    return ()

  @contextlib.contextmanager
  def reserve(self) -> Iterator[None]:
    """Reserve the worst case of an attempt while it is made, and record the attempt.

    Raises:
      NoAnswer: the run is being stopped.
    """
    pair = self.model.pair
    with self.model.slots, self.reserve_budgets(self.bound_usd) as self.cost:
      if pair.stopping.is_set():
        raise NoAnswer(f"{self.model.name} was not asked: the run is being stopped")
      self.number = pair.calls.begin(self.model.index, self.bound_usd, self.request)
      # Until its outcome is known, the attempt costs its worst case. An interruption
      # leaves it so.
      self.cost.usd = self.bound_usd
      yield

  async def attempt(self) -> Outcome:
    """Make one attempt, and return its outcome."""
    return self.model.pair.run(self.model.try_reply(self.body))

  def settle(self, outcome: Outcome) -> Reply | None:
    """Record the outcome and the cost of an attempt.

    Returns:
      The reply; None if the attempt failed.

    Raises:
      ValueError: the provider's endpoint would refuse every call, its answers cannot be
        priced, it billed more than the worst case, or it failed `max_failures` times in
        a row.
    """
    model = self.model
    kind = outcome.kind
    reply = problem = None
    if kind in (REPLY, RETRY):
      model.is_tier_known = True
    if kind != PRESUMED:
      # The usage of an attempt that was not billed is 0 tokens, so the cost is $0.
      self.cost.usd = model.price.cost_usd(outcome.usage)
    usd = self.cost.usd
    if kind == REPLY:
      call = Call(model.index, outcome.usage, usd, time.monotonic() - self.start_s)
      reply = Reply(outcome.text, call, tuple(self.lost))
    elif kind != FAILED:
      self.lost.append(Call(model.index, outcome.usage, usd, kind=kind))
    # The problem is recorded only while the run goes on. A run that is being stopped
    # cancels its calls, which is no failure of the provider's endpoint.
    if not model.pair.stopping.is_set():
      problem = outcome.problem.partition(":")[0]
    model.pair.calls.end(self.number, kind, usd, reply, problem)
    if usd > self.bound_usd * (1 + ROUNDING):
      raise ValueError(
        f"{model.where} billed ${usd:.6f}, above the worst case of "
        f"${self.bound_usd:.6f}. Set --config.models.token_limit_field to the field by "
        "which this endpoint limits a reply, then run the same command again."
      )
    if outcome.fatal:
      raise ValueError(
        f"{model.where} {outcome.problem}. Every call would end like this. Correct the "
        "settings --config.models of this model, then run the same command again."
      )
    if problem and model.find_repeated_problem():
      raise ValueError(
        f"{model.where} {problem}, {model.config.max_failures} times in a row "
        "(--config.models.max_failures). Check the endpoint and run the command again."
      )
    return reply

  def refuse(self, outcome: Outcome, attempts: int) -> NoAnswer:
    """Make the error to raise after the last failed attempt."""
    return NoAnswer(f"{self.model.where} {outcome.problem} ({attempts} attempts)")

  async def prepare(self, outcome: Outcome, wait_s: float, is_last: bool) -> bool:
    """Wait before the next attempt; return False, because the model stays the same."""
    self.model.pair.stopping.wait(wait_s)
    return False


@dataclasses.dataclass
class ChatAgent(Agent):
  """One API model during one episode.

  Attributes:
    counted_messages: number of messages in the last billed prompt.
    counted_tokens: number of tokens in the last billed prompt.
  """

  model: ChatModel
  task: Task
  seed: int
  reserve: Reserve
  counted_messages: int = 0
  counted_tokens: int = 0

  def bound_usd(self, messages: Messages, step: int) -> float:
    """Compute the worst case of one attempt at a reply, in dollars.

    The tokens of the last billed prompt are known. A newer message has at most one
    token per UTF-8 byte, plus `TOKENS_PER_MESSAGE`. The request limits the reply's
    tokens.
    """
    tokens = self.counted_tokens
    for message in messages[self.counted_messages :]:
      tokens += len(message["content"].encode()) + TOKENS_PER_MESSAGE
    model = self.model
    request = FORM.write_request({}, model.endpoint)
    return model.bound_usd(request, tokens, model.config.max_completion_tokens)

  def reply(self, messages: Messages, step: int) -> Reply:
    """Replay the recorded reply to the messages, or ask the model for a reply.

    A recorded reply is replayed only if the model, the sampling, the messages, the
    trial and the step are the same.
    """
    model = self.model
    config = model.config
    request = model.hash(messages, self.task.id, self.seed, step)
    if reply := model.pair.calls.find(request):
      usd = sum(call.cost_usd for call in reply.calls("act"))
      with self.reserve(usd, replayed=True) as cost:
        cost.usd = usd
    else:
      bound_usd = self.bound_usd(messages, step)
      body = {
        "messages": messages,
        "temperature": config.temperature,
        "seed": self.seed,
      }
      books = ReplyBooks(model, self.reserve, body, request, bound_usd)
      reply = run_in_thread(ask(books, config.retries))
    self.counted_messages = len(messages)
    self.counted_tokens = reply.call.usage.prompt_tokens
    return reply
