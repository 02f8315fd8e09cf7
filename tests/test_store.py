"""Check that the store keeps what it is given, and each key once."""

import sqlite3

import pytest
from tiny import call, episode

from baar_jax.episode import Call, Usage
from baar_jax.store import Store


@pytest.fixture
def path(tmp_path):
  return tmp_path / "episodes.sqlite"


@pytest.fixture
def store(path):
  return Store(path)


def test_an_episode_is_read_as_it_was_stored(store, path):
  whole = episode("t1", "random(p=0.5)", 3, "SLS", score=0.25, stop="max_steps")
  whole.call_budget = 2
  step = whole.steps[1]
  step.observation = 'a "quoted"\nline \N{SNOWMAN}\t'
  step.action = "go to O'Hara"
  step.calls = [
    Call(1, Usage(9, 4, 2), 0.1 + 0.2, 1 / 3),
    call(2, 0.5, 7, "judge", True),
  ]
  step.router_cost_usd = 1e-17
  step.logp = -1.2345678901234567
  store.add(whole)
  store.close()
  assert Store(path).episodes("random(p=0.5)") == [whole]


def test_a_key_is_stored_once_and_orders_the_episodes(store):
  keys = [("t2", "dev", 10), ("t1", "test", 2), ("t2", "dev", 9), ("t1", "dev", 11)]
  store.add(episode("t1", "q", 2, purpose="test"))
  for task_id, purpose, trial in keys:
    store.add(episode(task_id, "p", trial, purpose=purpose))
  with pytest.raises(sqlite3.IntegrityError):
    store.add(episode("t1", "p", 2, score=0.0, purpose="test"))
  assert [e.key for e in store.episodes("p")] == sorted(keys)
  assert store.keys("p") == set(keys) and len(store.table()) == 5
