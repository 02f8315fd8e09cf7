"""The dry run: what is missing, what it may cost, and that nothing is touched."""

import dataclasses

import pytest
import tiny

from baar_jax.config import ModelsConfig
from baar_jax.llms.prices import prices_of
from baar_jax.run import Run
from baar_jax.stages import plan, profile
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles

STAGES = ["setup", "profile", "references", "pretrain", "sft", "bopo", "evaluate", "report"]


@pytest.fixture
def config(tmp_path):
  return tiny.config(tmp_path / "runs")


def table(capsys) -> dict[str, list[float]]:
  """Episodes, calls, and expected, least and most dollars, by stage."""
  rows = {}
  for line in capsys.readouterr().out.splitlines():
    name, numbers = line[:12].strip(), line[12:].replace("to", " ").replace(",", "").split()
    if name in (*STAGES, "in all"):
      rows[name] = list(map(float, numbers))
  return rows


def test_nothing_is_made_and_no_key_is_needed(config, tmp_path, monkeypatch, capsys):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  config.models = ModelsConfig(kind="chat")
  plan.main(config, STAGES)
  assert list(tmp_path.iterdir()) == []
  out = capsys.readouterr().out
  assert "nothing is run, nothing is spent" in out and plan.ASSUMED in out


def test_what_a_fresh_run_has_to_do(config, capsys):
  plan.main(config, STAGES)
  rows = table(capsys)
  # 6 tasks, 2 trials of 2 boundaries; 60 % of 10 steps each.
  assert rows["profile"][:2] == [24, 144]
  # 40 % of the tasks are taken for hard, 3 samples each: 2.4 * 3, rounded.
  assert rows["references"][0] == 7
  # 1 lam, 2 updates of 2 tasks and 2 episodes.
  assert rows["bopo"][0] == 8
  # 3 tasks: always-small and -large, first-large(K=1), random, oracle, sft and bopo, the last four
  # also with K = 1; and six weights of the optimum.
  assert rows["evaluate"][0] == 3 * (3 + 2 * 4 + 6)
  for name in ("setup", "pretrain", "sft", "report"):
    assert rows[name] == [0] * 5
  assert rows["in all"][0] == 24 + 7 + 8 + 51
  expected, least, most = rows["in all"][2:]
  assert 0 < least < expected < most


def test_stored_episodes_say_what_the_next_ones_cost(config, capsys):
  directory = tiny.config(config.runs).runs + "/tiny"
  Run(config).close()
  store = Store(f"{directory}/episodes.sqlite")
  for seed, usd in enumerate((1.0, 2.0, 3.0)):
    store.add(tiny.episode("other", "always-small", seed, "SS", cost_usd=usd))
    store.add(tiny.episode("other", "always-large", seed, "LLLL", cost_usd=10 * usd))
  store.close()
  plan.main(config, ["profile", "bopo"])
  rows = table(capsys)
  # 12 episodes of each boundary are missing: of $2 and 2 calls, of $20 and 4 calls.
  assert rows["profile"] == [24, 12 * 2 + 12 * 4, 264, 12 * 1 + 12 * 10, 12 * 3 + 12 * 30]
  # 8 episodes between the boundaries' means of $2 and $20, and between their ends of $1 and $30.
  assert rows["bopo"] == [8, 24, 88, 8, 240]


def test_b_max_caps_what_an_episode_may_cost(config):
  """A boundary under B_max costs what it does without, capped."""
  config.evaluate.usd_budgets = (2.5,)
  store = Store(":memory:")
  for seed, usd in enumerate((1.0, 2.0, 3.0)):
    store.add(tiny.episode("other", "always-small", seed, "SS", cost_usd=usd))
    store.add(tiny.episode("other", "always-large", seed, "LLLL", cost_usd=10 * usd))
  prices = prices_of(config.models.names)
  parts = {part.policy: part for part in plan.missing(config, store, "evaluate")}
  found = {name: plan.per_episode(config, store, prices, part) for name, part in parts.items()}
  assert found["always-small(usd=2.5)"] == (2, (1.0, 2.0, 2.5), True)
  # Between the boundaries: $1 to $30, expected $11.
  assert found["first-large(usd=2.5)"] == (3, (1.0, 2.5, 2.5), True)
  assert found["first-large(K=1)"] == (3, (1.0, 11.0, 30.0), True)
  store.close()


def test_what_is_done_is_not_missing(config, capsys):
  with tiny.compiled_once():
    run = Run(config)
    profile.main(run)
    hard = sum(p.difficulty == "hard" for p in load_profiles(run.store, run.config).values())
    run.close()
  capsys.readouterr()
  plan.main(config, STAGES)
  rows = table(capsys)
  assert rows["profile"] == [0] * 5
  assert rows["references"][0] == 3 * hard


def test_the_configuration_is_left_alone(config):
  before = dataclasses.asdict(config)
  plan.main(config, STAGES)
  assert dataclasses.asdict(config) == before
