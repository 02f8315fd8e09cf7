"""Figures of a hand-made store, with the arithmetic in the comments."""

import json
import math

import pytest
from tiny import call

from baar_jax.config import Config
from baar_jax.episode import Episode, Step, Task
from baar_jax.report import rows
from baar_jax.report.learning import training
from baar_jax.report.results import summarize
from baar_jax.rollout.entries import Entry
from baar_jax.store import Store
from baar_jax.train.dataset import Profile

BOPO = {"lam": 0.3, "threshold": 0.5}
ENTRIES = [
  Entry("always-small", {}, "always-small"),
  Entry("always-large", {}, "always-large"),
  Entry("random", {"p": 0.5}, "random(p=0.5)"),
  Entry("bopo", BOPO, "bopo(lam=0.3)"),
  Entry("first-large", {}, "first-large(K=2)", 2),
  Entry("bopo", BOPO, "bopo(lam=0.3,K=1)", 1),
]
# Models of each step, and scores of the four tasks: easy, hard, hard, intractable.
EPISODES = {
  "always-small": ("SSSS", (1.0, 0.2, 0.0, 0.0)),
  "always-large": ("LLLL", (1.0, 1.0, 1.0, 0.0)),
  "random(p=0.5)": ("SLSL", (1.0, 0.2, 1.0, 0.0)),
  "bopo(lam=0.3)": ("SSSL", (1.0, 1.0, 1.0, 0.0)),
  "first-large(K=2)": ("LLSS", (1.0, 0.2, 1.0, 0.0)),
  "bopo(lam=0.3,K=1)": ("SSLL", (1.0, 1.0, 0.0, 0.0)),
}


def episode(policy: str, task_id: str, seed: int, models: str, score: float) -> Episode:
  steps = [
    Step("seen", i, "act", [call(i, (1.0, 5.0)[i])], router_cost_usd=0.5)
    for i in map("SL".index, models)
  ]
  return Episode(task_id, policy, seed, steps, score, "done")


def fill(store: Store) -> None:
  store.put_tasks("test", [Task(f"test-{i}", "test", "do it", 40) for i in range(4)])
  for policy, (models, scores) in EPISODES.items():
    for i, score in enumerate(scores):
      # BoPO calls LARGE on the hard tasks alone.
      used = "SSSS" if policy == "bopo(lam=0.3)" and i in (0, 3) else models
      for seed in range(2):
        store.add(episode(policy, f"test-{i}", seed, used, score))
  # Neither another split nor another seed may count.
  store.add(episode("always-small", "train-0", 0, "SSSSSSSS", 1.0))
  store.add(episode("always-small", "test-0", 7, "SSSSSSSS", 0.0))


def config() -> Config:
  result = Config()
  result.bopo.lam = (0.3,)
  result.evaluate.seeds = 2
  result.evaluate.bootstrap = 200
  return result


def profiles() -> dict[str, Profile]:
  return {
    "train-0": Profile("easy", 4.0, 20.0, [], []),
    "train-1": Profile("hard", 9.0, 6.0, [], []),
  }


@pytest.fixture(scope="module")
def summary(tmp_path_factory) -> dict:
  store = Store(tmp_path_factory.mktemp("run") / "episodes.sqlite")
  fill(store)
  return summarize(store, ENTRIES, config(), profiles(), [])


def row(summary: dict, policy: str) -> dict:
  return next(p for p in summary["policies"] if p["policy"] == policy)


def test_policy_figures(summary):
  bopo = row(summary, "bopo(lam=0.3)")
  assert bopo["episodes"] == 8
  assert bopo["cost_usd"] == 6.0  # (4 + 8 + 8 + 4) / 4
  assert bopo["router_cost_usd"] == 2.0  # 4 decisions of 0.5, apart from the cost
  assert bopo["steps"] == 4.0
  assert bopo["success_percent"] == 75.0
  assert bopo["score_percent"] == 75.0
  assert row(summary, "always-small")["score_percent"] == pytest.approx(30.0)  # 1.2 / 4
  assert row(summary, "always-small")["success_percent"] == 25.0
  low, high = bopo["success_interval"]
  assert 0.0 <= low < 75.0 < high <= 100.0


