"""References: which trajectory of a task is imitated."""

from types import SimpleNamespace

import pytest
from tiny import episode

from baar_jax.config import Config, ReferencesConfig
from baar_jax.episode import Task
from baar_jax.rollout.live import Job, Live
from baar_jax.rollout.policies import always
from baar_jax.stages import references
from baar_jax.stages.references import stratified_random
from baar_jax.store import Store
from baar_jax.train.dataset import Profile, cheapest, choose_reference, load_references

NAMES = "always-small", "always-large"


def small(seed, score, usd):
  return episode(policy=NAMES[0], seed=seed, models="SS", score=score, cost_usd=usd)


def large(seed, score, usd):
  return episode(policy=NAMES[1], seed=seed, models="LL", score=score, cost_usd=usd)


def mixed(seed, score, usd, models="SL"):
  return episode(policy="stratified", seed=seed, models=models, score=score, cost_usd=usd)


def test_easy_takes_the_cheapest_successful_small_trial():
  trials = [small(0, 1, 3.0), small(1, 0, 1.0), small(2, 1, 2.0)]
  profile = Profile("easy", 2.0, 9.0, trials, [large(0, 1, 0.5)])
  assert choose_reference(profile, [], clone_large=False) is trials[2]


def test_intractable_takes_the_cheapest_small_trial():
  # Also where SMALL got lucky: the dearer success is not what is imitated.
  trials = [small(0, 1, 3.0), small(1, 0, 1.0), small(2, 0, 2.0)]
  profile = Profile("intractable", 2.0, 9.0, trials, [large(0, 0, 0.5)])
  assert choose_reference(profile, [], clone_large=False) is trials[1]


HARD = Profile(
  "hard",
  2.0,
  9.0,
  [small(0, 1, 0.1)],
  [large(0, 0, 1.0), large(1, 1, 9.0), large(2, 1, 8.0)],
)


def test_hard_takes_the_cheapest_successful_stratified_episode():
  episodes = [mixed(1, 0, 1.0), mixed(2, 1, 5.0), mixed(3, 1, 4.0)]
  assert choose_reference(HARD, episodes, clone_large=False) is episodes[2]
  # even where the profile has a cheaper one
  dear = [mixed(1, 1, 50.0)]
  assert choose_reference(HARD, dear, clone_large=False) is dear[0]


def test_hard_without_a_stratified_success_takes_the_cheapest_successful_large_trial():
  for episodes in ([], [mixed(1, 0, 1.0), mixed(2, 0.99, 2.0)]):
    assert choose_reference(HARD, episodes, clone_large=False) is HARD.large[2]


def test_the_ablation_clones_large_on_hard_tasks_alone():
  episodes = [mixed(1, 1, 1.0)]
  assert choose_reference(HARD, episodes, clone_large=True) is HARD.large[2]
  easy = Profile("easy", 2.0, 9.0, [small(0, 1, 3.0)], [large(0, 1, 0.5)])
  assert choose_reference(easy, episodes, clone_large=True) is easy.small[0]


def test_ties():
  # Dollars first, whatever else is against it.
  a, b = mixed(1, 1, 4.0, "SS"), mixed(2, 1, 3.0, "LLLLL")
  assert cheapest([a, b]) is b
  # Then fewer LARGE calls, whatever the steps.
  a, b = mixed(1, 1, 4.0, "LL"), mixed(2, 1, 4.0, "SLSS")
  assert cheapest([a, b]) is b
  # Then fewer steps.
  a, b = mixed(1, 1, 4.0, "SLSS"), mixed(2, 1, 4.0, "SL")
  assert cheapest([a, b]) is b
  # Then the smaller k, which is the first.
  a, b = mixed(1, 1, 4.0, "SL"), mixed(2, 1, 4.0, "LS")
  assert cheapest([a, b]) is a
  assert cheapest([]) is None


