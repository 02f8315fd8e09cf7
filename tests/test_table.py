"""Check the run's dollars: their parts, their sum, and what does not count."""

import dataclasses

from tiny import call, episode

from baar_jax.llms.ledger import (
  FAILED,
  PRESUMED,
  REPLY,
  RETRY,
  Calls,
  Spent,
  read_spent,
)
from baar_jax.report.table import run_ledger
from baar_jax.store import Store


def table(*episodes):
  """Return the table of a new store with these episodes."""
  store = Store(":memory:")
  store.add(*(dataclasses.replace(e, trial=i) for i, e in enumerate(episodes)))
  return store.table()


def test_recorded_calls_replace_the_dollars_of_episodes():
  first, second = episode(models="SL"), episode(models="SL")
  for e, replayed in ((first, False), (second, True)):  # what is replayed was paid once
    retry = dataclasses.replace(call(kind="retry"), billed_usd=0.5)
    e.steps[0].calls += [call(2, 0.125, kind="judge"), retry]
    e.steps[0].calls.append(call(usd=8.0, kind="presumed"))
    e.steps[1].calls.append(call(0, 0.75, kind="proposal", replayed=replayed))
    e.steps[1].router_cost_usd = 0.25
  second.lost_usd = 4.0
  # Played once.
  episodes = table(first, second, dataclasses.replace(first, reused=True))
  # SMALL, LARGE, proposals, judge, retries, router; the sum, and what is unknown.
  ledger = run_ledger(episodes, None, 2)
  assert [*ledger.values()] == [2.0, 10.0, 0.75, 0.25, 5.0, 0.5, 18.5, 16.0]
  # SMALL replied twice and proposed once, LARGE replied twice, the judge once.
  ledger = run_ledger(episodes, Spent((2.75, 10.0, 0.125), 0.5, 2.0), 2)
  assert [*ledger.values()] == [2.0, 10.0, 0.75, 0.125, 0.5, 0.5, 13.875, 2.0]
  # With three models the judge is the fourth.
  ledger = run_ledger(table(), Spent((1.0, 2.0, 4.0, 8.0)), 3)
  assert [*ledger.values()][:4] == [1.0, 6.0, 0.0, 8.0]


def test_calls_of_all_processes_are_added_up(tmp_path):
  for name in ("episodes", "episodes-12", "episodes-old"):  # the last is no process's
    calls = Calls(tmp_path / f"{name}.sqlite")
    for kind, dollars in ((REPLY, 2.0), (RETRY, 4.0), (PRESUMED, 8.0), (FAILED, 0.0)):
      calls.end(calls.begin(1, 99.0, "r"), kind, dollars)
    calls.begin(1, 16.0, "r")  # its process was killed
    calls.close()
  spent = read_spent(tmp_path, 2)
  assert (spent, spent.at_most_usd) == (Spent((0.0, 4.0), 8.0, 48.0), 60.0)
