"""The rollout loop: live episodes are decided together and act independently."""

import dataclasses
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
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
) -> Iterator[Episode]:
  """Runs episodes, as many at a time as there are environments, and yields each as it ends.

  The caller's thread is the only one that decides; model calls and environment steps run in
  worker threads, and a slow one delays its own episode only.

  Args:
    jobs: may repeat tasks; an environment is given the task that it holds where possible.
    policy: decides for all episodes that are ready at once.
    call_budget: cap on large calls of each episode; None is no cap.
    usd_budget: cap on dollars of each episode; one that cannot go on within it stops as "budget".
    cap: on dollars of all episodes, these and others; None is no cap.

  Yields:
    Finished episodes. One whose environment died more than `RESTARTS` times, or whose model gave
    no answer, has a stop of "error:..." and must not be stored as a result.

  Raises:
    CapReached: a call did not fit the cap; after all episodes that could be finished within it.
  """
  loop = _Loop(jobs, policy, pair, envs, call_budget, usd_budget, cap)
  try:
    stopped = yield from loop.run()
  except BaseException:  # Ctrl-C, an abandoned loop, or a bug: nobody waits for replies
    pair.stop()
    raise
  finally:
    loop.workers.shutdown(wait=True, cancel_futures=True)
  if stopped:
    raise stopped


class _Loop:
  """One call of `run_episodes`: the jobs that wait, and the events of the live episodes.

  An event is (live, error): a worker has finished its part of an episode, or raised the error.
  """

  def __init__(self, jobs, policy, pair, envs, call_budget, usd_budget, cap):
    self.policy, self.pair, self.envs = policy, pair, envs
    self.call_budget, self.usd_budget, self.run_budget = call_budget, usd_budget, cap
    self.waiting: dict[str, deque[Job]] = {}  # by task
    for job in jobs:
      self.waiting.setdefault(job.task.id, deque()).append(job)
    self.events: queue.SimpleQueue[tuple[Live, Exception | None]] = queue.SimpleQueue()
    self.workers = ThreadPoolExecutor(len(envs), thread_name_prefix="episode")

  def run(self) -> Iterator[Episode]:
    """Yields the episodes; returns the exception of a cap that was reached, else None."""
    stopped: CapReached | None = None
    live_count = min(len(self.envs), sum(map(len, self.waiting.values())))
    for env in self.envs[:live_count]:
      self.begin(self.next_job(None), env)
    while live_count:
      events, ready = [self.events.get()], []
      while not self.events.empty():
        events.append(self.events.get())
      for live, error in events:
        if error is None and not live.stop:
          ready.append(live)
          continue
        self.policy.finish(live)
        if isinstance(error, EnvDied) and live.restarts < RESTARTS:
          self.begin(live.job, live.env, live.restarts + 1)
          continue
        if isinstance(error, CapReached):
          stopped = error
        elif error and not isinstance(error, EnvDied | agent.NoAnswer):
          raise error  # a bug
        else:
          yield _episode(live, self.policy.name, error)
        if self.waiting and not stopped:
          self.begin(self.next_job(live.task.id), live.env)
        else:
          live_count -= 1
      self.dispatch(ready)
    return stopped

  def begin(self, job: Job, env: Env, restarts: int = 0) -> None:
    """Starts an episode in an environment."""
    live = Live(job, env, run_budget=self.run_budget, restarts=restarts)
    if self.call_budget is not None:
      live.call_budget = CallBudget(self.call_budget)
    if self.usd_budget is not None:
      live.dollar_budget = DollarBudget(self.usd_budget)
    self.submit(live, _reset, self.pair, self.policy)

  def dispatch(self, ready: Sequence[Live]) -> None:
    """Asks the policy where the budgets leave a choice, and has the chosen models act."""
    free = [live for live in ready if len(live.allowed) > 1]
    chosen = dict(zip(free, self.policy.choose(free))) if free else {}
    for live in ready:
      if live.allowed:
        decision = chosen.get(live, Decision(live.allowed[0]))
        self.submit(live, _act, _cheaper(decision, live.allowed), self.policy)
      else:
        self.submit(live, _stop, "budget")

  def submit(self, live: Live, work: Callable[..., None], *args) -> None:
    """Has a worker do the next part of an episode."""

    def run():
      try:
        work(live, *args)
        self.events.put((live, None))
      except Exception as error:
        self.events.put((live, error))

    self.workers.submit(run)

  def next_job(self, held: str | None) -> Job:
    """The next job of the task that an environment holds, else of the first task that waits."""
    task_id = held if held in self.waiting else next(iter(self.waiting))
    jobs = self.waiting.pop(task_id)
    job = jobs.popleft()
    if jobs:
      self.waiting[task_id] = jobs  # at the end: other environments take other tasks
    return job


