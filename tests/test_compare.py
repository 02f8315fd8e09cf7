"""The figures of hand-made evaluations, with the arithmetic in the comments."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_store import BOPO, BOUNDARIES, EVERY, FEW, SEEDS, config, entries, figures, fill
from tiny import episode

from baar_jax.config import ABLATIONS, BaselinesConfig
from baar_jax.report import compare, texts
from baar_jax.report.compare import choose
from baar_jax.report.frontier import interval
from baar_jax.report.page import compute_results, plain
from baar_jax.report.table import COMPARED, load
from baar_jax.rollout.policies import Entry


@pytest.fixture(scope="module")
def every() -> dict:
  settings = config()
  settings.baselines = BaselinesConfig(ablations=tuple(ABLATIONS))
  return figures(EVERY, settings)


def row(frame: pd.DataFrame, **where) -> pd.Series:
  for column, value in where.items():
    frame = frame[frame[column] == value]
  (fields,) = frame.to_dict("records")
  return pd.Series(fields)


POINTS = {
  1: ("SSSL", (1.0, 0.0, 0.0, 0.0)),
  2: ("SSLL", (1.0, 1.0, 1.0, 0.0)),
  3: ("LLLL", (1.0, 1.0, 1.0, 0.0)),
}


def bopo(points: dict) -> dict:
  return {f"bopo(lam={lam})": ("bopo", {"lam": lam}, None, *p) for lam, p in points.items()}


def chosen(policies: dict, ablations=(), lam=(0.3,)):
  settings = config(lam)
  settings.baselines.ablations = ablations
  return choose(fill(policies), entries(policies), settings)


def test_the_vertices_of_a_familys_hull_and_its_highest_point():
  # Shares of the cost gap 1/4, 1/2 and 1 and of the success gap 0, 1 and 1: 1/2 above at most. Only
  # the second is on the hull: the first lies below the line, the third on LARGE.
  choice = chosen(BOUNDARIES | bopo(POINTS))
  assert choice.vertices["bopo", "success_percent"] == ["bopo(lam=2)"]
  assert choice.headline == choice.typical["bopo"] == "bopo(lam=2)"
  assert choice.policies == [*BOUNDARIES, "bopo(lam=2)"]
  assert choice.dev.success_percent.tolist() == [25, 75, 25, 75, 75]
  # Of a family with nothing above the line the one nearest in cost to the headline is shown.
  below = {f"sft{lam}": ("sft", {}, None, *POINTS[lam]) for lam in (1, 3)}
  choice = chosen(BOUNDARIES | bopo(POINTS) | below)
  assert choice.vertices["sft", "success_percent"] == [] and choice.typical["sft"] == "sft1"
  # Ablations are held against BoPO at one weight.
  ablation = {"no-reference": ("no-reference", {"lam": 2}, None, *POINTS[3])}
  choice = chosen(BOUNDARIES | bopo(POINTS) | ablation, ("no-reference",), (2, 3))
  assert choice.vertices[COMPARED, "success_percent"] == ["bopo(lam=2)"]
  assert "no-reference" not in choice.policies


def test_the_best_under_each_budget_the_first_of_equal_ones():
  capped = {f"sft{i}": ("sft", {}, 1, "SL", (x, 1.0, 0.0, 0.0)) for i, x in enumerate((0, 1, 1))}
  capped |= {f"sft{i}": ("sft", {}, 2, "LL", (x, 1.0, 0.0, 0.0)) for i, x in ((3, 1), (4, 0.9))}
  assert chosen(BOUNDARIES | capped).policies == [*BOUNDARIES, "sft1", "sft3"]
  lines = [Entry("sft", {}, name, usd_budget=2.0) for name in ("sft0", "sft1")]
  lines = entries(BOUNDARIES) + lines
  assert choose(fill(BOUNDARIES | capped), lines, config()).policies == [*BOUNDARIES, "sft1"]


def test_test_has_no_say():
  store, names = fill(BOUNDARIES | bopo(POINTS)), ["bopo(lam=2)"]
  # On test the chosen point is no better than SMALL, and another would be on the hull.
  where = "policy = 'bopo(lam=2)' AND seed >= 3000"
  store._db.execute(f"UPDATE episodes SET score = 0, success = 0 WHERE {where}")
  results = compute_results(store, entries(BOUNDARIES | bopo(POINTS)), config(), Path("none"))
  row = results["frontiers"].query("metric == 'success_percent'").iloc[0]
  # (1/2, -1/2), 25 being 0: -1/8 to the left, (-1/2 + 1) / 4 to the right
  assert row.policies == names and row.area == pytest.approx(-1 / 8 + 1 / 8)
  assert results["headline"] == names[0]
  assert [*results["policies"].index] == [*BOUNDARIES, *names]


def test_areas_draw_the_same_tasks_for_policies_and_boundaries():
  # The policy is LARGE on the first half of the tasks and SMALL on the second. Whatever tasks are
  # drawn, it has LARGE's score at n / N of the extra cost, n of them from the first half: x =
  # n / N, y = 1, area = x / 2 + (1 - x). Drawn apart, scores above 1 would occur.
  score = (1.0,) * 10 + (0.0,) * 10
  policies = {
    "always-small": ("always-small", {}, None, "S", (0.0,) * 20),
    "always-large": ("always-large", {}, None, "L", score),
    "bopo": ("bopo", BOPO, None, "S", score),
  }
  store = fill(policies)
  # "test-0" to "test-9" have six letters.
  where = "policy = 'bopo' AND length(task_id) = 6"
  store._db.execute(f"UPDATE episodes SET cost_usd = 5 WHERE {where}")
  e = load(store, entries(policies), config(), "test")
  area = interval("area", compare.resample_area(e, ["bopo"], "score_percent"))
  # n is binomial(20, 1/2): 95 % within 6..14
  expected = (0.75, 1 - 14 / 20 / 2, 1 - 6 / 20 / 2)
  assert tuple(area.values()) == pytest.approx(expected, abs=0.03) and area["area"] == 0.75


def test_policy_figures(every):
  table = every["policies"]
  bopo = table.loc["bopo(lam=0.3)"]
  assert (bopo.episodes, bopo.steps) == (8, 4.0)
  assert bopo.cost_usd == 6.0  # (4 + 8 + 8 + 4) / 4
  assert bopo.deciding_usd == 2.0  # 4 decisions of 0.5, apart from the cost
  assert bopo.success_percent == bopo.score_percent == 75.0
  assert 0.0 <= bopo.success_percent_low < 75.0 < bopo.success_percent_high <= 100.0
  assert table.score_percent["always-small"] == pytest.approx(30.0)  # 1.2 / 4
  assert table.success_percent["always-small"] == 25.0
  # 1 + 1 + 1 + 5, and a proposal of 0.5; 1 + 3 * 5, and beside it four judgements of 0.125
  assert table.cost_usd["cascade"] == 8.5
  assert tuple(table.loc["zero-shot", ["cost_usd", "deciding_usd"]]) == (16.0, 0.5)
  # (6 - 4) / (20 - 4) and (75 - 25) / (75 - 25); (12 - 4) / 16 and (50 - 25) / 50
  shares = ["cost_gap_share", "success_gap_share"]
  assert tuple(bopo[shares]) == (0.125, 1.0) and every["headline"] == bopo.name
  assert bopo.cost_gap_share_low <= 0.125 <= bopo.cost_gap_share_high
  assert tuple(table.loc["random(p=0.5)", shares]) == (0.5, 0.5)
  assert tuple(table.loc["first-large(K=2)", ["use_share", "overruns"]]) == (1.0, 0)
  # Two LARGE calls where one is allowed, in every one of 4 x 2 episodes.
  assert tuple(table.loc["bopo(lam=0.3,K=1)", ["use_share", "overruns"]]) == (2.0, 8)
  assert math.isnan(table.use_share["bopo(lam=0.3)"])


def test_dollar_budgets_are_apart():
  store, lines = fill(FEW), entries(FEW)
  lines.append(Entry("bopo", BOPO, "bopo(usd=7)", usd_budget=7.0))
  for split, i in itertools.product(SEEDS, range(4)):
    for seed in range(2):
      name, models = f"{split}-{i}", "SL" if i else "LL"
      e = episode(name, "bopo(usd=7)", SEEDS[split] + seed, models, 1.0)
      e.usd_budget = 7.0
      store.add(e)
  results = compute_results(store, lines, config(), Path("none"))
  # $10 on one task of four; (10 + 6 + 6 + 6) / 4 / 7 of the cap
  assert tuple(results["policies"].loc["bopo(usd=7)", ["overruns", "use_share"]]) == (2, 1.0)
  assert all("bopo(usd=7)" not in names for names in results["frontiers"].policies)


def test_frontiers_take_points_without_a_budget_and_first_large_its_budgets(every):
  fronts = every["frontiers"]
  assert row(fronts, family="first-large", metric="score_percent").policies == ["first-large(K=2)"]
  rows = fronts[fronts.metric == "success_percent"]
  assert not rows.family.duplicated().any()
  success = dict(zip(rows.family, rows.itertuples()))
  assert success["bopo"].policies == ["bopo(lam=0.3)"]
  assert success["random"].policies == []  # it lies on the line
  baselines = {"random", "first-large", "sft", "vanilla", "cascade", "single-turn", "zero-shot"}
  assert set(success) == {"bopo", *baselines}
  # The line (0, 0), (1/8, 1), (1, 1): a triangle of 1/16 and a rectangle of 7/8.
  assert success["bopo"].area == pytest.approx(15 / 16) and math.isnan(success["bopo"].area_gain)
  random = success["random"]
  assert random.area == pytest.approx(0.5) and random.area_gain == pytest.approx(7 / 16)
  assert 0.0 < random.area_gain_low <= 7 / 16 <= random.area_gain_high
  # Vanilla RL solves all three for always-SMALL's $4: an area of 1. BoPO pays for LARGE on every
  # hard task, so in every resample that holds one it is behind.
  assert success["vanilla"].area_gain == pytest.approx(-1 / 16)
  assert success["vanilla"].area_gain_high < 0


def test_ablations_against_bopo_at_the_same_weight(every):
  rows = every["ablations"]
  rows = rows[rows.metric == "success_percent"]
  assert set(rows.family) == {COMPARED, "sft", *ABLATIONS}
  # BoPO has 15/16; the ablation lies on always-SMALL: 1/2.
  without = row(rows, family="no-reference")
  assert (without.area, without.area_gain) == pytest.approx((0.5, 7 / 16))
  assert 0 < without.area_gain_low <= 7 / 16 <= without.area_gain_high
  # SFT, at (1/4, 1/2): the line through it has 1/16 + 3/4 * 3/4.
  assert row(rows, family="sft").area == pytest.approx(1 / 16 + 9 / 16)
  # Where the money goes is shown of neither, nor of what has a budget.
  assert not {"no-reference", "first-large"} & set(every["by_difficulty"].family)
  assert figures(EVERY)["ablations"].empty


def test_the_rows_under_a_budget(every):
  rows = every["hard_budget"]
  families = ["always-small", "always-large", "bopo", "single-turn"]
  assert rows.family[rows.K == 1].tolist() == families
  best = row(rows, K=1, family="bopo")
  assert (best.policy, best.overruns) == ("bopo(lam=0.3,K=1)", 8) and math.isnan(best.gain)
  # Scores by task: BoPO 1, 1, 0, 0; single-turn 1, 0, 0, 0; always-SMALL 1, .2, 0, 0.
  other = row(rows, K=1, family="single-turn")
  assert other.gain == pytest.approx(50 - 25) and other.gain_low == 0 < other.gain_high
  small = row(rows, K=1, family="always-small")
  assert small.gain == pytest.approx(50 - 30) and math.isnan(small.use_share)
  assert math.isnan(row(rows, K=2, family="first-large").gain)  # there is no BoPO


def test_the_one_router_comes_first_where_it_is():
  one = {"one": ("conditioned", {}, None, "SSSL", (1.0, 1.0, 1.0, 0.0))}
  one |= {"one(K=1)": ("conditioned", {}, 1, "SSSL", (1.0, 1.0, 1.0, 1.0))}
  results = figures(EVERY | one)
  assert (results["run"]["main"], results["headline"]) == ("conditioned", "one")
  assert results["frontiers"].family[0] == "conditioned"
  # (1/4, 1): 1/8 + 3/4 against BoPO's 15/16
  gain = row(results["frontiers"], family="bopo", metric="success_percent").area_gain
  assert gain == pytest.approx(14 / 16 - 15 / 16)
  assert row(results["hard_budget"], K=1, family="bopo").gain == pytest.approx(100 - 50)


def test_seconds_by_the_rates_and_as_measured(every):
  # Three replies of SMALL with 90 tokens and a proposal of 45; one reply of LARGE with 90; four
  # decisions.
  cascade = every["latency"].loc["cascade"]
  assert cascade.small_s == pytest.approx(315 / 90) and cascade.large_s == pytest.approx(90 / 80)
  assert cascade.router_s == pytest.approx(4 / 180)
  assert cascade.router_share == pytest.approx(4 / 180 / (315 / 90 + 90 / 80 + 4 / 180))
  assert cascade.waited_s == 1.0
  # Four answers of 160 tokens of LARGE decide; no router of its own.
  assert every["latency"].router_s["zero-shot"] == pytest.approx(4 * 160 / 80)
  assert math.isnan(every["latency"].waited_s["bopo"])  # it was not measured


def test_the_paper_stands_beside_the_same_environment_alone(every):
  rows = every["paper"].set_index("family")
  assert rows.loc["always-small"].tolist() == ["", "43.5", "30.0"]
  assert [*rows.index] == ["always-small", "always-large"]  # K = 1 and 2 here
  sandbox = every["run"] | {"environment": "sandbox"}
  assert texts.beside_paper(every | {"run": sandbox}).empty
  ours = {"first-large(K=5)": ("first-large", {}, 5, "LLSS", (1.0, 1.0, 1.0, 1.0))}
  paper = row(figures(FEW | ours)["paper"], family="first-large")
  assert paper[["K", "paper", "ours"]].tolist() == ["5", "44.7 (95 %)", "100.0 (40 %)"]


def test_the_figures_are_strict_json(every):
  assert json.loads(json.dumps(plain(every), allow_nan=False)) == plain(every)
  odd = {"a": [math.inf, np.float32("nan")], "c": pd.DataFrame({"x": [-math.inf, 1]})}
  assert plain(odd) == {"a": [None, None], "c": [{"x": None}, {"x": 1.0}]}


def test_an_episode_lost_to_an_error_is_left_out_for_all_and_a_policy_without_is_named():
  policies = {n: (*kind[:4], (1.0,) * 12) for n, kind in BOUNDARIES.items()}
  store = fill(policies)
  where = "policy = 'always-large' AND task_id = 'test-0' AND seed = 3001"
  store._db.execute(f"DELETE FROM episodes WHERE {where}")
  results = compute_results(store, entries(policies), config(), Path("none"))
  assert results["run"]["left_out_episodes"] == ["test-0 seed 3001"]
  assert results["run"]["test_tasks"] == 12
  assert results["policies"].episodes.tolist() == [23, 23]
  lines = [*entries(policies), Entry("sft", {}, "sft")]
  with pytest.raises(ValueError, match="^sft lacks episodes on dev: run --stage=evaluate first$"):
    choose(store, lines, config())
