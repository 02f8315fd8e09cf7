"""The rollout loop: live episodes are decided together and act independently."""

import dataclasses
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from baar_jax.envs.base import Env, EnvDied
from baar_jax.episode import SMALL, Episode, Step
from baar_jax.llms import agent
from baar_jax.rollout.budget import BudgetSpent, CallBudget, CapReached, DollarBudget
from baar_jax.rollout.live import Decision, Job, Live, Policy

RESTARTS = 2  # of one episode whose environment died
PLACES = 12  # decimals of a dollar that rounding does not reach


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
  loop = _Loop(jobs, policy, pair, envs, (call_budget, usd_budget, cap))
  try:
    stopped = yield from loop.run()
  except BaseException:  # Ctrl-C, an abandoned loop, or a bug: nobody waits for replies
    pair.stop()
    raise
  finally:
    loop.workers.shutdown(wait=True, cancel_futures=True)
  if stopped:
    raise stopped


@dataclasses.dataclass(frozen=True)
class _Event:
  """A worker has finished its part of a live episode, or something was raised."""

  live: Live
  error: Exception | None = None


class _Loop:
  """One call of `run_episodes`: the jobs that wait, and the events of the live episodes."""

  def __init__(self, jobs, policy, pair, envs, limits):
    self.policy, self.pair, self.envs, self.limits = policy, pair, envs, limits
    self.waiting: dict[str, deque[Job]] = {}  # by task
    for job in jobs:
      self.waiting.setdefault(job.task.id, deque()).append(job)
    self.events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    self.workers = ThreadPoolExecutor(len(envs), thread_name_prefix="episode")

  def run(self) -> Iterator[Episode]:
    """Yields the episodes; returns the exception of a cap that was reached, else None."""
    stopped: CapReached | None = None
    live_count = min(len(self.envs), sum(map(len, self.waiting.values())))
    for env in self.envs[:live_count]:
      self.begin(self.next_job(None), env)
    while live_count:
      ready = []
      for event in self.take_events():
        live = event.live
        if event.error is None and not live.stop:
          ready.append(live)
          continue
        self.policy.finish(live)
        if isinstance(event.error, EnvDied) and live.restarts < RESTARTS:
          self.begin(live.job, live.env, live.restarts + 1)
          continue
        if isinstance(event.error, CapReached):
          stopped = event.error
        else:
          yield _episode(live, self.policy.name, event.error)
        if self.waiting and not stopped:
          self.begin(self.next_job(live.task.id), live.env)
        else:
          live_count -= 1
      for live, decision in zip(ready, _decide(self.policy, ready)):
        if decision is None:
          self.submit(live, _stop, "budget")
        else:
          self.submit(live, _act, decision, self.policy)
    return stopped

  def begin(self, job: Job, env: Env, restarts: int = 0) -> None:
    """Starts an episode in an environment."""
    call_budget, usd_budget, cap = self.limits
    calls = None if call_budget is None else CallBudget(call_budget)
    dollars = None if usd_budget is None else DollarBudget(usd_budget)
    self.submit(Live(job, env, calls, dollars, cap, restarts), _reset, self.pair, self.policy)

  def submit(self, live: Live, work: Callable[..., None], *args) -> None:
    """Has a worker do the next part of an episode."""

    def run():
      try:
        work(live, *args)
        self.events.put(_Event(live))
      except Exception as error:
        self.events.put(_Event(live, error))

    self.workers.submit(run)

  def take_events(self) -> list[_Event]:
    """Waits for one event and takes all others that have come."""
    events = [self.events.get()]
    while not self.events.empty():
      events.append(self.events.get())
    return events

  def next_job(self, held: str | None) -> Job:
    """The next job of the task that an environment holds, else of the first task that waits."""
    task_id = held if held in self.waiting else next(iter(self.waiting))
    jobs = self.waiting.pop(task_id)
    job = jobs.popleft()
    if jobs:
      self.waiting[task_id] = jobs  # at the end: other environments take other tasks
    return job


def _decide(policy: Policy, ready: Sequence[Live]) -> list[Decision | None]:
  """Asks the policy where the budgets leave a choice, and holds it to what they allow.

  None is where no model is left. A model that is pruned gives way to the dearest below it.
  """
  free = [live for live in ready if len(live.allowed) > 1]
  chosen = dict(zip(map(id, free), policy.choose(free))) if free else {}
  decisions = []
  for live in ready:
    if not live.allowed:
      decisions.append(None)
      continue
    decision = chosen.get(id(live), Decision(live.allowed[0]))
    if decision.model not in live.allowed:
      below = [model for model in live.allowed if model < decision.model]
      decision = _forced(decision, below[-1] if below else live.allowed[0])
    decisions.append(decision)
  return decisions


