"""Check which of a run's stored episodes are loaded for what (run.py)."""

import itertools

from tiny import episode

from baar_jax import run
from baar_jax.config import Config, ReferencesConfig, SamplePlan
from baar_jax.episode import Task
from baar_jax.rollout.jobs import BOUNDARY_KEYS, new_trials
from baar_jax.store import Store

SMALL, LARGE = BOUNDARY_KEYS
STRATIFIED = "stratified(samples=20)"
TASKS = {id_: Task(id_, "train", "do it", 9) for id_ in ("b", "a", "one", "other")}
# By family; all others play the profile.
PURPOSES = {
  "stratified": "reference",
  "exploration": "exploration",
  "exploration-all": "exploration",
}


def store_of(*keys, score=1.0) -> Store:
  """Store training tasks, and episodes by (task, policy, trial)."""
  store = Store(":memory:")
  store.put_tasks("train", TASKS.values())
  for task_id, policy, trial in keys:
    purpose = PURPOSES.get(policy.partition("(")[0], "profile")
    store.add(episode(task_id, policy, trial, score=score, purpose=purpose))
  return store


def keys_of(episodes):
  return {(e.task_id, e.policy, e.trial) for e in episodes}


def test_profiles_have_the_first_trials_and_the_order_of_tasks():
  """A task without trials of one boundary has no profile."""
  keys = [*itertools.product("ab", BOUNDARY_KEYS, range(6))]
  keys += [("one", SMALL, 0), ("one", "random(p=0.5)", 0), ("other", LARGE, 0)]
  keys += [("a test task", SMALL, 0), ("a test task", LARGE, 0)]
  store = store_of(*keys)
  for policy in BOUNDARY_KEYS:  # The last is no trial of 3 new ones, but of 4.
    for trial in (3, 4, 5, 6):
      store.add(episode("b", policy, trial, purpose="robustness"))
  new = {"purpose": "robustness", "trials": new_trials(3)}
  wanted = (({}, "ba", range(5)), (new, "b", range(3, 6)))
  for options, ids, numbers in wanted:
    profiles = run.load_profiles(store, Config(), "train", **options)
    assert list(profiles) == [*ids]
    for trial in (profiles["b"].small, profiles["b"].large):
      assert [e.trial for e in trial] == [*numbers]


def test_references_are_chosen_among_the_configured_samples():
  store = store_of(("a", LARGE, 0), ("a", "stratified(samples=9)", 1))
  store.add(episode("a", SMALL, score=0.0))
  # Both cost the same, so the earlier one counts.
  for trial in (10, 2):
    store.add(episode("a", STRATIFIED, trial, purpose="reference"))
  config = Config()
  profiles = run.load_profiles(store, config, "train")
  for clone_large, key in ((False, (STRATIFIED, 2)), (True, (LARGE, 0))):
    config.references.clone_large = clone_large
    chosen = run.load_references(store, config, profiles)["a"]
    assert (chosen.policy, chosen.trial) == key


def test_the_stored_episodes_of_thresholds_and_value_heads():
  first = {*itertools.product("ab", BOUNDARY_KEYS, (0,))}
  second = {*itertools.product("ab", BOUNDARY_KEYS, (1,))}
  # The quarters of 20 samples are k = 5, 10 and 15; sample 10 is missing.
  quarters = {("a", STRATIFIED, 5), ("a", STRATIFIED, 15)}
  sample = {("a", STRATIFIED, 2)}
  hard = {("a", "exploration(steps=2)", 1)}
  rest = {("b", "exploration-all(samples=20,steps=2)", 1)}
  # A test task and a sixth trial are for neither.
  unused = {("a test task", SMALL, 0), ("a", SMALL, 5)}
  store = store_of(*first, *second, *quarters, *sample, *hard, *rest, *unused)
  plans = SamplePlan("samples", 20, True), SamplePlan("steps", 2, True)
  config = Config(references=ReferencesConfig(plans=plans))
  learnt = first | second | quarters | sample | hard
  assert keys_of(run.load_threshold_episodes(store, config)) == first | quarters
  assert keys_of(run.load_value_episodes(store, config)) == learnt | rest
