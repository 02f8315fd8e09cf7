"""Choose models for agents of other programs: `Router`, and decisions in batches."""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baar_jax.episode import SMALL, Call, Task, Usage
from baar_jax.families.conditioned import load_default
from baar_jax.families.table import FAMILIES
from baar_jax.learn.checkpoint import Checkpoints
from baar_jax.llms.history import History, bound_tokens, read_chat
from baar_jax.llms.prices import CHARS_PER_TOKEN
from baar_jax.mesh import one_device
from baar_jax.rollout.jobs import BOPO, CONDITIONED, SFT
from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import Cap, Decision, Job, Live
from baar_jax.router.policy import ARGMAX
from baar_jax.run import RouterFiles
from baar_jax.store import read_run


class Decider:
  """Decide for live episodes that other programs play, in batches.

  The policy remembers at most `rows` episodes: those with the newest decisions.

  Attributes:
    lives: the live episodes that have a row in the KV cache, by `Live.key`. The one
      with the newest decision is last.
  """

  def __init__(self, policy: Policy, rows: int):
    """Set up a decider without any episodes.

    Args:
      rows: the number of episodes that the policy's KV cache can hold.
    """
    self.policy = policy
    self.lives: dict[tuple[str, int], Live] = {}
    self._rows = rows
    # The calls that wait for a decision. They are stored by call and not by episode,
    # because a client may drop a call and send the next one while the dropped call is
    # being decided.
    self._ready: dict[Live, asyncio.Future[Decision]] = {}
    self._lock = asyncio.Lock()

  async def decide(self, live: Live) -> Decision:
    """Choose an episode's next model, in one batch with all waiting episodes.

    The first waiting call runs the policy in a thread. The other calls await the
    result. A quick policy decides at once.
    """
    if self.policy.is_quick:
      (decision,) = self.choose([live])
      return decision
    self._ready[live] = result = asyncio.get_running_loop().create_future()
    try:
      # If this call is cancelled, the thread still chooses, and no other may.
      await asyncio.shield(self._choose_until(live))
      return result.result()
    finally:
      # An error of the policy ends this call alone. The other waiting calls run the
      # policy again.
      del self._ready[live]

  async def _choose_until(self, live: Live) -> None:
    """Choose for batches of waiting episodes, until one has its decision or is gone."""
    async with self._lock:
      while live in self._ready and not self._ready[live].done():
        waiting = [call for call, future in self._ready.items() if not future.done()]
        batch = waiting[: self._rows]
        decisions = await asyncio.to_thread(self.choose, batch)
        for call, decision in zip(batch, decisions):
          # A call is missing here if its client has dropped it meanwhile.
          if call in self._ready:
            self._ready[call].set_result(decision)

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Return the policy's decisions for different episodes.

    There must be at most as many episodes as the policy's KV cache has rows.
    """
    for live in ready:
      self.remember(live)
    return self.policy.choose(ready)

  def remember(self, live: Live) -> None:
    """Keep a live episode, as the one with the newest decision.

    If there are more episodes than rows in the KV cache, free the row of the episode
    whose last decision is the oldest.
    """
    self.lives.pop(live.key, None)
    self.lives[live.key] = live
    if len(self.lives) > self._rows:
      self.policy.finish(self.lives.pop(next(iter(self.lives))))


class RoutedModel(NamedTuple):
  """The model for the next call, with the router's probabilities.

  Attributes:
    model: the name of the chosen model.
    probabilities: the router's probability of each model, by name. The
      budget-conditioned router has no probabilities: the chosen model gets 1, and the
      others get 0.
  """

  model: str
  probabilities: dict[str, float]


class Router:
  """Choose the model of each call by a trained router.

  `Router.load` opens a trained router. The program that uses it calls the chosen models
  itself. The router remembers the chosen model and the remaining caps of each step in
  its newest sessions.
  """

  def __init__(
    self, policy: Policy, models: Sequence[str], max_steps: int, sessions: int
  ):
    """Set up a router that decides by a policy.

    Args:
      policy: the policy that decides.
      models: the names of the models, SMALL first.
      max_steps: the number of steps that the policy assumes a task to have at most.
      sessions: the number of sessions to remember.
    """
    self._decider = Decider(policy, sessions)
    self._lock = threading.Lock()
    self._models = models
    self._max_steps = max_steps

  @classmethod
  def load(cls, directory: str | Path, sessions: int = 16) -> "Router":
    """Open the budget-conditioned router of a run, or else its BoPO or SFT router.

    Args:
      directory: the run's directory, such as "runs/code".
      sessions: the number of sessions to remember.

    Raises:
      ValueError: the directory has no run, or the run has no trained router.
    """
    directory = Path(directory)
    config = read_run(directory)
    policy = open_router(RouterFiles(directory, config, one_device(), rows=sessions))
    return cls(policy, config.models.names, config.env.max_steps, sessions)

  def decide(
    self,
    messages: Sequence[Mapping],
    *,
    tools: object = None,
    left_usd: float | None = None,
    left_large_calls: int | None = None,
    session: str | None = None,
    score: float | None = None,
  ) -> RoutedModel:
    """Choose the model that answers the next call of a session.

    The caller must check by itself whether the chosen model's call fits `left_usd`.

    Args:
      messages: all messages of the session, in the form of OpenAI's chat completions.
      tools: the tools of the call, in the same form.
      left_usd: the remaining US dollars of the session's cap; None without a cap.
      left_large_calls: the remaining LARGE calls of the session's cap; None without a
        cap.
      session: the session's name. Without it, the task's text identifies the session.
      score: the score that your agent has reached so far, in [0, 1]; None if unknown.

    Raises:
      ValueError: a message has a wrong field, a remaining cap is negative, or the score
        is outside [0, 1].
    """
    text = read_chat(messages)
    remaining_cap = Cap(left_large_calls, left_usd)
    if min(remaining_cap.calls or 0, remaining_cap.usd or 0) < 0:
      raise ValueError("left_usd or left_large_calls is negative. Pass 0 or more.")
    if not 0 <= (score or 0) <= 1:
      raise ValueError(f"The score is {score}. Pass a number in [0, 1].")
    with self._lock:
      live = self._make_live(session or text.opening, text, remaining_cap)
      if live.steps:
        live.steps[-1].score = score
      if remaining_cap.calls == 0:
        self._decider.remember(live)
        decision = Decision(SMALL, p_A=[1.0, *[0.0] * len(self._models[1:])])
      else:
        (decision,) = self._decider.choose([live])
      # The caller is assumed to call the chosen model now; the prompt is an estimate.
      # The action of this step is filled in from the messages of the next call.
      prompt_tokens = bound_tokens([*messages, tools]) // CHARS_PER_TOKEN
      call = Call(decision.model, Usage(prompt_tokens, 0, 0), 0.0)
      step = decision.make_step("", [call], started_s=live.started_s)
      live.steps.append(step)
    model = self._models[decision.model]
    return RoutedModel(model, dict(zip(self._models, decision.p_A)))

  def _make_live(self, session: str, text: History, remaining_cap: Cap) -> Live:
    """Make the live episode of a session, from which the policy decides.

    The texts come from the messages. The models and the remaining caps of earlier steps
    come from this router's memory of the session.
    """
    task = Task(session, "test", text.task, self._max_steps)
    job = Job(task, "test", 0)
    remembered = self._decider.lives.get(job.key, Live(job))
    count = len(text.actions)
    past_caps = [*remembered.remaining_caps, *[remaining_cap] * count]
    return Live(
      job,
      models=len(self._models),
      steps=text.write_steps(dict(enumerate(remembered.steps))),
      observation=text.observations[-1],
      remaining_caps=[*past_caps[:count], remaining_cap],
      # Only differences count, so any clock will do.
      started_s=time.monotonic(),
    )


def open_router(files: RouterFiles) -> Policy:
  """Open the router that a run has trained.

  The budget-conditioned router with its default cost weight is preferred, then BoPO's
  router with the first cost weight, then the SFT router. Routers that are not trained
  are passed over.

  Raises:
    ValueError: no router is trained.
  """
  config = files.config
  family = FAMILIES[CONDITIONED]
  points = [*family.points(config)]
  if points and files.checkpoints("value").exists():
    spec = dataclasses.replace(points[0], cost_weight=load_default(files))
    return family.open(spec, files)
  family = FAMILIES[SFT]
  directory = files.checkpoints(BOPO, config.bopo.lam[0])
  with contextlib.closing(Checkpoints(directory)) as checkpoints:
    if checkpoints.last_update:
      family = FAMILIES[BOPO]
  router = family.list_routers(config)[0]
  return family.open(dataclasses.replace(router, threshold=ARGMAX), files)
