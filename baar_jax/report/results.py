"""The evaluation's samples -> its figures, as one dict that JSON can hold."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from baar_jax.config import Config, compared_lam
from baar_jax.llms.calls import Spent
from baar_jax.llms.endpoints import endpoints
from baar_jax.llms.prices import prices_of
from baar_jax.report import contests, frontier, latency, learning, published, showcase, spending
from baar_jax.report.ledger import run_ledger
from baar_jax.report.rows import dollar_budget_row, headline, policy_row
from baar_jax.report.samples import Sample, load_samples
from baar_jax.rollout.entries import Entry
from baar_jax.store import Store
from baar_jax.train.dataset import Profile, robustness


def summarize(
  store: Store,
  entries: Sequence[Entry],
  config: Config,
  profiles: Mapping[str, Profile],
  metrics: Iterable[Mapping],
  exact: Mapping | None = None,
  spent: Spent | None = None,
  methods: Iterable[dict] = (),
) -> dict:
  """The figures of the evaluation.

  Args:
    store: holds the test tasks and the entries' episodes.
    entries: of the evaluation, always-small and always-large among them.
    config: of the run.
    profiles: of the training tasks.
    metrics: lines of metrics.jsonl.
    exact: the sandbox's exact frontier: {"optimum": [[cost, success], ...], "small": [cost,
      success], "large": [...]}, dollars and probabilities.
    spent: on API models, by the books of their calls.
    methods: how each was trained, of `methods.methods`.

  Returns:
    Lists and dicts of plain values: run, policies, frontiers, bopo_alone, headline, ablations,
    hard_budget, hard_budget_best, dollar_budget, beaten, spend, latency, costs, taxonomy, training,
    calibration, methods, episodes, ledger, published, and exact if given. Scores and successes are
    in percent, shares in [0, 1], intervals are [low, high] of 95 %; None is what cannot be
    computed.

  Raises:
    ValueError: an entry, or too much of one, has not been evaluated.
  """
  metrics = list(metrics)
  samples, left_out = load_samples(store, entries, config.evaluate.seeds, config.evaluate.tasks)
  capped = [sample for sample in samples if sample.entry.usd_budget is not None]
  samples = [sample for sample in samples if sample.entry.usd_budget is None]
  resamples = config.evaluate.bootstrap
  families = {entry.family for entry in entries}
  scripted = config.models.kind == "scripted"
  policies = [policy_row(sample, samples, resamples) for sample in samples]
  best = headline(policies, samples, resamples)
  results = {
    "run": _run_facts(config, metrics, samples, families, len(profiles), left_out),
    "policies": policies,
    "frontiers": contests.frontiers(policies, samples, compared_lam(config), resamples),
    "bopo_alone": contests.bopo_alone(policies, samples, resamples),
    "headline": best,
    "ablations": contests.ablations(policies, samples, resamples),
    "hard_budget": contests.hard_budget(policies),
    "dollar_budget": [dollar_budget_row(sample, resamples) for sample in capped],
    "spend": spending.spend(policies, samples, best, config.profile.easy_rate),
    "costs": spending.costs(profiles),
    "taxonomy": robustness(store, config),
    "training": learning.training(metrics, families),
    "calibration": learning.calibration(metrics, families),
    "methods": list(methods),
    "ledger": run_ledger(store.table(), spent, len(config.models.names)),
  }
  metric, spent_on = results["run"]["sr_metric"], results["spend"]
  results["hard_budget_best"] = contests.best_under_budgets(policies, samples, metric, resamples)
  results["beaten"] = contests.beaten(
    results["frontiers"], results["hard_budget_best"], results["ablations"]
  )
  results["latency"] = latency.latency(spent_on["policies"], samples, scripted)
  results["episodes"] = showcase.showcase(store, policies, samples, best, spent_on["difficulty"])
  results["published"] = published.beside(results)
  if exact is not None:
    best_area = frontier.area(*zip(*exact["optimum"]), exact["small"], exact["large"])
    results["exact"] = {**exact, "area": best_area}
  return results


def _run_facts(
  config: Config,
  metrics: Sequence[Mapping],
  samples: Sequence[Sample],
  families: Collection[str],
  train_tasks: int,
  left_out: Sequence[str],
) -> dict:
  """What was run: environment, models, router, and how many tasks and seeds."""
  noted = [line for line in metrics if line.get("stage") == "environments"]
  scripted = config.models.kind == "scripted"
  return {
    "name": config.name,
    "environment": config.env.kind.rpartition(":")[2],  # the class of one of the user's own
    "environment_mb": max((line["mb_per_live_episode"] for line in noted), default=None),
    "own_tasks": any(line["own_tasks"] for line in noted),
    "models": {"kind": config.models.kind, "names": list(config.models.names)}
    | ({"hosts": _hosts(config)} if config.models.kind == "chat" else {}),
    "prices_usd_per_million": {
      name: dataclasses.asdict(price)
      for name, price in zip(
        config.models.names, prices_of(config.models.names, config.models.prices)
      )
    },
    "router": dataclasses.asdict(config.router),
    "train_tasks": train_tasks,
    "test_tasks": len(samples[0].trials),
    "seeds": config.evaluate.seeds,
    "profile_trials": config.profile.trials,
    "compared_lam": compared_lam(config),
    "left_out_episodes": left_out,
    # Families of which this run has something else under their name.
    "stand_ins": ["zero-shot"] if scripted and "zero-shot" in families else [],
    "sr_metric": "score" if config.env.kind == "scienceworld" else "success",
  }


def _hosts(config: Config) -> list[dict]:
  """Where each model was asked: the host, and whether it is this machine or a private network."""
  return [{"name": e.host, "own": e.own} for e in endpoints(config.models)]
