"""Check stage `references`: the episodes that it plays, and its summary."""

from types import SimpleNamespace

import pytest
from hand import live, models
from tiny import episode

from baar_jax.config import Config, ReferencesConfig, SamplePlan
from baar_jax.episode import Task
from baar_jax.open import RouterFiles
from baar_jax.rollout.jobs import BOUNDARY_KEYS
from baar_jax.stages import collect
from baar_jax.store import Store


def test_hard_tasks_have_samples_with_large_at_rate_k_over_n(tmp_path, capsys):
  store, events, policies = Store(tmp_path / "episodes.sqlite"), [], []
  # A task without a profile is left out. Dev tasks have their own references.
  for split, names in (("train", ("h1", "e", "lost")), ("dev", ("h2",))):
    store.put_tasks(split, [Task(name, split, "do it", 9) for name in names])
  for task_id, scores in {"h1": (0, 1), "e": (1, 0), "h2": (0, 1)}.items():
    for name, letter, score in zip(BOUNDARY_KEYS, "SL", scores):
      store.add(episode(task_id, name, 0, letter * 2, score))

  def play(title, planned, build):
    policy = build(planned.spec)
    events.extend([title, *((job.task.id, job.seed) for job in planned.jobs)])
    policies.append(policy)
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
  jobs = [(task_id, k) for task_id in ("h1", "h2") for k in (1001, 1002, 1003)]
  assert [policy.spec.key for policy in policies] == [
    "stratified(samples=3)",
    "exploration-all(samples=3,steps=2,repeats=1)",
    "exploration(steps=2,repeats=1)",
  ]
  assert events == [
    "profile",
    "stratified samples",
    *jobs,
    "samples of other tasks",
    # An easy task has all plans: 3 + 2 + 1 samples.
    *[("e", k) for k in range(4001, 4007)],
    # The value heads learn from training tasks only.
    "samples of hard tasks",
    *[("h1", k) for k in range(4001, 4004)],
  ]
  assert store.finished("references")
  # LARGE at one of two steps of h1, and at both of the LARGE trial of h2.
  assert (
    "LARGE at 75% of their steps; 1 without a successful sample"
    in capsys.readouterr().out
  )
  for k in (1, 2, 3):
    decisions = policies[0].choose(
      [live("t", k, step, purpose="reference") for step in range(1000)]
    )
    large = sum(decision.model for decision in decisions)
    # 1000 draws: four standard deviations are below 0.064; k = N is always LARGE.
    assert large / 1000 == pytest.approx(k / 3, abs=0.064 if k < 3 else 0)


def test_exploration_takes_large_at_consecutive_steps():
  # 10 k / (2 * 5) = k of 10 steps: the first 1 and 3 are LARGE, and all but the first 2 and 4. Then
  # the same at 5/3, 10/3 and 5 of 0, 0, 1, 1, 2, 3, 4, 5, 6, 7 observations that were not new.
  steps = "LSSSSSSSSS", "SSLLLLLLLL", "LLLSSSSSSS", "SSSSLLLLLL", "LLLLLSSSSS"
  repeats = "LLLLSSSSSS", "SSSSSSLLLL", "LLLLLLLSSS"
  together = SamplePlan("steps", 5), SamplePlan("repeats", 3)
  stratified = SamplePlan("samples", 4)
  families = {"exploration": together, "exploration-all": (stratified, *together)}
  for k, letters in enumerate(steps + repeats, 1):
    for first, (family, plans) in zip(
      (0, 4), families.items()
    ):  # after 4 stratified ones
      lives = [live("t", first + k, step, purpose="exploration") for step in range(10)]
      taken = models(family, lives, plans=plans)
      assert "".join("SL"[model] for model in taken) == letters
  lives = [live("t", 2, step, purpose="reference") for step in range(30)]
  strata = models("stratified", lives, plans=(stratified,))
  lives = [live("t", 2, step, purpose="exploration") for step in range(30)]
  assert models("exploration-all", lives, plans=families["exploration-all"]) != strata
