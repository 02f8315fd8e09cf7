"""The report of a store with every baseline and ablation: figures by hand, and their words."""

import json

import pytest
from test_report import read
from test_results import BOPO, ENTRIES, config, episode, fill, profiles, row
from tiny import call

from baar_jax.config import ABLATIONS
from baar_jax.episode import Step, Task
from baar_jax.report import budget_tables, cells, contests, results, sections, study_tables, tables
from baar_jax.report.samples import METRICS, Sample, Trial, halves, picked_elsewhere
from baar_jax.report.theme import parameter_text
from baar_jax.rollout.entries import Entry
from baar_jax.stages import report
from baar_jax.store import Store

SHARE = {"lam": 0.3, "update": 12, "share": 0.25}
# Family -> parameters, the models of its steps, scores of the four tasks (easy, hard, hard,
# intractable). SMALL costs $1, LARGE $5.
FAMILIES = {
  "sft": ({"update": 6, "threshold": 0.5}, "SSSL", (1.0, 1.0, 0.0, 0.0)),
  "vanilla": ({"lam": 0.3, "update": 12, "threshold": 0.5}, "SSSS", (1.0, 1.0, 1.0, 0.0)),
  "cascade": ({"share": 0.25}, "SSSL", (1.0, 1.0, 0.0, 0.0)),
  "single-turn": (SHARE, "SSLL", (1.0, 0.0, 1.0, 0.0)),
  "zero-shot": ({}, "SLLL", (1.0, 1.0, 0.0, 0.0)),
  "no-stratified": (BOPO, "LLLL", (1.0, 1.0, 0.0, 0.0)),
  "no-reference": (BOPO, "SSSS", (1.0, 0.0, 0.0, 0.0)),
  "no-hard-bonus": ({"lam": 0.9, "threshold": 0.5}, "SSSS", (1.0, 0.0, 0.0, 0.0)),
}
BUDGETED = {
  "bopo": ({"lam": 0.3, "update": 12, "share": 0.4}, "LSSS", (1.0, 1.0, 1.0, 0.0)),
  "single-turn": (SHARE, "SSLS", (1.0, 0.0, 0.0, 0.0)),
}
METRICS_LINES = [
  {"stage": "vanilla", "lam": 0.3, "update": 1, "loss": 1.0},
  {"stage": "bopo", "lam": 0.3, "ablation": "no-reference", "update": 1, "loss": 2.0},
  {"stage": "bopo", "lam": 0.3, "update": 1, "loss": 3.0},
  {"stage": "cascade", "update": 1, "loss": 0.5},
  {"stage": "cascade-calibration", "brier": 0.9, "base_rate": 0.9, "bins": []},
  {
    "stage": "cascade-calibration",
    "brier": 0.1,
    "base_rate": 0.4,
    "bins": [
      {"predicted": 0.1, "observed": 0.2, "count": 30},
      {"predicted": 0.8, "observed": 0.7, "count": 20},
    ],
  },
]
METHODS = [
  {
    "family": "cascade",
    "training_episodes": 1200,
    "settings": {"epochs": 4, "learning_rate": 1e-3},
    "chosen": "by <held-out> loss",
  },
]


def entries() -> list[Entry]:
  found = list(ENTRIES[:5])
  found += [Entry(family, parameters, family) for family, (parameters, *_) in FAMILIES.items()]
  found += [
    Entry(family, parameters, f"{family}(K=1)", 1) for family, (parameters, *_) in BUDGETED.items()
  ]
  return found


def fill_families(store: Store) -> None:
  fill(store)
  added = {family: made[1:] for family, made in FAMILIES.items()}
  added |= {f"{family}(K=1)": made[1:] for family, made in BUDGETED.items()}
  for policy, (models, scores) in added.items():
    for i, score in enumerate(scores):
      for seed in range(2):
        e = episode(policy, f"test-{i}", seed, models, score)
        for step in e.steps:
          step.calls, step.router_latency_s = [call(step.model, step.cost_usd, 90)], 0.25
          if policy == "cascade" and step.model:
            step.proposal = "no"
            step.calls.append(call(0, 0.5, kind="proposal"))
          if policy == "zero-shot":
            step.router_cost_usd = 0.0
            step.calls.append(call(2, 0.125, kind="judge"))
        store.add(e)


