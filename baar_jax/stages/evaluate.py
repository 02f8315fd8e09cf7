"""Run the stages evaluate and report."""

import itertools
from collections.abc import Sequence

import pandas as pd

from baar_jax.config import ABLATIONS, Config
from baar_jax.families.conditioned import save_default
from baar_jax.families.table import (
  FAMILIES,
  list_specs,
  open_with,
  require_trained,
)
from baar_jax.report import frontier
from baar_jax.report.compare import Choice, Results, label_policy
from baar_jax.report.table import (
  COMPARED,
  COMPARED_COLUMNS,
  METRICS,
  Evaluation,
  load_split,
  measure_robustness,
  read_ledger,
)
from baar_jax.rollout.jobs import (
  BOPO,
  BOUNDARY_KEYS,
  CONDITIONED,
  list_evaluation,
  new_trials,
)
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import Run, load_profiles
from baar_jax.store import BUDGETS, Store

# The label of each family in the report.
LABELS = {name: family.label for name, family in FAMILIES.items()}
LABELS[COMPARED] = "BoPO at the same λ"


def main(run: Run) -> None:
  """Collect the episodes of every policy on dev, then of the chosen ones on test.

  Their episodes on dev decide which policies are chosen, and which cost weight the
  budget-conditioned router uses by default.
  """
  require_trained(run)
  specs = run.source.list_playable(list_specs(run.config))
  _collect(run, specs, "dev")
  choice = choose_on_dev(run.store, specs, run.config)
  if choice.default and run.is_main:
    save_default(run.files(), choice.default.cost_weight)
  _collect(run, choice.entries, "test")


def _collect(run: Run, specs: Sequence[PolicySpec], split: str) -> None:
  """Collect the policies' episodes on a split.

  The evaluation seeds are shared out among the training seeds' routers.

  Args:
    run: the run.
    specs: the policies, in the order of `list_specs`.
    split: "dev" or "test".
  """
  for files in run.all_files():
    jobs = list_evaluation(run.config, run.tasks(split), split, files.training_seed)
    for spec in specs:
      title = f"{split} {label_policy(spec, LABELS)}"
      run.play(title, {spec: jobs}, open_with(files))


def choose_on_dev(
  store: Store, planned: Sequence[PolicySpec], config: Config
) -> Choice:
  """Choose the policies to play on test, by their results on dev.

  These policies are chosen:

  - the boundary policies,
  - each family's policies on its upper hull, by each of METRICS,
  - each family's policy with the highest sum of SR and success under each cap (our
    choice; the paper also has BoPO's with the smallest and the largest `lam`),
  - a typical policy of each family (see `Choice`),
  - the default policy of the budget-conditioned router (see `choose_default`).

  Of equal policies the cheapest is chosen, and of equally cheap ones the first.
  Episodes on test play no part, so that the results on test are unbiased.

  Args:
    store: the run's store.
    planned: the policies to choose from, in the report's order.
    config: the run's configuration.

  Raises:
    ValueError: a policy lacks episodes on dev.
  """
  data = load_split(store, planned, config, "dev")
  # Means of the same numbers may differ in their last bits. Rounding makes them equal.
  mean = data.mean(COMPARED_COLUMNS).round(12)
  is_capped = data.entries[[*BUDGETS]].notna().any(axis=1)
  free = data.entries[~is_capped]
  # A policy with a cap on calls may be a point of a frontier, for a router may cap
  # itself (our choice; the paper's frontiers have no caps).
  pointed = data.entries[data.entries.usd_budget.isna()]
  points = dict(pointed.groupby("family", sort=False).groups)
  if config.baselines.ablations:
    # Ablations are played without a cap, so they are compared with such policies.
    points[COMPARED] = free.index[free.family == BOPO]
  vertices = {}
  for family, metric in itertools.product(points, METRICS):
    vertices[family, metric] = _on_hull(mean, points[family], metric)
  main = CONDITIONED if CONDITIONED in points else BOPO
  middle_usd = mean.cost_usd[[*BOUNDARY_KEYS]].mean()
  typical = {}
  distance_usd = (mean.cost_usd - middle_usd).abs()
  for family, names in free.groupby("family").groups.items():
    if family not in ABLATIONS:
      on_hull = names.intersection(vertices[family, data.sr])
      typical[family] = distance_usd[names if on_hull.empty else on_hull].idxmin()
  merit = mean[[*METRICS]].sum(axis=1).round(9)
  # Of equal policies `idxmax` returns the first, which is the cheapest in this order.
  capped = data.entries[is_capped].assign(merit=merit, cost_usd=mean.cost_usd)
  capped = capped.sort_values("cost_usd", kind="stable")
  best = capped.groupby(["family", *BUDGETS], dropna=False).merit.idxmax()
  ours = {s.key: s for s in planned if s.family == CONDITIONED and not s.cap}
  default = ours.get(choose_default(data, [*ours])) if ours else None
  chosen = {*typical.values(), *best}.union(*vertices.values())
  listed = [spec for spec in planned if spec.key in chosen or spec is default]
  return Choice(mean, listed, main, [*best], vertices, typical, default)


