"""Make an evaluation by hand in which every family has episodes."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tiny import call, episode

from baar_jax.config import Config
from baar_jax.episode import Task
from baar_jax.paper.references import profile_tasks
from baar_jax.report.page import compute_results
from baar_jax.report.table import Results
from baar_jax.rivals.families import FAMILIES
from baar_jax.rollout.jobs import ALWAYS_LARGE, ALWAYS_SMALL, BOUNDARY_KEYS
from baar_jax.rollout.specs import FIRST_SEED, Cap, PolicySpec
from baar_jax.stages.evaluate import choose_on_dev
from baar_jax.store import Store


class Played(NamedTuple):
  """A policy with its episodes. SMALL costs $1 a step, LARGE $5, a decision $0.5."""

  spec: PolicySpec
  models: str  # of each step
  scores: Sequence[
    float
  ]  # of the tasks: an easy one, two hard ones, an intractable one


BOPO = PolicySpec("bopo", lam=0.3, threshold=0.5)
SINGLE_TURN = PolicySpec("single-turn", lam=0.3, update=12, share=0.25)
BOUNDARIES = [
  Played(ALWAYS_SMALL, "SSSS", (1.0, 0.2, 0.0, 0.0)),
  Played(ALWAYS_LARGE, "LLLL", (1.0, 1.0, 1.0, 0.0)),
]
FEW = [
  *BOUNDARIES,
  Played(PolicySpec("random", p=0.5), "SLSL", (1.0, 0.2, 1.0, 0.0)),
  Played(BOPO, "SSSL", (1.0, 1.0, 1.0, 0.0)),
  Played(PolicySpec("first-large", cap=Cap(2)), "LLSS", (1.0, 0.2, 1.0, 0.0)),
  Played(BOPO.under(Cap(1)), "SSLL", (1.0, 1.0, 0.0, 0.0)),
]
EVERY = [
  *FEW,
  Played(PolicySpec("sft", update=6, threshold=0.5), "SSSL", (1.0, 1.0, 0.0, 0.0)),
  Played(
    PolicySpec("vanilla", lam=0.3, update=12, threshold=0.5),
    "SSSS",
    (1.0, 1.0, 1.0, 0.0),
  ),
  Played(PolicySpec("cascade", share=0.25), "SSSL", (1.0, 1.0, 0.0, 0.0)),
  Played(SINGLE_TURN, "SSLL", (1.0, 0.0, 1.0, 0.0)),
  Played(PolicySpec("zero-shot"), "SLLL", (1.0, 1.0, 0.0, 0.0)),
  Played(
    PolicySpec("no-stratified", lam=0.3, threshold=0.5), "LLLL", (1.0, 1.0, 0.0, 0.0)
  ),
  Played(
    PolicySpec("no-reference", lam=0.3, threshold=0.5), "SSSS", (1.0, 0.0, 0.0, 0.0)
  ),
  Played(
    PolicySpec("no-hard-bonus", lam=0.9, threshold=0.5), "SSSS", (1.0, 0.0, 0.0, 0.0)
  ),
  Played(SINGLE_TURN.under(Cap(1)), "SSLS", (1.0, 0.0, 0.0, 0.0)),
]


def specs(policies: list[Played]) -> list[PolicySpec]:
  return [played.spec for played in policies]


def config(robustness: tuple[int, ...] = ()) -> Config:
  """Return a configuration of ScienceWorld with scripted models."""
  result = Config()
  result.bopo.lam, result.evaluate.seeds, result.evaluate.bootstrap = (0.3,), 2, 200
  result.profile.robustness = robustness
  return result


def fill(policies: list[Played]) -> Store:
  """Store these policies' episodes, and a profile of two training tasks.

  Every policy has two evaluation seeds, which are alike on dev and test.
  """
  store = Store(":memory:")
  tasks = max(len(played.scores) for played in policies)
  for split, count in (("train", 2), ("dev", tasks), ("test", tasks)):
    store.put_tasks(
      split, [Task(f"{split}-{i}", split, "do it", 40) for i in range(count)]
    )
  # On the second training task SMALL is costlier than LARGE, and fails.
  for name, models, score in (
    ("always-small", "SSSSSSSSS", 0.0),
    ("always-large", "L", 1.0),
  ):
    store.add(episode("train-0", name, 0, models[:1], 1.0))
    store.add(episode("train-1", name, 0, models, score))
  # The evaluation does not read this seed.
  store.add(episode("test-0", "always-small", 7, "SSSSSSSS", 0.0))
  for spec, models, scores in policies:
    for i, score in enumerate(scores):
      # BoPO calls LARGE on hard tasks only.
      used = "SSSS" if spec == BOPO and i in (0, 3) else models
      for split, trial in itertools.product(("dev", "test"), range(2)):
        seed = FIRST_SEED[split] + trial
        e = episode(f"{split}-{i}", spec.key, seed, used, score)
        e.call_budget = spec.cap.calls
        for step in e.steps:
          step.calls = [call(step.model, 5.0 if step.model else 1.0, tokens=90)]
          step.router_cost_usd = 0.5
          if spec.family == "zero-shot":
            step.router_cost_usd = 0.0
            step.router_latency_s = 0.25
            step.calls.append(call(2, 0.125, tokens=160, kind="judge"))
          if spec.family == "cascade":
            step.router_latency_s = 0.25
            if step.model == 1:
              proposal = call(0, 0.5, tokens=45, kind="proposal", replayed=trial == 1)
              step.calls.append(proposal)
        store.add(e)
  return store


def compute(
  store: Store,
  listed: list[PolicySpec],
  settings: Config,
  directory: Path = Path("none"),
) -> Results:
  """Compute the report's results on what dev chooses of these policies."""
  choice = choose_on_dev(store, listed, settings)
  ids = [task.id for task in store.tasks("train")]
  trials = [e for key in BOUNDARY_KEYS for e in store.episodes(key)]
  profiles = profile_tasks(ids, trials)
  return compute_results(store, choice, profiles, settings, directory, FAMILIES)


def figures(
  policies: list[Played],
  settings: Config | None = None,
  directory: Path = Path("none"),
) -> Results:
  """Compute the report's results on these policies."""
  return compute(fill(policies), specs(policies), settings or config(), directory)
