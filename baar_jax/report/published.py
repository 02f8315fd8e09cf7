"""The paper's own figures, to hold ours against where the environment is the same."""

from collections.abc import Mapping, Sequence

from baar_jax.report.samples import LARGE_FAMILY, SMALL_FAMILY

BOUNDARIES = {  # SR of always-SMALL and always-LARGE
  "alfworld": (40.0, 63.5),
  "scienceworld": (43.5, 65.4),
  "appworld": (53.0, 66.7),
}
# SR and Use% at K = 5, 10, 15; of BoPO's two rows the better one at each K.
HARD_BUDGET = {
  "alfworld": {
    "first-large": ((49.5, 99), (51.0, 92), (54.5, 86)),
    "zero-shot": ((49.5, 99), (53.5, 95), (58.0, 89)),
    "cascade": ((47.5, 96), (53.5, 93), (56.0, 88)),
    "single-turn": ((50.0, 98), (52.5, 92), (57.5, 84)),
    "vanilla": ((52.0, 96), (55.0, 88), (56.5, 68)),
    "bopo": ((54.2, 96), (56.6, 75), (60.0, 92)),
  },
  "scienceworld": {
    "first-large": ((44.7, 95), (47.8, 89), (52.5, 84)),
    "zero-shot": ((46.2, 99), (50.5, 94), (57.7, 85)),
    "cascade": ((45.1, 98), (48.4, 92), (54.5, 82)),
    "single-turn": ((44.0, 99), (47.4, 93), (53.8, 86)),
    "vanilla": ((48.5, 97), (52.5, 86), (53.0, 65)),
    "bopo": ((50.4, 92), (55.1, 72), (59.5, 88)),
  },
  "appworld": {
    "first-large": ((59.5, 100), (64.9, 100), (65.5, 90)),
    "zero-shot": ((60.1, 99), (62.5, 96), (66.1, 91)),
    "cascade": ((57.6, 98), (63.3, 92), (65.1, 85)),
    "single-turn": ((58.8, 99), (63.3, 94), (64.9, 82)),
    "vanilla": ((62.5, 95), (64.1, 89), (65.5, 73)),
    "bopo": ((64.2, 94), (65.0, 96), (66.5, 88)),
  },
}
BUDGETS = (5, 10, 15)
# Over the paper's three benchmarks together.
SPEND = {"easy": 21.8, "hard": 52.2, "intractable": 26.0}  # BoPO's dollars
VANILLA_INTRACTABLE = 37.5  # percent of vanilla RL's dollars
INTRACTABLE_TASKS = 25.8  # percent
ROUTER_SHARE_BELOW = 2.0  # percent of an episode's seconds
TAXONOMY_TRIALS = 5
TAXONOMY = {3: (78.5, 0.69), 10: (87.4, 0.76)}  # K: label agreement in percent, Jaccard of hard


def beside(results: Mapping) -> list[dict]:
  """The paper's figures with ours; empty for an environment that it does not have.

  Args:
    results: of `summarize`, all but this.

  Returns:
    Rows of section, what, paper and ours (texts; ours is None where this run has no such figure).
  """
  environment, metric = results["run"]["environment"], results["run"]["sr_metric"]
  if environment not in BOUNDARIES:
    return []
  policies, rows = results["policies"], []

  def add(section: str, what: str, paper: str, ours: str | None) -> None:
    rows.append({"section": section, "what": what, "paper": paper, "ours": ours})

  soft = {p["family"]: p for p in policies if p["call_budget"] is None}
  for family, published in zip((SMALL_FAMILY, LARGE_FAMILY), BOUNDARIES[environment]):
    ours = f"{soft[family][f'{metric}_percent']:.1f}"
    add("Boundaries, SR", family, f"{published:.1f}", ours)
  for place, K in enumerate(BUDGETS):
    if str(K) not in results["hard_budget_best"]:
      continue
    families = results["hard_budget_best"][str(K)]["families"]
    for family, published in HARD_BUDGET[environment].items():
      own, (sr, use) = families.get(family), published[place]
      ours = own and f"{own[f'{metric}_percent']:.1f} ({100 * own['use_share']:.0f} %)"
      add(f"SR (Use%) at K = {K}", family, f"{sr:.1f} ({use} %)", ours)
  spent = {r["family"]: r["cost_share"] for r in results["spend"]["policies"]}

  def add_share(section: str, shares: Mapping | None, difficulty: str, published: float) -> None:
    ours = shares and f"{100 * shares[difficulty]:.1f} %"
    add(section, difficulty, f"{published:.1f} %", ours)

  for difficulty, published in SPEND.items():
    add_share("BoPO's share of dollars", spent.get("bopo"), difficulty, published)
  add_share(
    "Vanilla RL's share of dollars", spent.get("vanilla"), "intractable", VANILLA_INTRACTABLE
  )
  add_share("Share of the tasks", results["spend"]["task_mix"], "intractable", INTRACTABLE_TASKS)
  seconds = next((r for r in results["latency"] if r["family"] == "bopo"), None)
  ours = seconds and seconds["router_share"] and f"{100 * seconds['router_share']:.1f} %"
  share = f"below {ROUTER_SHARE_BELOW:.0f} %"
  add("Router's share of seconds, by the rates", "bopo", share, ours)
  _add_taxonomy(add, results["taxonomy"], results["run"]["profile_trials"])
  return rows


def _add_taxonomy(add, robustness: Sequence[Mapping], base_trials: int) -> None:
  ours = {row["trials"]: row for row in robustness if base_trials == TAXONOMY_TRIALS}
  for K, (agreement, jaccard) in TAXONOMY.items():
    row = ours.get(K)
    known = row is not None and row["agreement"] is not None
    text = f"{100 * row['agreement']:.1f} %" if known else None
    add(f"Labels of {K} trials against {TAXONOMY_TRIALS}", "agreement", f"{agreement:.1f} %", text)
    known = row is not None and row["hard_jaccard"] is not None
    text = f"{row['hard_jaccard']:.2f}" if known else None
    add(f"Labels of {K} trials against {TAXONOMY_TRIALS}", "Jaccard, hard", f"{jaccard:.2f}", text)