def choose_default(data: Evaluation, names: Sequence[str]) -> str:
  """Choose the default policy of the budget-conditioned router (our choice).

  It is the cheapest of some policies whose mean score is at most one
  standard error below the highest (the rule of Breiman et al. 1984 for pruning trees).
  The standard error is that of the mean over tasks of the difference to the policy with
  the highest score, so it is paired by task: all policies play the same tasks, and a
  task that is hard for all of them says nothing about their difference. A policy that
  loses one task of N is exactly one standard error below, and is near enough.

  Args:
    data: the evaluation on dev.
    names: keys of the router's policies without a cap.

  Returns:
    The key of the policy.
  """
  usd_P = data.per_task("cost_usd").mean(axis=1)[names]
  score_PxN = data.per_task("score").loc[names]
  gap_PxN = score_PxN.loc[score_PxN.mean(axis=1).idxmax()] - score_PxN
  error_P = gap_PxN.sem(axis=1).fillna(0.0)  # One task has no standard error.
  return usd_P[gap_PxN.mean(axis=1) <= error_P + 1e-9].idxmin()


def _on_hull(mean: pd.DataFrame, names: Sequence[str], metric: str) -> list[str]:
  """Return those of some policies that are on the upper hull with the boundaries.

  Args:
    mean: the means on dev, a row per policy.
    names: keys of the policies.
    metric: one of METRICS.

  Returns:
    Keys of the policies; empty unless always-LARGE costs more and scores more than
      always-SMALL.
  """
  points = mean.loc[names]
  small, large = mean.loc[[*BOUNDARY_KEYS], ["cost_usd", metric]].to_numpy()
  if (small >= large).any():
    return []
  return [
    *points.index[frontier.vertices(points.cost_usd, points[metric], small, large)]
  ]


def report(run: Run) -> None:
  """Write the results as a page, figures and tables, and print the main results."""
  config = run.config
  # If trials are missing, these calls raise the error that names the missing stage.
  profiles = load_profiles(run.store, config, "train")
  repeats = {}
  for count in config.profile.robustness:
    repeats[count] = load_profiles(
      run.store, config, "train", purpose="robustness", trials=new_trials(count)
    )
  # All processes must open checkpoints together.
  require_trained(run)
  listed = run.source.list_playable(list_specs(config))
  if not run.is_main:
    return
  # The page needs matplotlib, which takes a second to import. Only this stage needs it.
  from baar_jax.report import page

  choice = choose_on_dev(run.store, listed, config)
  results = Results(
    config=config,
    choice=choice,
    data=load_split(run.store, choice.entries, config, "test"),
    labels=LABELS,
    robustness=measure_robustness(profiles, config.profile.trials, repeats),
    inverted=[p.cost_small > p.cost_large for p in profiles.values()],
    ledger=read_ledger(config, run.dir),
  )
  print(page.terminal_table(results))
  print(f"report: {page.write(results, run.dir / 'report')}")
