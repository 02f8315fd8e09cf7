"""Play many episodes at once: one decision for all that wait, then a step of each.

`run_episodes` is the loop over all live episodes, `play_episode` the life of one of
them. They meet at a generator: it yields when its episode needs a decision, and the
loop sends the decision.
"""

import dataclasses
import queue
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Protocol

from baar_jax.config import ModelsConfig
from baar_jax.envs.base import Env, EnvDied
from baar_jax.episode import Episode, Reserve, Task
from baar_jax.llms.history import (
  NO_ACTION,
  NO_CODE,
  Agent,
  NoAnswer,
  extend,
  open_conversation,
  parse_action,
)
from baar_jax.rollout.budget import CallBudget, CapReached, DollarBudget, reserve
from baar_jax.rollout.policy import Policy, StepContext
from baar_jax.rollout.specs import Decision, Job, Live

RESTARTS = 2  # the most restarts of one episode after deaths of its environment
MAX_FAILURES = 20  # failed attempts at a policy's episodes in a row that end the run


class Trial(NamedTuple):
  """A trial that is to be played, with the policy that plays it."""

  policy: Policy
  job: Job


@dataclasses.dataclass
class Running:
  """An episode that is played or has ended, with all that controls it.

  Attributes:
    trial: the trial that is played, and the policy that plays it.
    live: the policy's view of the episode, with its steps.
    env: the environment, which plays no other episode meanwhile.
    play: the generator that plays the episode; see `play_episode`.
    restarts: number of restarts after deaths of the environment.
    episode: the record, once the episode has ended.
    error: the exception that ended the episode, if one did. Then it must not be stored.
  """

  trial: Trial
  live: Live
  env: Env
  play: Generator[None, Decision, Episode]
  restarts: int = 0
  episode: Episode | None = None
  error: BaseException | None = None

  def advance(self, decision: Decision | None, arrivals: "Arrivals") -> None:
    """Play until the next decision or the end.

    Args:
      decision: the decision that the episode waits for; None at its start.
      arrivals: the queue into which this episode is put afterwards.
    """
    try:
      self.play.send(decision)
    except StopIteration as end:
      self.episode = end.value
    except BaseException as error:
      self.error = error
    arrivals.put(self)


# Episodes that wait for a decision or have ended.
Arrivals = queue.SimpleQueue[Running]


class InThisThread(Executor):
  """Execute what is submitted before `submit` returns."""

  def submit(self, function: Callable, *args: object) -> None:
    """Call a function that raises nothing; its result is dropped."""
    function(*args)


class Pair(Protocol):
  """Two or more models to route between, the cheapest first."""

  names: tuple[str, ...]

  def start(self, env: Env, task: Task, seed: int, reserve: Reserve) -> Sequence[Agent]:
    """Start one agent for each model in an episode.

    Args:
      env: the environment of the episode.
      task: the task of the episode.
      seed: the seed of the episode.
      reserve: reserves the agents' calls in the budgets.
    """

  def judge(self, config: ModelsConfig) -> Callable[[Task, int, Reserve], Agent]:
    """Prepare the judge, the model that a zero-shot router asks.

    Args:
      config: the configuration of this model.

    Returns:
      A function that starts an agent for a task, a seed and the episode's `reserve`.

    Raises:
      ValueError: the model has no price.
    """

  def stop(self) -> None:
    """Stop all calls: cancel the calls in flight, and make no further attempts."""

  def close(self) -> None:
    """Close connections and files."""


def run_episodes(
  trials: Iterable[Trial],
  pair: Pair,
  envs: Sequence[Env],
  run_budget: DollarBudget | None = None,
) -> Iterator[Running]:
  """Play episodes; each environment plays one episode at a time.

  A policy decides in the caller's thread, for all its episodes at once that wait for a
  decision. Models and environments run in worker threads, so a slow episode delays no
  other episode. If nothing is ever slow (`Env.waits`), threads would only cost time.

  Args:
    trials: the trials to play, each with its policy.
    pair: the models.
    envs: the environments. Their number is the most episodes that are live at a time.
    run_budget: the budget of all episodes together; None is no cap.

  Yields:
    Each episode when it has ended, with its record; with an error instead if its
    environment died more than `RESTARTS` times, or if a model gave no answer.

  Raises:
    CapReached: a call does not fit `run_budget`. All calls in flight have ended.
    ValueError: `MAX_FAILURES` attempts at a policy's episodes in a row have failed.
  """
  # By trial, then by task, so that all tasks are begun early. Policies that play the
  # same jobs take turns, so that the servers of all their models are in use.
  waiting = sorted(trials, key=lambda trial: trial.job.key[::-1])
  arrivals: Arrivals = queue.SimpleQueue()
  workers = _open_workers(envs)

  def begin(trial: Trial, env: Env, restarts: int = 0) -> None:
    """Start an episode, and let a worker play it to its first decision."""
    live = Live(trial.job, trial.policy.spec.cap, len(pair.names))
    play = play_episode(live, env, pair, trial.policy, run_budget)
    workers.submit(Running(trial, live, env, play, restarts).advance, None, arrivals)

  try:
    live_count = min(len(envs), len(waiting))
    failures = Counter()
    for env in envs[:live_count]:
      begin(waiting.pop(0), env)
    while live_count:
      ready = []
      for running in _take_all(arrivals):
        if not running.episode and not running.error:
          ready.append(running)
          continue
        running.trial.policy.finish(running.live)
        _count_failure(running, failures)
        if isinstance(running.error, EnvDied) and running.restarts < RESTARTS:
          begin(running.trial, running.env, running.restarts + 1)
          continue
        yield running
        if waiting:
          begin(waiting.pop(0), running.env)
        else:
          live_count -= 1
      for policy in {running.trial.policy for running in ready}:
        batch = [running for running in ready if running.trial.policy is policy]
        decisions = policy.choose([running.live for running in batch])
        for running, decision in zip(batch, decisions):
          workers.submit(running.advance, decision, arrivals)
  except CapReached:
    raise
  except BaseException:
    # The caller has abandoned the loop, or an error has ended it. So nobody needs the
    # model calls and environment steps that are in progress: they are cancelled.
    pair.stop()
    for env in envs:
      env.close()
    raise
  finally:
    workers.shutdown(wait=True, cancel_futures=True)


