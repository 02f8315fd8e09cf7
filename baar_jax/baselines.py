"""Stage baselines: trains the rivals of BoPO and its ablations, from what the run has stored."""

import dataclasses
from collections.abc import Iterator

from baar_jax import bopo, cascade, sft, single_turn, vanilla, zero_shot
from baar_jax.config import ABLATIONS, Config, ablation_lam
from baar_jax.references import stratified_random
from baar_jax.run import UNSTRATIFIED, Run
from baar_jax.taxonomy import load_profiles

TRAIN = {"cascade": cascade.main, "single-turn": single_turn.main, "vanilla": vanilla.main}
OWN = "learning rates, updates and lam: by hand, on earlier runs with these environments' tasks"
SFTS = "SFT's, with a number of updates of their own that was set once"


def main(run: Run) -> None:
  config = run.config.baselines
  if config.rivals or config.ablations:
    sft.load_sft(run)  # what is not trained yet is said before anything is run
  for rival in config.rivals:
    if rival in TRAIN:
      TRAIN[rival](run)
  for ablation in config.ablations:
    other = run.ablated(ablation)
    if ablation == UNSTRATIFIED:
      sft.main(other)
    bopo.train(other, ablation_lam(run.config))
  for method in methods(run):
    run.log_once(stage="method", **method)


def methods(run: Run) -> Iterator[dict]:
  """What each method has learned from and with: episodes that it or its initial router has seen in
  training, settings, and how those were chosen."""
  c = run.config
  profiled = sum(len(p.small) + len(p.large) for p in load_profiles(run).values())
  stored = profiled + len(run.store.keys(stratified_random(c.references.samples).name))
  tasks = min(c.bopo.tasks_per_update, len(run.store.tasks("train")))
  rolled_out = stored + c.bopo.updates * tasks * c.bopo.group_size
  fitted = dataclasses.asdict(cascade.settings(run))
  bopos = dataclasses.asdict(c.bopo)

  def method(family: str, episodes: int, settings: dict, chosen: str) -> dict:
    chosen = f"{chosen}; {_thresholds(c, family)}"
    return {"family": family, "training_episodes": episodes, "settings": settings, "chosen": chosen}

  yield method("sft", stored, dataclasses.asdict(c.sft), OWN)
  yield method("bopo", rolled_out, bopos, OWN)
  if "zero-shot" in c.baselines.rivals:
    judge = c.baselines.judge
    settings = {"judge": judge.names[0], "kind": run.pair.kind, "temperature": judge.temperature}
    settings |= {"max_completion_tokens": judge.max_completion_tokens, "tries": zero_shot.TRIES}
    note = {"family": "zero-shot", "training_episodes": 0}
    yield note | {"settings": settings, "chosen": "its prompt was written once"}
  if "cascade" in c.baselines.rivals:
    yield method("cascade", stored, fitted, SFTS)
  if "single-turn" in c.baselines.rivals:
    yield method("single-turn", stored if c.pretrain.epochs else profiled, fitted, SFTS)
  if "vanilla" in c.baselines.rivals:
    dapo = {name: bopos[name] for name in ("lam", "learning_rate", "adam_eps", "updates", "epochs")}
    dapo |= {"clip_low": vanilla.CLIP_LOW, "clip_high": vanilla.CLIP_HIGH}
    dapo["unit_of_cost"] = "mean of always-LARGE"
    yield method("vanilla", rolled_out, dapo, "BoPO's, clips of DAPO's paper")
  for ablation in c.baselines.ablations:
    section, part, value = ABLATIONS[ablation]
    settings = {f"{section}.{part}": value, "lam": ablation_lam(c)}
    yield method(ablation, rolled_out, settings, "BoPO's but for what is left out")


def _thresholds(config: Config, family: str) -> str:
  """How the thresholds of a family's points came about."""
  c, parts = config.evaluate, ["the more probable model"]
  if c.shares:
    asked = "its decisions" if family != "cascade" else "SMALL's steps"
    shares = ", ".join(f"{share:g}" for share in c.shares)
    parts.append(f"thresholds at the shares {shares} of {asked} in stored training episodes")
  if c.thresholds:
    parts.append(f"thresholds {', '.join(f'{t:g}' for t in c.thresholds)}, set by hand")
  return "points: " + ", ".join(parts)