def everything(directory, **changed) -> dict:
  """The figures of a store in which every family has episodes, as of ScienceWorld."""
  store = Store(directory / "episodes.sqlite")
  fill_families(store)
  c = config()
  for name, value in changed.items():
    setattr(c.profile, name, value)
  return results.summarize(store, entries(), c, profiles(), METRICS_LINES, methods=METHODS)


@pytest.fixture(scope="module")
def summary(tmp_path_factory) -> dict:
  return everything(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def index(summary, tmp_path_factory):
  return report.write_report(summary, tmp_path_factory.mktemp("report") / "report")


def named(rows: list[dict], family: str) -> dict:
  return next(r for r in rows if r["family"] == family)


def test_costs_hold_what_a_baseline_asked(summary):
  # 1 + 1 + 1 + 5, and a proposal of 0.5; 1 + 3 * 5, and beside it four judgements of 0.125
  assert row(summary, "cascade")["cost_usd"] == 8.5
  zero_shot = row(summary, "zero-shot")
  assert (zero_shot["cost_usd"], zero_shot["router_cost_usd"]) == (16.0, 0.5)


def test_ablations_are_not_on_the_frontier(summary):
  assert set(summary["frontiers"]) == {
    *("random", "bopo", "first-large", "sft", "vanilla", "cascade", "single-turn", "zero-shot"),
  }
  assert not {r["family"] for r in summary["spend"]["policies"]} & {"no-stratified", "no-reference"}


def test_ablations_against_bopo_at_the_same_settings(summary):
  rows = summary["ablations"]["rows"]
  assert [r["family"] for r in rows] == ["sft", "no-stratified", "no-reference", "no-hard-bonus"]
  bopo = next(i for i, p in enumerate(summary["policies"]) if p["policy"] == "bopo(lam=0.3)")
  without = named(rows, "no-reference")
  assert (without["lam"], without["bopo_policies"]) == (0.3, [bopo])
  # BoPO's hull (0, 0), (1/8, 1), (1, 1) has 1/16 + 7/8; the ablation lies on always-SMALL: 1/2.
  assert without["area"]["success"]["value"] == pytest.approx(0.5)
  assert without["bopo_area"]["success"]["value"] == pytest.approx(15 / 16)
  assert without["bopo_gain"]["success"]["value"] == pytest.approx(7 / 16)
  low, high = without["bopo_gain"]["success"]["interval"]
  assert 0 < low <= 7 / 16 <= high
  # SFT, at (1/4, 1/2): the hull through it has 1/16 + 3/4 * 3/4.
  assert named(rows, "sft")["lam"] == 0.3
  assert named(rows, "sft")["area"]["success"]["value"] == pytest.approx(1 / 16 + 9 / 16)
  # Of lam 0.9 there is no BoPO to compare with.
  assert named(rows, "no-hard-bonus")["policies"] == [] and not named(rows, "no-hard-bonus")["area"]


def test_where_a_baseline_beats_bopo_is_said(summary):
  # Vanilla RL solves all three for always-SMALL's $4: an area of 1 against 15/16.
  losses = {r["family"]: r for r in summary["beaten"]["areas"] if r["metric"] == "success"}
  assert set(losses) == {"vanilla"}
  assert losses["vanilla"]["gain"]["value"] == pytest.approx(-1 / 16)
  # BoPO pays for LARGE on every hard task, so in every resample that holds one it is behind.
  assert losses["vanilla"]["gain"]["interval"][1] < 0 and losses["vanilla"]["clear"] is True
  text = tables.areas_beaten(summary)
  assert "vanilla RL, success rate: by 0.06; the 95 % interval" in text
  # Were the interval to touch 0, the text would say so.
  doubtful = {"areas": [losses["vanilla"] | {"clear": False}], "budgets": []}
  assert "does not exclude 0" in tables.areas_beaten(summary | {"beaten": doubtful})
  assert "No baseline has a larger area" in tables.areas_beaten(
    summary | {"beaten": {"areas": [], "budgets": []}}
  )


def gapless(store: Store, families: tuple[str, ...]) -> None:
  store.put_tasks("test", [Task("test-0", "test", "do it", 40)])
  for family in families:
    for seed in range(2):
      store.add(episode(family, "test-0", seed, "S", 1.0))


def test_areas_that_cannot_be_computed_are_no_victory(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  families = ("always-small", "always-large", "random", "bopo", "no-reference")
  gapless(store, families)
  known = [Entry(f, BOPO if f in families[3:] else {}, f) for f in families]
  summary = results.summarize(store, known, config(), profiles(), [])
  for text in (tables.areas_beaten(summary), tables.ablations_beaten(summary)):
    assert "No area can be computed: always-LARGE is not both" in text
    assert "larger area" not in text


def test_an_area_that_cannot_be_computed_in_one_metric_alone(summary):
  bopo = summary["frontiers"]["bopo"]
  changed = bopo | {"area": bopo["area"] | {"score": None}}
  nobody = {"areas": [], "ablations": [], "budgets": []}
  text = tables.areas_beaten(
    summary | {"frontiers": summary["frontiers"] | {"bopo": changed}, "beaten": nobody}
  )
  assert "No area can be computed in mean score:" in text
  assert "No baseline has a larger area than BoPO in success rate." in text


def test_an_ablation_that_beats_bopo_is_said(summary, tmp_path):
  assert "No ablation has a larger area than BoPO." in study_tables.ablations(summary)
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  for i, score in enumerate((1.0, 1.0, 1.0, 0.0)):
    for seed in range(2):
      store.add(episode("no-reference", f"test-{i}", seed, "SSSS", score))
  known = [*ENTRIES[:4], Entry("no-reference", BOPO, "no-reference")]
  beaten = results.summarize(store, known, config(), profiles(), [])
  # All three for always-SMALL's $4: an area of 1 against 15/16.
  losses = {r["metric"]: r for r in beaten["beaten"]["ablations"]}
  assert losses["success"]["gain"]["value"] == pytest.approx(-1 / 16)
  text = study_tables.ablations(beaten)
  assert "Ablations with a larger area than BoPO:" in text
  assert "no reference advantage, success rate: by 0.06; the 95 % interval" in text


def test_bopo_s_area_at_one_lam_alone(summary, tmp_path):
  assert summary["bopo_alone"] == []  # there is one lam
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  for i, score in enumerate((1.0, 1.0, 0.0, 0.0)):
    for seed in range(2):
      store.add(episode("bopo(lam=0.9)", f"test-{i}", seed, "SSLL", score))
  known = [*ENTRIES, Entry("bopo", {"lam": 0.9, "threshold": 0.5}, "bopo(lam=0.9)")]
  known += [Entry("vanilla", {"lam": lam, "threshold": 0.5}, "random(p=0.5)") for lam in (0.3, 0.9)]
  two = results.summarize(store, known, config(), profiles(), [])
  rows = {r["lam"]: r for r in two["bopo_alone"]}
  # 15/16 as in test_results; half of both gaps lies on the line between the boundaries.
  assert rows[0.3]["area"]["success"]["value"] == pytest.approx(15 / 16)
  assert rows[0.9]["area"]["success"]["value"] == pytest.approx(0.5)
  assert [r["policies"] for r in rows.values()] == [[3], [6]]
  # Random has no lam and is compared with one BoPO router, vanilla RL has as many as BoPO.
  fronts = two["frontiers"]
  assert fronts["random"]["bopo_policies"] == [3]
  assert fronts["random"]["bopo_gain"]["success"]["value"] == pytest.approx(15 / 16 - 0.5)
  assert fronts["vanilla"]["bopo_policies"] == [3, 6]
  text = tables.areas(two)
  assert "with one λ or none is at λ = 0.3." in text
  assert '<th scope="row">BoPO, λ = 0.9 alone</th><td>1</td>' in text
  assert "More points can only raise" in sections.areas(two)


def test_parameters_are_picked_on_the_other_half():
  def sample(models: str, scores: tuple[float, ...]) -> Sample:
    made = {
      f"test-{i}": [Trial.of(episode("bopo", f"test-{i}", 0, models, s))]
      for i, s in enumerate(scores)
    }
    return Sample(Entry("bopo", BOPO, "bopo"), made)

  one, other = sample("SL", (1.0, 0.0, 1.0, 0.0)), sample("LL", (0.0, 1.0, 1.0, 0.25))
  assert halves(4).tolist() == [0, 0, 1, 1]
  # Tasks 0 and 1: 1 against 1, so the first is taken for 2 and 3. Tasks 2 and 3: 1 against 1.25, so
  # the other is taken for 0 and 1.
  found = picked_elsewhere([one, other], "score")
  assert found.mean_N("score").tolist() == [0.0, 1.0, 1.0, 0.0]
  assert found.mean_N("large_calls").tolist() == [2, 2, 1, 1]
  assert picked_elsewhere([one], "score").trials == one.trials
  # By success tasks 2 and 3 are even too, 1 against 1.
  assert picked_elsewhere([one, other], "success").mean_N("success").tolist() == [1, 0, 1, 0]


def test_halves_are_drawn_whatever_the_order():
  half_N = halves(61)
  assert sorted(half_N.tolist()) == [0] * 31 + [1] * 30
  assert 10 < half_N[::2].sum() < 20  # of 31: every other task would all be in one half


def test_a_budget_s_families_have_parameters_of_the_other_half(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  fill_families(store)
  known = entries()
  for name, scores in (("a", (1.0, 0.0, 1.0, 0.0)), ("b", (0.0, 1.0, 1.0, 0.25))):
    policy = f"sft({name},K=1)"
    known.append(Entry("sft", {"update": 6, "share": 0.5 if name == "a" else 0.25}, policy, 1))
    for i, score in enumerate(scores):
      for seed in range(2):
        store.add(episode(policy, f"test-{i}", seed, "SL" if name == "a" else "LS", score))
  summary = results.summarize(store, known, config(), profiles(), [])
  row = summary["hard_budget_best"]["1"]["families"]["sft"]
  assert [summary["policies"][i]["policy"] for i in row["candidates"]] == [
    "sft(a,K=1)",
    "sft(b,K=1)",
  ]
  # As in the test above; alone they have 50 and 56.25.
  assert (row["score_percent"], row["use_share"], row["overruns"]) == (50.0, 1.0, 0)
  assert row["gain"]["value"] == pytest.approx(75 - 50)
  assert row["score_interval"] == [0.0, 100.0]
  text = "and the other way round, out of so many candidates: SFT only 2."
  directory = report.write_report(summary, tmp_path / "report").parent
  shown = [
    budget_tables.hard_budget(summary),
    study_tables.published(summary),
    *((directory / f"hard_budget.{end}").read_text("utf-8") for end in ("md", "tex")),
  ]
  assert [text in place for place in shown] == [True] * len(shown)
  assert "<td>2</td><td>50.0 <small>[0.0, 100.0]</small></td>" in shown[0]
  assert "| SFT only | 2 | 50.0 [0.0, 100.0] | 100 |" in shown[2]
  page = (directory / "index.html").read_text(encoding="utf-8")
  assert any(text in figure for figure in page.split("<figcaption>")[1:])
  assert "5 policies, each at parameters of its own" in page
  every = budget_tables.every_budget(summary)
  assert "<td>50.0 <small>[" in every and "<td>56.2 <small>[" in every


def test_how_many_candidates(summary):
  assert cells.picked(summary) == "No family has more than one candidate at a K."
  families = (("bopo", 2, "5"), ("bopo", 3, "10"), ("zero-shot", 2, "10"), ("sft", 1, "10"))
  best: dict = {"5": {"families": {}}, "10": {"families": {}}}
  for family, many, K in families:
    best[K]["families"][family] = {"candidates": [0] * many}
  made = {"run": {"stand_ins": ["zero-shot"]}, "hard_budget_best": best}
  assert cells.picked(made).endswith(": BoPO 2 to 3, zero-shot (stand-in) 2.")


def test_a_stand_in_is_called_so_everywhere(summary, index, tmp_path):
  assert summary["run"]["stand_ins"] == ["zero-shot"]
  page = index.read_text(encoding="utf-8")
  assert "zero-shot LLM" not in page and page.count("zero-shot (stand-in)") > 6
  assert "a rule on the same text stands in for the judge" in sections.method(summary)
  assert "a rule on the same text stands in for the judge" in study_tables.published(summary)
  assert "zero-shot router (stand-in)" in budget_tables.ledger(summary)
  assert "\nzero-shot (stand-in)  " in report.terminal_table(summary)
  store = Store(tmp_path / "episodes.sqlite")
  fill_families(store)
  asked = config()
  asked.models.kind = "chat"
  real = results.summarize(store, entries(), asked, profiles(), [])
  assert "zero-shot LLM" in tables.areas(real) and "stand-in" not in tables.areas(real)
  assert "stands in" not in sections.method(real) + study_tables.published(real)


def test_best_under_a_budget(summary):
  best = summary["hard_budget_best"]
  # K = 1: scores of BoPO 3/4, always-SMALL 0.3, single-turn 1/4: SMALL is the runner-up.
  assert (best["1"]["best"], best["1"]["runner_up"]) == ("bopo", "always-small")
  assert best["1"]["gain"]["value"] == pytest.approx(75 - 30)
  # The gains by task are 0, 80, 100, 0: one resample in 16 holds zeros alone, so the interval of
  # 95 % begins at 0 and the gain is not clear.
  assert best["1"]["gain"]["interval"][0] == 0.0 and best["1"]["clear"] is False
  gains = {family: row["gain"] for family, row in best["1"]["families"].items()}
  assert gains["bopo"] is None and gains["single-turn"]["value"] == pytest.approx(75 - 25)
  assert gains["always-small"] == best["1"]["gain"]
  assert summary["beaten"]["budgets"] == []
  # K = 2: First-Large alone, (1 + 0.2 + 1 + 0) / 4 = 55, against always-SMALL's 30.
  assert best["2"]["best"] == "first-large"
  assert best["2"]["gain"]["value"] == pytest.approx(25)
  assert [row["gain"] for row in best["2"]["families"].values()] == [None, None]


def test_a_loss_is_clear_only_where_its_interval_excludes_zero():
  more = lambda low, high: {"value": -0.1, "interval": [low, high]}  # noqa: E731
  fronts = {
    "cascade": {"bopo_gain": {"success": more(-0.3, -0.01), "score": more(-0.3, 0.1)}},
    "vanilla": {"bopo_gain": {"success": {"value": -0.1, "interval": None}, "score": None}},
    "random": {"bopo_gain": {"success": {"value": 0.2, "interval": [0.1, 0.3]}}},
    "oracle": {"bopo_gain": {"success": more(-0.3, -0.2)}},  # privileged
  }
  gains = {"first-large": more(-0.3, 0.0), "sft": None, "oracle": more(-0.3, -0.2)}
  families = {family: {"gain": gain} for family, gain in gains.items()}
  found = contests.beaten(fronts, {"5": {"families": families}}, None)
  assert [(r["family"], r["metric"], r["clear"]) for r in found["areas"]] == [
    ("cascade", "success", True),
    ("cascade", "score", False),
    ("vanilla", "success", False),
  ]
  assert [(r["K"], r["family"], r["clear"]) for r in found["budgets"]] == [
    (5, "first-large", False)
  ]


def test_bold_only_where_the_gain_is_clear(summary):
  for clear in (True, False):
    best = {"1": {**summary["hard_budget_best"]["1"], "clear": clear}}
    changed = summary | {"hard_budget_best": best}
    assert ("<b>75.0</b>" in budget_tables.hard_budget(changed)) is clear
    assert ("**75.0**" in budget_tables.hard_budget_markdown(changed)) is clear
    assert (r"\textbf{75.0}" in budget_tables.hard_budget_latex(changed)) is clear


def test_the_hard_budget_as_markdown_and_latex(summary, index):
  lines = (index.parent / "hard_budget.md").read_text(encoding="utf-8").splitlines()
  assert lines[0] == "| Family | Candidates | K = 1 SR | Use% | K = 2 SR | Use% |"
  assert lines[1] == "|---|---:|---:|---:|---:|---:|"
  assert "| single-turn | 1 | 25.0 [0.0, 75.0] | 100 | – | – |" in lines
  assert "| First-Large | 1 | – | – |" in "\n".join(lines)
  # What has no cap has no share of it; SMALL keeps every cap.
  assert lines[2:4] == [
    "| always SMALL | 1 | 30.0 [0.0, 75.0] | 0 | 30.0 [0.0, 75.0] | 0 |",
    "| always LARGE | no cap | 75.0 [25.0, 100.0] | – | 75.0 [25.0, 100.0] | – |",
  ]
  html = budget_tables.hard_budget(summary)
  assert "<td>no cap</td><td>75.0 <small>[25.0, 100.0]</small></td><td>75.0</td><td>–</td>" in html
  tex = (index.parent / "hard_budget.tex").read_text(encoding="utf-8")
  assert r"single-turn & 1 & 25.0 [0.0, 75.0] & 100 & -- & -- \\" in tex
  assert r"\begin{tabular}{lrrrrr}" in tex and r"\cmidrule(lr){5-6}" in tex
  assert r"always LARGE & no cap & 75.0 [25.0, 100.0] & -- & 75.0 [25.0, 100.0] & -- \\" in tex
  assert tex.count(r"\midrule") == 2 and r"\toprule" in tex and r"\bottomrule" in tex


def test_latex_has_no_commands_of_others():
  assert budget_tables.latex(r"a_b & 5% {x} \y #1 $z ~^ <") == (
    r"a\_b \& 5\% \{x\} \textbackslash{}y \#1 \$z \textasciitilde{}\textasciicircum{} $<$"
  )


def test_seconds_by_the_rates_and_as_measured(summary):
  rows = summary["latency"]
  # Three replies of SMALL with 90 tokens and a proposal of one; one reply of LARGE with 90; four
  # decisions.
  cascade = named(rows, "cascade")
  assert cascade["small_s"] == pytest.approx(3 + 1 / 90)
  assert cascade["large_s"] == pytest.approx(90 / 80)
  assert cascade["router_s"] == pytest.approx(4 / 180)
  total = 3 + 1 / 90 + 90 / 80 + 4 / 180
  assert cascade["router_share"] == pytest.approx(4 / 180 / total)
  assert (cascade["measured_router_s"], cascade["measured_decision_s"]) == (1.0, 0.25)
  assert cascade["measured_models_s"] is None  # of scripts
  assert cascade["measured_router_share"] == pytest.approx(1 / (1 + 3 + 1 / 90 + 90 / 80))
  # Four words of LARGE decide; no router of its own.
  assert named(rows, "zero-shot")["router_s"] == pytest.approx(4 / 80)
  assert named(rows, "bopo")["measured_router_s"] is None  # stored before it was measured


def test_seconds_by_stored_lengths(tmp_path):
  """As the test above, with lengths and without dollars: local models may cost nothing."""
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  for i in range(4):
    for seed in range(2):
      cascade = episode("cascade", f"test-{i}", seed, "SSL", 1.0)
      for step in cascade.steps:
        step.calls, step.proposal = [call(step.model, step.cost_usd, 90)], "go"
      cascade.steps[2].calls.append(call(0, 0.0, 45, "proposal", seed == 1))
      judged = episode("zero-shot", f"test-{i}", seed, "SL", 1.0)
      for step in judged.steps:
        step.calls = [call(step.model, step.cost_usd, 0), call(2, 0.0, 160, "judge")]
        step.router_latency_s, step.router_cost_usd = 0.5, 0.0
      for made in (cascade, judged):
        store.add(made)
  known = [*ENTRIES[:4], Entry("cascade", {}, "cascade"), Entry("zero-shot", {}, "zero-shot")]
  summary = results.summarize(store, known, config(), profiles(), [])
  # Two replies of SMALL with 90 tokens and a proposal of 45 that was not taken.
  assert named(summary["latency"], "cascade")["small_s"] == pytest.approx(225 / 90)
  zero_shot = named(summary["latency"], "zero-shot")
  assert zero_shot["router_s"] == pytest.approx(2 * 160 / 80)
  assert (zero_shot["measured_router_s"], zero_shot["measured_decision_s"]) == (1.0, 0.5)
  trials = [Trial.of(e) for e in store.episodes("cascade") if e.task_id == "test-0"]
  assert [(t.proposal_tokens, t.replayed) for t in trials] == [(45, 0), (45, 1)]


def test_what_is_not_evaluated_is_not_shown(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  lines = [*METRICS_LINES, {"stage": "sft", "update": 1, "loss": 1.0}]
  summary = results.summarize(store, ENTRIES, config(), profiles(), lines)
  kinds = [(s["stage"], s["ablation"]) for s in summary["training"]]
  assert kinds == [("bopo", None), ("sft", None)]
  assert summary["calibration"] is None


def test_an_ablation_of_the_configuration_is_none_of_the_rivals(summary, monkeypatch):
  monkeypatch.setitem(ABLATIONS, "vanilla", ("bopo", "clip_low", None))
  samples = [None] * len(summary["policies"])
  monkeypatch.setattr(contests, "area", lambda *args: None)
  monkeypatch.setattr(contests, "area_gain", lambda *args: None)
  assert "vanilla" not in contests.frontiers(summary["policies"], samples, 0.3, 10)


def test_calibration_and_methods(summary):
  assert summary["calibration"]["brier"] == 0.1
  text = study_tables.methods(summary)
  assert "1,200" in text and "epochs = 4, learning_rate = 0.001" in text
  assert "by &lt;held-out&gt; loss" in text


def test_curves_of_ablations_are_apart(summary):
  kinds = [(s["stage"], s["ablation"], s["lam"]) for s in summary["training"]]
  assert kinds == [
    ("vanilla", None, 0.3),
    ("bopo", "no-reference", 0.3),
    ("bopo", None, 0.3),
    ("cascade", None, None),
  ]


def test_the_paper_stands_beside_the_same_environment_alone(summary):
  rows = {(r["section"], r["what"]): r for r in summary["published"]}
  boundary = rows["Boundaries, SR", "always-small"]
  assert (boundary["paper"], boundary["ours"]) == ("43.5", "30.0")
  assert rows["BoPO's share of dollars", "hard"]["ours"] == "66.7 %"  # 16 of 24 dollars
  # Vanilla RL spends $4 on every task.
  assert rows["Vanilla RL's share of dollars", "intractable"]["paper"] == "37.5 %"
  assert rows["Vanilla RL's share of dollars", "intractable"]["ours"] == "25.0 %"
  assert rows["Share of the tasks", "intractable"]["paper"] == "25.8 %"
  assert rows["Share of the tasks", "intractable"]["ours"] == "25.0 %"
  assert rows["Labels of 3 trials against 5", "agreement"]["ours"] is None
  assert not any(section.startswith("SR (Use%)") for section, _ in rows)  # K = 1 and 2 here
  for name in ("sandbox", "my.py:Own"):
    assert results.published.beside({"run": {"environment": name, "sr_metric": "success"}}) == []


def test_the_paper_s_budgets_where_ours_are_the_same(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  for i in range(4):
    for seed in range(2):
      store.add(episode("first-large(K=5)", f"test-{i}", seed, "LLSS", 1.0))
      store.add(episode("oracle(K=5)", f"test-{i}", seed, "LSSS", 1.0))
  known = [*ENTRIES[:4], Entry("oracle", {}, "oracle(K=5)", 5)]
  known += [Entry("first-large", {}, "first-large(K=5)", 5)]
  summary = results.summarize(store, known, config(), profiles(), [])
  rows = {(r["section"], r["what"]): r for r in summary["published"]}
  own = rows["SR (Use%) at K = 5", "first-large"]
  assert (own["paper"], own["ours"]) == ("44.7 (95 %)", "100.0 (40 %)")
  assert rows["SR (Use%) at K = 5", "bopo"]["ours"] is None
  # The oracle, as good, does not compete. Gains over always-SMALL by task: 0, 80, 100, 100. One
  # resample in 256 holds zeros alone, fewer than the 2.5 % that the interval leaves out below.
  best = summary["hard_budget_best"]["5"]
  assert best["best"] == "first-large" and best["clear"] is True


def test_episodes_are_chosen_by_the_rule(summary):
  shown = summary["episodes"]
  assert shown["policy"] == "bopo(lam=0.3)"
  assert [(e["task_id"], e["why"]) for e in shown["episodes"]] == [
    ("test-1", "hard, solved where always SMALL fails"),
    ("test-2", "hard, solved where always SMALL fails"),
    ("test-0", "easy"),
    ("test-3", "intractable"),
  ]
  last = shown["episodes"][0]["steps"][-1]
  assert (last["model"], last["cost_usd"], last["large_calls"]) == (1, 8.0, 1)
  assert last["p_large"] is None  # no router's probability is stored there


def test_episode_pages_escape_what_environments_say(tmp_path):
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  entry = Entry("bopo", BOPO, "bopo(evil)")
  said = "<script>alert(1)</script> & " + "x" * 900
  for i in range(4):
    for seed in range(2):
      # log 0.2 of SMALL: LARGE had 0.8; then LARGE at 0.8.
      steps = [
        Step(said, 0, "<b>go</b>", [call(0, 1.0)], logp=-1.6094379124341003),
        Step("seen", 1, "", [call(1, 5.0)], logp=-0.2231435513142097),
      ]
      made = episode("bopo(evil)", f"test-{i}", seed, "S", 1.0)
      made.steps = steps
      store.add(made)
  summary = results.summarize(store, [*ENTRIES[:3], entry], config(), profiles(), [])
  steps = summary["episodes"]["episodes"][0]["steps"]
  assert [step["p_large"] for step in steps] == pytest.approx([0.8, 0.8])
  assert len(steps[0]["observation"]) < 330
  path = report.write_report(summary, tmp_path / "report")
  text = path.read_text(encoding="utf-8")
  assert "<script" not in text and "<b>go" not in text and "&lt;b&gt;go" in text
  assert "p(LARGE) 0.80" in text and "(no action in the reply)" in text
  assert read(path).open == []


def test_the_page_has_every_section(index, summary):
  reader = read(index)
  assert reader.open == []
  text = reader.text.replace("\u00a0", " ")
  for words in (
    "What each part of BoPO is worth",
    "Seconds of an episode",
    "Some episodes, step by step",
    "published, not measured here",
    "Calibration of the cascade",
    "How each method was trained",
    "no reference advantage, λ = 0.3",
    "proposals not taken",
    "zero-shot router",
  ):
    assert words in text, words
  assert json.loads(json.dumps(summary, allow_nan=False)) == summary
  assert all(set(front["area"]) == set(METRICS) for front in summary["frontiers"].values())


def test_nothing_is_minus_zero():
  assert cells.interval_text([-0.004, -0.0], 1, 2, ", ", "+") == "+0.00, +0.00"
  assert cells.interval_text([-0.04, 0.25], 1, 1, " to ") == "0.0 to 0.2"
  assert cells.interval_text([-0.06, 0.06], 100, 0, ", ", "+") == "-6, +6"


@pytest.mark.parametrize(
  "parameters, text",
  [
    ({"lam": 0.3, "update": 12, "threshold": 0.5}, "λ = 0.3"),
    ({"lam": 0.3, "update": 12, "threshold": 0.2}, "λ = 0.3, t = 0.2"),
    ({"lam": 0.3, "update": 12, "share": 0.25}, "λ = 0.3, share 25 %"),
    ({"p": 0.5}, "p = 0.5"),
    ({}, ""),
  ],
)
def test_parameters_in_words(parameters, text):
  assert parameter_text(parameters) == text


def test_the_labels_of_other_trials_are_reported(tmp_path):
  """SMALL solves the task in the second trial alone, LARGE in the third: K decides."""
  store = Store(tmp_path / "episodes.sqlite")
  fill(store)
  store.put_tasks("train", [Task("train-9", "train", "do it", 40)])
  for seed in range(3):
    store.add(episode("always-small", "train-9", seed, "S", float(seed == 1)))
    store.add(episode("always-large", "train-9", seed, "L", float(seed == 2)))
  c = config()
  c.profile.trials, c.profile.robustness = 3, (1, 3)
  summary = results.summarize(store, ENTRIES, c, profiles(), [])
  one, three = summary["taxonomy"]
  # One trial: intractable. Three: hard.
  assert (one["agreement"], one["hard_jaccard"], three["agreement"]) == (0.0, 0.0, 1.0)
  assert "Same label as K = 3" in study_tables.taxonomy(summary)
