"""The rollout loop: live episodes are decided together and act independently."""

import dataclasses
import queue
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from baar_jax.envs.base import Env, EnvDied
from baar_jax.episode import SMALL, Episode, Reply, Step
from baar_jax.llms import agent
from baar_jax.rollout.budget import BudgetSpent, CallBudget, CapReached, DollarBudget
from baar_jax.rollout.live import Decision, Job, Live, Policy

RESTARTS = 2  # of one episode whose environment died
PLACES = 12  # decimals of lost_usd: it is a difference of sums, so it is rounded


def run_episodes(
  jobs: Iterable[Job],
  policy: Policy,
  pair: agent.Pair,
  envs: Sequence[Env],
  call_budget: int | None = None,
  usd_budget: float | None = None,
  cap: DollarBudget | None = None,
  max_failures: int = 100,
) -> Iterator[Episode]:
  """Runs episodes, as many at a time as there are environments, and yields each as it ends.

  The caller's thread decides, for all that are ready at once; `_play` runs in worker threads, and a
  slow episode delays no other. `call_budget` and `usd_budget` cap each episode, `cap` all of them.
  One whose environment died more than `RESTARTS` times, or whose model gave no answer, stops as
  "error:..." and must not be stored. Raises CapReached after all that could be finished within the
  cap, and ValueError once `max_failures` tries in a row have failed.
  """
  waiting = sorted(jobs, key=lambda job: job.seed)  # all tasks once, then again
  events: queue.SimpleQueue[Live] = queue.SimpleQueue()  # whose next decision or end has come
  workers = ThreadPoolExecutor(len(envs), thread_name_prefix="episode")

  def begin(job: Job, env: Env, restarts: int = 0) -> None:
    dollars = None if usd_budget is None else DollarBudget(usd_budget)
    live = Live(job, env, CallBudget(call_budget), dollars, cap, restarts)
    live.rest = _play(live, pair, policy)
    workers.submit(_go_on, live, events)

  try:
    live_count, failures, stopped = min(len(envs), len(waiting)), 0, None
    for env in envs[:live_count]:
      begin(_take(waiting), env)
    while live_count:
      arrived = [events.get()]
      arrived += [events.get() for _ in range(events.qsize())]
      for live in (live for live in arrived if live.stop):
        policy.finish(live)
        failures = _count_failures(live, failures, max_failures)
        if isinstance(live.error, EnvDied) and live.restarts < RESTARTS:
          begin(live.job, live.env, live.restarts + 1)
          continue
        if isinstance(live.error, CapReached):
          stopped = live.error
        else:
          yield _episode(live, policy.name)
        if waiting and not stopped:
          begin(_take(waiting, live.task.id), live.env)
        else:
          live_count -= 1
      for live in _decide(arrived, policy):
        workers.submit(_go_on, live, events)
  except BaseException:  # Ctrl-C, an abandoned loop, or a bug: nobody waits for replies or steps
    pair.stop()
    for env in envs:
      env.close()
    raise
  finally:
    workers.shutdown(wait=True, cancel_futures=True)
  if stopped:
    raise stopped


def _take(waiting: list[Job], held: str = "") -> Job:
  """Takes the next job of the task that an environment holds, else the first one."""
  return waiting.pop(next((i for i, job in enumerate(waiting) if job.task.id == held), 0))


def _count_failures(live: Live, in_a_row: int, limit: int) -> int:
  """The failed tries in a row, with this one. Raises ValueError at the limit, and any bug."""
  if live.error is None or isinstance(live.error, CapReached):
    return 0
  if not isinstance(live.error, EnvDied | agent.NoAnswer):
    raise live.error  # a bug
  if in_a_row + 1 >= limit:
    times = f"{limit} times in a row an episode has failed, at last {live.task.id}"
    raise ValueError(f"{times}: {live.error}; see --config.models.max_failures")
  return in_a_row + 1


def _decide(arrived: Sequence[Live], policy: Policy) -> list[Live]:
  """Asks the policy where the budgets leave a choice. Returns all episodes that go on."""
  ready = [live for live in arrived if not live.stop]
  free = [live for live in ready if len(live.allowed) > 1]
  for live, decision in zip(free, policy.choose(free) if free else ()):
    live.decision = decision
  return ready