def _open_workers(envs: Sequence[Env]) -> Executor:
  """Open a thread for each environment, or none if nothing waits in them."""
  if envs[0].waits:
    return ThreadPoolExecutor(len(envs), thread_name_prefix="episode")
  return InThisThread()


def _take_all(arrivals: Arrivals) -> list[Running]:
  """Wait until the queue has an episode, then take all episodes in the queue."""
  episodes = [arrivals.get()]
  for _ in range(arrivals.qsize()):
    episodes.append(arrivals.get())
  return episodes


def _count_failure(running: Running, failures: Counter[Policy]) -> None:
  """Count the failed attempts at episodes in a row, of each policy.

  So a dead model ends the run although a policy with another model succeeds.

  Args:
    running: an episode that has ended.
    failures: the counts before this episode, which change.

  Raises:
    ValueError: the count has reached `MAX_FAILURES`.
    BaseException: the episode's error, if it is neither EnvDied (the environment died)
      nor NoAnswer (a model gave no answer).
  """
  error = running.error
  policy = running.trial.policy
  failures[policy] += 1
  if error is None:
    failures[policy] = 0
  elif not isinstance(error, EnvDied | NoAnswer):
    raise error
  elif failures[policy] >= MAX_FAILURES:
    raise ValueError(
      f"Episodes of {policy.spec.key} have failed {MAX_FAILURES} times in a row. The "
      f"last failure is of task {running.live.task.id}: {error}. Correct its cause, "
      "then run the same command again."
    )


def play_episode(
  live: Live, env: Env, pair: Pair, policy: Policy, budget: DollarBudget | None
) -> Generator[None, Decision, Episode]:
  """Play an episode from its reset to its score.

  The generator yields when the policy must decide, and receives the decision.

  Args:
    live: the policy's view of the episode; each step updates it.
    env: the environment.
    pair: the models.
    policy: the policy.
    budget: the budget of all episodes together; None is no cap.

  Returns:
    The record of the episode.

  Raises:
    EnvDied: the environment died.
    NoAnswer: a model gave no answer.
    CapReached: a call does not fit the run's budget.
  """
  task = live.task
  calls = CallBudget(live.cap.calls)
  dollars = DollarBudget(live.cap.usd)
  reserve_call = partial(reserve, dollars, budget)
  live.observation = env.reset(task.id)
  agents = pair.start(env, task, live.job.seed, reserve_call)
  opening = env.opening
  messages = open_conversation(env.system_prompt, task, live.observation, opening)
  stop = ""
  while not stop:
    context = StepContext(
      live, agents, messages, calls, dollars, reserve_call, env.code_actions
    )
    live.draft = None
    move = yield from policy.play(context)
    if move is None:
      stop = "budget"
      break
    text = move.reply.text
    action = parse_action(text, env.code_actions)
    done = False
    observation = NO_CODE if env.code_actions else NO_ACTION
    # A remark would continue a conversation, so where each step begins a new one, the
    # environment answers a reply without an action.
    if action is not None or opening:
      observation, done = env.step(action or "")
    score = env.score() if env.scores_steps else None
    step = move.decision.make_step(
      live.observation, move.reply.calls("act"), action or "", score
    )
    live.steps.append(step)
    live.observation = observation
    if opening:
      messages = open_conversation(env.system_prompt, task, observation, opening)
    else:
      extend(messages, text, observation)
    if done:
      stop = "done"
    elif len(live.steps) >= task.max_steps:
      stop = "max_steps"
  return Episode(
    task_id=task.id,
    policy=policy.spec.key,
    purpose=live.job.purpose,
    trial=live.job.trial,
    steps=live.steps,
    score=env.score(),
    stop=stop,
    call_budget=live.cap.calls,
    usd_budget=live.cap.usd,
    lost_usd=dollars.lost_usd(live.steps),
    success_score=env.success_score,
  )
