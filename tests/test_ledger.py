"""The ledger: parts that add up to the whole, and what is left out of it."""

import dataclasses

import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from baar_jax.episode import Episode, Step
from baar_jax.llms.calls import FAILED, PRESUMED, REPLY, RETRY, Calls, Spent, read_spent
from baar_jax.report.ledger import PARTS, episode_parts, run_ledger

usd = st.floats(0, 10)
steps = st.builds(
  Step,
  observation=st.just(""),
  model=st.integers(0, 2),
  action=st.just(""),
  cost_usd=usd,
  prompt_tokens=st.just(0),
  cached_tokens=st.just(0),
  completion_tokens=st.just(0),
  router_cost_usd=usd,
  retry_usd=usd,
  proposal_usd=usd,
  judge_usd=usd,
)
episodes = st.builds(
  Episode,
  *map(st.just, ("t", "p", 0)),
  st.lists(steps, max_size=20),
  st.just(1.0),
  st.just("done"),
  lost_usd=usd,
)


@given(st.lists(episodes, max_size=10))
def test_the_parts_are_the_whole(found):
  wholes = [e.spent_usd + sum(step.router_cost_usd for step in e.steps) for e in found]
  for e, whole in zip(found, wholes):
    assert sum(episode_parts(e).values()) == pytest.approx(whole, rel=1e-12, abs=1e-12)
  ledger = run_ledger(found, None, 2)
  whole = sum(wholes)
  assert ledger["total_usd"] == pytest.approx(whole, rel=1e-12, abs=1e-12)
  assert sum(ledger[part] for part in PARTS) == pytest.approx(whole, rel=1e-12, abs=1e-12)


def test_an_episode_by_hand():
  e = tiny.episode(models="SLS")
  e.steps[0].retry_usd, e.steps[1].router_cost_usd, e.steps[2].presumed_usd = 0.5, 0.25, 8.0
  assert episode_parts(e) == {
    "small_usd": 2.0,
    "large_usd": 5.0,
    "proposals_usd": 0.0,
    "judge_usd": 0.0,
    "retries_usd": 0.5,
    "router_usd": 0.25,
  }
  assert (e.cost_usd, e.spent_usd) == (7.0, 15.5)
  lost = dataclasses.replace(e, lost_usd=4.0)
  assert (lost.spent_usd, episode_parts(lost)["retries_usd"]) == (19.5, 4.5)
  reused = dataclasses.replace(e, reused=True)
  ledger = run_ledger([e, reused], None, 2)
  assert (ledger["total_usd"], ledger["presumed_usd"]) == (7.75, 8.0)


def test_the_books_of_the_calls_come_first():
  """A reply that is replayed in a second episode was paid once."""
  first, second = tiny.episode(models="SL"), tiny.episode(models="SL")
  for step in second.steps:
    step.replayed = True
  second.steps[0].router_cost_usd = 0.25
  ledger = run_ledger([first, second], Spent((1.0, 5.0), 0.5, 2.0), 2)
  assert ledger == {
    "small_usd": 1.0,
    "large_usd": 5.0,
    "proposals_usd": 0.0,
    "judge_usd": 0.0,
    "retries_usd": 0.5,
    "router_usd": 0.25,
    "total_usd": 6.75,
    "presumed_usd": 2.0,
    "replayed_usd": 6.0,
  }


def test_proposals_and_judges():
  """The second episode's proposal was replayed; the first one's is in SMALL's books."""
  first, second = tiny.episode(models="SL"), tiny.episode(models="SL")
  for e in (first, second):
    e.steps[1].proposal, e.steps[1].proposal_usd, e.steps[0].judge_usd = "do", 0.75, 0.125
  second.steps[1].proposal_replayed = True
  assert (episode_parts(first)["proposals_usd"], episode_parts(first)["judge_usd"]) == (0.75, 0.125)
  scripted = run_ledger([first, second], None, 2)
  assert (scripted["proposals_usd"], scripted["judge_usd"]) == (1.5, 0.25)
  assert scripted["total_usd"] == 2 * (1.0 + 5.0 + 0.75 + 0.125)
  # The books: SMALL replied twice and proposed once, LARGE replied twice, the judge once.
  books = run_ledger([first, second], Spent((2.75, 10.0, 0.125)), 2)
  assert [books[part] for part in PARTS] == [2.0, 10.0, 0.75, 0.125, 0.0, 0.0]
  assert books["total_usd"] == 12.875
  assert books["replayed_usd"] == 0.75


def test_the_judge_comes_after_all_models():
  books = run_ledger([], Spent((1.0, 2.0, 4.0, 8.0)), 3)
  assert [books[part] for part in PARTS] == [1.0, 6.0, 0.0, 8.0, 0.0, 0.0]


def test_the_books_of_several_processes(tmp_path):
  for number in range(2):
    calls = Calls(tmp_path / f"{number}.sqlite")
    for model, kind, dollars in (
      (0, REPLY, 1.0),
      (1, REPLY, 2.0),
      (1, RETRY, 4.0),
      (0, PRESUMED, 8.0),
      (0, FAILED, 0.0),
    ):
      calls.end(calls.begin(model, 99.0, "r"), kind, dollars)
    calls.begin(1, 16.0, "r")  # its process was killed
    calls.close()
  paths = sorted(tmp_path.glob("*.sqlite"))
  found = read_spent(paths, 2)
  assert found == Spent((2.0, 4.0), 8.0, 48.0)
  assert found.at_most_usd == 62.0
