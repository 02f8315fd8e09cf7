"""The dry run: what is missing, what it may cost, and that nothing is touched."""

import contextlib
import dataclasses
import json
from functools import partial

import pytest
import tiny

from baar_jax.config import EnvConfig, ModelsConfig
from baar_jax.envs.alfworld import GAME, GAMES
from baar_jax.run import Run
from baar_jax.stages import plan, profile
from baar_jax.train.dataset import load_profiles

STAGES = ["setup", "profile", "references", "pretrain", "sft", "bopo", "evaluate", "report"]


@pytest.fixture
def config(tmp_path):
  return tiny.config(tmp_path / "runs")


def table(config, capsys, stages=STAGES) -> dict[str, list[float]]:
  """Episodes, calls, and expected, least and most dollars, by stage."""
  capsys.readouterr()
  before = dataclasses.asdict(config)
  plan.main(config, stages)
  assert dataclasses.asdict(config) == before
  lines = [(line[:12].strip(), line[12:]) for line in capsys.readouterr().out.splitlines()]
  rows = [(name, text) for name, text in lines if name in (*stages, "in all")]
  return {n: [float(x) for x in t.replace("to", "").replace(",", "").split()] for n, t in rows}


def test_nothing_is_created_and_no_key_is_needed(config, tmp_path, monkeypatch, capsys):
  monkeypatch.delenv("OPENAI_API_KEY", raising=False)
  config.models = ModelsConfig(kind="chat")
  plan.main(config, STAGES)
  assert list(tmp_path.iterdir()) == []
  out = capsys.readouterr().out
  assert "nothing is run, nothing is spent" in out and "assumed where nothing is stored" in out


def test_what_a_fresh_run_has_to_do(config, capsys):
  rows = table(config, capsys)
  # 6 training and 2 dev tasks, 2 trials of 2 boundaries; 60 % of 10 steps each.
  assert rows["profile"][:2] == [32, 192]
  # A SMALL episode of 6 steps: 6 * 1000 + 150 * (0 + 1 + ... + 5) = 8250 tokens at $0.4 a million
  # and 6 * 60 at $1.6; LARGE five times as much. 16 * (0.0033 + 0.000576) * 6
  assert rows["profile"][2] == pytest.approx(0.3721, abs=5e-5)
  # References: 40 % of the tasks are taken for hard, 3 samples each: 3.2 * 3, rounded. BoPO: 1 lam,
  # 2 updates of 2 tasks and 2 episodes. Evaluation: 2 dev and 3 test tasks; always-small and
  # always-large, first-large(K=1), random, sft and bopo, the last three also with K = 1; and
  # six weights of the optimum, and the optimum with K = 1.
  numbers = {"references": 10, "bopo": 8, "evaluate": 5 * (3 + 2 * 3 + 7), "in all": 50 + 80}
  assert {name: rows[name][0] for name in numbers} == numbers
  assert all(rows[name] == [0] * 5 for name in ("setup", "pretrain", "sft", "report"))
  expected, least, most = rows["in all"][2:]
  assert 0 < least < expected < most


@pytest.mark.parametrize("usd_budget", [None, 2.5])
def test_stored_episodes_say_what_the_next_ones_cost(usd_budget, config, capsys):
  config.evaluate.usd_budgets = (usd_budget,) if usd_budget else ()
  before = table(config, capsys, ["evaluate"])["evaluate"]
  with contextlib.closing(Run(config)) as run:
    for seed, usd in enumerate((1.0, 2.0, 3.0)):
      run.store.add(tiny.episode("other", "always-small", seed, "SS", cost_usd=usd))
      run.store.add(tiny.episode("other", "always-large", seed, "LLLL", cost_usd=10 * usd))
  rows = table(config, capsys, ["profile", "bopo", "evaluate"])
  # 16 episodes of each boundary are missing: of $2 and 2 calls, of $20 and 4 calls.
  assert rows["profile"] == [32, 16 * 2 + 16 * 4, 352, 16 * 1 + 16 * 10, 16 * 3 + 16 * 30]
  # 8 episodes between the boundaries' means of $2 and $20, and between their ends of $1 and $30.
  assert rows["bopo"] == [8, 24, 88, 8, 240]
  # 5 of always-small, 5 of always-large, and 70 between them. Of these the budget adds 25: always-
  # small, and First-Large, random, sft, bopo: $1 to $2.5, of which always-small expects $2.
  assert rows["evaluate"][0] == before[0] == (105 if usd_budget else 80)
  capped = [5 * 2 + 20 * 2.5, 25 * 1, 25 * 2.5] if usd_budget else [0, 0, 0]
  free = [5 * 2 + 5 * 20 + 70 * 11, 5 * 1 + 5 * 10 + 70 * 1, 5 * 3 + 5 * 30 + 70 * 30]
  assert rows["evaluate"][2:] == [a + b for a, b in zip(free, capped)]


def test_it_lists_the_tasks_where_that_needs_no_engine(config, tmp_path, capsys):
  splits = ("train", "train", "valid_seen", "valid_unseen")
  names = [f"{s}/pick_and_place_simple-Mug-None-Desk-{i}/trial_{i}" for i, s in enumerate(splits)]
  game = {"solvable": True, "pddl_domain": "d", "pddl_problem": "p"}
  for name in names:
    (tmp_path / GAMES / name).mkdir(parents=True)
    text = json.dumps(game | {"grammar": 'Your task is to: put a mug on the desk."'})
    (tmp_path / GAMES / name / GAME).write_text(text)
  (tmp_path / "list.txt").write_text("\n".join(names[:2]))
  config.env = EnvConfig("alfworld", 2, 1, 1, data=str(tmp_path), train_split="list.txt")
  plan.main(config, STAGES)
  out = capsys.readouterr().out
  assert "tasks: 2 train, 1 dev, 1 test" in out and "210" in out
  config.env.train_tasks = 3
  with pytest.raises(ValueError, match="list.txt in .* has 2 games, 3 were asked for"):
    plan.main(config, STAGES)


def test_what_is_done_is_not_missing(config, capsys):
  with contextlib.closing(Run(config)) as run:
    profile.main(run)
    load = partial(load_profiles, run.store, run.config)
    profiles = [*load().values(), *load(split="dev").values()]
    hard = sum(p.difficulty == "hard" for p in profiles)
  rows = table(config, capsys)
  assert rows["profile"] == [0] * 5 and rows["references"][0] == 3 * hard


def test_vanilla_rl_may_need_three_times_the_rollouts_of_bopo(config, capsys):
  config.baselines.rivals = ("vanilla",)
  rows = table(config, capsys, ["bopo", "baselines"])
  (episodes, _, usd, least, most), vanilla = rows["bopo"], rows["baselines"]
  assert [vanilla[0], *vanilla[2:]] == pytest.approx(
    [2 * episodes, 2 * usd, least, 3 * most], rel=1e-3
  )
