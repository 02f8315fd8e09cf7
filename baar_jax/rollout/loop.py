"""The rollout loop: live episodes are decided together and act independently."""

import queue
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from baar_jax.envs.base import Env, EnvDied
from baar_jax.episode import SMALL, Episode, Reply, Step
from baar_jax.llms import agent
from baar_jax.rollout.budget import BudgetSpent, CallBudget, CapReached, DollarBudget
from baar_jax.rollout.policies import Job, Live, Policy

RESTARTS = 2  # of one episode whose environment died
FAILED = "{} times in a row an episode has failed, at last {}: {}; see --config.models.max_failures"


def run_episodes(
  jobs: Iterable[Job],
  policy: Policy,
  pair: agent.Pair,
  envs: Sequence[Env],
  call_budget: int | None = None,
  usd_budget: float | None = None,
  run_budget: DollarBudget | None = None,
  max_failures: int = 100,
) -> Iterator[Episode]:
  """Runs episodes, as many at a time as there are environments, and yields each as it ends.

  The caller's thread decides, for all that are ready at once; `_play` runs in worker threads, and a
  slow episode delays no other. `call_budget` and `usd_budget` limit each episode, `run_budget` all.
  An episode whose environment died more than `RESTARTS` times, or whose model gave no answer, stops
  as "error:..." and must not be stored. Raises CapReached once calls in flight have ended, and
  ValueError once `max_failures` tries in a row have failed.
  """
  waiting = sorted(jobs, key=lambda job: job.seed)  # each task's first job, then the second
  arrivals: queue.SimpleQueue[Live] = queue.SimpleQueue()  # they wait for a decision or are over
  workers = ThreadPoolExecutor(len(envs), thread_name_prefix="episode")

  def begin(job: Job, env: Env, restarts: int = 0) -> None:
    live = Live(job, env, CallBudget(call_budget), DollarBudget(usd_budget), run_budget, restarts)
    live.coroutine = _play(live, pair, policy)
    workers.submit(_advance, live, arrivals)

  try:
    live_count, failures = min(len(envs), len(waiting)), 0
    for env in envs[:live_count]:
      begin(_pop_job(waiting), env)
    while live_count:
      arrived = [arrivals.get(), *(arrivals.get() for _ in range(arrivals.qsize()))]
      for live in (live for live in arrived if live.stop):
        policy.finish(live)
        if not isinstance(live.error, EnvDied | agent.NoAnswer | None):
          raise live.error  # the run's cap, or a bug
        failures = failures + 1 if live.error else 0
        if failures >= max_failures:
          raise ValueError(FAILED.format(failures, live.task.id, live.error))
        if isinstance(live.error, EnvDied) and live.restarts < RESTARTS:
          begin(live.job, live.env, live.restarts + 1)
          continue
        yield _record_episode(live, policy.name)
        if waiting:
          begin(_pop_job(waiting, live.task.id), live.env)
        else:
          live_count -= 1
      for live in _decide(arrived, policy):
        workers.submit(_advance, live, arrivals)
  except CapReached:
    raise
  except BaseException:  # an abandoned loop or a bug: nobody waits for replies or steps
    pair.stop()
    for env in envs:
      env.close()
    raise
  finally:
    workers.shutdown(wait=True, cancel_futures=True)


def _pop_job(waiting: list[Job], last_task: str = "") -> Job:
  """Takes the next job of an environment's last task, as long as it has any, else the first."""
  return waiting.pop(next((i for i, job in enumerate(waiting) if job.task.id == last_task), 0))


def _decide(arrived: Sequence[Live], policy: Policy) -> list[Live]:
  """The episodes that go on. The policy decides once for all that may still choose; for the others
  `_ask` takes what is allowed."""
  ready = [live for live in arrived if not live.stop]
  undecided = [live for live in ready if len(live.allowed) > 1]
  for live, decision in zip(undecided, policy.choose(undecided) if undecided else ()):
    live.step.model, live.step.logp = decision.model, decision.logp
    live.step.router_cost_usd += decision.cost_usd
    live.step.router_latency_s += decision.latency_s
  return ready


