"""Stage references: which episodes of hard tasks it asks for, and what it says of them."""

from types import SimpleNamespace

import pytest
from tiny import episode

from baar_jax.config import Config, ReferencesConfig
from baar_jax.episode import Task
from baar_jax.rollout.policies import BOUNDARIES, Job, Live, rule_policy
from baar_jax.stages import train
from baar_jax.store import Store


def test_hard_tasks_alone_have_episodes_k_of_n_with_large_at_k_over_n(tmp_path, capsys):
  store, events, policies = Store(tmp_path / "episodes.sqlite"), [], []
  # A task without a profile is passed over. Dev has references of its own.
  for split, names in (("train", ("h1", "e", "lost")), ("dev", ("h2",))):
    store.put_tasks(split, [Task(name, split, "do it", 9) for name in names])
  for task_id, scores in {"h1": (0, 1), "e": (1, 0), "h2": (0, 1)}.items():
    for name, letter, score in zip(BOUNDARIES, "SL", scores):
      store.add(episode(task_id, name, 0, letter * 2, score))

  def collect(label, policy, jobs):
    events.extend([label, *((job.task.id, job.seed) for job in jobs)])
    policies.append(policy)
    for task_id, score in (("h1", 1), ("h2", 0)):
      store.add(episode(task_id, policy.name, 1002, "SL", score, cost_usd=0.1))

  config = Config(references=ReferencesConfig(samples=3, together=2))
  run = SimpleNamespace(store=store, config=config, tasks=store.tasks, print=print)
  run.collect, run.require = collect, events.append
  train.references(run)
  jobs = [(task_id, k) for task_id in ("h1", "h2") for k in (1001, 1002, 1003)]
  together = [("h1", 1001), ("h1", 1002)]  # the values learn from training tasks alone
  assert events == ["profile", "references", *jobs, "together", *together]
  assert store.finished("references")
  # LARGE at one of two steps of h1, and at both of the LARGE trial of h2.
  assert "LARGE at 75% of their steps; 1 had no stratified" in capsys.readouterr().out
  task = Task("t", "train", "do it", 9)
  for k in (1, 2, 3):
    job, pair = Job(task, 1000 + k), [None] * 2
    lives = [Live(job, None, agents=pair, steps=[None] * i) for i in range(1000)]
    large = sum(decision.model for decision in policies[0].choose(lives))
    # 1000 draws: four standard deviations are below 0.064; k = N is always LARGE.
    assert large / 1000 == pytest.approx(k / 3, abs=0.064 if k < 3 else 0)


def test_large_steps_may_be_together_in_time():
  task = Task("t", "train", "do it", 8)

  def models(k):
    lives = [Live(Job(task, 1000 + k), None, agents=[None] * 2, steps=[None] * s) for s in range(8)]
    choices = rule_policy("together", samples=4).choose(lives)
    return "".join("SL"[decision.model] for decision in choices)

  # 8 k / (2 * 4) = k steps: the first 1 and 3 are LARGE, and all but the first 2 and 4.
  assert [models(k) for k in (1, 2, 3, 4)] == ["LSSSSSSS", "SSLLLLLL", "LLLSSSSS", "SSSSLLLL"]
