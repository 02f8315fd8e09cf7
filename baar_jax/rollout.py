"""The rollout loop: live episodes are decided together and act on their own."""

import dataclasses
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from baar_jax import agent
from baar_jax.budget import CallBudget
from baar_jax.envs.base import Env, EnvDied
from baar_jax.episode import SMALL, Episode, Step, Task

RESTARTS = 2  # of one episode whose environment died


@dataclasses.dataclass(frozen=True)
class Job:
  """An episode to be run."""

  task: Task
  seed: int


@dataclasses.dataclass(frozen=True)
class Decision:
  """A policy's choice: the model, its log-probability if sampled, and what deciding cost."""

  model: int
  logp: float | None = None
  cost_usd: float = 0.0


@dataclasses.dataclass(eq=False)
class Live:
  """A live episode: all that a policy may look at, and what the loop keeps beside it.

  A policy decides from task, steps, observation, call_budget and budget. `agents` are for the
  privileged oracle policy alone.
  """

  job: Job
  env: Env
  call_budget: int | None
  budget: CallBudget | None
  agents: Sequence[agent.Agent] = ()
  messages: agent.Messages = dataclasses.field(default_factory=list)
  steps: list[Step] = dataclasses.field(default_factory=list)
  observation: str = ""
  score: float = 0.0
  stop: str = ""
  restarts: int = 0

  @property
  def task(self) -> Task:
    return self.job.task


class Policy(Protocol):
  """Chooses a model for each of the episodes that are ready.

  `name` is part of the episodes' key: it carries every parameter and checkpoint.
  """

  name: str

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """One decision per episode, each of a model that the episode's budget allows."""

  def finish(self, live: Live) -> None:
    """Forgets an episode that ended or starts again."""


def run_episodes(
  jobs: Iterable[Job],
  policy: Policy,
  pair: agent.Pair,
  envs: Sequence[Env],
  call_budget: int | None = None,
) -> Iterator[Episode]:
  """Runs episodes, as many at a time as there are environments, and yields each as it ends.

  The caller's thread is the only one that decides; model calls and environment steps run in
  worker threads, and a slow one delays its own episode only.

  Args:
    jobs: may repeat tasks; an environment is given the task that it holds where possible.
    policy: decides for all episodes that are ready at once.
    call_budget: cap on large calls of each episode; None is no cap.

  Yields:
    Finished episodes. One whose environment died more than `RESTARTS` times has a stop of
    "error:..." and must not be stored as a result.
  """
  waiting: dict[str, deque[Job]] = {}
  for job in jobs:
    waiting.setdefault(job.task.id, deque()).append(job)
  events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
  workers = ThreadPoolExecutor(len(envs), thread_name_prefix="episode")

  def submit(live: Live, work: Callable[..., bool], *args) -> None:
    def run():
      try:
        events.put(_Event(live, over=work(live, *args)))
      except Exception as error:
        events.put(_Event(live, error=error))

    workers.submit(run)

  def begin(job: Job, env: Env, restarts: int = 0) -> None:
    budget = None if call_budget is None else CallBudget(call_budget)
    submit(Live(job, env, call_budget, budget, restarts=restarts), _reset, pair)

  try:
    live_count = min(len(envs), sum(map(len, waiting.values())))
    for env in envs[:live_count]:
      begin(_next_job(waiting, None), env)
    while live_count:
      ready = []
      for event in _take_all(events):
        live = event.live
        if event.error is None and not event.over:
          ready.append(live)
          continue
        policy.finish(live)
        if isinstance(event.error, EnvDied) and live.restarts < RESTARTS:
          begin(live.job, live.env, live.restarts + 1)
          continue
        yield _episode(live, policy.name, event.error)
        if waiting:
          begin(_next_job(waiting, live.task.id), live.env)
        else:
          live_count -= 1
      if ready:
        for live, decision in zip(ready, _decide(policy, ready)):
          submit(live, _act, decision, pair)
  finally:
    workers.shutdown(wait=True, cancel_futures=True)


@dataclasses.dataclass(frozen=True)
class _Event:
  """A worker is done with a live episode: it goes on, it is over, or something was raised."""

  live: Live
  over: bool = False
  error: Exception | None = None


def _take_all(events: "queue.SimpleQueue[_Event]") -> list[_Event]:
  """Waits for one event and takes whatever else is there."""
  taken = [events.get()]
  while not events.empty():
    taken.append(events.get())
  return taken


def _next_job(waiting: dict[str, deque[Job]], held: str | None) -> Job:
  """The next job of the task that an environment holds, else of the first task that waits."""
  task_id = held if held in waiting else next(iter(waiting))
  job = waiting[task_id].popleft()
  if waiting[task_id]:
    waiting[task_id] = waiting.pop(task_id)  # to the back: other environments take other tasks
  else:
    del waiting[task_id]
  return job


def _decide(policy: Policy, ready: Sequence[Live]) -> list[Decision]:
  """Asks the policy where the budget leaves a choice, and holds it to what is allowed."""
  free = [live for live in ready if live.budget is None or live.budget.remaining > 0]
  chosen = dict(zip(map(id, free), policy.choose(free))) if free else {}
  decisions = []
  for live in ready:
    decision = chosen.get(id(live), Decision(SMALL))
    if live.budget is not None:
      live.budget.reserve(decision.model)
    decisions.append(decision)
  return decisions


def _reset(live: Live, pair: agent.Pair) -> bool:
  live.observation = live.env.reset(live.task.id)
  live.agents = pair.start(live.env, live.task, live.job.seed)
  live.messages = agent.opening(live.env.system_prompt, live.task, live.observation)
  return False


def _act(live: Live, decision: Decision, pair: agent.Pair) -> bool:
  """One model call and one environment step. Returns whether the episode is over."""
  start = time.monotonic()
  reply = live.agents[decision.model].reply(live.messages, len(live.steps))
  latency_s = time.monotonic() - start
  action = agent.parse_action(reply.text, live.env.code_actions)
  observation, done = (agent.NO_ACTION, False) if action is None else live.env.step(action)
  live.steps.append(
    Step(
      observation=live.observation,
      model=decision.model,
      action=action or "",
      cost_usd=pair.prices[decision.model].cost_usd(reply.usage),
      **dataclasses.asdict(reply.usage),
      router_cost_usd=decision.cost_usd,
      latency_s=latency_s,
      logp=decision.logp,
    )
  )
  agent.extend(live.messages, reply.text, observation)
  live.observation = observation
  if done or len(live.steps) >= live.task.max_steps:
    live.stop = "done" if done else "max_steps"
    live.score = live.env.score()
    return True
  return False


def _episode(live: Live, policy_name: str, error: Exception | None) -> Episode:
  """The finished record. Raises the error unless it is the environment's end."""
  if error is not None and not isinstance(error, EnvDied):
    raise error
  stop = live.stop if error is None else f"error:{error}"
  key = (live.task.id, policy_name, live.job.seed)
  return Episode(*key, live.steps, live.score, stop, live.call_budget)
