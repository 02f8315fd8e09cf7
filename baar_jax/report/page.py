"""The report: all results as one dict of tables, and the files that show them, first the page."""

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
from baar_jax.report import compare, plots, texts
from baar_jax.report.choice import choose, main_family
from baar_jax.report.optimum import exact_frontier
from baar_jax.report.table import Evaluation, load, run_ledger, training
from baar_jax.rollout.entries import Entry
from baar_jax.store import Store
from baar_jax.train.dataset import load_profiles, measure_robustness

RIVAL_STAGES = ("cascade", "single-turn", "cascade-calibration")


def compute_results(
  store: Store,
  entries: Sequence[Entry],
  config: Config,
  metrics=(),
  spent: Spent | None = None,
  forecast: Mapping | None = None,
) -> dict:
  """The results of the evaluation, tables and values, by name.

  All but "dev" are of test and of what dev has chosen. *_percent is in percent, *_share in [0, 1];
  *_low and *_high are ends of 95 % intervals; NaN or None is what cannot be computed. `metrics` are
  lines of metrics.jsonl, `spent` the recorded calls of API models, `forecast` what the stage kept.
  Raises ValueError where the profile or an entry's episodes are missing.
  """
  profiles = load_profiles(store, config)  # a run without a profile is told to make one first
  choice = choose(store, entries, config)
  shown = [entry for entry in entries if entry.policy in choice.policies]
  data = load(store, shown, config, "test")
  table = compare.policies(data)
  headline = compare.headline(data, choice, table)
  difficulty = compare.difficulties(data, config.profile.easy_rate)
  # Lines that state another number of updates are of an earlier training.
  updates = {None, config.baselines.updates}
  metrics = [m for m in metrics if m["stage"] not in RIVAL_STAGES or m.get("updates") in updates]
  metrics = [m for m in metrics if not m.get("train_seed")]  # curves are of the first training seed
  calibrations = [line for line in metrics if line["stage"] == "cascade-calibration"]
  families = {entry.family for entry in entries}
  results = {
    "run": _facts(config, metrics, data) | {"train_tasks": len(profiles)},
    "dev": choice.dev,
    "policies": table,
    "headline": headline,
    "frontiers": compare.frontiers(data, choice),
    "ablations": compare.ablations(data, choice),
    "hard_budget": compare.hard_budgets(data, table),
    "by_difficulty": compare.by_difficulty(data, choice.typical, difficulty),
    "latency": compare.latency(data, choice.typical, config.models.kind == "scripted"),
    "inverted_tasks": sum(p.cost_small > p.cost_large for p in profiles.values()),
    "robustness": measure_robustness(store, config),
    "training": training(metrics, families),
    "forecast": forecast,
    "calibration": calibrations[-1] if calibrations and "cascade" in families else None,
    "ledger": run_ledger(store.table(), spent, len(config.models.names)),
    "exact": exact_frontier(config),
    "episodes": showcase(store, data, headline["policy"], difficulty) if headline else None,
  }
  return results | {"paper": texts.beside_paper(results)}


def _facts(config: Config, metrics: Sequence[Mapping], data: Evaluation) -> dict:
  """What was run: environment, models, router, and how many tasks and seeds."""
  models, scripted = config.models, config.models.kind == "scripted"
  environments = [line for line in metrics if line["stage"] == "environments"]
  memory_mb = [line["mb_per_live_episode"] for line in environments]
  hosts = [] if scripted else [endpoint.host for endpoint in endpoints(models)]
  prices = map(dataclasses.asdict, prices_of(models.names, models.prices))
  return {
    "name": config.name,
    "environment": config.env.kind.rpartition(":")[2],  # the class of one of the user's own
    "environment_mb": max(memory_mb, default=None),
    "own_tasks": any(line["own_tasks"] for line in environments),
    "models": {"kind": models.kind, "names": list(models.names), "hosts": hosts},
    "prices_usd_per_million": dict(zip(models.names, prices)),
    "router": dataclasses.asdict(config.router),
    "test_tasks": len(data.tasks),
    "seeds": config.evaluate.seeds,
    "profile_trials": config.profile.trials,
    "train_seeds": config.train_seeds,
    "main": main_family(data.entries.family),
    "left_out_episodes": data.left_out,
    # Families of which a scripted run evaluates something else under their name.
    "stand_ins": ["zero-shot"] if scripted and "zero-shot" in set(data.entries.family) else [],
    "sr": data.sr,
  }


