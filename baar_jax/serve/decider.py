"""Decide for all waiting sessions in one batched call of a policy."""

import asyncio
from collections.abc import Sequence

from baar_jax.rollout.rules import Policy
from baar_jax.rollout.specs import Decision, Live


class Decider:
  """Decide for the sessions of one policy, in batches.

  The policy's KV cache has `rows` rows. They belong to the sessions whose decisions are
  the newest.

  Attributes:
    lives: the live episode of each session that has a row in the KV cache, by
      `Live.key`. The session with the newest decision is last.
  """

  def __init__(self, policy: Policy, rows: int):
    """Set up a decider without any sessions.

    Args:
      rows: the number of sessions that the policy's KV cache can hold.
    """
    self.policy = policy
    self.lives: dict[tuple[str, int], Live] = {}
    self._rows = rows
    # The calls that wait for a decision. They are stored by call and not by session,
    # because a client may drop a call and send the next one while the dropped call is
    # being decided.
    self._ready: dict[Live, asyncio.Future[Decision]] = {}
    self._lock = asyncio.Lock()

  async def decide(self, live: Live) -> Decision:
    """Choose a session's next model, in one batch with all waiting sessions.

    The first waiting call runs the policy in a thread. The other calls await the
    result.
    """
    result = asyncio.get_running_loop().create_future()
    self._ready[live] = result
    try:
      async with self._lock:
        while not result.done():
          waiting = [call for call, future in self._ready.items() if not future.done()]
          batch = waiting[: self._rows]
          decisions = await asyncio.to_thread(self.choose, batch)
          for call, decision in zip(batch, decisions):
            # A call is missing here if its client has dropped it meanwhile.
            if call in self._ready:
              self._ready[call].set_result(decision)
      return result.result()
    finally:
      # An error of the policy ends this call alone. The other waiting calls run the
      # policy again.
      del self._ready[live]

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    """Return the policy's decisions for different sessions.

    There must be at most as many sessions as the policy's KV cache has rows.
    """
    for live in ready:
      self.remember(live)
    return self.policy.choose(ready)

  def remember(self, live: Live) -> None:
    """Keep a session's live episode, as the one with the newest decision.

    If there are more sessions than rows in the KV cache, free the row of the session
    whose last decision is the oldest.
    """
    self.lives.pop(live.key, None)
    self.lives[live.key] = live
    if len(self.lives) > self._rows:
      oldest = next(iter(self.lives))
      self.policy.finish(self.lives.pop(oldest))
