"""One batching loop: all sessions that are ready are decided in one call of a policy."""

import asyncio
from collections.abc import Sequence

from baar_jax.episode import SMALL, Step
from baar_jax.rollout.budget import CallBudget, DollarBudget
from baar_jax.rollout.policies import Decision, Job, Live, Policy
from baar_jax.serve.request import Conversation


class Decider:
  """Decides for sessions, of which the newest have a row of the policy's cache each."""

  def __init__(self, policy: Policy, rows: int):
    self.policy, self._rows = policy, rows
    self.lives: dict[str, Live] = {}  # by session, the newest last
    self._ready: dict[Live, list[Decision]] = {}
    self._lock = asyncio.Lock()

  async def decide(self, live: Live) -> Decision:
    """The decision for a session. Who comes first decides for all that are ready, in a thread."""
    decided = self._ready[live] = []
    try:
      async with self._lock:
        while not decided:
          batch = [other for other, made in self._ready.items() if not made][: self._rows]
          for other, decision in zip(batch, await asyncio.to_thread(self.choose, batch)):
            self._ready.get(other, []).append(decision)  # its call may have ended
      return decided.pop()
    finally:  # a failure ends the call that has decided: the others decide anew
      del self._ready[live]

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decisions for different sessions, no more than there are rows."""
    return self.policy.choose([self.keep(live) for live in ready])

  def keep(self, live: Live) -> Live:
    """The object by which the policy knows this session, as it stands now; a new session takes the
    row of the one that was asked for least recently."""
    kept = self.lives.pop(live.task.id, live)
    vars(kept).update(vars(live))
    self.lives[live.task.id] = kept
    if len(self.lives) > self._rows:
      self.policy.finish(self.lives.pop(next(iter(self.lives))))
    return kept


def make_live(
  job: Job, text: Conversation, steps: Sequence[Step], left: tuple, models: Sequence[str]
) -> Live:
  """A session that waits for a decision, as an episode.

  `steps` have the models and calls of the text's actions; `left` are dollars and large calls, None
  without a cap.
  """
  live, (left_usd, left_large_calls) = Live(job, env=None, agents=models), left
  live.observation = text.observations[-1]
  live.steps = [
    Step(observation, step.model, action, step.calls)
    for step, observation, action in zip(steps, text.observations, text.actions)
  ]
  # The view and the heads take what the steps have spent off these limits.
  spent_usd, made = sum(s.spent_usd for s in steps), sum(s.model != SMALL for s in steps)
  live.call_budget = CallBudget(None if left_large_calls is None else left_large_calls + made)
  live.dollar_budget = DollarBudget(None if left_usd is None else left_usd + spent_usd, spent_usd)
  return live
