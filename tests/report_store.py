"""A hand-made evaluation in which every family has episodes, for the tests of the
report.
"""

import itertools
from pathlib import Path

from baar_jax.rollout.policies import Entry
from tiny import call, episode

from baar_jax.config import DEV_SEEDS, TEST_SEEDS, Config
from baar_jax.episode import Task
from baar_jax.report.page import compute_results
from baar_jax.report.results import Results
from baar_jax.stages.evaluate import choose_on_dev
from baar_jax.store import Store

SEEDS = {"dev": DEV_SEEDS, "test": TEST_SEEDS}
BOPO, SHARE = {"lam": 0.3, "threshold": 0.5}, {"lam": 0.3, "update": 12, "share": 0.25}
# Policy: family, parameters, K, models of each step, and scores of the four tasks,
# which are easy, hard, hard and intractable. SMALL costs $1 a step, LARGE $5, and a
# router's decision $0.5.
BOUNDARIES = {
  "always-small": ("always-small", {}, None, "SSSS", (1.0, 0.2, 0.0, 0.0)),
  "always-large": ("always-large", {}, None, "LLLL", (1.0, 1.0, 1.0, 0.0)),
}
FEW = BOUNDARIES | {
  "random(p=0.5)": ("random", {"p": 0.5}, None, "SLSL", (1.0, 0.2, 1.0, 0.0)),
  "bopo(lam=0.3)": ("bopo", BOPO, None, "SSSL", (1.0, 1.0, 1.0, 0.0)),
  "first-large(K=2)": ("first-large", {}, 2, "LLSS", (1.0, 0.2, 1.0, 0.0)),
  "bopo(lam=0.3,K=1)": ("bopo", BOPO, 1, "SSLL", (1.0, 1.0, 0.0, 0.0)),
}
EVERY = FEW | {
  "sft": ("sft", {"update": 6, "threshold": 0.5}, None, "SSSL", (1.0, 1.0, 0.0, 0.0)),
  "vanilla": ("vanilla", {**BOPO, "update": 12}, None, "SSSS", (1.0, 1.0, 1.0, 0.0)),
  "cascade": ("cascade", {"share": 0.25}, None, "SSSL", (1.0, 1.0, 0.0, 0.0)),
  "single-turn": ("single-turn", SHARE, None, "SSLL", (1.0, 0.0, 1.0, 0.0)),
  "zero-shot": ("zero-shot", {}, None, "SLLL", (1.0, 1.0, 0.0, 0.0)),
  "no-stratified": ("no-stratified", BOPO, None, "LLLL", (1.0, 1.0, 0.0, 0.0)),
  "no-reference": ("no-reference", BOPO, None, "SSSS", (1.0, 0.0, 0.0, 0.0)),
  "no-hard-bonus": (
    "no-hard-bonus",
    {**BOPO, "lam": 0.9},
    None,
    "SSSS",
    (1.0, 0.0, 0.0, 0.0),
  ),
  "single-turn(K=1)": ("single-turn", SHARE, 1, "SSLS", (1.0, 0.0, 0.0, 0.0)),
}


def entries(policies: dict) -> list[Entry]:
  return [
    Entry(family, fields, name, K) for name, (family, fields, K, *_) in policies.items()
  ]


def config(lam: tuple[float, ...] = (0.3,), robustness: tuple[int, ...] = ()) -> Config:
  """Of ScienceWorld with scripted models."""
  result = Config()
  result.bopo.lam, result.evaluate.seeds, result.evaluate.bootstrap = lam, 2, 200
  result.profile.robustness = robustness
  return result


def fill(policies: dict) -> Store:
  """A store with these policies' episodes, two seeds each and alike on dev and test,
  and a profile of two training tasks."""
  store = Store(":memory:")
  tasks = max(len(scores) for *_, scores in policies.values())
  for split, count in (("train", 2), ("dev", tasks), ("test", tasks)):
    store.put_tasks(
      split, [Task(f"{split}-{i}", split, "do it", 40) for i in range(count)]
    )
  # On the second training task SMALL is the dearer one, and alone without success.
  for name, models, score in (
    ("always-small", "SSSSSSSSS", 0.0),
    ("always-large", "L", 1.0),
  ):
    store.add(episode("train-0", name, 0, models[:1], 1.0))
    store.add(episode("train-1", name, 0, models, score))
  # A seed that does not count.
  store.add(episode("test-0", "always-small", 7, "SSSSSSSS", 0.0))
  for policy, (family, _, K, models, scores) in policies.items():
    for i, score in enumerate(scores):
      # BoPO calls LARGE on the hard tasks alone.
      used = "SSSS" if policy == "bopo(lam=0.3)" and i in (0, 3) else models
      for split, seed in itertools.product(SEEDS, range(2)):
        e = episode(f"{split}-{i}", policy, SEEDS[split] + seed, used, score)
        e.call_budget = K
        for step in e.steps:
          step.calls = [call(step.model, 5.0 if step.model else 1.0, tokens=90)]
          step.router_cost_usd = 0.5
          if family == "zero-shot":
            step.router_cost_usd, judgement = (
              0.0,
              call(2, 0.125, tokens=160, kind="judge"),
            )
            step.router_latency_s, step.calls = 0.25, [*step.calls, judgement]
          if family == "cascade":
            step.router_latency_s = 0.25
            proposal = call(0, 0.5, tokens=45, kind="proposal", replayed=seed == 1)
            step.calls += [proposal] * (step.model == 1)
        store.add(e)
  return store


def compute(
  store: Store, listed: list[Entry], settings: Config, directory: Path = Path("none")
) -> Results:
  """Compute the report's results on what dev chooses of these entries."""
  choice = choose_on_dev(store, listed, settings)
  return compute_results(store, choice, 2, settings, directory)


def figures(
  policies: dict, settings: Config | None = None, directory: Path = Path("none")
) -> Results:
  """Compute the report's results on these policies."""
  return compute(fill(policies), entries(policies), settings or config(), directory)
