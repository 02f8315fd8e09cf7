"""Check the figures of hand-made evaluations; comments have the arithmetic."""

import itertools
import math

import pandas as pd
import pytest
from report_store import (
  BOPO,
  BOUNDARIES,
  EVERY,
  FEW,
  Played,
  compute,
  config,
  figures,
  fill,
  specs,
)
from tiny import episode

from baar_jax.config import ABLATIONS
from baar_jax.report.table import Results, load_split
from baar_jax.report.texts import claim, main_budgets
from baar_jax.rollout.jobs import BOUNDARY_KEYS, COMPARED
from baar_jax.rollout.specs import FIRST_SEED, Cap, PolicySpec
from baar_jax.stages.evaluate import choose_on_dev

SOLVED = (1.0, 1.0, 1.0, 0.0)  # all tasks but the intractable one
THREE = [
  *BOUNDARIES,
  Played(PolicySpec("bopo", lam=1), "SSSL", (1.0, 0.0, 0.0, 0.0)),
  Played(PolicySpec("bopo", lam=2, cap=Cap(2)), "SSLL", SOLVED),
  Played(PolicySpec("bopo", lam=3), "LLLL", SOLVED),
]


@pytest.fixture(scope="module")
def every() -> Results:
  settings = config()
  settings.baselines.ablations = tuple(ABLATIONS)
  return figures(EVERY, settings)


def row(frame: pd.DataFrame, **where) -> pd.Series:
  for column, value in where.items():
    frame = frame[frame[column] == value]
  (fields,) = frame.to_dict("records")
  return pd.Series(fields)


def test_dev_chooses_the_points_on_the_hull():
  # Shares of the cost gap 1/4, 1/2 and 1 and of the success gap 0, 1 and 1. Only the
  # second is on the hull: the first lies below the line, the third on LARGE. A cap is no
  # bar.
  choice = choose_on_dev(fill(THREE), specs(THREE), config())
  assert choice.vertices["bopo", "success_percent"] == ["bopo(lam=2,K=2)"]
  assert choice.typical["bopo"] == "bopo(lam=2,K=2)"
  chosen = [spec.key for spec in choice.entries]
  assert chosen == [*BOUNDARY_KEYS, "bopo(lam=2,K=2)"]
  assert choice.dev.success_percent.tolist() == [25, 75, 25, 75, 75]


def test_a_family_has_one_row_under_each_budget():
  """The third one has the highest success, and the first one the highest score. The
  second one has the highest sum: 25 + 77.5, more than 0 + 90 and 50 + 50. A fourth one
  is its equal, for less.
  """
  first, second, third, fourth = (
    PolicySpec("bopo", lam=lam, cap=Cap(2)) for lam in (4, 5, 6, 7)
  )
  capped = [
    Played(first, "SSLL", (0.9,) * 4),
    Played(second, "SSLL", (1.0, 0.9, 0.9, 0.3)),
    Played(third, "SSLL", (1.0, 1.0, 0.0, 0.0)),
    Played(fourth, "SSSL", (1.0, 0.9, 0.9, 0.3)),
  ]
  results = figures([*BOUNDARIES, *capped, FEW[4]])
  keys = [*BOUNDARY_KEYS, fourth.key, "first-large(K=2)"]
  assert results.hard_budget.policy.tolist() == keys
  # 310 / 4, and 220 / 4 of First-Large.
  row = " ".join(main_budgets(results).iloc[0].astype(str))
  assert row.startswith("2 77.5 +22.5 [") and row.endswith("] 55.0")


def test_the_choice_does_not_depend_on_test():
  store = fill(THREE)
  # On test the chosen point is no better than SMALL, and another would be on the hull.
  where = "policy = 'bopo(lam=2,K=2)' AND seed >= 3000"
  store._db.execute(f"UPDATE episodes SET score = 0, success = 0 WHERE {where}")
  results = compute(store, specs(THREE), config())
  bopo = row(results.frontiers, metric="success_percent")
  # (1/2, -1/2), 25 being 0: -1/8 to the left, (-1/2 + 1) / 4 to the right
  assert bopo.policies == ["bopo(lam=2,K=2)"] and bopo.area == pytest.approx(
    -1 / 8 + 1 / 8
  )
  assert "is not shown to beat" in claim(results, "success_percent")
  assert [*results.policies.index] == [*BOUNDARY_KEYS, "bopo(lam=2,K=2)"]


CAPPED = BOPO.under(Cap(1)).key
FIGURES = {
  (BOPO.key, "episodes"): 8,
  (BOPO.key, "cost_usd"): 6.0,  # (4 + 8 + 8 + 4) / 4
  (BOPO.key, "deciding_usd"): 2.0,  # 4 decisions of 0.5, apart from the cost
  (BOPO.key, "success_percent"): 75.0,
  (BOPO.key, "use_share"): math.nan,
  (CAPPED, "use_share"): 2.0,  # two LARGE calls where one is allowed
  (CAPPED, "overspends"): 8,
  ("always-small", "score_percent"): 30.0,  # 1.2 / 4
  ("cascade(share=0.25)", "cost_usd"): 8.5,  # 1 + 1 + 1 + 5, and a proposal of 0.5
  ("zero-shot", "cost_usd"): 16.0,  # 1 + 3 * 5, and beside it four judgements of 0.125
  ("zero-shot", "deciding_usd"): 0.5,
  ("first-large(K=2)", "use_share"): 1.0,
  ("first-large(K=2)", "overspends"): 0,
}


