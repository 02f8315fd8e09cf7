"""Check the figures of hand-made evaluations; comments have the arithmetic."""

import dataclasses
import math

import pytest
from report_store import (
  ALL,
  BOPO,
  BOUNDARIES,
  EVERY,
  FEW,
  ONE,
  TWO,
  Played,
  config,
  figures,
  fill,
  read,
  specs,
)

from baar_jax.conditioned.policy import ConditionedSpec
from baar_jax.families.family import RouterSpec
from baar_jax.families.table import list_specs
from baar_jax.report.compare import Results, label_policy
from baar_jax.report.page import claim, main_budgets, terminal_table
from baar_jax.report.table import COMPARED, load_split
from baar_jax.rollout.jobs import BOUNDARY_KEYS
from baar_jax.rollout.specs import Cap
from baar_jax.stages.evaluate import LABELS, choose_on_dev
from configs import reproduce
from configs.sciworld import ABLATIONS

CAPPED = BOPO.under(Cap(1)).key
THREE = [
  *BOUNDARIES,
  Played(RouterSpec("bopo", lam=1), "SSSL", (1.0, 0.0, 0.0, 0.0)),
  Played(RouterSpec("bopo", lam=2, cap=Cap(2)), "SSLL", ALL),
  Played(RouterSpec("bopo", lam=3), "LLLL", ALL),
]
CHOSEN = "bopo(lam=2,K=2)"


@pytest.fixture(scope="module")
def every() -> Results:
  return figures(EVERY)


def test_dev_chooses_the_points_on_the_hull():
  # Shares of the cost gap 1/4, 1/2 and 1 and of the success gap 0, 1 and 1. Only the
  # second is on the hull: the first lies below the line, the third on LARGE. A cap is no
  # bar.
  choice = choose_on_dev(fill(THREE), specs(THREE), config())
  assert choice.vertices["bopo", "success_percent"] == [CHOSEN]
  # Of the policies without a cap, the first is nearer to half of the cost gap.
  assert choice.typical["bopo"] == "bopo(lam=1)"
  assert [spec.key for spec in choice.entries] == [
    *BOUNDARY_KEYS,
    "bopo(lam=1)",
    CHOSEN,
  ]
  assert choice.dev.success_percent.tolist() == [25, 75, 25, 75, 75]


def test_a_family_has_one_row_under_each_budget():
  """The third one has the highest success, and the first one the highest score. The
  second one has the highest sum: 25 + 77.5, more than 0 + 90 and 50 + 50. A fourth one
  is its equal, for less.
  """
  capped = []
  for lam, models, scores in (
    (4, "SSLL", (0.9,) * 4),
    (5, "SSLL", (1.0, 0.9, 0.9, 0.3)),
    (6, "SSLL", (1.0, 1.0, 0.0, 0.0)),
    (7, "SSSL", (1.0, 0.9, 0.9, 0.3)),
  ):
    capped.append(Played(RouterSpec("bopo", lam=lam, cap=Cap(2)), models, scores))
  results = figures([*BOUNDARIES, *capped, FEW[4]])
  keys = [*BOUNDARY_KEYS, "bopo(lam=7,K=2)", "first-large(K=2)"]
  assert results.hard_budget.policy.tolist() == keys
  # 310 / 4, and 220 / 4 of First-Large.
  row = " ".join(main_budgets(results).iloc[0].astype(str))
  assert row.startswith("2 77.5 +22.5 [") and row.endswith("] 55.0")


@pytest.mark.parametrize(
  "scores, weight",
  [
    # Of four tasks each lost one is exactly one standard error: 1/4.
    ({0.0: ALL, 0.5: TWO, 1.0: ONE}, 0.5),
    # Two lost are 2/4, and their standard error is 0.29.
    ({0.0: ALL, 1.0: ONE}, 0.0),
    # The gaps 0.1, 0.1, 0.1 and 0 have the mean 0.075, and the standard error 0.025.
    ({0.0: ALL, 1.0: (0.9, 0.9, 0.9, 0.0)}, 0.0),
    ({0.0: ALL, 0.5: ALL, 1.0: ALL}, 1.0),
    ({0.0: ONE, 0.5: TWO, 1.0: ALL}, 1.0),
    ({}, None),
  ],
)
def test_dev_chooses_the_cheapest_weight_near_the_best_score(scores, weight):
  """A weight of 0 plays LLLL, of 0.5 SLLL and of 1 SSLL. A capped policy is left out."""
  models = {0.0: "LLLL", 0.5: "SLLL", 1.0: "SSLL"}
  listed = [*BOUNDARIES, FEW[3]]
  for cost_weight, each in scores.items():
    spec = ConditionedSpec("conditioned", 2, None, cost_weight, cap_conditioned=True)
    listed.append(Played(spec, models[cost_weight], each))
    listed.append(Played(spec.under(Cap(0)), "SSSS", ALL))
  choice = choose_on_dev(fill(listed), specs(listed), config())
  assert getattr(choice.default, "cost_weight", None) == weight
  assert weight is None or choice.default in choice.entries