def live(k, task_id="t", step=0):
  job = Job(Task(task_id, "train", "do it", 9), k)
  return Live(job, None, steps=[None] * step)


def test_episode_k_takes_large_with_probability_k_over_n():
  policy = stratified_random(Config(references=ReferencesConfig(samples=4)))
  shares = []
  for k in range(1, 5):
    ready = [live(k, f"t{t}", step) for t in range(50) for step in range(20)]
    shares.append(sum(d.model for d in policy.choose(ready)) / len(ready))
  # 1000 draws each: four standard deviations are below 0.064
  assert shares[:3] == pytest.approx([0.25, 0.5, 0.75], abs=0.064)
  assert shares[3] == 1.0  # k = N is always LARGE
  assert policy.name == "stratified(samples=4)"


@pytest.fixture
def run(tmp_path):
  """A run of one task of each class, whose hard task has a stratified success of k = 2 and 10."""
  store = Store(tmp_path / "episodes.sqlite")
  store.put_tasks("train", [Task(name, "train", "do it", 9) for name in ("h", "e", "i")])
  scores = {"h": (0, 1), "e": (1, 0), "i": (0, 0)}
  for task_id, both in scores.items():
    for boundary, score in enumerate(both):
      store.add(episode(task_id, NAMES[boundary], 0, "SL"[boundary] * 2, score))
  for k in (2, 10):  # as text, "10" would come before "2"
    store.add(episode("h", "stratified(samples=20)", k, "SL", 1, cost_usd=4.0))
  store.add(episode("h", "stratified(samples=5)", 1, "SL", 1, cost_usd=0.1))  # other settings
  noted = []
  yield SimpleNamespace(
    noted=noted,
    require=lambda stage: noted.append(f"required {stage}"),
    say=print,
    finish=lambda stage: noted.append(f"finished {stage}"),
    store=store,
    dir=tmp_path,
    config=Config(),
    boundaries=[always(model, name) for model, name in enumerate(NAMES)],
    tasks=store.tasks,
    collect=lambda *args: None,
  )
  store.close()


def keys(found):
  return {task_id: (e.policy, e.seed) for task_id, e in found.items()}


def test_stored_references(run):
  assert keys(load_references(run.store, run.config)) == {
    "h": ("stratified(samples=20)", 2),
    "e": ("always-small", 0),
    "i": ("always-small", 0),
  }
  run.config.references.clone_large = True
  assert keys(load_references(run.store, run.config))["h"] == ("always-large", 0)


def test_without_stratified_episodes_the_stage_is_named(run):
  run.config.references.samples = 7
  with pytest.raises(ValueError, match="lacks references of 1 tasks: run --stage=references"):
    load_references(run.store, run.config)
  run.config.references.clone_large = True  # needs none
  assert len(load_references(run.store, run.config)) == 3


def test_the_stage_asks_for_k_from_1_to_n_on_hard_tasks_alone(run):
  asked = []

  def collect(label, policy, jobs):
    run.noted.append("collected")
    asked.extend((job.task.id, job.seed) for job in jobs)

  run.collect = collect
  references.main(run)
  assert run.noted == ["required profile", "collected", "finished references"]
  assert asked == [("h", k) for k in range(1, 21)]


def test_the_stage_counts_the_tasks_that_fell_back(run, capsys):
  references.main(run)
  assert "1 hard tasks, LARGE at 50% of their steps; 0 had no" in capsys.readouterr().out
  run.config.references.samples = 3
  run.store.add(episode("h", "stratified(samples=3)", 1, "SL", 0))
  references.main(run)
  assert "LARGE at 100% of their steps; 1 had no stratified success" in capsys.readouterr().out


def test_the_stage_passes_over_a_task_without_a_profile(run, capsys):
  train = run.store.tasks("train")
  run.store.put_tasks("train", [*train, Task("lost", "train", "do it", 9)])
  references.main(run)
  assert "1 hard tasks" in capsys.readouterr().out
