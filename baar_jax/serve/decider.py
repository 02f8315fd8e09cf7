"""One batching loop: all sessions that are ready are decided in one call of a policy."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from baar_jax.episode import SMALL, Step, Task
from baar_jax.rollout.budget import CallBudget, DollarBudget
from baar_jax.rollout.policies import Decision, Job, Live, Policy
from baar_jax.serve.request import Conversation


class Situation(NamedTuple):
  """What a session's next decision is made from."""

  id: str
  job: Job
  text: Conversation
  steps: Sequence[Step]  # models and calls of the text's actions
  left_usd: float | None  # None is no cap, also below
  left_large_calls: int | None
  price: float | None = None  # as of `Live`


class Decider:
  """Decides for sessions, of which the newest have a row of the policy's cache each."""

  def __init__(self, policy: Policy, models: Sequence, rows: int):
    self.policy, self._models, self._rows = policy, models, rows
    self._lives: dict[str, Live] = {}  # by session, the newest last
    self._ready: dict[str, Situation] = {}
    self._decided: dict[str, Decision] = {}
    self._lock = asyncio.Lock()

  async def decide(self, situation: Situation) -> Decision:
    """The decision for a session. Who comes first decides for all that are ready, in a thread."""
    self._ready[situation.id] = situation
    async with self._lock:
      while situation.id in self._ready:
        batch = [self._ready.pop(id_) for id_ in [*self._ready][: self._rows]]
        decisions = await asyncio.to_thread(self.choose, batch)
        self._decided |= {other.id: decision for other, decision in zip(batch, decisions)}
    return self._decided.pop(situation.id)

  def choose(self, situations: Sequence[Situation]) -> list[Decision]:
    """Decisions for different sessions, no more than there are rows."""
    ready = [self.show(situation) for situation in situations]
    return self.policy.choose(ready)

  def show(self, situation: Situation) -> Live:
    """The session's episode, where it stands now."""
    _, job, text, steps, left_usd, left_large_calls, price = situation
    live = self.find(situation.id)
    live.job, live.price, live.observation = job, price, text.observations[-1]
    live.steps = [
      Step(observation, step.model, action, step.calls)
      for step, observation, action in zip(steps, text.observations, text.actions)
    ]
    # The view and the heads take what the steps have spent off these limits.
    spent_usd, made = sum(s.spent_usd for s in steps), sum(s.model != SMALL for s in steps)
    live.call_budget = CallBudget(None if left_large_calls is None else left_large_calls + made)
    usd_limit = None if left_usd is None else left_usd + spent_usd
    live.dollar_budget = DollarBudget(usd_limit, spent_usd)
    return live

  def find(self, id_: str) -> Live:
    """The episode of a session; a new one takes the row of the one that was asked for least
    recently."""
    live = self._lives.pop(id_, None)
    if live is None:
      live = Live(Job(Task(id_, "test", "", 1), 0), env=None, agents=self._models)
    self._lives[id_] = live
    if len(self._lives) > self._rows:
      self.policy.finish(self._lives.pop(next(iter(self._lives))))
    return live
