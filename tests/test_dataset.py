"""Check profiles, references, labels and the order of batches by hand."""

import collections
import itertools

import pytest
from tiny import episode

from baar_jax import open
from baar_jax.config import Config, ReferencesConfig, SamplePlan
from baar_jax.episode import Task
from baar_jax.learn.batches import draw_batches
from baar_jax.paper import references
from baar_jax.paper.sft import mix_batches
from baar_jax.rivals.single_turn import find_winners
from baar_jax.rollout.jobs import BOUNDARY_KEYS, draw_task_batches
from baar_jax.store import Store


def trials(task_id, policy, outcomes):
  """One episode per (score, dollars)."""
  return [
    episode(task_id, policy, seed, score=score, cost_usd=usd)
    for seed, (score, usd) in enumerate(outcomes)
  ]


# Per task: trials of SMALL and of LARGE, the class, and the median dollars of both.
TASKS = {
  # Four of five are 80 %.
  "most": (
    [(1, 1.0), (1, 2.0), (0, 99.0), (1, 3.0), (1, 4.0)],
    [(0, 9.0)] * 5,
    ("easy", 3.0, 9.0),
  ),
  # A partial score is no success.
  "nearly": ([(0.99, 1.0)] * 5, [(0.99, 5.0)] * 5, ("intractable", 1.0, 5.0)),
  # With fewer trials, the rate is over these (3 of 4). An even median is a mean.
  "few": (
    [(1, 1.0), (1, 2.0), (1, 4.0), (0, 50.0)],
    [(1, 5.0), (1, 7.0)],
    ("hard", 3.0, 6.0),
  ),
  # SMALL may cost more than LARGE. The sixth trials do not count.
  "inverted": (
    [(0, 9.0)] * 5 + [(1, 1.0)],
    [(1, 2.0)] * 5 + [(1, 99.0)],
    ("hard", 9.0, 2.0),
  ),
  # A task without trials of one boundary has no profile.
  "no-small": ([], [(1, 5.0)], None),
  "no-large": ([(1, 1.0)], [], None),
}


@pytest.fixture
def store():
  return Store(":memory:")


def fill(store, task_ids, episodes):
  store.put_tasks("train", [Task(task_id, "train", "do it", 9) for task_id in task_ids])
  for e in episodes:
    store.add(e)


def test_profiles_are_of_training_tasks_in_their_order(store):
  names = sorted(TASKS, reverse=True)
  others = [episode("a test task", name) for name in BOUNDARY_KEYS]
  # An episode of another policy is no trial.
  others.append(episode("nearly", "random(p=0.5)"))
  for name, (small, large, _) in TASKS.items():
    others += trials(name, "always-small", small) + trials(name, "always-large", large)
  fill(store, names, others)
  profiles = open.load_profiles(store, Config(), "train")
  assert list(profiles) == [name for name in names if TASKS[name][2]]
  for name, profile in profiles.items():
    figures = profile.difficulty, profile.cost_small, profile.cost_large
    assert figures == pytest.approx(TASKS[name][2])
  assert [e.seed for e in profiles["inverted"].small] == [0, 1, 2, 3, 4]
  # Pretraining has no sixth trials either, and no test tasks.
  stored = open.load_hard_episodes(store, Config())
  assert max(e.seed for e in stored) == 4 and {e.task_id for e in stored} == {*names}


# Outcomes of trials of SMALL and of LARGE per task, and its difficulty from the first two (the
# base), from the first, and from all four.
OUTCOMES = {
  "always": ("1111", "0000"),  # easy three times
  "late": ("0111", "0001"),  # intractable, intractable, hard
  "early": ("1000", "1000"),  # hard, easy, hard
  "helped": ("0000", "1111"),  # hard three times
  "short": ("000", "111"),  # hard, hard, too few trials
}


def test_robustness_compares_labels_and_sets_of_hard_tasks(store):
  for task_id, outcomes in OUTCOMES.items():
    for name, marks in zip(BOUNDARY_KEYS, outcomes):
      fill(store, OUTCOMES, trials(task_id, name, [(int(mark), 1.0) for mark in marks]))
  profiles = open.load_profiles(store, Config(), "train", trials=9)
  rows = references.measure_robustness(profiles, 2, (1, 4, 9))
  assert [list(row.values()) for row in rows] == [
    # Four of five agree; hard are {helped, short} and {early, helped, short}.
    [1, 5, pytest.approx(4 / 5), 2, 3, pytest.approx(2 / 3)],
    # Without "short": three of four agree; hard are {late, early, helped} and {early, helped}.
    [4, 4, pytest.approx(3 / 4), 3, 2, pytest.approx(2 / 3)],
    [9, 0, None, 0, 0, None],  # no task has nine trials
  ]


def trial(seed, score, usd=None, models="SL"):
  return episode(seed=seed, models=models, score=score, cost_usd=usd)


def test_the_cheapest_episode_by_dollars_calls_steps_and_order():
  costs = [3.0, 4.0, 4.0, 4.0, 4.0, 5.0]
  models = ["LLL", "SL", "LS", "SLSS", "LL", "S"]
  episodes = [trial(*each) for each in zip(range(6), [1] * 6, costs, models)]
  for best in range(6):
    left = [episodes[i] for i in (0, 4, 3, 1, 2, 5) if i >= best]
    assert references.find_cheapest(left) is episodes[best]