def _advance(live: Live, arrivals: queue.SimpleQueue[Live]) -> None:
  """Plays to the next decision or to the end, in a worker thread."""
  try:
    next(live.coroutine, None)
  except BaseException as error:
    live.error, live.stop = error, f"error:{error}"
  arrivals.put(live)


def _play(live: Live, pair: agent.Pair, policy: Policy) -> Iterator[None]:
  """Plays an episode, from its reset to its score, and keeps its state in `live`.

  Each `yield` waits for a decision.
  """
  env, task = live.env, live.task
  live.observation = env.reset(task.id)
  live.agents = pair.start(env, task, live.job.seed, live.hold)
  live.messages = agent.open_conversation(env.system_prompt, task, live.observation)
  while not live.stop:
    _prepare(live, policy)
    yield
    reply = yield from _ask(live)
    if reply is None:
      live.stop = "budget"
      break
    action = agent.parse_action(reply.text, env.code_actions)
    observation, done = (agent.NO_ACTION, False) if action is None else env.step(action)
    step, live.observation = live.step, observation
    step.action = action or ""
    step.calls = [*reply.calls("act"), *step.calls]
    step.score = env.score() if env.scores_steps else None
    live.steps.append(step)
    agent.extend(live.messages, reply.text, observation)
    if done or len(live.steps) >= task.max_steps:
      live.stop = "done" if done else "max_steps"
  live.score = env.score()


def _prepare(live: Live, policy: Policy) -> None:
  """Begins a step: finds the allowed models, and lets the policy call models before it decides."""
  live.step, live.proposal_reply = Step(live.observation, SMALL, ""), None
  live.allowed = _allowed(live)
  if len(live.allowed) > 1:
    try:
      policy.prepare(live)
      live.allowed = _allowed(live)
    except BudgetSpent:  # by these calls: only SMALL is left
      live.allowed = [model for model in _allowed(live) if model == SMALL]


def _ask(live: Live) -> Generator[None, None, Reply | None]:
  """The reply of the decided model, else of the nearest cheaper one that is allowed, else of the
  cheapest allowed one; `live.step` then names it. None is the end of the budget.

  After a proposal (a cascade) the decided model proposes, too, and the next decision is waited for;
  the dearest allowed model acts at once, and a model that is decided for again acts as it proposed.
  """
  step = live.step
  while live.allowed:
    model = max((m for m in live.allowed if m <= step.model), default=live.allowed[0])
    if model != step.model:
      step.model, step.logp = model, None
    proposal = live.proposal_reply
    if proposal and model == live.proposer:
      return proposal
    live.call_budget.reserve(model)
    try:
      reply = live.agents[model].reply(live.messages, len(live.steps))
    except BudgetSpent:  # its attempts have spent what it needs
      live.call_budget.settle(model, made=False)
      live.allowed = [cheaper for cheaper in _allowed(live) if cheaper < model]
      continue
    if proposal:
      step.calls = [*proposal.calls("proposal"), *step.calls]
    if not proposal or model == live.allowed[-1]:
      return reply
    live.propose(reply)
    step.logp = None
    live.allowed = [dearer for dearer in _allowed(live) if dearer >= model]
    yield


def _allowed(live: Live) -> list[int]:
  """The models whose next call fits the episode's budgets, whatever it will cost."""
  paid = live.proposer if live.proposal_reply else None
  allowed, budget = [], live.dollar_budget
  for model, player in enumerate(live.agents):
    fits = live.call_budget.allows(model)
    if fits and model != paid and budget.limit_usd is not None:  # counting tokens is slow
      fits = budget.allows(player.bound_usd(live.messages, len(live.steps)))
    if fits or model == paid:
      allowed.append(model)
  return allowed


def _record_episode(live: Live, policy_name: str) -> Episode:
  """The record of an episode that ended."""
  fields = live.task.id, policy_name, live.job.seed, live.steps, live.score, live.stop
  caps = live.call_budget.limit, live.dollar_budget.limit_usd
  return Episode(*fields, *caps, lost_usd=live.dollar_budget.lost_usd(live.steps))
