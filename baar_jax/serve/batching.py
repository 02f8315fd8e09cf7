"""One batching loop: all sessions that are ready are decided in one router call."""

import asyncio
import collections
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from baar_jax.rollout.policies import Decision, Live, Policy


class Decider:
  """Decides for all sessions of one policy that are ready, in one call, in a thread of its own.

  The sessions that were decided last have a row of the router's cache each; others wait for none.
  """

  def __init__(self, policy: Policy, rows: int):
    self.policy, self._rows = policy, rows
    self._thread = ThreadPoolExecutor(1, thread_name_prefix="router")
    self._ready: list[tuple[Live, asyncio.Future]] = []
    self._cached: collections.OrderedDict[Live, None] = collections.OrderedDict()
    self._task: asyncio.Task | None = None

  async def decide(self, live: Live) -> Decision:
    """The decision for an episode, which waits for no other call of it."""
    future = asyncio.get_running_loop().create_future()
    self._ready.append((live, future))
    if self._task is None or self._task.done():
      self._task = asyncio.create_task(self._decide_all())
    return await future

  async def _decide_all(self) -> None:
    while self._ready:
      batch, self._ready = self._ready[: self._rows], self._ready[self._rows :]
      lives, futures = zip(*batch)
      try:
        choose = self._thread.submit(self._choose, lives)
        results = await asyncio.wrap_future(choose)
      except Exception as error:  # a bug, or a router's number that is not finite: told to each
        results = [error] * len(batch)
      for future, result in zip(futures, results):
        if not future.done():
          (future.set_exception if isinstance(result, Exception) else future.set_result)(result)

  def _choose(self, lives: Sequence[Live]) -> list[Decision]:
    for live in lives:
      self._cached[live] = None
      self._cached.move_to_end(live)
    while len(self._cached) > self._rows:
      self.policy.finish(self._cached.popitem(last=False)[0])
    return self.policy.choose(lives)

  def close(self) -> None:
    self._thread.shutdown(wait=True, cancel_futures=True)
