"""The rollout loop: live episodes are decided together and act on their own."""

import dataclasses
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from baar_jax.envs.base import Env, EnvDied
from baar_jax.episode import SMALL, Call, Episode, Step, Usage
from baar_jax.llms import agent
from baar_jax.rollout.budget import BudgetSpent, CallBudget, CapReached, DollarBudget, Purse
from baar_jax.rollout.live import NO_ADVICE, Decision, Job, Live, Policy

RESTARTS = 2  # of one episode whose environment died
PLACES = 12  # of a dollar's decimals that are no rounding


def run_episodes(
  jobs: Iterable[Job],
  policy: Policy,
  pair: agent.Pair,
  envs: Sequence[Env],
  call_budget: int | None = None,
  usd_budget: float | None = None,
  cap: DollarBudget | None = None,
) -> Iterator[Episode]:
  """Runs episodes, as many at a time as there are environments, and yields each as it ends.

  The caller's thread is the only one that decides; model calls and environment steps run in
  worker threads, and a slow one delays its own episode only.

  Args:
    jobs: may repeat tasks; an environment is given the task that it holds where possible.
    policy: decides for all episodes that are ready at once.
    call_budget: cap on large calls of each episode; None is no cap.
    usd_budget: cap on dollars of each episode; one that cannot go on within it has a stop of
      "budget".
    cap: on dollars of all episodes, these and others; None is no cap.

  Yields:
    Finished episodes. One whose environment died more than `RESTARTS` times, or whose model gave
    no answer, has a stop of "error:..." and must not be stored as a result.

  Raises:
    CapReached: a call did not fit the cap; after all episodes that could be finished within it.
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
    calls = None if call_budget is None else CallBudget(call_budget)
    dollars = None if usd_budget is None else DollarBudget(usd_budget)
    live = Live(job, env, call_budget, calls, usd_budget, dollars, restarts=restarts)
    submit(live, _reset, pair, cap, policy)

  stopped: CapReached | None = None
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
        if isinstance(event.error, CapReached):
          stopped = event.error
        else:
          yield _episode(live, policy.name, event.error)
        if waiting and not stopped:
          begin(_next_job(waiting, live.task.id), live.env)
        else:
          live_count -= 1
      for live, decision in zip(ready, _decide(policy, ready)):
        if decision is None:
          submit(live, _stop, "budget")
        else:
          submit(live, _act, decision, pair, policy)
  except BaseException:  # Ctrl-C, an abandoned loop, or somebody's bug: nobody waits for replies
    pair.stop()
    raise
  finally:
    workers.shutdown(wait=True, cancel_futures=True)
  if stopped:
    raise stopped


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


def _decide(policy: Policy, ready: Sequence[Live]) -> list[Decision | None]:
  """Asks the policy where the budgets leave a choice, and holds it to what they allow.

  None is where no model is left. A model that is pruned gives way to the dearest below it.
  """
  allowed = [_allowed(live) for live in ready]
  free = [live for live, models in zip(ready, allowed) if len(models) > 1]
  chosen = dict(zip(map(id, free), policy.choose(free))) if free else {}
  decisions = []
  for live, models in zip(ready, allowed):
    if not models:
      decisions.append(None)
      continue
    decision = chosen.get(id(live), Decision(models[0]))
    if decision.model not in models:
      below = max((m for m in models if m < decision.model), default=models[0])
      decision = dataclasses.replace(decision, model=below, logp=None)
    if live.budget is not None:
      live.budget.reserve(decision.model)
    decisions.append(decision)
  return decisions


def _allowed(live: Live) -> list[int]:
  """The models whose next call fits the episode's budgets, whatever it will cost."""
  return [
    model
    for model in range(1 if live.forced else len(live.agents))
    if live.budget is None or live.budget.allows(model)
    if live.dollars is None or live.dollars.allows(live.bounds_usd[model])
  ]


def _reset(live: Live, pair: agent.Pair, cap: DollarBudget | None, policy: Policy) -> bool:
  live.observation = live.env.reset(live.task.id)
  live.purse = Purse(live.dollars, cap)
  live.agents = pair.start(live.env, live.task, live.job.seed, live.purse)
  live.messages = agent.opening(live.env.system_prompt, live.task, live.observation)
  _prepare(live, policy)
  return False