@pytest.mark.parametrize(
  "times, end", [(1, "4 test tasks: too few to tell."), (3, "12 test tasks.")]
)
def test_the_report_says_what_the_default_policy_saves(times, end):
  """SSLL costs 2 + 10 dollars and always-LARGE 20; 0.8 of one task in four is lost."""
  spec = ConditionedSpec("conditioned", 2, None, 0.5, cap_conditioned=True)
  listed = [*BOUNDARIES, Played(spec, "SSLL", (1.0, 1.0, 0.2, 0.0))]
  results = figures(
    [played._replace(scores=played.scores * times) for played in listed]
  )
  *_, text = terminal_table(results).splitlines()
  assert text.startswith(
    "Use the model name baar:cost_weight=0.5: it costs $12.000000 [12.000000, 12.000000]"
    " per task, which saves 40% [40%, 40%] of always-LARGE's dollars, at -20.0 ["
  )
  assert text.endswith(f"] points of mean score, on {end}")


def test_the_choice_does_not_depend_on_test():
  store = fill(THREE)
  # On test the chosen point is no better than SMALL, and another would be on the hull.
  where = f"policy = '{CHOSEN}' AND purpose = 'test'"
  store._db.execute(f"UPDATE episodes SET score = 0, success = 0 WHERE {where}")
  results = read(store, THREE, config())
  bopo = results.frontiers.set_index("metric").loc["success_percent"]
  # At (1/2, -1/2), for 25 is 0: -1/8 to the left, and (-1/2 + 1) / 4 to the right.
  assert bopo.policies == [CHOSEN] and bopo.area == pytest.approx(0)
  assert "is not shown to beat" in claim(results, "success_percent")
  assert [*results.policies.index] == [*BOUNDARY_KEYS, "bopo(lam=1)", CHOSEN]


FIGURES = {
  (BOPO.key, "cost_usd"): 6.0,  # (4 + 8 + 8 + 4) / 4
  (BOPO.key, "deciding_usd"): 2.0,  # 4 decisions of 0.5, apart from the cost
  (BOPO.key, "use_share"): math.nan,
  (CAPPED, "use_share"): 2.0,  # two LARGE calls where one is allowed
  (CAPPED, "overspends"): 8,
  ("always-small", "score_percent"): 30.0,  # 1.2 / 4
  ("cascade(share=0.25)", "cost_usd"): 8.5,  # 1 + 1 + 1 + 5, and a proposal of 0.5
  ("zero-shot", "cost_usd"): 16.0,  # 1 + 3 * 5, and beside it four judgements of 0.125
  ("zero-shot", "deciding_usd"): 0.5,
  ("first-large(K=2)", "use_share"): 1.0,
}


def test_the_figures_of_policies_are_those_worked_out_by_hand(every):
  table = every.policies
  shown = {key: float(table.loc[key]) for key in FIGURES}
  assert shown == pytest.approx(FIGURES, nan_ok=True)


def test_caps_in_dollars_are_not_on_the_frontier():
  spec = BOPO.under(Cap(usd=7.0))
  listed = [*FEW, Played(spec, "SL", (1.0,) * 4)]
  store = fill(listed)
  key = f"policy = '{spec.key}'"
  store._db.execute(f"UPDATE episodes SET usd_budget = 7 WHERE {key}")
  costly = f"{key} AND task_id = 'test-2'"
  store._db.execute(
    f"UPDATE episodes SET counted_usd = 10 WHERE {costly}"
  )  # not as billed
  results = read(store, listed, config())
  # $10 on one task of four; (10 + 6 + 6 + 6) / 4 / 7 of the cap.
  row = results.policies.loc[spec.key]
  assert (row.overspends, row.use_share) == (2, 1.0)
  assert all(spec.key not in names for names in results.frontiers.policies)


