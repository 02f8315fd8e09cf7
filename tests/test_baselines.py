"""All rivals and ablations on the smallest run: trained, evaluated, and resumed."""

import json
import shutil

import pytest
import tiny

from baar_jax.config import ABLATIONS, RIVALS, BaselinesConfig, ablate
from baar_jax.episode import SMALL
from baar_jax.rollout.entries import rollouts_name, zero_shot_name
from baar_jax.run import Run
from baar_jax.stages import baselines, bopo, cascade, evaluate, references, sft
from baar_jax.stages import profile as taxonomy


def configured(runs):
  config = tiny.config(runs)
  config.baselines = BaselinesConfig(RIVALS, tuple(ABLATIONS), compared_lam=0.1, updates=2)
  config.evaluate.shares, config.evaluate.budget_rules = (0.5,), True
  return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  runs = tmp_path_factory.mktemp("baselines")
  with tiny.compiled_once():
    run = Run(configured(runs))
    for stage in (taxonomy, references, sft, bopo, baselines):
      stage.main(run)
    evaluate.main(run)
    yield run
    run.close()


def test_every_entry_is_evaluated(run):
  wanted = {(task.id, 0) for task in run.tasks("test")}
  for entry in evaluate.entries(run.config):
    found = {key for key in run.store.keys(entry.policy) if key in wanted}
    assert found == wanted, entry.policy
    for e in run.store.episodes(entry.policy):
      assert entry.call_budget is None or e.large_calls <= entry.call_budget


def test_vanilla_and_ablations_use_as_many_episodes_as_bopo(run):
  def rolled_out(family):
    names = [rollouts_name(family, 0.1, update) for update in (1, 2)]
    return sorted(key for name in names for key in run.store.keys(name))

  expected = rolled_out("bopo")
  assert len(expected) == 8  # 2 updates of 2 tasks with 2 episodes each
  for family in ("vanilla", *ABLATIONS):
    assert rolled_out(family) == expected


def test_a_cascades_episodes_hold_both_calls(run):
  (name,) = [
    entry.policy
    for entry in evaluate.entries(run.config)
    if entry.family == "cascade" and entry.parameters.get("share") and not entry.call_budget
  ]
  steps = [step for e in run.store.episodes(name) for step in e.steps]
  assert {step.model for step in steps} == {SMALL, 1}
  for step in steps:
    assert step.proposal is not None
    assert (step.usd("proposal") > 0) == (step.model != SMALL)
    if step.model == SMALL:
      assert step.action == step.proposal


def test_zero_shot_pays_for_its_questions_beside_the_models(run):
  episodes = run.store.episodes(zero_shot_name(run.config))
  assert len(episodes) == 3
  for e in episodes:
    assert sum(step.tokens("judge") for step in e.steps) >= len(e.steps)
    judged = sum(step.usd("judge") for step in e.steps)
    assert judged > 0
    assert e.router_cost_usd == pytest.approx(judged)
    assert e.cost_usd == pytest.approx(sum(step.usd("act") for step in e.steps))


def test_calibration_is_noted(run):
  lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
  (line,) = [line for line in lines if line["stage"] == "cascade-calibration"]
  held_out = cascade.split(run.store.tasks("train"))[1]
  names = ["always-small", "stratified(samples=3)"]
  steps = [
    step
    for name in names
    for e in run.store.episodes(name)
    if e.task_id in held_out
    for step in e.steps
    if step.model == SMALL
  ]
  assert sum(part["count"] for part in line["bins"]) == len(steps)


def test_the_stage_says_nothing_twice(run):
  path = run.dir / "metrics.jsonl"
  before = path.read_text()
  baselines.main(run)
  assert path.read_text() == before


def test_an_ablation_changes_one_thing():
  config = tiny.config("runs")
  changed = ablate(config, "no-hard-bonus")
  assert changed.bopo.r_hard == 0.0
  changed.bopo.r_hard = config.bopo.r_hard
  assert changed == config
  assert ablate(config, "no-stratified").references.clone_large
  assert not ablate(config, "no-reference").bopo.reference_guided


def test_the_stage_goes_on_where_it_stopped(run, tmp_path):
  """Without its last checkpoints it ends with the same parameters, and runs no episode again."""
  for name in ("episodes.sqlite", "config.json", "metrics.jsonl"):
    shutil.copy(run.dir / name, tmp_path / name)
  copied = tmp_path / "runs" / "tiny"
  shutil.copytree(run.dir, copied)
  for place in ("vanilla-lam0.1", "no-reference-lam0.1", "cascade-2"):
    shutil.rmtree(copied / "checkpoints" / place)
  config = configured(tmp_path / "runs")
  again = Run(config)
  before = again.store.count()
  baselines.main(again)
  assert again.store.count() == before
  for family in ("vanilla", "no-reference", "cascade"):
    lam = None if family == "cascade" else 0.1
    ours, theirs = (
      evaluate.load_router(each, family, lam).embedding_VxD[...] for each in (again, run)
    )
    assert (abs(ours - theirs) < 1e-6).all()
  again.close()


def test_untrained_rivals_are_named(tmp_path):
  config = configured(tmp_path)
  run = Run(config)
  with pytest.raises(ValueError, match="run --stage=(profile|sft) first"):
    baselines.main(run)
  run.close()