def showcase(store: Store, data: Evaluation, policy: str, difficulty: pd.Series) -> pd.DataFrame:
  """A policy's first episode, by task and seed, of each difficulty and outcome."""
  descriptions = {task.id: task.description for task in store.tasks("test")}
  stored = {(episode.task_id, episode.seed): episode for episode in store.episodes(policy)}
  rows = data.episodes[data.episodes.policy == policy]
  rows = rows.assign(difficulty=rows.task_id.map(difficulty), text=rows.task_id.map(descriptions))
  rows = rows.sort_values("difficulty", kind="stable").drop_duplicates(["difficulty", "success"])
  rows["episode"] = [stored[key] for key in zip(rows.task_id, rows.seed)]
  for shown in rows.episode:
    numbers = [x for s in shown.steps for x in (s.cost_usd, s.router_cost_usd, -(s.logp or 0.0))]
    if not all(-0.01 < x < math.inf for x in numbers):  # the log of 1 may be rounded up
      row = f"policy {shown.policy}, task {shown.task_id}, seed {shown.seed}"
      raise ValueError(f"the stored episode of {row} has a number out of its range: restore a copy")
  return rows[["difficulty", "success", "text", "episode"]]


def write(results: Mapping, directory: Path) -> Path:
  """Writes index.html, PNGs, results.json and hard_budget.*; returns the page's path."""
  directory.mkdir(parents=True, exist_ok=True)
  files = {"results.json": json.dumps(plain(results), indent=1, allow_nan=False)}
  if len(results["hard_budget"]):
    table = texts.hard_budget(results)
    narrow = table.loc[:, table.columns.isin(["Family", "Candidates", "SR", "Use%"], level=1)]
    files["hard_budget.md"] = texts.to_markdown(narrow)
    files["hard_budget.tex"] = texts.to_latex(narrow)
  images = {}
  for name, figure in plots.draw_all(results).items():
    file = directory / f"{name}.png"
    figure.savefig(file, dpi=144)
    images[name] = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
  files["index.html"] = render(results, images)
  for name, text in files.items():
    (directory / name).write_text(text, encoding="utf-8")
  return directory / "index.html"


def render(results: Mapping, images: Mapping[str, str]) -> str:
  """The page, with images by name as URLs. Whatever the results hold, the template escapes it."""
  files, clean = jinja2.FileSystemLoader(Path(__file__).parent), texts.clean
  jinja = jinja2.Environment(loader=files, autoescape=True, trim_blocks=True, finalize=clean)
  context = {"results": results, "texts": texts, "compare": compare, "exp": math.exp}
  page = jinja.get_template("page.html.j2").render(context, images=images)
  return page.replace(" %", "\u00a0%")


def plain(value):
  """A value as lists and dicts that strict JSON can hold: tables as rows, NaN as None."""
  if isinstance(value, pd.DataFrame):
    value = (value.reset_index() if value.index.name else value).to_dict("records")
  elif dataclasses.is_dataclass(value):
    value = dataclasses.asdict(value)
  if isinstance(value, Mapping):
    return {key: plain(item) for key, item in value.items()}
  if isinstance(value, Collection) and not isinstance(value, str):
    return [plain(item) for item in value]
  value = value.item() if hasattr(value, "item") else value  # a number of NumPy's
  wrong = isinstance(value, float) and not math.isfinite(value)
  return None if wrong or value is pd.NA else value