def test_the_reference_of_each_difficulty(store):
  """Easy: SMALL's cheapest success. Hard: the cheapest stratified one, else LARGE's.
  Intractable: SMALL's cheapest trial."""
  small, large = BOUNDARY_KEYS
  episodes = [episode("h", "stratified(samples=5)", 1, "SL", 1, cost_usd=0.1)]
  episodes += trials("h", small, [(0, 0.5)])
  episodes += trials("h", large, [(0, 0.1), (1, 9.0), (1, 8.0)])
  episodes += trials("e", small, [(1, 3.0), (1, 4.0), (0, 1.0), (1, 2.0), (1, 2.0)])
  episodes += trials("i", small, [(0, 3.0), (0.9, 2.0)])
  episodes += trials("e", large, [(1, 0.1)]) + trials("i", large, [(0, 0.1)])
  key = "h", "stratified(samples=20)"
  for k, score, usd in ((1, 0.99, 1.0), (2, 1, 55.0), (10, 1, 50.0), (11, 1, 50.0)):
    episodes.append(episode(*key, 1000 + k, score=score, cost_usd=usd))
  fill(store, "hei", episodes)
  config = Config()
  rest = {"e": ("always-small", 3), "i": ("always-small", 1)}
  profiles = open.load_profiles(store, config, "train")

  def keys():
    chosen = open.load_references(store, config, profiles)
    return {task: (e.policy, e.seed) for task, e in chosen.items()}

  assert keys() == {"h": ("stratified(samples=20)", 1010)} | rest
  config.references.clone_large = True  # which uses no stratified samples
  assert keys() == {"h": ("always-large", 2)} | rest


def test_the_stored_episodes_of_thresholds_and_value_heads(store):
  trials = [episode(*key) for key in itertools.product("eh", BOUNDARY_KEYS, (0, 1))]
  stratified = [episode("h", "stratified(samples=20)", 1000 + k) for k in (2, 5, 15)]
  explored = [episode("e", "exploration-all(samples=20)", 1001)]
  plans = (SamplePlan("samples", 20, all_tasks=True),)
  config = Config(references=ReferencesConfig(plans=plans))
  other = episode("a test task", BOUNDARY_KEYS[0])
  fill(store, "eh", [*trials, *stratified, other, *explored])

  def keys(episodes):
    return sorted((e.task_id, e.policy, e.seed) for e in episodes)

  # The quarters of 20 samples are k = 5, 10 and 15; sample 10 is missing.
  learnt = [e for e in trials if e.seed == 0] + stratified[1:]
  assert keys(open.load_threshold_episodes(store, config)) == keys(learnt)
  learnt = trials + stratified
  assert keys(open.load_hard_episodes(store, config)) == keys(learnt)
  assert keys(open.load_value_episodes(store, config)) == keys(learnt + explored)


def first(count, batches):
  return list(itertools.islice(batches, count))


@pytest.mark.parametrize("size, hards", [(64, 45), (10, 7)])
def test_batches_have_the_share_of_hard_tasks(size, hards):
  """One in eleven stored references is of a hard task."""
  batches = mix_batches([*range(10)], [*range(100, 200)], size, 0)
  for batch in first(5, batches):
    assert len(batch) == size and sum(number < 100 for number in batch) == hards
  # If one pool is empty, the other fills the batch.
  for pools in ([], [1, 2]), ([1, 2], []):
    assert sorted(next(mix_batches(*pools, 4, 0))) == [1, 1, 2, 2]


def test_a_pool_is_used_up_in_a_new_order_before_it_repeats():
  pool = [*range(6)]
  draw = lambda seed: sum(first(9, draw_batches(pool, 2, seed)), [])  # noqa: E731
  assert draw(0) == draw(0) != draw(7)
  passes = [draw(0)[start : start + 6] for start in (0, 6, 12)]
  assert all(sorted(one_pass) == pool for one_pass in passes) and passes[0] != passes[1]


@pytest.mark.parametrize("count, size", [(6, 2), (7, 3), (3, 8)])
def test_all_tasks_are_drawn_before_one_repeats(count, size):
  tasks = [Task(f"t{i}", "train", "do it", 9) for i in range(count)]
  draw = lambda seed: first(20, draw_task_batches(tasks, size, seed))  # noqa: E731
  assert draw(0) == draw(0) != draw(1)
  seen = collections.Counter()
  for batch in draw(0):
    ids = [task.id for task in batch]
    assert len(set(ids)) == len(ids) == min(size, count)
    seen.update(ids)
    assert max(seen.values()) - min(seen[t.id] for t in tasks) <= 1 + (count % size > 0)


def test_the_cheapest_model_that_succeeds_wins():
  small = list(map(trial, range(5), (1, 0, 0, 1, 0)))
  large = list(map(trial, (0, 1, 2, 3, 9), (1, 1, 0.9, 0, 1)))
  keys = [("t", seed) for seed in range(4)]
  assert find_winners([small, large]) == dict(zip(keys, [0, 1, 0, 0]))
  middle = list(map(trial, range(3), (1, 0, 1)))
  winners = find_winners([small, middle, large])
  assert winners == dict(zip(keys[:3], [0, 2, 1]))
