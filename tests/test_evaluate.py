"""The evaluation's line-up, and what its policies did on the test tasks."""

import copy
import dataclasses

import pytest
import tiny

from baar_jax.config import RIVALS, BaselinesConfig
from baar_jax.rollout.entries import entries, zero_shot_name
from baar_jax.router.build import build_model
from baar_jax.run import Run
from baar_jax.stages import evaluate
from baar_jax.stages import profile as taxonomy

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
    patch.setattr(evaluate, "load_router", lambda run, family, lam: model)
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
  assert "sft(update=3,threshold=0.5)" in [entry.policy for entry in entries(config)]


def test_rivals_and_ablations_join_with_the_same_points(run):
  config = dataclasses.replace(run.config)
  config.baselines = BaselinesConfig(RIVALS, ("no-reference",), compared_lam=0.3, updates=7)
  config.evaluate = dataclasses.replace(
    config.evaluate, thresholds=(), shares=(0.25,), call_budgets=(2,), budget_rules=True
  )
  names = {entry.policy for entry in entries(config)} - {
    entry.policy for entry in entries(run.config)
  }
  judged = zero_shot_name(config)
  assert judged.startswith("zero-shot gpt-5 ")
  expected = {judged, f"{judged}(K=2)"}
  fitted = {"cascade(update=7,", "single-turn(update=7,"}
  vanilla = {"vanilla(lam=0.1,update=2,", "vanilla(lam=0.3,update=2,"}
  old = {"sft(update=2,", "bopo(lam=0.1,update=2,", "bopo(lam=0.3,update=2,"}
  expected |= {router + "share=0.25)" for router in fitted | vanilla | old}
  expected |= {router + "share=0.25,K=2)" for router in fitted | vanilla | old}
  expected |= {router + "threshold=0.5)" for router in fitted | vanilla}
  expected |= {router + "threshold=0.5,K=2)" for router in fitted | vanilla}
  expected |= {f"no-reference(lam=0.3,update=2,{rule})" for rule in ("threshold=0.5", "share=0.25")}
  assert names == expected
  # What sees its budget is run under it, not taken from the run without one.
  by_name = {entry.policy: entry for entry in entries(config)}
  assert by_name[f"{judged}(K=2)"].unlimited is None
  assert by_name["cascade(update=7,share=0.25,K=2)"].unlimited is None
  config.router = dataclasses.replace(config.router, show_budget=False)
  by_name = {entry.policy: entry for entry in entries(config)}
  assert by_name["cascade(update=7,share=0.25,K=2)"].unlimited == "cascade(update=7,share=0.25)"
  assert by_name[f"{judged}(K=2)"].unlimited is None


@pytest.mark.parametrize(
  "change", [{"temperature": 0.5}, {"max_completion_tokens": 9}, {"base_urls": ("http://h/v1",)}]
)
def test_what_changes_the_judge_changes_the_name(run, change):
  config = dataclasses.replace(run.config)
  judge = dataclasses.replace(config.baselines.judge, **change)
  config.baselines = dataclasses.replace(config.baselines, judge=judge)
  assert zero_shot_name(config) != zero_shot_name(run.config)


def test_fewer_tasks_are_the_first(run):
  config = dataclasses.replace(run.config)
  config.evaluate = dataclasses.replace(config.evaluate, tasks=2)
  fewer = copy.copy(run)
  fewer.config = config
  assert evaluate.test_tasks(fewer) == run.tasks("test")[:2]


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
  untimed = lambda call: dataclasses.replace(call, latency_s=0.0)  # noqa: E731
  return [dataclasses.replace(step, calls=[*map(untimed, step.calls)]) for step in episode.steps]


def test_stored_episodes_are_what_a_run_of_their_own_gives(run):
  """Also where an episode of another entry stands for them."""
  rules = ("first-large", "random", "oracle")
  jobs = [evaluate.Job(task, 0) for task in run.tasks("test")]
  policies = evaluate.Policies(run)
  for entry in entries(run.config):
    if entry.family in rules and entry.call_budget is not None:
      own_entry = dataclasses.replace(entry, policy="own " + entry.policy)
      own = run.collect("own", policies.make(own_entry), jobs, entry.call_budget)
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
