"""Check stage `references`: which tasks have references, and its summary."""

from types import SimpleNamespace

from tiny import episode

from baar_jax.config import Config, ProfileConfig
from baar_jax.episode import Task
from baar_jax.learn.checkpoint import RouterFiles
from baar_jax.rollout.jobs import BOUNDARY_KEYS, list_profile, new_trials
from baar_jax.rollout.specs import seed_of
from baar_jax.stages import collect
from baar_jax.store import Store


def test_only_training_tasks_have_new_trials_and_no_seed_is_shared():
  tasks = [Task("t", "train", "", 9), Task("d", "dev", "", 9)]
  config = Config(profile=ProfileConfig(2, robustness=(1, 3)))
  for planned, key in zip(list_profile(config, tasks), BOUNDARY_KEYS):
    assert planned.spec.key == key
    # Trial 0 of one; before the trials of three are those of one and of two.
    new = [("t", seed) for seed in (5000, 5003, 5004, 5005)]
    expected = [("t", 0), ("t", 1), *new, ("d", 0), ("d", 1)]
    assert [job.key for job in planned.jobs] == expected
  trials = [k for count in range(1, 45) for k in new_trials(count)]
  assert trials == [*range(990)] and seed_of("robustness", 990) < seed_of("rollout", 0)


def test_hard_tasks_of_both_splits_have_references(tmp_path, capsys):
  store = Store(":memory:")
  # The task "lost" has no profile, so it is left out.
  for split, names in (("train", ("h1", "e", "lost")), ("dev", ("h2",))):
    store.put_tasks(split, [Task(name, split, "do it", 9) for name in names])
  for task_id, scores in {"h1": (0, 1), "e": (1, 0), "h2": (0, 1)}.items():
    for name, letter, score in zip(BOUNDARY_KEYS, "SL", scores):
      store.add(episode(task_id, name, 0, letter * 2, score))
  planned = []

  def play(title, plan, build):
    planned.append((title, {job.task.id for job in plan.jobs}))
    for task_id, score in (("h1", 1), ("h2", 0)):
      store.add(episode(task_id, plan.spec.key, 1002, "SL", score, cost_usd=0.1))

  config = Config()
  run = SimpleNamespace(store=store, config=config, tasks=store.tasks, print=print)
  run.is_main = True
  run.dir = tmp_path
  run.source = SimpleNamespace(episodes=play, live_episodes=1)
  run.require = planned.append
  run.files = lambda: RouterFiles(tmp_path, config, mesh=None)
  collect.references(run)
  assert planned == ["profile", ("stratified samples", {"h1", "h2"})]
  assert store.finished("references")
  assert (tmp_path / "vocabulary.npz").exists()
  # LARGE at one of two steps of h1, and at both of the LARGE trial of h2.
  summary = "LARGE at 75% of their steps; 1 without a successful sample"
  assert summary in capsys.readouterr().out