def test_gap_shares(summary):
  bopo = row(summary, "bopo(lam=0.3)")
  assert bopo["cost_gap_share"] == 0.125  # (6 - 4) / (20 - 4)
  assert bopo["success_gap_share"] == 1.0  # (75 - 25) / (75 - 25)
  half = row(summary, "random(p=0.5)")
  assert half["cost_gap_share"] == 0.5  # (12 - 4) / 16
  assert half["success_gap_share"] == 0.5  # (50 - 25) / 50
  assert half["score_gap_share"] == pytest.approx(25 / 45)  # (55 - 30) / (75 - 30)


def test_use_share_and_overruns(summary):
  assert row(summary, "first-large(K=2)")["use_share"] == 1.0
  assert row(summary, "first-large(K=2)")["overruns"] == 0
  # Two LARGE calls where one is allowed, in every one of 4 x 2 episodes.
  assert row(summary, "bopo(lam=0.3,K=1)")["use_share"] == 2.0
  assert row(summary, "bopo(lam=0.3,K=1)")["overruns"] == 8
  assert row(summary, "bopo(lam=0.3)")["use_share"] is None
  tables = {(r["family"], *r["budgets"]): r for r in summary["hard_budget"]}
  assert set(tables) == {("first-large", "2"), ("bopo", "1")}
  assert tables["first-large", "2"]["budgets"]["2"]["success_percent"] == 50.0


def test_frontiers_take_soft_points_and_first_large_its_budgets(summary):
  fronts = summary["frontiers"]
  assert fronts["bopo"]["policies"] == [3]
  assert fronts["first-large"]["policies"] == [4]
  assert set(fronts) == {"random", "bopo", "first-large"}
  # The hull (0, 0), (1/8, 1), (1, 1): a triangle of 1/16 and a rectangle of 7/8.
  assert fronts["bopo"]["area"]["success"]["value"] == pytest.approx(1 / 16 + 7 / 8)
  assert fronts["random"]["area"]["success"]["value"] == pytest.approx(0.5)
  assert fronts["random"]["bopo_gain"]["success"]["value"] == pytest.approx(7 / 16)
  assert fronts["bopo"]["bopo_gain"] == {}
  low, high = fronts["random"]["bopo_gain"]["success"]["interval"]
  assert 0.0 < low <= 7 / 16 <= high


def test_headline(summary):
  best = summary["headline"]
  assert best["parameters"] == BOPO
  assert (best["cost_gap_share"], best["success_gap_share"]) == (0.125, 1.0)


@pytest.mark.parametrize(
  "shares, index",
  [
    ([(0.9, 0.6), (0.5, 0.1), (1.0, 1.0)], 1),  # .3, .4 and 0 above the line
    ([(0.1, 0.5), (0.0, 0.0)], 1),
    ([(None, 0.5), (0.2, None)], None),
  ],
)
def test_headline_is_the_highest_above_the_line(summary, monkeypatch, shares, index):
  policies = [
    {
      "family": "bopo",
      "call_budget": None,
      "policy": str(i),
      "parameters": {},
      "score_gap_share": 0,
    }
    | {"success_gap_share": success, "cost_gap_share": cost}
    for i, (success, cost) in enumerate(shares)
  ]
  monkeypatch.setattr(rows, "gap_share_interval", lambda *args: None)
  best = rows.headline(policies, [None] * len(policies), 10)
  assert best is None if index is None else best["index"] == index


def test_spend_by_difficulty(summary):
  spend = summary["spend"]
  assert spend["difficulty"] == {
    "test-0": "easy",
    "test-1": "hard",
    "test-2": "hard",
    "test-3": "intractable",
  }
  assert spend["task_mix"] == {"easy": 0.25, "hard": 0.5, "intractable": 0.25}
  rows = {r["family"]: r for r in spend["policies"]}
  assert "first-large" not in rows  # it has no point without a budget
  assert rows["always-small"]["large_share"] is None
  # Dollars 4, 8, 8, 4; LARGE calls 0, 1, 1, 0.
  assert rows["bopo"]["cost_share"] == pytest.approx(
    {"easy": 4 / 24, "hard": 16 / 24, "intractable": 4 / 24}
  )
  assert rows["bopo"]["large_share"] == {"easy": 0.0, "hard": 1.0, "intractable": 0.0}
  # Four steps begin at 0, 25, 50 and 75 % of the episode; the other tenths hold no decision.
  x = None
  assert rows["random"]["large_share_by_progress"] == [0.0, x, 1.0, x, x, 0.0, x, 1.0, x, x]


