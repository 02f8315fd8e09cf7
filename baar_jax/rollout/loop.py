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
DECIMALS = 12  # of lost_usd: it is a difference of sums, so it is rounded


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
  slow episode delays no other. `call_budget` and `usd_budget` limit each episode, `run_budget` all
  together. An episode whose environment died more than `RESTARTS` times, or whose model gave no
  answer, stops as "error:..." and must not be stored. Raises CapReached after what could be
  finished within the run's budget, and ValueError once `max_failures` tries in a row have failed.
  """
  waiting = sorted(jobs, key=lambda job: job.seed)  # all tasks once, then again
  events: queue.SimpleQueue[Live] = queue.SimpleQueue()  # which wait for a decision or are over
  workers = ThreadPoolExecutor(len(envs), thread_name_prefix="episode")

  def begin(job: Job, env: Env, restarts: int = 0) -> None:
    dollars = None if usd_budget is None else DollarBudget(usd_budget)
    live = Live(job, env, CallBudget(call_budget), dollars, run_budget, restarts=restarts)
    live.coroutine = _play(live, pair, policy)
    workers.submit(_advance, live, events)

  try:
    live_count, failures, cap_reached = min(len(envs), len(waiting)), 0, None
    for env in envs[:live_count]:
      begin(_pop_job(waiting), env)
    while live_count:
      arrived = [events.get(), *(events.get() for _ in range(events.qsize()))]
      for live in (live for live in arrived if live.stop):
        policy.finish(live)
        failures = _count_failures(live, failures, max_failures)
        if isinstance(live.error, EnvDied) and live.restarts < RESTARTS:
          begin(live.job, live.env, live.restarts + 1)
          continue
        if isinstance(live.error, CapReached):
          cap_reached = live.error
        else:
          yield _record_episode(live, policy.name)
        if waiting and not cap_reached:
          begin(_pop_job(waiting, live.task.id), live.env)
        else:
          live_count -= 1
      _decide(arrived, policy)
      for live in (live for live in arrived if not live.stop):
        workers.submit(_advance, live, events)
  except BaseException:  # an abandoned loop or a bug: nobody waits for replies or steps
    pair.stop()
    for env in envs:
      env.close()
    raise
  finally:
    workers.shutdown(wait=True, cancel_futures=True)
  if cap_reached:
    raise cap_reached


def _pop_job(waiting: list[Job], last_task: str = "") -> Job:
  """Takes the next job of the task that an environment ran last, else the first job."""
  return waiting.pop(next((i for i, job in enumerate(waiting) if job.task.id == last_task), 0))


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


def _decide(arrived: Sequence[Live], policy: Policy) -> None:
  """Asks the policy for the decisions that the budgets leave open."""
  undecided = [live for live in arrived if not live.stop and len(live.allowed) > 1]
  for live, decision in zip(undecided, policy.choose(undecided) if undecided else ()):
    live.decision = decision


def _advance(live: Live, events: queue.SimpleQueue[Live]) -> None:
  """Plays to the next decision or to the end, in a worker thread."""
  try:
    next(live.coroutine, None)
  except BaseException as error:
    live.error, live.stop = error, f"error:{error}"
  events.put(live)


def _play(live: Live, pair: agent.Pair, policy: Policy) -> Iterator[None]:
  """Plays an episode in worker threads, from its reset to its score, and keeps its state in `live`.

  Each `yield` waits for a decision.
  """
  live.observation = live.env.reset(live.task.id)
  live.agents = pair.start(live.env, live.task, live.job.seed, live.hold)
  live.messages = agent.open_conversation(live.env.system_prompt, live.task, live.observation)
  while not live.stop:
    _prepare(live, policy)
    yield
    while _goes_on(live):
      yield
    reply = _ask(live)
    if reply is None:
      live.stop = "budget"
      break
    action = agent.parse_action(reply.text, live.env.code_actions)
    observation, done = (agent.NO_ACTION, False) if action is None else live.env.step(action)
    live.steps.append(_record_step(live, reply, action or ""))
    live.steps[-1].score = live.env.score() if live.env.scores_steps else None
    agent.extend(live.messages, reply.text, observation)
    live.observation = observation
    if done or len(live.steps) >= live.task.max_steps:
      live.stop = "done" if done else "max_steps"
  live.score = live.env.score()


def _prepare(live: Live, policy: Policy) -> None:
  """Sets the allowed models, and lets the policy call models before it decides.

  If these calls spend the budget, only SMALL is left. Until the policy decides, the decision is the
  cheapest allowed model.
  """
  live.proposal_reply = live.judgement = None
  live.allowed = _allowed(live)
  if len(live.allowed) > 1:
    try:
      policy.prepare(live)
      live.allowed = _allowed(live)
    except BudgetSpent:
      live.allowed = [model for model in _allowed(live) if model == SMALL]
  live.decision = Decision(min(live.allowed, default=SMALL))


def _goes_on(live: Live) -> bool:
  """Has a cascade's next model propose too, where the policy has passed over the last proposal.

  The dearest allowed one acts at once. Returns whether there is a new proposal to decide on.
  """
  model, passed, decision = live.decision.model, live.proposal_reply, live.decision
  if not live.proposal_reply or _is_paid(live, model) or model not in live.allowed[:-1]:
    return False
  proposal = _call(live, model)
  if proposal is None:
    return False
  live.proposal_reply = proposal
  before = live.judgement or Decision(SMALL)
  waste = before.cost_usd + decision.cost_usd, before.latency_s + decision.latency_s
  live.judgement = Decision(model, None, *waste, [*before.calls, *passed.calls("proposal")])
  live.decision = Decision(model)
  live.allowed = [dearer for dearer in _allowed(live) if dearer >= model]
  return True


def _call(live: Live, model: int) -> Reply | None:
  """A model's reply; None where its attempts spend the budget: then cheaper ones are allowed."""
  live.call_budget.reserve(model)
  try:
    return live.agents[model].reply(live.messages, len(live.steps))
  except BudgetSpent:
    live.call_budget.settle(model, made=False)
    live.allowed = [cheaper for cheaper in _allowed(live) if cheaper < model]
    return None