def _go_on(live: Live, events: queue.SimpleQueue[Live]) -> None:
  """Plays to the next decision or to the end, in a worker thread."""
  try:
    next(live.rest, None)
  except BaseException as error:
    live.error, live.stop = error, f"error:{error}"
  events.put(live)


def _play(live: Live, pair: agent.Pair, policy: Policy) -> Iterator[None]:
  """One episode, from its reset to its score, in worker threads; each `yield` waits for a decision.

  What the policy may see of it and what it brings are in `live`.
  """
  live.observation = live.env.reset(live.task.id)
  live.agents = pair.start(live.env, live.task, live.job.seed, live.hold)
  live.messages = agent.open_conversation(live.env.system_prompt, live.task, live.observation)
  while not live.stop:
    _prepare(live, policy)
    yield
    reply = _ask(live)
    if reply is None:
      live.stop = "budget"
      break
    action = agent.parse_action(reply.text, live.env.code_actions)
    observation, done = (agent.NO_ACTION, False) if action is None else live.env.step(action)
    live.steps.append(_step(live, reply, action or ""))
    agent.extend(live.messages, reply.text, observation)
    live.observation = observation
    if done or len(live.steps) >= live.task.max_steps:
      live.stop = "done" if done else "max_steps"
  live.score = live.env.score()


def _prepare(live: Live, policy: Policy) -> None:
  """Sets the allowed models, and has the policy ask for what its decision needs.

  If that spends the budget, only SMALL is left. The decision is what the budgets leave, until the
  policy takes another.
  """
  live.proposal_reply = live.judged = None
  live.allowed = _allowed(live)
  if len(live.allowed) > 1:
    try:
      policy.prepare(live)
      live.allowed = _allowed(live)
    except BudgetSpent:
      live.allowed = [model for model in _allowed(live) if model == SMALL]
  live.decision = Decision(min(live.allowed, default=SMALL))


def _allowed(live: Live) -> list[int]:
  """The models whose next call fits the episode's budgets, whatever it will cost."""

  def fits(model: int) -> bool:
    if not live.call_budget.allows(model):
      return False
    if live.dollar_budget is None or (model == SMALL and live.proposal_reply):  # which is paid for
      return True
    return live.dollar_budget.allows(live.agents[model].bound_usd(live.messages, len(live.steps)))

  return [model for model in range(len(live.agents)) if fits(model)]


def _ask(live: Live) -> Reply | None:
  """The reply of the chosen model, or of the dearest below it that the budgets allow; else None.

  `live.decision` becomes that model's. Of SMALL the proposal is taken, if there is one.
  """
  allowed = live.allowed
  while allowed:
    model = max((m for m in allowed if m <= live.decision.model), default=allowed[0])
    if model != live.decision.model:
      live.decision = dataclasses.replace(live.decision, model=model, logp=None)
    if model == SMALL and live.proposal_reply:
      return live.proposal_reply
    live.call_budget.reserve(model)
    try:
      return live.agents[model].reply(live.messages, len(live.steps))
    except BudgetSpent:  # by attempts that brought no answer
      live.call_budget.settle(model, made=False)
      allowed = [cheaper for cheaper in _allowed(live) if cheaper < model]
  return None


def _step(live: Live, reply: Reply, action: str) -> Step:
  """The record of a step: the decision, the action, and all calls that were made for it."""
  made, calls, latency_s = live.decision, reply.calls("act"), live.decision.latency_s
  if live.proposal_reply and reply is not live.proposal_reply:
    calls += live.proposal_reply.calls("proposal")
  if live.judged:
    calls += live.judged.calls
    latency_s += live.judged.latency_s
  deciding = made.logp, made.cost_usd, latency_s
  return Step(live.observation, made.model, action, calls, *deciding, proposal=live.proposed)


def _episode(live: Live, policy_name: str) -> Episode:
  """The record of an episode that ended."""
  settled_usd = 0.0 if live.dollar_budget is None else live.dollar_budget.settled_usd
  lost_usd = max(0.0, round(settled_usd - sum(step.spent_usd for step in live.steps), PLACES))
  key, caps = (live.task.id, policy_name, live.job.seed), (live.call_limit, live.usd_limit)
  return Episode(*key, live.steps, live.score, live.stop, *caps, lost_usd=lost_usd)