def _forced(decision: Decision, model: int) -> Decision:
  """The decision for another model, which a budget made."""
  return dataclasses.replace(decision, model=model, logp=None)


def _reset(live: Live, pair: agent.Pair, policy: Policy) -> None:
  live.observation = live.env.reset(live.task.id)
  live.agents = pair.start(live.env, live.task, live.job.seed, live.hold)
  live.messages = agent.opening(live.env.system_prompt, live.task, live.observation)
  _prepare(live, policy)


def _prepare(live: Live, policy: Policy) -> None:
  """Works out which models the budgets allow, and what the policy needs to choose among them."""
  live.proposal = live.judged = None
  live.allowed = _allowed(live)
  if len(live.allowed) < 2:
    return
  try:
    policy.prepare(live)
    live.allowed = _allowed(live)
  except BudgetSpent:  # SMALL may still fit
    live.allowed = [model for model in _allowed(live) if model == SMALL]


def _allowed(live: Live) -> list[int]:
  """The models whose next call fits the episode's budgets, whatever it will cost."""

  def fits(model: int) -> bool:
    if live.calls is not None and not live.calls.allows(model):
      return False
    if live.dollars is None or (model == SMALL and live.proposal):  # a proposal is paid for
      return True
    return live.dollars.allows(live.agents[model].bound_usd(live.messages, len(live.steps)))

  return [model for model in range(len(live.agents)) if fits(model)]


def _act(live: Live, decision: Decision, policy: Policy) -> None:
  """One model call and one environment step.

  A model whose attempts have used up what it needs gives way to the dearest below it that fits.
  """
  while True:
    try:
      reply = _reply(live, decision.model)
      break
    except BudgetSpent:  # by attempts that brought no answer
      below = [model for model in _allowed(live) if model < decision.model]
      if not below:
        return _stop(live, "budget")
      decision = _forced(decision, below[-1])
  action = agent.parse_action(reply.text, live.env.code_actions)
  observation, done = (agent.NO_ACTION, False) if action is None else live.env.step(action)
  live.steps.append(_step(live, decision, reply, action or ""))
  agent.extend(live.messages, reply.text, observation)
  live.observation = observation
  if done or len(live.steps) >= live.task.max_steps:
    return _stop(live, "done" if done else "max_steps")
  return _prepare(live, policy)


def _reply(live: Live, model: int) -> agent.Reply:
  """The model's answer; of SMALL the proposal, if there is one. Raises BudgetSpent."""
  if model == SMALL and live.proposal:
    return live.proposal
  if live.calls is not None:
    live.calls.reserve(model)
  try:
    return live.agents[model].reply(live.messages, len(live.steps))
  except BudgetSpent:
    if live.calls is not None:
      live.calls.settle(model, made=False)
    raise


def _step(live: Live, decision: Decision, reply: agent.Reply, action: str) -> Step:
  calls = reply.calls("act")
  if live.proposal and reply is not live.proposal:
    calls += live.proposal.calls("proposal")
  router_latency_s = decision.latency_s
  if live.judged:
    calls += live.judged.calls
    router_latency_s += live.judged.latency_s
  return Step(
    observation=live.observation,
    model=decision.model,
    action=action,
    calls=calls,
    logp=decision.logp,
    router_cost_usd=decision.cost_usd,
    router_latency_s=router_latency_s,
    proposal=live.proposed,
  )


def _stop(live: Live, stop: str) -> None:
  """Ends an episode with the score that it has."""
  live.score = live.env.score()
  live.stop = stop


def _episode(live: Live, policy_name: str, error: Exception | None) -> Episode:
  """The finished record. Raises the error unless it is the environment's end or a model's."""
  if error is not None and not isinstance(error, EnvDied | agent.NoAnswer):
    raise error
  settled_usd = 0.0 if live.dollars is None else live.dollars.settled_usd
  lost_usd = round(settled_usd - sum(step.spent_usd for step in live.steps), PLACES)
  return Episode(
    task_id=live.task.id,
    policy=policy_name,
    seed=live.job.seed,
    steps=live.steps,
    score=live.score,
    stop=live.stop if error is None else f"error:{error}",
    call_budget=live.call_budget,
    usd_budget=live.usd_budget,
    lost_usd=max(0.0, lost_usd),
  )