def test_costs_mark_inversions(summary):
  assert [(c["task_id"], c["inverted"]) for c in summary["costs"]] == [
    ("train-0", False),
    ("train-1", True),
  ]


def test_strict_json(summary):
  assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_later_metrics_win():
  lines = [
    {"stage": "sft", "update": 1, "loss": 0.7},
    {"stage": "sft", "update": 2, "loss": 0.6},
    {"stage": "bopo", "lam": 0.1, "update": 1, "reward": 0.1},
    {"stage": "bopo", "lam": 0.9, "update": 1, "reward": 0.9},
    {"stage": "sft", "update": 2, "loss": 0.5},
    {"stage": "sft", "update": 3, "loss": math.nan},
    {"stage": "other", "update": 1, "loss": 9.0},
  ]
  none = {"ablation": None, "lam": None}
  assert training(lines, ()) == [
    {"stage": "sft", **none, "update": [1, 2, 3], "values": {"loss": [0.7, 0.5, None]}},
    {"stage": "bopo", **none, "lam": 0.1, "update": [1], "values": {"reward": [0.1]}},
    {"stage": "bopo", **none, "lam": 0.9, "update": [1], "values": {"reward": [0.9]}},
  ]


def test_a_training_of_another_length_is_another_curve():
  """Lines of old records do not say of how many updates they are."""
  lines = [
    {"stage": "cascade", "update": update, "loss": loss, **updates}
    for updates, losses in (({}, (9, 8, 7)), ({"updates": 2}, (6, 5)), ({"updates": 1}, (4,)))
    for update, loss in enumerate(losses, 1)
  ]
  curve = {"stage": "cascade", "ablation": None, "lam": None}
  known = [training(lines[:end], {"cascade"}) for end in (3, 4, 5, 6)]
  assert known == [
    [curve | {"update": list(range(1, 1 + len(losses))), "values": {"loss": losses}}]
    for losses in ([9.0, 8.0, 7.0], [6.0], [6.0, 5.0], [4.0])
  ]


def test_an_episode_lost_to_an_error_is_left_out_for_all(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  tasks = [Task(f"test-{i}", "test", "do it", 40) for i in range(12)]
  store.put_tasks("test", tasks)
  for entry in ENTRIES[:2]:
    for task in tasks:
      for seed in range(2):
        if (entry.family, task.id, seed) != ("always-large", "test-0", 1):
          store.add(episode(entry.policy, task.id, seed, "S", float(seed)))
  summary = summarize(store, ENTRIES[:2], config(), profiles(), [])
  assert summary["run"]["left_out_episodes"] == ["test-0 seed 1"]
  assert summary["run"]["test_tasks"] == 12
  assert [p["episodes"] for p in summary["policies"]] == [23, 23]
  assert summary["policies"][0]["success_percent"] == pytest.approx(100 * 5.5 / 12)


def test_boundaries_without_a_gap_have_no_shares(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  store.put_tasks("test", [Task("test-0", "test", "do it", 40)])
  for entry in ENTRIES[:3]:
    for seed in range(2):
      store.add(episode(entry.policy, "test-0", seed, "S", 1.0))
  summary = summarize(store, ENTRIES[:3], config(), profiles(), [])
  assert summary["policies"][2]["success_gap_share"] is None
  assert summary["frontiers"]["random"]["area"] == {"score": None, "success": None}
  assert summary["headline"] is None


def test_exact_frontier_gets_its_area(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  exact = {"optimum": [[4.0, 0.2], [8.0, 0.8]], "small": [4.0, 0.2], "large": [20.0, 0.8]}
  summary = summarize(store, ENTRIES, config(), profiles(), [], exact)
  assert summary["exact"]["area"] == pytest.approx(0.875)  # 1/2 * 1/4 + 3/4


def test_what_is_not_evaluated_yet_is_named(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  with pytest.raises(ValueError, match="no test tasks: run --stage=evaluate first"):
    summarize(store, ENTRIES, config(), profiles(), [])
  fill(store)
  sft = Entry("sft", {}, "sft")
  with pytest.raises(ValueError, match="^sft has 0 of 8 episodes: run --stage=evaluate first$"):
    summarize(store, [*ENTRIES, sft], config(), profiles(), [])
  with pytest.raises(ValueError, match="no entry for always-large: run --stage=evaluate first"):
    summarize(store, ENTRIES[:1], config(), profiles(), [])
