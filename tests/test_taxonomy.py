"""The profile stage: classes and medians of hand-made trials."""

from types import SimpleNamespace

import pytest
from tiny import episode

from baar_jax.config import Config, ProfileConfig
from baar_jax.episode import Task
from baar_jax.rollout.policies import always
from baar_jax.store import Store
from baar_jax.train.dataset import (
  load_profiles,
  paid_episodes,
  profile_tasks,
  robustness,
  success,
)


def trials(task_id, policy, outcomes):
  """An episode per (score, dollars)."""
  return [
    episode(task_id, policy, seed, "S" if policy == "always-small" else "L", score, cost_usd=usd)
    for seed, (score, usd) in enumerate(outcomes)
  ]


# Per task: trials of SMALL and of LARGE, the class, and the median dollars of both.
TASKS = {
  # four of five is 80 %
  "four-of-five": (
    [(1, 1.0), (1, 2.0), (0, 99.0), (1, 3.0), (1, 4.0)],
    [(0, 9.0)] * 5,
    ("easy", 3.0, 9.0),
  ),
  "three-of-five": (
    [(1, 1.0), (1, 1.0), (1, 1.0), (0, 2.0), (0, 7.0)],
    [(0, 5.0), (0, 6.0), (1, 8.0), (0, 1.0), (0, 2.0)],
    ("hard", 1.0, 5.0),
  ),
  "lucky-once": (
    [(1, 1.0), (0, 1.0), (0, 1.0), (0, 1.0), (0, 1.0)],
    [(0, 5.0)] * 5,
    ("intractable", 1.0, 5.0),
  ),
  # a partial score is no success
  "nearly": ([(0.99, 1.0)] * 5, [(0.99, 5.0)] * 5, ("intractable", 1.0, 5.0)),
  # fewer trials: the rate is over those there are (2 of 2, 3 of 4); an even median is the mean
  "two-trials": ([(1, 1.0), (1, 4.0)], [(0, 5.0)], ("easy", 2.5, 5.0)),
  "four-trials": (
    [(1, 1.0), (1, 2.0), (1, 4.0), (0, 50.0)],
    [(1, 5.0), (1, 7.0)],
    ("hard", 3.0, 6.0),
  ),
  # SMALL may be the dearer one
  "inverted": ([(0, 9.0)] * 3, [(1, 2.0)] * 3, ("hard", 9.0, 2.0)),
  # without a trial of either there is no profile
  "no-small": ([], [(1, 5.0)], None),
  "no-large": ([(1, 1.0)], [], None),
}
NAMES = "always-small", "always-large"


def episodes_of(boundary):
  return [e for name in TASKS for e in trials(name, NAMES[boundary], TASKS[name][boundary])]


@pytest.fixture
def profiles():
  return profile_tasks(episodes_of(0), episodes_of(1), 0.8)


@pytest.mark.parametrize("name", TASKS)
def test_class_and_median_costs(profiles, name):
  wanted = TASKS[name][2]
  if wanted is None:
    assert name not in profiles
  else:
    found = profiles[name]
    assert (found.difficulty, found.cost_small, found.cost_large) == pytest.approx(wanted)


def test_a_profile_keeps_its_trials(profiles):
  profile = profiles["four-trials"]
  assert [e.cost_usd for e in profile.small] == [1.0, 2.0, 4.0, 50.0]
  assert [e.cost_usd for e in profile.large] == [5.0, 7.0]


def test_the_rate_is_the_config_s():
  loose = profile_tasks(episodes_of(0), episodes_of(1), 0.6)
  assert loose["three-of-five"].difficulty == "easy"
  strict = profile_tasks(episodes_of(0), episodes_of(1), 0.9)
  assert strict["four-of-five"].difficulty == "intractable"


@pytest.mark.parametrize("score, wanted", [(1.0, True), (0.999, False), (0.0, False)])
def test_success(score, wanted):
  assert success(episode(score=score)) is wanted


