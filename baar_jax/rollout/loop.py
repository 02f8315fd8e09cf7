"""The rollout loop: live episodes are decided together and act independently."""

import dataclasses
import queue
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from baar_jax.envs.base import Env, EnvDied
from baar_jax.episode import Episode, Step
from baar_jax.llms import agent
from baar_jax.llms.pair import Pair
from baar_jax.rollout.budget import CallBudget, CapReached, DollarBudget
from baar_jax.rollout.specs import Decision, Job, Live
from baar_jax.rollout.turn import Policy, Purse, Turn

RESTARTS = 2  # of one episode whose environment died
Play = Generator[None, Decision, Episode]  # yields where the policy has to decide


@dataclasses.dataclass(frozen=True)
class Failure:
  """An episode that an error ended; it must not be stored."""

  job: Job
  steps: list[Step]
  error: EnvDied | agent.NoAnswer


@dataclasses.dataclass
class Running:
  """An episode under way, as the loop controls it."""

  live: Live
  env: Env  # runs this episode alone
  play: Play
  restarts: int = 0  # how often it was run again because its environment died
  episode: Episode | None = None  # once it is over
  error: BaseException | None = None  # the one that ended it

  def advance(self, decision: Decision | None, arrivals: "Arrivals") -> None:
    """Play to the next decision or to the end, in a worker thread."""
    try:
      self.play.send(decision)
    except StopIteration as end:
      self.episode = end.value
    except BaseException as error:
      self.error = error
    arrivals.put(self)


Arrivals = queue.SimpleQueue[Running]  # they wait for a decision or are over


def run_episodes(
  jobs: Iterable[Job],
  policy: Policy,
  pair: Pair,
  envs: Sequence[Env],
  run_budget: DollarBudget | None = None,
  max_failures: int = 100,
) -> Iterator[Episode | Failure]:
  """Run episodes, as many at a time as there are environments; yield each as it ends.

  The caller's thread decides, for all that are ready at once. `play_episode` runs in
  worker threads, and a slow episode delays no other. An episode whose environment died
  more than `RESTARTS` times, or whose model gave no answer, is a `Failure`.

  Args:
    run_budget: of all episodes; None is no limit.
    max_failures: tries in a row that may fail.

  Raises:
    CapReached: the run's budget is spent, and the calls in flight have ended.
    ValueError: `max_failures` tries in a row have failed.
  """
  # Each task's first job, then each task's second.
  waiting = sorted(jobs, key=lambda job: job.seed)
  arrivals: Arrivals = queue.SimpleQueue()
  workers = ThreadPoolExecutor(len(envs), thread_name_prefix="episode")

  def begin(job: Job, env: Env, restarts: int = 0) -> None:
    """Start an episode up to its first decision, in a worker thread."""
    cap = policy.spec.cap
    live = Live(job, cap, len(pair.names))
    purse = Purse(CallBudget(cap.calls), DollarBudget(cap.usd), run_budget)
    play = play_episode(live, env, pair, policy, purse)
    workers.submit(Running(live, env, play, restarts).advance, None, arrivals)

  try:
    live_count = min(len(envs), len(waiting))
    failures = 0
    for env in envs[:live_count]:
      begin(_pop_job(waiting), env)
    while live_count:
      ready = []
      for running in _take_all(arrivals):
        if not running.episode and not running.error:
          ready.append(running)
          continue
        policy.finish(running.live)
        failures = _count_failures(running, failures, max_failures)
        died = isinstance(running.error, EnvDied)
        if died and running.restarts < RESTARTS:
          begin(running.live.job, running.env, running.restarts + 1)
          continue
        live = running.live
        yield running.episode or Failure(live.job, live.steps, running.error)
        if waiting:
          begin(_pop_job(waiting, live.task.id), running.env)
        else:
          live_count -= 1
      decisions = policy.choose([running.live for running in ready]) if ready else ()
      for running, decision in zip(ready, decisions):
        workers.submit(running.advance, decision, arrivals)
  except CapReached:
    raise
  except BaseException:  # an abandoned loop or a bug: nobody waits for replies or steps
    pair.stop()
    for env in envs:
      env.close()
    raise
  finally:
    workers.shutdown(wait=True, cancel_futures=True)


def _take_all(arrivals: Arrivals) -> list[Running]:
  """Wait for an arrival; return it with all others that are there."""
  arrived = [arrivals.get()]
  for _ in range(arrivals.qsize()):
    arrived.append(arrivals.get())
  return arrived


def _count_failures(running: Running, failures: int, most: int) -> int:
  """Count the tries in a row that failed; raise what is no failure of one episode."""
  error = running.error
  if error is None:
    return 0
  if not isinstance(error, EnvDied | agent.NoAnswer):
    raise error  # the run's cap, or a bug
  failures += 1
  if failures >= most:
    problem = f"{failures} times in a row an episode has failed"
    last = f"at last {running.live.task.id}: {error}"
    raise ValueError(f"{problem}, {last}; see --config.models.max_failures")
  return failures


def _pop_job(waiting: list[Job], last_task: str = "") -> Job:
  """Take the next job of an environment's last task, if it has any, else the first."""
  for index, job in enumerate(waiting):
    if job.task.id == last_task:
      return waiting.pop(index)
  return waiting.pop(0)


def play_episode(
  live: Live, env: Env, pair: Pair, policy: Policy, purse: Purse
) -> Play:
  """Play an episode, from its reset to its score; return its record."""
  task = live.task
  live.observation = env.reset(task.id)
  agents = pair.start(env, task, live.job.seed, purse.hold)
  messages = agent.open_conversation(env.system_prompt, task, live.observation)
  stop = ""
  while not stop:
    turn = Turn(live, agents, messages, purse, env.code_actions)
    reply = yield from policy.act(turn)
    if reply is None:
      stop = "budget"
      break
    action = agent.parse_action(reply.text, env.code_actions)
    done = False
    observation = agent.NO_ACTION
    if action is not None:
      observation, done = env.step(action)
    step = turn.step
    step.action = action or ""
    step.calls = [*reply.calls("act"), *step.calls]
    step.score = env.score() if env.scores_steps else None
    live.steps.append(step)
    live.observation = observation
    agent.extend(messages, reply.text, observation)
    if done:
      stop = "done"
    elif len(live.steps) >= task.max_steps:
      stop = "max_steps"
  return Episode(
    task_id=task.id,
    policy=policy.spec.key,
    seed=live.job.seed,
    steps=live.steps,
    score=env.score(),
    stop=stop,
    call_budget=live.cap.calls,
    usd_budget=live.cap.usd,
    lost_usd=purse.dollars.lost_usd(live.steps),
  )
