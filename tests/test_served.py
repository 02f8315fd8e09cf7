"""Sessions that clients have played, as tasks and episodes of a run."""

import dataclasses

import pytest
import tiny

from baar_jax.config import Config, ProfileConfig, ReferencesConfig
from baar_jax.episode import Episode, Step
from baar_jax.rollout.policies import Job
from baar_jax.rollout.served import add_sessions, find_sessions
from baar_jax.store import Store

CONFIG = Config(profile=ProfileConfig(trials=2), references=ReferencesConfig(samples=3))


def add(store, task_id, policy, seed=0):
  episode = tiny.episode(task_id, policy, seed)
  return add_sessions(store, CONFIG, [(episode, "do it")])[0].seed


def test_a_task_stays_in_the_split_of_its_first_session(tmp_path):
  for names in ("abcdef", "fedcba"):
    store = Store(tmp_path / "a.sqlite")
    for name in names:
      add(store, name, "always-small")
    store.close()
  store = Store(tmp_path / "a.sqlite")
  tasks = [[task.id for task in store.tasks(split)] for split in ("train", "dev", "test")]
  assert tasks == [["a", "c", "e", "f"], ["b"], ["d"]]
  assert store.tasks("dev")[0].description == "do it"


@pytest.mark.parametrize(
  "task, policy, seeds",
  [  # of the first task, which is for training, of the second (dev) and the fourth (test)
    ("a", "always-small", [0, 1, 10_000, 10_001]),
    ("b", "always-large", [0, 1, 2000, 2001]),
    ("d", "always-small", [3000, 3001]),
    ("b", "bopo(lam=0.7)", [2000, 2001]),
    ("a", "bopo(lam=0.7)/1", [10_000, 10_001]),
    ("a", "stratified(samples=3)", [1002, 1001, 1003, 1004]),  # the first one has drawn its number
  ],
)
def test_sessions_have_the_seeds_that_stages_read(task, policy, seeds):
  store = Store(":memory:")
  for name in "abcd":
    store.name_task(name, "", 9)
  drawn = (1002, 1005, 1002, 1001)[: len(seeds)]
  assert [add(store, task, policy, seed) for seed in drawn] == seeds


def test_what_clients_still_have_to_play_is_told_in_one_line():
  store = Store(":memory:")
  tasks = [store.name_task(name, "", 9) for name in "ab"]
  jobs = [Job(task, seed) for task in tasks for seed in (0, 1)]
  for name, policy in zip("aababb", ["always-small"] * 3 + ["always-large"] * 3):
    add(store, name, policy)
  line = "2 of 8 trials are missing, of 2 tasks, such as 1 of 'b' by always-small, 1 of 'a' by "
  with pytest.raises(ValueError, match=f"^{line}always-large: [^\n]*$"):
    find_sessions(store, "always-large", jobs)
  add(store, "a", "always-large"), add(store, "b", "always-small")
  episodes = find_sessions(store, "always-large", jobs)
  assert [(e.task_id, e.seed) for e in episodes] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
  bare = Episode("a", "random(p=0.5)", 0, [Step("", 0, "")], 1.0, "done")
  (bare,) = add_sessions(store, CONFIG, [(bare, "")])
  with pytest.raises(ValueError, match="record_text"):
    find_sessions(store, bare.policy, [Job(tasks[0], bare.seed)])


def test_episodes_are_stored_together_or_not_at_all():
  store, one = Store(":memory:"), tiny.episode()
  with pytest.raises(ValueError, match="already stored"):
    store.add(dataclasses.replace(one, seed=1), one, one, finished=["mark"])
  assert not store.keys("p") and not store.finished("mark")