def _prepare(live: Live, policy: Policy) -> None:
  """All that the next decision needs."""
  start = time.monotonic()
  live.forced = False
  _foresee(live)
  if len(_allowed(live)) > 1:
    try:
      policy.prepare(live)
    except BudgetSpent:  # SMALL may fit all the same
      live.forced = True
    _foresee(live)
  live.prepared_s = time.monotonic() - start


def _foresee(live: Live) -> None:
  """Works out what the next call may cost, where a budget asks for it."""
  if live.dollars is not None:
    live.bounds_usd = [a.bound_usd(live.messages, len(live.steps)) for a in live.agents]
    if live.proposal:  # is paid for
      live.bounds_usd[SMALL] = 0.0


def _act(live: Live, decision: Decision, pair: agent.Pair, policy: Policy) -> bool:
  """One model call and one environment step. Returns whether the episode is over.

  A model whose attempts have used up what it needs gives way to the dearest below it that fits.
  """
  start = time.monotonic()
  proposal, proposed, advice = live.proposal, live.proposed, live.advice or NO_ADVICE
  live.proposal = live.advice = None
  try:
    if proposal and decision.model == SMALL:
      reply = proposal
    else:
      reply = live.agents[decision.model].reply(live.messages, len(live.steps))
  except BudgetSpent:  # by attempts that brought no answer
    if live.budget is not None:
      live.budget.settle(decision.model, made=False)
    live.proposal, live.advice = proposal, advice
    _foresee(live)
    below = [model for model in _allowed(live) if model < decision.model]
    if not below:
      return _stop(live, "budget")
    if live.budget is not None:
      live.budget.reserve(below[-1])
    cheaper = dataclasses.replace(decision, model=below[-1], logp=None)
    return _act(live, cheaper, pair, policy)
  refused = None if reply is proposal else proposal
  asked = [part for part in (reply, refused, advice) if part]
  latency_s = time.monotonic() - start
  action = agent.parse_action(reply.text, live.env.code_actions)
  observation, done = (agent.NO_ACTION, False) if action is None else live.env.step(action)
  waited_s = live.prepared_s if proposal else 0.0
  calls = [_call(pair, decision.model, reply, "act", latency_s + (0.0 if refused else waited_s))]
  if refused:
    calls.append(_call(pair, SMALL, refused, "proposal", waited_s))
  if advice is not NO_ADVICE:
    usage = Usage(0, 0, advice.judge_tokens)
    calls.append(Call(len(pair.names), usage, advice.judge_usd, live.prepared_s, kind="judge"))
  for kind in ("retry", "presumed"):
    usd = sum(getattr(part, f"{kind}_usd") for part in asked)
    if usd:
      calls.append(Call(decision.model, Usage(0, 0, 0), usd, kind=kind))
  live.steps.append(
    Step(
      observation=live.observation,
      model=decision.model,
      action=action or "",
      calls=calls,
      router_cost_usd=decision.cost_usd,
      router_latency_s=decision.latency_s + (live.prepared_s if advice is not NO_ADVICE else 0.0),
      logp=decision.logp,
      proposal=proposed,
    )
  )
  agent.extend(live.messages, reply.text, observation)
  live.observation = observation
  if done or len(live.steps) >= live.task.max_steps:
    return _stop(live, "done" if done else "max_steps")
  _prepare(live, policy)
  return False


def _call(pair: agent.Pair, model: int, reply: agent.Reply, kind: str, latency_s: float) -> Call:
  usd = pair.prices[model].cost_usd(reply.usage)
  return Call(model, reply.usage, usd, latency_s, reply.replayed, kind)


def _stop(live: Live, stop: str) -> bool:
  """Ends an episode with the score that it has."""
  live.stop, live.score = stop, live.env.score()
  return True


def _episode(live: Live, policy_name: str, error: Exception | None) -> Episode:
  """The finished record. Raises the error unless it is the environment's end or a model's."""
  if error is not None and not isinstance(error, EnvDied | agent.NoAnswer):
    raise error
  stop = live.stop if error is None else f"error:{error}"
  key = (live.task.id, policy_name, live.job.seed)
  known = live.steps, live.score, stop, live.call_budget, live.usd_budget
  settled_usd = 0.0 if live.dollars is None else live.dollars.settled_usd
  lost_usd = round(settled_usd - sum(step.spent_usd for step in live.steps), PLACES)
  return Episode(*key, *known, lost_usd=max(0.0, lost_usd))
