"""Stage references: which episodes of hard tasks it asks for, and what it says of them."""

from types import SimpleNamespace

import pytest
from tiny import episode

from baar_jax.config import Config
from baar_jax.episode import Task
from baar_jax.rollout.entries import BOUNDARIES
from baar_jax.rollout.live import Job, Live
from baar_jax.stages import references
from baar_jax.store import Store


@pytest.mark.parametrize("k, share", [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)])
def test_episode_k_takes_large_with_probability_k_over_n(k, share):
  lives = [
    Live(Job(Task(f"t{t}", "train", "do it", 9), k), None, steps=[None] * step)
    for t in range(50)
    for step in range(20)
  ]
  picks = [references.stratified_rule(live, 4) for live in lives]
  # 1000 draws: four standard deviations are below 0.064; k = N is always LARGE.
  assert sum(picks) / 1000 == pytest.approx(share, abs=0.064 if share < 1 else 0)


def test_the_stage_asks_for_k_from_1_to_n_on_hard_tasks_alone(tmp_path, capsys):
  store, events = Store(tmp_path / "episodes.sqlite"), []
  # A task without a profile is passed over.
  names = ["h1", "e", "h2", "lost"]
  store.put_tasks("train", [Task(name, "train", "do it", 9) for name in names])
  for task_id, scores in {"h1": (0, 1), "e": (1, 0), "h2": (0, 1)}.items():
    for name, letter, score in zip(BOUNDARIES, "SL", scores):
      store.add(episode(task_id, name, 0, letter * 2, score))

  def collect(label, policy, jobs):
    events.append(label)
    events.extend((job.task.id, job.seed) for job in jobs)
    store.add(episode("h1", policy.name, 2, "SL", 1, cost_usd=0.1))
    store.add(episode("h2", policy.name, 2, "SL", 0, cost_usd=0.1))

  config = Config()
  config.references.samples = 3
  run = SimpleNamespace(
    store=store, config=config, tasks=store.tasks, say=print, collect=collect, require=events.append
  )
  references.main(run)
  jobs = [(task_id, k) for task_id in ("h1", "h2") for k in (1, 2, 3)]
  assert events == ["profile", "references", *jobs]
  assert store.finished("references")
  # LARGE at one of two steps of h1, and at both of the LARGE trial of h2.
  said = "references: 2 hard tasks, LARGE at 75% of their steps; 1 had no stratified success"
  assert capsys.readouterr().out.startswith(said)
  store.close()
