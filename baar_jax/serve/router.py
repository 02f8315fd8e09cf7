"""`Router` decides without a server, for callers that call the models themselves."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from baar_jax.episode import SMALL, Step, Task
from baar_jax.mesh import one_device
from baar_jax.rollout.specs import Cap, Decision, Job, Live
from baar_jax.rollout.turn import Policy
from baar_jax.serve.decider import Decider
from baar_jax.serve.request import Conversation, read_messages
from baar_jax.store import read_run
from baar_jax.train.families import open_router
from baar_jax.train.training import RouterFiles


class Choice(NamedTuple):
  """A model, and the router's probabilities by model.

  The budget-conditioned router compares values: its choice has 1.
  """

  model: str
  probabilities: dict[str, float]


class Router:
  """Decides for sessions whose calls the caller makes; `Router.load` opens one.

  Of its newest sessions it remembers its choices, and what was left at each step.
  """

  def __init__(
    self, policy: Policy, models: Sequence[str], max_steps: int, sessions: int
  ):
    self._decider = Decider(policy, sessions)
    self._lock = threading.Lock()
    self._models = models
    self._max_steps = max_steps

  @classmethod
  def load(cls, directory: str | Path, sessions: int = 16) -> "Router":
    """Open the router that a run serves. Raises ValueError if there is none."""
    directory = Path(directory)
    config = read_run(directory)
    policy = open_router(RouterFiles(directory, config, one_device()), sessions)
    return cls(policy, config.models.names, config.env.max_steps, sessions)

  def decide(
    self,
    messages: Sequence[Mapping],
    *,
    tools: object = None,
    left_usd: float | None = None,
    left_large_calls: int | None = None,
    session: str | None = None,
  ) -> Choice:
    """Choose the model that is to answer messages of OpenAI's chat completions.

    The caller checks whether a call fits the dollars.

    Args:
      left_usd: left of the session's cap; None without one.
      left_large_calls: the same.
      session: its name; without one system text, tools and first user message tell it.

    Raises:
      ValueError: for messages or caps that are none.
    """
    text = read_messages(messages, tools)
    left = Cap(left_large_calls, left_usd)
    if min(left.calls or 0, left.usd or 0) < 0:
      raise ValueError("left_usd and left_large_calls must not be negative")
    with self._lock:
      live = self._make_live(session or text.fingerprint, text, left)
      if left.calls == 0:
        self._decider.keep(live)
        decision = Decision(SMALL, p_A=[1.0, *[0.0] * len(self._models[1:])])
      else:
        (decision,) = self._decider.choose([live])
      # The next decision adds its action.
      live.steps.append(Step("", decision.model, ""))
    model = self._models[decision.model]
    return Choice(model, dict(zip(self._models, decision.p_A)))

  def _make_live(self, session: str, text: Conversation, left: Cap) -> Live:
    """Make what the policy sees of a session, with what is remembered of it."""
    task = Task(session, "test", text.task, self._max_steps)
    job = Job(task, "test", 0)
    last = self._decider.lives.get((task.id, job.seed), Live(job))
    count = len(text.actions)
    # Replies that were not asked for here count as SMALL's.
    others = [Step("", SMALL, "")] * count
    told = [*last.told, *[left] * count]
    return Live(
      job,
      models=len(self._models),
      steps=text.write_steps([*last.steps, *others]),
      observation=text.observations[-1],
      told=[*told[:count], left],
    )