def test_areas_and_gains_are_those_worked_out_by_hand(every):
  rows = every.frontiers.set_index(["metric", "family"])
  assert rows.policies["score_percent", "first-large"] == ["first-large(K=2)"]
  success = rows.loc["success_percent"]
  # The main family comes first; ablations and boundaries are no rivals.
  assert (len(success), success.index[0]) == (8, "bopo")
  names = ["bopo", "random", "vanilla"]
  # BoPO's line (0, 0), (1/8, 1), (1, 1): a triangle of 1/16 and a rectangle of 7/8.
  # Vanilla RL solves all three for always-SMALL's $4: an area of 1.
  assert success.area[names].tolist() == pytest.approx([15 / 16, 0.5, 1])
  gains = success.area_gain[names].tolist()
  assert gains == pytest.approx([math.nan, 7 / 16, -1 / 16], nan_ok=True)
  random = success.loc["random"]
  assert 0.0 < random.area_gain_low <= 7 / 16 <= random.area_gain_high
  # BoPO pays for LARGE on every hard task, so in every resample that holds one it is
  # behind.
  assert success.area_gain_high["vanilla"] < 0


def test_a_claim_needs_the_whole_interval(every):
  choice = every.choice._replace(main="random")
  other = dataclasses.replace(every, choice=choice)
  assert "random is not shown to beat" in claim(other, "score_percent")  # 0.53


def test_ablations_are_compared_with_bopo_at_the_same_lam(every):
  rows = every.ablations.set_index(["metric", "family"]).loc["success_percent"]
  assert {*rows.index} == {COMPARED, "sft", *ABLATIONS}
  # BoPO has 15/16; the ablation lies on always-SMALL: 1/2. SFT is at (1/4, 1/2).
  ablation = rows.loc["no-reference"]
  assert (ablation.area, ablation.area_gain) == (0.5, pytest.approx(7 / 16))
  assert rows.area["sft"] == pytest.approx(1 / 16 + 3 / 4 * 3 / 4)


def test_claims_are_judged_by_the_interval_of_the_difference(every):
  rows = every.claims.set_index("claim")
  # In mean score BoPO has 15/16, vanilla RL 1, a random mix and no reference 1/2. BoSFT is
  # at (1/4, 4/9): 1/18 + 13/24. First-Large is at (1/2, 5/9): 1/36 above the mix.
  gains = rows.gain.round(4)
  assert gains["BoPO's frontier is above BoSFT's"] == 0.3403
  assert gains["First-Large is strong: above random mixes"] == 0.0278
  assert gains["BoPO's frontier is above vanilla RL's"] == -0.0625
  assert gains["vanilla RL is no better than random mixes"] == -0.5
  assert gains["the reference raises the frontier"] == 0.4375
  verdicts = rows.verdict
  assert verdicts["vanilla RL is no better than random mixes"] == "does not hold"
  assert verdicts["the reference raises the frontier"] == "holds"
  assert verdicts["First-Large is strong: above random mixes"] == "not shown"
  # BoPO spends $4 on the easy and the intractable task, and $8 on each of two hard ones.
  assert gains["BoPO moves dollars to hard tasks"] == pytest.approx(
    16 / 24 - 2 / 4, 1e-3
  )


def test_rows_of_a_hard_budget_have_gains_over_each_family(every):
  rows = every.hard_budget
  rows = rows[rows.K == 1].set_index("family")
  assert [*rows.index] == ["always-small", "always-large", "bopo", "single-turn"]
  # Scores by task: BoPO 1, 1, 0, 0; single-turn 1, 0, 0, 0; always-SMALL 1, .2, 0, 0.
  gains = [50 - 30, 50 - 75, math.nan, 50 - 25]
  assert rows.gain_points.tolist() == pytest.approx(gains, nan_ok=True)
  other = rows.loc["single-turn"]
  assert other.gain_points_low == 0 < other.gain_points_high
  assert rows.policy["bopo"] == CAPPED
  # Always-LARGE makes 4 LARGE calls, and K allows 1.
  assert rows.use_share[["always-small", "always-large"]].tolist() == [0.0, 4.0]


def test_an_episode_lost_to_an_error_is_left_out_for_all():
  policies = [played._replace(scores=(1.0,) * 12) for played in BOUNDARIES]
  store = fill(policies)
  where = "policy = 'always-large' AND task_id = 'test-0' AND trial = 1"
  store._db.execute(f"DELETE FROM episodes WHERE {where}")
  settings = config()
  settings.train_seeds = 2
  data = load_split(store, specs(policies), settings, "test")
  assert (data.left_out, len(data.tasks)) == (1, 12)
  episodes = data.episodes
  assert {*zip(episodes.trial, episodes.training_seed)} == {(0, 0), (1, 1)}
  assert episodes.policy.value_counts().tolist() == [23, 23]


def test_two_policies_of_a_run_never_share_a_label():
  config = reproduce.get_config()
  config.models.names = ("gpt-4.1-nano", "gpt-4.1-mini", "gpt-4.1")
  config.evaluate.usd_budgets = (0.02, 0.05)
  config.evaluate.thresholds = (0.3,)
  listed = list_specs(config)
  assert len({label_policy(spec, LABELS) for spec in listed}) == len(listed)