def test_the_figures_of_policies_are_those_worked_out_by_hand(every):
  table, bopo = every.policies, every.policies.loc[BOPO.key]
  figures = {key: float(table.loc[key]) for key in FIGURES}
  assert figures == pytest.approx(FIGURES, nan_ok=True)
  assert 0.0 <= bopo.success_percent_low < 75.0 < bopo.success_percent_high <= 100.0


def test_caps_in_dollars_are_not_on_the_frontier():
  store = fill(FEW)
  spec = BOPO.under(Cap(usd=7.0))
  for split, i, trial in itertools.product(("dev", "test"), range(4), range(2)):
    seed = FIRST_SEED[split] + trial
    e = episode(f"{split}-{i}", spec.key, seed, "SL" if i else "LL", 1.0)
    e.usd_budget = 7.0
    store.add(e)
  results = compute(store, [*specs(FEW), spec], config())
  # $10 on one task of four; (10 + 6 + 6 + 6) / 4 / 7 of the cap
  assert tuple(results.policies.loc[spec.key, ["overspends", "use_share"]]) == (
    2,
    1.0,
  )
  assert all(spec.key not in names for names in results.frontiers.policies)


def test_areas_and_gains_are_those_worked_out_by_hand(every):
  rows = every.frontiers
  assert row(rows, family="first-large", metric="score_percent").policies == [
    "first-large(K=2)"
  ]
  success = rows[rows.metric == "success_percent"].set_index("family")
  assert success.index[0] == "bopo"
  assert {*success.index[1:]} == {
    "random",
    "first-large",
    "sft",
    "vanilla",
    "cascade",
    "single-turn",
    "zero-shot",
  }
  assert success.policies[["bopo", "random"]].tolist() == [[BOPO.key], []]
  # BoPO's line (0, 0), (1/8, 1), (1, 1): a triangle of 1/16 and a rectangle of 7/8.
  # Vanilla RL solves all three for always-SMALL's $4: an area of 1.
  assert success.area[["bopo", "random", "vanilla"]].tolist() == pytest.approx(
    [15 / 16, 0.5, 1]
  )
  gains = success.area_gain[["bopo", "random", "vanilla"]].tolist()
  assert gains == pytest.approx([math.nan, 7 / 16, -1 / 16], nan_ok=True)
  assert (
    0.0 < success.area_gain_low["random"] <= 7 / 16 <= success.area_gain_high["random"]
  )
  # BoPO pays for LARGE on every hard task, so in every resample that holds one it is
  # behind.
  assert success.area_gain_high["vanilla"] < 0


def test_ablations_are_compared_with_bopo_at_the_same_lam(every):
  rows = every.ablations
  areas = rows[rows.metric == "success_percent"].set_index("family")[
    ["area", "area_gain"]
  ]
  assert {*areas.index} == {COMPARED, "sft", *ABLATIONS}
  # BoPO has 15/16; the ablation lies on always-SMALL: 1/2. SFT is at (1/4, 1/2).
  assert tuple(areas.loc["no-reference"]) == pytest.approx((0.5, 7 / 16))
  assert areas.area["sft"] == pytest.approx(1 / 16 + 3 / 4 * 3 / 4)


def test_rows_of_a_hard_budget_have_gains_over_each_family(every):
  rows = every.hard_budget
  families = ["always-small", "always-large", "bopo", "single-turn"]
  assert rows.family[rows.K == 1].tolist() == families
  best = row(rows, K=1, family="bopo")
  assert best.policy == CAPPED and math.isnan(best.gain)
  # Scores by task: BoPO 1, 1, 0, 0; single-turn 1, 0, 0, 0; always-SMALL 1, .2, 0, 0.
  other = row(rows, K=1, family="single-turn")
  assert other.gain == pytest.approx(50 - 25) and other.gain_low == 0 < other.gain_high
  small = row(rows, K=1, family="always-small")
  assert small.gain == pytest.approx(50 - 30) and math.isnan(small.use_share)


def test_seconds_follow_from_rates_and_measured_waits(every):
  # Three replies of SMALL with 90 tokens and a proposal of 45; one of LARGE with 90; 4
  # decisions.
  expected = [315 / 90, 90 / 80, 4 / 180, 4 / 180 / (315 / 90 + 90 / 80 + 4 / 180), 1.0]
  assert every.latency.loc["cascade"].tolist() == pytest.approx(expected)
  # Four answers of 160 tokens of LARGE decide; no router of its own.
  assert every.latency.router_s["zero-shot"] == pytest.approx(4 * 160 / 80)


def test_an_episode_lost_to_an_error_is_left_out_for_all():
  policies = [played._replace(scores=(1.0,) * 12) for played in BOUNDARIES]
  store = fill(policies)
  where = "policy = 'always-large' AND task_id = 'test-0' AND seed = 3001"
  store._db.execute(f"DELETE FROM episodes WHERE {where}")
  data = load_split(store, specs(policies), config(), "test")
  assert data.left_out == ["test-0 seed 3001"] and len(data.tasks) == 12
  assert data.episodes.policy.value_counts().tolist() == [23, 23]
