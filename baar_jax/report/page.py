"""The report: all figures as one dict of tables, and its files, the page first of all."""

import base64
import dataclasses
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jinja2
import pandas as pd

from baar_jax.config import Config
from baar_jax.llms.calls import Spent
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.prices import prices_of
from baar_jax.report import compare, plots, spend, tables
from baar_jax.report.table import Evaluation, load
from baar_jax.rollout.entries import ALWAYS_SMALL, Entry
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles, measure_robustness

HERE = Path(__file__).parent


def summarize(
  store: Store,
  entries: Sequence[Entry],
  config: Config,
  metrics: Sequence[Mapping] = (),
  exact: Mapping | None = None,
  spent: Spent | None = None,
) -> dict:
  """The figures of the evaluation, tables and values, by name.

  *_percent is in percent, *_share in [0, 1]; *_low and *_high are ends of 95 % intervals; NaN or
  None is what cannot be computed. `exact` is of `optimum.exact_frontier`; `spent` are the recorded
  calls of API models. Raises ValueError where the profile or an entry's episodes are missing.
  """
  profiles = load_profiles(store, config)  # a run without a profile is told to make one first
  e, scripted = load(store, entries, config), config.models.kind == "scripted"
  table = compare.policies(e)
  best = compare.headline(e, table)
  chosen = spend.representatives(e, table, best)
  difficulty = spend.difficulties(e, config.profile.easy_rate)
  families = set(table.family)
  updates = config.baselines.updates
  calibrations = [line for line in metrics if line.get("stage") == "cascade-calibration"]
  calibrations = [line for line in calibrations if line.get("updates", updates) == updates]
  results = {
    "run": _facts(config, metrics, e) | {"train_tasks": len(profiles)},
    "policies": table,
    "headline": best,
    "frontiers": compare.frontiers(e),
    "ablations": compare.ablations(e),
    "hard_budget": compare.hard_budgets(e, table),
    "by_difficulty": spend.by_difficulty(e, chosen, difficulty),
    "latency": spend.latency(e, chosen, scripted),
    "inverted_tasks": sum(p.cost_small > p.cost_large for p in profiles.values()),
    "robustness": measure_robustness(store, config),
    "training": spend.training(metrics, families),
    "calibration": calibrations[-1] if calibrations and "cascade" in families else None,
    "ledger": spend.run_ledger(store.table(), spent, len(config.models.names)),
    "exact": exact,
    "episodes": showcase(store, e, best, difficulty),
  }
  return results | {"paper": spend.beside_paper(results)}


def _facts(config: Config, metrics: Sequence[Mapping], e: Evaluation) -> dict:
  """What was run: environment, models, router, and how many tasks and seeds."""
  models, scripted = config.models, config.models.kind == "scripted"
  environments = [line for line in metrics if line.get("stage") == "environments"]
  hosts = [] if scripted else [{"name": m.host, "own": m.own} for m in endpoints(models)]
  prices = map(dataclasses.asdict, prices_of(models.names, models.prices))
  return {
    "name": config.name,
    "environment": config.env.kind.rpartition(":")[2],  # the class of one of the user's own
    "environment_mb": max((line["mb_per_live_episode"] for line in environments), default=None),
    "own_tasks": any(line["own_tasks"] for line in environments),
    "models": {"kind": models.kind, "names": list(models.names), "hosts": hosts},
    "prices_usd_per_million": dict(zip(models.names, prices)),
    "router": dataclasses.asdict(config.router),
    "test_tasks": len(e.tasks),
    "seeds": config.evaluate.seeds,
    "profile_trials": config.profile.trials,
    "compared_lam": e.compared_lam,
    "left_out_episodes": e.left_out,
    # Families of which a scripted run evaluates something else under their name.
    "stand_ins": ["zero-shot"] if scripted and "zero-shot" in set(e.entries.family) else [],
    "sr": e.sr,
  }


def showcase(
  store: Store, e: Evaluation, best: Mapping | None, difficulty: pd.Series
) -> list[dict]:
  """A few episodes of the headline's policy, else of BoPO's first; none without BoPO.

  They are of the first tasks that fit the rules, at their first seed. Rows of why, description,
  small_score (always-SMALL's) and episode.
  """
  if e.soft("bopo").empty:
    return []
  policy = best["policy"] if best else e.soft("bopo").index[0]
  first = e.episodes.sort_values("seed").groupby(["policy", "task_id"])[["score", "seed"]].first()
  routed, small = (first.loc[name].loc[e.tasks] for name in (policy, ALWAYS_SMALL))
  hard, solved = difficulty == "hard", routed.score >= 1
  rules = {
    "hard, solved where always SMALL fails": (hard & solved & (small.score < 1), 2),
    "hard, not solved": (hard & ~solved, 1),
    "easy": (difficulty == "easy", 1),
    "intractable": (difficulty == "intractable", 1),
  }
  texts = {task.id: task.description for task in store.tasks("test")}
  stored = {(x.task_id, x.seed): x for x in store.episodes(policy)}
  rows = []
  for why, (fits, count) in rules.items():
    for task, seed in routed.seed[fits][:count].items():
      row = {"why": why, "description": texts[task], "small_score": small.score[task]}
      rows.append(row | {"episode": stored[task, seed]})
  return rows


def write(results: Mapping, directory: Path) -> Path:
  """Writes index.html, PNGs, results.json and hard_budget.*; returns the page's path."""
  directory.mkdir(parents=True, exist_ok=True)
  text = json.dumps(plain(results), indent=1, allow_nan=False)
  (directory / "results.json").write_text(text, encoding="utf-8")
  if len(results["hard_budget"]):
    frame, bold = tables.hard_budget(results)
    narrow = frame.columns.get_level_values(1).isin(["Family", "Candidates", "SR", "Use%"])
    for ending, export in (("md", tables.to_markdown), ("tex", tables.to_latex)):
      text = export(frame.loc[:, narrow], bold.loc[:, narrow])
      (directory / f"hard_budget.{ending}").write_text(text, encoding="utf-8")
  images = {}
  for name, figure in plots.draw_all(results).items():
    file = directory / f"{name}.png"
    figure.savefig(file, dpi=144)
    images[name] = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
  path = directory / "index.html"
  path.write_text(render(results, images), encoding="utf-8")
  return path


def render(results: Mapping, images: Mapping[str, str]) -> str:
  """The page, with images by name as URLs. Whatever the results hold, the template escapes it."""
  loader = jinja2.FileSystemLoader(HERE)
  jinja = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
  style = (HERE / "report.css").read_text(encoding="utf-8")
  context = {"r": results, "t": tables, "spend": spend, "exp": math.exp, "style": style}
  page = jinja.get_template("page.html.j2").render(context, images=images)
  return page.replace(" %", "\u00a0%")


def plain(value):
  """The same as lists and dicts that strict JSON can hold: tables as rows, NaN as None."""
  if isinstance(value, pd.DataFrame):
    return plain((value.reset_index() if value.index.name else value).to_dict("records"))
  if dataclasses.is_dataclass(value):
    return plain(dataclasses.asdict(value))
  if isinstance(value, Mapping):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, Collection) and not isinstance(value, str):
    return [plain(item) for item in value]
  value = value.item() if hasattr(value, "item") else value  # a number of NumPy's
  return None if isinstance(value, float) and not math.isfinite(value) else value