def _is_paid(live: Live, model: int) -> bool:
  """Whether the model's reply is there already, as a proposal."""
  return live.proposal_reply is not None and live.proposer == model


def _allowed(live: Live) -> list[int]:
  """The models whose next call fits the episode's budgets, whatever it will cost."""

  def fits(model: int) -> bool:
    if _is_paid(live, model):
      return True
    if not live.call_budget.allows(model):
      return False
    dollars, call = live.dollar_budget, (live.messages, len(live.steps))
    return dollars is None or dollars.allows(live.agents[model].bound_usd(*call))

  return [model for model in range(len(live.agents)) if fits(model)]


def _ask(live: Live) -> Reply | None:
  """The reply of the chosen model, else of the next cheaper one, else of the cheapest allowed one.

  `live.decision` then names the model that replied; its proposal is its reply. None is the end of
  the budget.
  """
  while live.allowed:
    model = max((m for m in live.allowed if m <= live.decision.model), default=live.allowed[0])
    if model != live.decision.model:
      live.decision = dataclasses.replace(live.decision, model=model, logp=None)
    if _is_paid(live, model):
      return live.proposal_reply
    if reply := _call(live, model):
      return reply
  return None


def _record_step(live: Live, reply: Reply, action: str) -> Step:
  """The record of a step: the decision, the action, and all calls that were made for it."""
  decision, calls = live.decision, reply.calls("act")
  router_usd, latency_s = decision.cost_usd, decision.latency_s
  if live.proposal_reply and reply is not live.proposal_reply:
    calls += live.proposal_reply.calls("proposal")
  if live.judgement:
    calls += live.judgement.calls
    router_usd += live.judgement.cost_usd
    latency_s += live.judgement.latency_s
  router = decision.logp, router_usd, latency_s
  return Step(live.observation, decision.model, action, calls, *router, live.proposal)


def _record_episode(live: Live, policy_name: str) -> Episode:
  """The record of an episode that ended."""
  settled_usd = 0.0 if live.dollar_budget is None else live.dollar_budget.settled_usd
  lost_usd = max(0.0, round(settled_usd - sum(step.spent_usd for step in live.steps), DECIMALS))
  key, caps = (live.task.id, policy_name, live.job.seed), (live.call_limit, live.usd_limit)
  return Episode(*key, live.steps, live.score, live.stop, *caps, lost_usd=lost_usd)