def _cheaper(decision: Decision, allowed: Sequence[int]) -> Decision:
  """The decision, for the dearest model below where a budget forbids its own."""
  if decision.model in allowed:
    return decision
  below = [model for model in allowed if model < decision.model]
  return dataclasses.replace(decision, model=below[-1] if below else allowed[0], logp=None)


def _reset(live: Live, pair: agent.Pair, policy: Policy) -> None:
  live.observation = live.env.reset(live.task.id)
  live.agents = pair.start(live.env, live.task, live.job.seed, live.hold)
  live.messages = agent.open_conversation(live.env.system_prompt, live.task, live.observation)
  _prepare(live, policy)


def _prepare(live: Live, policy: Policy) -> None:
  """Sets the allowed models, and has the policy ask for what its decision needs.

  If that spends the budget, only SMALL is left.
  """
  live.proposal_reply = live.judged = None
  live.allowed = _allowed(live)
  if len(live.allowed) < 2:
    return
  try:
    policy.prepare(live)
    live.allowed = _allowed(live)
  except BudgetSpent:
    live.allowed = [model for model in _allowed(live) if model == SMALL]


def _allowed(live: Live) -> list[int]:
  """The models whose next call fits the episode's budgets, whatever it will cost."""

  def fits(model: int) -> bool:
    if live.call_budget is not None and not live.call_budget.allows(model):
      return False
    budget = live.dollar_budget
    if budget is None or (model == SMALL and live.proposal_reply):  # a proposal is paid for
      return True
    return budget.allows(live.agents[model].bound_usd(live.messages, len(live.steps)))

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
      decision = _cheaper(decision, below)
  action = agent.parse_action(reply.text, live.env.code_actions)
  observation, done = (agent.NO_ACTION, False) if action is None else live.env.step(action)
  calls, router_latency_s = reply.calls("act"), decision.latency_s
  if live.proposal_reply and reply is not live.proposal_reply:
    calls += live.proposal_reply.calls("proposal")
  if live.judged:
    calls += live.judged.calls
    router_latency_s += live.judged.latency_s
  live.steps.append(
    Step(
      observation=live.observation,
      model=decision.model,
      action=action or "",
      calls=calls,
      logp=decision.logp,
      router_cost_usd=decision.cost_usd,
      router_latency_s=router_latency_s,
      proposal=live.proposed,
    )
  )
  agent.extend(live.messages, reply.text, observation)
  live.observation = observation
  if done or len(live.steps) >= live.task.max_steps:
    return _stop(live, "done" if done else "max_steps")
  return _prepare(live, policy)


def _reply(live: Live, model: int) -> Reply:
  """The model's answer; of SMALL the proposal, if there is one. Raises BudgetSpent."""
  if model == SMALL and live.proposal_reply:
    return live.proposal_reply
  if live.call_budget is not None:
    live.call_budget.reserve(model)
  try:
    return live.agents[model].reply(live.messages, len(live.steps))
  except BudgetSpent:
    if live.call_budget is not None:
      live.call_budget.settle(model, made=False)
    raise


def _stop(live: Live, stop: str) -> None:
  """Ends an episode with the score that it has."""
  live.score = live.env.score()
  live.stop = stop


def _episode(live: Live, policy_name: str, error: Exception | None) -> Episode:
  """The record of an episode that ended, by an error of its environment or a model if any."""
  settled_usd = 0.0 if live.dollar_budget is None else live.dollar_budget.settled_usd
  lost_usd = round(settled_usd - sum(step.spent_usd for step in live.steps), PLACES)
  return Episode(
    task_id=live.task.id,
    policy=policy_name,
    seed=live.job.seed,
    steps=live.steps,
    score=live.score,
    stop=live.stop if error is None else f"error:{error}",
    call_budget=live.call_limit,
    usd_budget=live.usd_limit,
    lost_usd=max(0.0, lost_usd),
  )