@pytest.fixture
def run(tmp_path):
  """What load_profiles reads of a run."""
  store = Store(tmp_path / "episodes.sqlite")
  yield SimpleNamespace(
    store=store,
    dir=tmp_path,
    config=Config(),
    boundaries=[always(model, name) for model, name in enumerate(NAMES)],
  )
  store.close()


def test_stored_profiles_are_those_of_the_training_tasks_in_their_order(run):
  names = sorted(TASKS, reverse=True)
  run.store.put_tasks("train", [Task(name, "train", "do it", 9) for name in names])
  for boundary in (0, 1):
    for e in episodes_of(boundary):
      run.store.add(e)
  run.store.add(episode("a test task", NAMES[0]))
  run.store.add(episode("a test task", NAMES[1]))
  run.store.add(episode("nearly", "random(p=0.5)", score=1.0))  # another policy is no trial
  found = load_profiles(run.store, run.config)
  assert list(found) == [name for name in names if TASKS[name][2]]
  assert {name: p.difficulty for name, p in found.items()} == {
    name: wanted[0] for name, (_, _, wanted) in TASKS.items() if wanted
  }


def test_without_a_profile_the_stage_is_named(run):
  with pytest.raises(ValueError, match="run --stage=profile first"):
    load_profiles(run.store, run.config)


def test_the_profile_takes_the_first_trials_alone(run):
  run.store.put_tasks("train", [Task("a", "train", "do it", 9)])
  run.config.profile.trials = 2
  run.config.profile.robustness = (3,)
  for boundary, outcomes in enumerate(([(0, 1.0), (0, 3.0), (1, 99.0)], [(0, 5.0)] * 3)):
    for e in trials("a", NAMES[boundary], outcomes):
      run.store.add(e)
  found = load_profiles(run.store, run.config)["a"]
  assert (found.cost_small, [e.seed for e in found.small]) == (2.0, [0, 1])
  # Neither does the pretraining see the third, or its length would depend on it.
  assert sorted(e.seed for e in paid_episodes(run.store, run.config)) == [0, 0, 1, 1]


# Outcomes of four trials of SMALL and of LARGE per task; labels from the first two (the base),
# from the first, and from all four at an easy rate of 0.8:
#   always   1111 0000   easy, easy, easy
#   late     0111 0001   intractable (SMALL 1 of 2, LARGE 0), intractable, hard (SMALL 3 of 4)
#   early    1000 1000   hard, easy, hard
#   never    0000 0000   intractable three times
#   helped   0000 1111   hard three times
#   short    of three trials only: known for the base and for the first
OUTCOMES = {
  "always": ("1111", "0000"),
  "late": ("0111", "0001"),
  "early": ("1000", "1000"),
  "never": ("0000", "0000"),
  "helped": ("0000", "1111"),
  "short": ("000", "111"),
}


def test_robustness_of_the_labels(run):
  run.store.put_tasks("train", [Task(name, "train", "do it", 9) for name in OUTCOMES])
  for task_id, outcomes in OUTCOMES.items():
    for boundary in (0, 1):
      for e in trials(task_id, NAMES[boundary], [(int(o), 1.0) for o in outcomes[boundary]]):
        run.store.add(e)
  run.config.profile = ProfileConfig(trials=2, robustness=(1, 4, 9), easy_rate=0.8)
  one, four, nine = robustness(run.store, run.config)
  # Five of six agree; hard are {helped, short} and {early, helped, short}.
  assert one == {
    "trials": 1,
    "tasks": 6,
    "agreement": pytest.approx(5 / 6),
    "hard": 2,
    "base_hard": 3,
    "hard_jaccard": pytest.approx(2 / 3),
  }
  # Without "short": four of five agree; hard are {late, early, helped} and {early, helped}.
  assert (four["tasks"], four["agreement"]) == (5, pytest.approx(4 / 5))
  assert four["hard_jaccard"] == pytest.approx(2 / 3)
  # Nine trials there are of none: nothing is claimed of them.
  assert (nine["tasks"], nine["agreement"], nine["hard_jaccard"]) == (0, None, None)
