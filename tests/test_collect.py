"""Check stage `references`: the episodes that it plays, and its summary."""

from types import SimpleNamespace

from tiny import episode

from baar_jax.config import Config, ReferencesConfig, SamplePlan
from baar_jax.episode import Task
from baar_jax.learn.checkpoint import RouterFiles
from baar_jax.rollout.jobs import BOUNDARY_KEYS
from baar_jax.stages import collect
from baar_jax.store import Store


def test_hard_tasks_are_sampled_and_training_tasks_explored(tmp_path, capsys):
  store = Store(":memory:")
  # A task without a profile is left out. Dev tasks have their own references.
  for split, names in (("train", ("h1", "e", "lost")), ("dev", ("h2",))):
    store.put_tasks(split, [Task(name, split, "do it", 9) for name in names])
  for task_id, scores in {"h1": (0, 1), "e": (1, 0), "h2": (0, 1)}.items():
    for name, letter, score in zip(BOUNDARY_KEYS, "SL", scores):
      store.add(episode(task_id, name, 0, letter * 2, score))
  events = []

  def play(title, planned, build):
    policy = build(planned.spec)
    events.append((title, planned.spec.key))
    events.extend(job.key for job in planned.jobs)
    for task_id, score in (("h1", 1), ("h2", 0)):
      store.add(episode(task_id, policy.spec.key, 1002, "SL", score, cost_usd=0.1))

  plans = (
    SamplePlan("samples", 3, all_tasks=True),
    SamplePlan("steps", 2, all_tasks=True),
    SamplePlan("repeats", 1, all_tasks=True),
  )
  config = Config(references=ReferencesConfig(samples=3, plans=plans))
  run = SimpleNamespace(store=store, config=config, tasks=store.tasks, print=print)
  run.source = SimpleNamespace(episodes=play, live_episodes=1)
  run.require = events.append
  run.files = lambda: RouterFiles(tmp_path, config, mesh=None)
  collect.references(run)
  assert events == [
    "profile",
    ("stratified samples", "stratified(samples=3)"),
    *[("h1", k) for k in (1001, 1002, 1003)],
    *[("h2", k) for k in (1001, 1002, 1003)],
    # An easy task has all plans: 3 + 2 + 1 samples.
    ("samples of other tasks", "exploration-all(samples=3,steps=2,repeats=1)"),
    *[("e", k) for k in range(4001, 4007)],
    # The value heads learn from training tasks only.
    ("samples of hard tasks", "exploration(steps=2,repeats=1)"),
    *[("h1", k) for k in range(4001, 4004)],
  ]
  assert store.finished("references")
  # LARGE at one of two steps of h1, and at both of the LARGE trial of h2.
  summary = "LARGE at 75% of their steps; 1 without a successful sample"
  assert summary in capsys.readouterr().out
