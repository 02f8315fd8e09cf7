"""One batching loop: a policy decides for all sessions that are ready in one call."""

import asyncio
from collections.abc import Sequence

from baar_jax.rollout.specs import Decision, Live
from baar_jax.rollout.turn import Policy


class Decider:
  """Decides for sessions; each of the newest has a row of the policy's cache."""

  def __init__(self, policy: Policy, rows: int):
    self.policy = policy
    self.lives: dict[tuple[str, int], Live] = {}  # by key, the newest last
    self._rows = rows
    # By call: a session may ask again while its ended call is being decided.
    self._ready: dict[Live, asyncio.Future[Decision]] = {}
    self._lock = asyncio.Lock()

  async def decide(self, live: Live) -> Decision:
    """Decide for a session. The first to come decides for all that are ready.

    It does so in a thread.
    """
    decided = asyncio.get_running_loop().create_future()
    self._ready[live] = decided
    try:
      async with self._lock:
        while not decided.done():
          waiting = [other for other, made in self._ready.items() if not made.done()]
          batch = waiting[: self._rows]
          decisions = await asyncio.to_thread(self.choose, batch)
          for other, decision in zip(batch, decisions):
            if other in self._ready:  # else its call has ended
              self._ready[other].set_result(decision)
      return decided.result()
    finally:  # a failure ends the call that has decided: the others decide anew
      del self._ready[live]

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Decide for different sessions, no more than there are rows."""
    for live in ready:
      self.keep(live)
    return self.policy.choose(ready)

  def keep(self, live: Live) -> None:
    """Keep a session's newest state; free the row of the least recent session."""
    self.lives.pop(live.key, None)
    self.lives[live.key] = live
    if len(self.lives) > self._rows:
      oldest = next(iter(self.lives))
      self.policy.finish(self.lives.pop(oldest))
