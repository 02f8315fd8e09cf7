"""Make an evaluation by hand in which every family has episodes."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from tiny import call, episode

from baar_jax.config import Config
from baar_jax.episode import Episode, Task
from baar_jax.families.family import RouterSpec
from baar_jax.families.rules import RandomSpec
from baar_jax.report.compare import Results
from baar_jax.report.table import load_split
from baar_jax.rollout.jobs import ALWAYS_LARGE, ALWAYS_SMALL
from baar_jax.rollout.specs import Cap, PolicySpec
from baar_jax.stages.evaluate import LABELS, choose_on_dev
from baar_jax.store import Store
from configs.sciworld import ABLATIONS


class Played(NamedTuple):
  """A policy with its episodes. SMALL costs $1 a step, LARGE $5, a decision $0.5.

  Attributes:
    spec: the policy.
    models: the letter of the model at each step.
    scores: the scores of an easy task, two hard ones and an intractable one.
  """

  spec: PolicySpec
  models: str
  scores: Sequence[float]


BOPO = RouterSpec("bopo", lam=0.3, threshold=0.5)
SINGLE_TURN = RouterSpec("single-turn", lam=0.3, update=12, share=0.25)
ALL = (1.0, 1.0, 1.0, 0.0)
TWO = (1.0, 1.0, 0.0, 0.0)
ONE = (1.0, 0.0, 0.0, 0.0)
BOUNDARIES = [
  Played(ALWAYS_SMALL, "SSSS", (1.0, 0.2, 0.0, 0.0)),
  Played(ALWAYS_LARGE, "LLLL", ALL),
]
FEW = [
  *BOUNDARIES,
  Played(RandomSpec("random", 0.5), "SLSL", (1.0, 0.2, 1.0, 0.0)),
  Played(BOPO, "SSSL", ALL),
  Played(PolicySpec("first-large", cap=Cap(2)), "LLSS", (1.0, 0.2, 1.0, 0.0)),
  Played(BOPO.under(Cap(1)), "SSLL", TWO),
]
EVERY = [
  *FEW,
  Played(RouterSpec("sft", update=6, threshold=0.5), "SSSL", TWO),
  Played(RouterSpec("vanilla", lam=0.3, update=12, threshold=0.5), "SSSS", ALL),
  Played(RouterSpec("cascade", share=0.25), "SSSL", TWO),
  Played(SINGLE_TURN, "SSLL", (1.0, 0.0, 1.0, 0.0)),
  Played(PolicySpec("zero-shot"), "SLLL", TWO),
  Played(RouterSpec("no-stratified", lam=0.3, threshold=0.5), "LLLL", TWO),
  Played(RouterSpec("no-reference", lam=0.3, threshold=0.5), "SSSS", ONE),
  Played(RouterSpec("no-hard-bonus", lam=0.9, threshold=0.5), "SSSS", ONE),
  Played(SINGLE_TURN.under(Cap(1)), "SSLS", ONE),
]


def specs(policies: list[Played]) -> list[PolicySpec]:
  return [played.spec for played in policies]


def config() -> Config:
  """Return a configuration of ScienceWorld with scripted models and ablations."""
  result = Config()
  result.baselines.ablations = ABLATIONS
  result.bopo.lam = (0.3,)
  result.evaluate.seeds = 2
  return result


def fill(policies: list[Played]) -> Store:
  """Store these policies' episodes.

  Every policy has two evaluation seeds, which are alike on dev and test.
  """
  store = Store(":memory:")
  tasks = max(len(played.scores) for played in policies)
  for split in ("dev", "test"):
    listed = [Task(f"{split}-{i}", split, "do it", 40) for i in range(tasks)]
    store.put_tasks(split, listed)
  # The evaluation does not read trials of the profile.
  store.add(episode("test-0", "always-small", 7, "SSSSSSSS", 0.0))
  for played, split, trial in itertools.product(policies, ("dev", "test"), range(2)):
    for i, score in enumerate(played.scores):
      models = played.models
      if played.spec == BOPO and i in (0, 3):
        models = "SSSS"  # BoPO calls LARGE on hard tasks only.
      name = f"{split}-{i}"
      made = episode(name, played.spec.key, trial, models, score, purpose=split)
      made.call_budget = played.spec.cap.calls
      add_costs(made, played.spec.family, is_replayed=trial == 1)
      store.add(made)
  return store


def add_costs(made: Episode, family: str, is_replayed: bool) -> None:
  """Add to an episode what its family's decisions cost.

  Args:
    made: the episode.
    family: the policy's family.
    is_replayed: whether a cascade's proposals are replayed.
  """
  for step in made.steps:
    step.router_cost_usd = 0.5
    if family == "zero-shot":
      step.router_cost_usd = 0.0
      step.calls.append(call(2, 0.125, kind="judge"))
    if family == "cascade" and step.model == 1:
      step.calls.append(call(0, 0.5, kind="proposal", replayed=is_replayed))


def read(store: Store, policies: list[Played], settings: Config) -> Results:
  """Compute the report's results on stored episodes of these policies."""
  choice = choose_on_dev(store, specs(policies), settings)
  data = load_split(store, choice.entries, settings, "test")
  none = pd.DataFrame()
  return Results(settings, choice, data, LABELS, none, [], none)


def figures(policies: list[Played], settings: Config | None = None) -> Results:
  """Compute the report's results on these policies."""
  return read(fill(policies), policies, settings or config())
