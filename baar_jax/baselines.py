"""Stage baselines: trains the rivals of BoPO and its ablations, from what the run has stored."""

import dataclasses
from collections.abc import Iterator

from baar_jax import bopo, cascade, sft, single_turn, vanilla
from baar_jax.config import ABLATIONS
from baar_jax.references import stratified_random
from baar_jax.run import UNSTRATIFIED, Run
from baar_jax.taxonomy import load_profiles

TRAIN = {"cascade": cascade.main, "single-turn": single_turn.main, "vanilla": vanilla.main}
THRESHOLDS = "thresholds: the same shares of training tasks' decisions for all methods"
OWN = "learning rates, updates and lam: by hand, on earlier runs with these environments' tasks"
SFTS = "SFT's, with a number of updates of their own that was set once"


def main(run: Run) -> None:
  config = run.config.baselines
  if not config.rivals and not config.ablations:
    return
  sft.load_sft(run)  # what is not trained yet is said before anything is run
  for rival in config.rivals:
    if rival in TRAIN:
      TRAIN[rival](run)
  for ablation in config.ablations:
    other = run.ablated(ablation)
    if ablation == UNSTRATIFIED:
      sft.main(other)
    bopo.train(other, config.ablation_lam)
  for method in methods(run):
    run.log(stage="method", **method)


def methods(run: Run) -> Iterator[dict]:
  """What each method has learned from and with: training episodes per router, settings, and how
  those were chosen."""
  c = run.config
  profiled = sum(len(p.small) + len(p.large) for p in load_profiles(run).values())
  stored = profiled + len(run.store.keys(stratified_random(c.references.samples).name))
  rolled_out = c.bopo.updates * c.bopo.tasks_per_update * c.bopo.group_size
  fitted = dataclasses.asdict(cascade.settings(run))
  bopos = dataclasses.asdict(c.bopo)
  yield _method("sft", stored, dataclasses.asdict(c.sft), OWN)
  yield _method("bopo", stored + rolled_out, bopos, OWN)
  if "zero-shot" in c.baselines.rivals:
    judge = {"judge": c.baselines.judge.names[0], "models": run.pair.kind}
    yield {"family": "zero-shot", "training_episodes": 0, "settings": judge, "chosen": "none"}
  if "cascade" in c.baselines.rivals:
    yield _method("cascade", stored, fitted, SFTS)
  if "single-turn" in c.baselines.rivals:
    yield _method("single-turn", profiled, fitted, SFTS)
  if "vanilla" in c.baselines.rivals:
    dapo = {name: bopos[name] for name in ("lam", "learning_rate", "adam_eps", "updates", "epochs")}
    dapo |= {"clip_low": vanilla.CLIP_LOW, "clip_high": vanilla.CLIP_HIGH}
    yield _method("vanilla", stored + rolled_out, dapo, "BoPO's, clips of DAPO's paper")
  for ablation in c.baselines.ablations:
    section, part, value = ABLATIONS[ablation]
    settings = {f"{section}.{part}": value, "lam": c.baselines.ablation_lam}
    yield _method(ablation, stored + rolled_out, settings, "BoPO's but for what is left out")


def _method(family: str, episodes: int, settings: dict, chosen: str) -> dict:
  chosen = f"{chosen}; {THRESHOLDS}"
  return {"family": family, "training_episodes": episodes, "settings": settings, "chosen": chosen}
