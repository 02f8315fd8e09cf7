"""A trained router in Python, without a server: messages -> the model that is to answer next."""

import threading
from pathlib import Path
from typing import NamedTuple

from baar_jax.episode import SMALL, Call, Step, Task, Usage
from baar_jax.mesh import one_device
from baar_jax.rollout.budget import CallBudget, DollarBudget
from baar_jax.rollout.policies import Decision, Job, Live
from baar_jax.router.policy import RouterPolicy
from baar_jax.serve.decide import open_router, read_run
from baar_jax.serve.messages import read_messages


class Choice(NamedTuple):
  model: str
  probabilities: dict[str, float]  # by model; of the router that knows its budget 1 for its choice


class Router:
  """Decides for sessions whose calls the caller makes; `Router.load` opens one.

  Of its newest sessions it remembers which model it chose at each step, and what was left then.
  """

  def __init__(self, policy: RouterPolicy, models: tuple[str, ...], max_steps: int, sessions: int):
    self._policy, self._models, self._max_steps = policy, models, max_steps
    self._lives: dict[str, Live] = {}  # by session, the newest last
    self._most, self._lock = sessions, threading.Lock()

  @classmethod
  def load(cls, directory: str | Path, sessions: int = 16) -> "Router":
    """The router of a run that `--stage=serve` takes; ValueError if there is none."""
    directory = Path(directory)
    config = read_run(directory)
    policy = open_router(directory, config, one_device(), sessions)
    return cls(policy, config.models.names, config.env.max_steps, sessions)

  def decide(
    self, messages, *, tools=None, left_usd=None, left_large_calls=None, session=None
  ) -> Choice:
    """The model that is to answer `messages`, which are as of OpenAI's chat completions.

    `left_usd` and `left_large_calls` are left of the session's caps, None without one; the caller
    checks whether a call fits the dollars. Without a name for the `session`, its system text, tools
    and first user message tell it. Raises ValueError for what are no messages or no caps.
    """
    read = read_messages(messages, tools)
    if min(left_usd or 0, left_large_calls or 0) < 0:
      raise ValueError("left_usd and left_large_calls must not be negative")
    with self._lock:
      name = session or read.fingerprint
      live = self._lives.pop(name, None) or Live(Job(Task(name, "test", "", 1), 0), env=None)
      self._lives[name] = live
      if len(self._lives) > self._most:
        self._policy.finish(self._lives.pop(next(iter(self._lives))))
      live.job = Job(Task(name, "test", read.task, self._max_steps), 0)
      live.observation = read.observations[-1]
      del live.steps[len(read.actions) :]  # they are decided again
      for before, action in [*zip(read.observations, read.actions)][len(live.steps) :]:
        known = None not in (live.usd_limit, left_usd)
        usd = max(0.0, live.dollar_budget.remaining - left_usd) if known else 0.0
        model, live.dollar_budget = live.step.model, DollarBudget(None)
        live.step.model = SMALL  # of replies that were not asked for here
        live.steps.append(Step(before, model, action, [Call(model, Usage(0, 0, 0), usd)]))
      spent = sum(step.spent_usd for step in live.steps)
      used = sum(step.model != SMALL for step in live.steps)
      live.call_budget = CallBudget(None if left_large_calls is None else left_large_calls + used)
      live.dollar_budget = DollarBudget(None if left_usd is None else left_usd + spent, spent)
      decision = Decision(SMALL, p_A=[1.0] + [0.0] * len(self._models[1:]))
      if left_large_calls != 0:
        decision = self._policy.choose([live])[0]
      live.step.model = decision.model
      return Choice(self._models[decision.model], dict(zip(self._models, decision.p_A)))
