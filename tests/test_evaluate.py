"""The evaluation's line-up, and what its policies did on the test tasks."""

import dataclasses

import pytest
import tiny

from baar_jax import evaluate, taxonomy
from baar_jax.evaluate import entries
from baar_jax.router import build_model
from baar_jax.run import Run

BUDGETS = (1, 2)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """A run whose trained routers are an untrained one."""
  config = tiny.config(tmp_path_factory.mktemp("evaluated"))
  config.bopo.lam = (0.1, 0.3)
  config.evaluate.thresholds = (0.25,)
  config.evaluate.call_budgets = BUDGETS
  with tiny.compiled_once(), pytest.MonkeyPatch.context() as patch:
    run = Run(config)
    taxonomy.main(run)
    model = build_model(config.router, seed=0)
    patch.setattr(evaluate, "load_sft", lambda run: model)
    patch.setattr(evaluate, "load_bopo", lambda run, lam: model)
    evaluate.main(run)
    patch.undo()
    yield run
    run.close()


def test_names_are_unique_and_carry_every_parameter(run):
  names = [entry.policy for entry in entries(run.config)]
  assert len(set(names)) == len(names)
  expected = ["always-small", "always-large", "first-large(K=1)", "first-large(K=2)"]
  expected += ["random(p=0.5)", "random(p=0.5,K=1)", "random(p=0.5,K=2)"]
  expected += ["oracle", "oracle(K=1)", "oracle(K=2)"]
  expected += [f"optimum(mu={mu})" for mu in (40, 60, 90, 130, 200, 300)]
  for router in ("sft(update=2,", "bopo(lam=0.1,update=2,", "bopo(lam=0.3,update=2,"):
    expected += [router + "threshold=0.5)", router + "threshold=0.25)"]
    expected += [router + f"threshold=0.5,K={K})" for K in BUDGETS]
  assert sorted(names) == sorted(expected)


def test_what_changes_a_policy_changes_its_name(run):
  config = dataclasses.replace(
    run.config, sft=dataclasses.replace(run.config.sft, updates=3), bopo=run.config.bopo
  )
  assert "sft(update=3,threshold=0.5)" in [
    entry.policy for entry, _ in evaluate._lineup(config, run)
  ]


def test_entries_say_what_they_are(run):
  by_name = {entry.policy: entry for entry in entries(run.config)}
  entry = by_name["random(p=0.5,K=2)"]
  assert (entry.family, entry.parameters, entry.call_budget) == ("random", {"p": 0.5}, 2)
  entry = by_name["bopo(lam=0.3,update=2,threshold=0.25)"]
  assert entry.parameters == {"lam": 0.3, "update": 2, "threshold": 0.25}
  assert (entry.family, entry.call_budget) == ("bopo", None)


def test_every_entry_has_every_test_task_and_no_other(run):
  keys = {(task.id, 0) for task in run.tasks("test")}
  assert len(keys) == 3
  for entry in entries(run.config):
    found = run.store.keys(entry.policy)
    if entry.policy.startswith("always"):  # the profile's trials are under the same names
      found = {key for key in found if key[0].startswith("test")}
    assert found == keys


def test_no_budget_is_overrun_and_each_is_stored(run):
  for entry in entries(run.config):
    for e in run.store.episodes(entry.policy):
      assert e.call_budget == entry.call_budget
      assert entry.call_budget is None or e.large_calls <= entry.call_budget


def test_first_large_is_always_large_under_the_budget(run):
  for K in BUDGETS:
    for e in run.store.episodes(f"first-large(K={K})"):
      models = [step.model for step in e.steps]
      assert models == ([1] * K + [0] * len(models))[: len(models)]
    assert all(e.large_calls == K for e in run.store.episodes(f"first-large(K={K})"))


def test_boundaries_are_what_their_names_say(run):
  for model, name in enumerate(("always-small", "always-large")):
    assert {step.model for e in run.store.episodes(name) for step in e.steps} == {model}


def without_times(episode):
  return [dataclasses.replace(step, latency_s=0.0) for step in episode.steps]


def test_stored_episodes_are_what_a_run_of_their_own_gives(run):
  """Also where an episode of another entry stands for them."""
  rules = ("first-large", "random", "oracle")
  jobs = [evaluate.Job(task, 0) for task in run.tasks("test")]
  for entry, make in evaluate._lineup(run.config, run):
    if entry.family in rules and entry.call_budget is not None:
      own = run.collect("own", make("own " + entry.policy), jobs, entry.call_budget)
      stored = run.store.episodes(entry.policy)
      assert [(e.task_id, e.score, e.stop, without_times(e)) for e in own] == [
        (e.task_id, e.score, e.stop, without_times(e)) for e in stored
      ]


def test_without_trained_routers_the_stage_is_named_before_anything_is_run(tmp_path):
  run = Run(tiny.config(tmp_path))
  with pytest.raises(ValueError, match="run --stage=(profile|sft) first"):
    evaluate.main(run)
  assert run.store.count() == 0
  run.close()
