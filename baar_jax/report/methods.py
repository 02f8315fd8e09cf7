"""How each method of a run was trained and set: what its figures have to be read with."""

import dataclasses
from collections.abc import Iterator

from baar_jax.config import ABLATIONS, Config, compared_lam
from baar_jax.rollout.entries import stratified_name
from baar_jax.router import zero_shot
from baar_jax.run import UNSTRATIFIED, Run
from baar_jax.stages import cascade, vanilla
from baar_jax.train.dataset import load_profiles

CONFIGURED = (
  "set by the configuration (in this project's own by hand, on earlier runs with these test tasks)"
)


def methods(run: Run) -> Iterator[dict]:
  """Per method: family, training_episodes (those that were run for one of its routers or for the
  one that it starts from), settings, and where they come from."""
  c = run.config
  profiled = sum(len(p.small) + len(p.large) for p in load_profiles(run.store, c).values())
  stored = profiled + len(run.store.keys(stratified_name(c)))
  least = stored if c.pretrain.epochs else profiled  # pretraining reads all that is stored
  tasks = min(c.bopo.tasks_per_update, len(run.store.tasks("train")))
  rolled_out = c.bopo.updates * tasks * c.bopo.group_size
  fitted = dataclasses.asdict(cascade.settings(run))
  bopos = dataclasses.asdict(c.bopo)

  def method(family: str, episodes: int, settings: dict, chosen: str) -> dict:
    chosen = f"{chosen}; {_points(c, family)}"
    return {"family": family, "training_episodes": episodes, "settings": settings, "chosen": chosen}

  yield method("sft", stored, dataclasses.asdict(c.sft), _changed(c.sft))
  yield method("bopo", stored + rolled_out, bopos, _changed(c.bopo))
  if "zero-shot" in c.baselines.rivals:
    judge = c.baselines.judge
    settings = {"judge": judge.names[0], "kind": run.pair.kind, "temperature": judge.temperature}
    settings |= {"max_completion_tokens": judge.max_completion_tokens, "tries": zero_shot.TRIES}
    note = {"family": "zero-shot", "training_episodes": 0}
    yield note | {"settings": settings, "chosen": "its prompt was written once"}
  as_sft = "as SFT's, with a number of updates of their own that was set once"
  if "cascade" in c.baselines.rivals:
    yield method("cascade", stored, fitted, as_sft)
  if "single-turn" in c.baselines.rivals:
    yield method("single-turn", least, fitted, as_sft)
  if "vanilla" in c.baselines.rivals:
    dapo = {name: bopos[name] for name in ("lam", "learning_rate", "adam_eps", "updates", "epochs")}
    dapo |= {"clip_low": vanilla.CLIP_LOW, "clip_high": vanilla.CLIP_HIGH}
    dapo["unit_of_cost"] = "mean of always-LARGE"
    yield method("vanilla", stored + rolled_out, dapo, "BoPO's, clips of DAPO's paper")
  for ablation in c.baselines.ablations:
    section, part, value = ABLATIONS[ablation]
    settings = {f"{section}.{part}": value, "lam": compared_lam(c)}
    before = least if ablation == UNSTRATIFIED else stored
    yield method(ablation, before + rolled_out, settings, "BoPO's but for what is left out")


def _changed(section) -> str:
  """Which settings of a part of the configuration are other than its defaults."""
  defaults = type(section)()
  names = [
    field.name
    for field in dataclasses.fields(section)
    if getattr(section, field.name) != getattr(defaults, field.name)
  ]
  rest = "the defaults: the paper's where it states one"
  return f"{', '.join(names)}: {CONFIGURED}; else {rest}" if names else rest


def _points(config: Config, family: str) -> str:
  """How the thresholds of a family's points came about."""
  c, parts = config.evaluate, ["the more probable model"]
  if c.shares:
    asked = "its decisions" if family != "cascade" else "SMALL's steps"
    shares = ", ".join(f"{share:g}" for share in c.shares)
    parts.append(f"thresholds at the shares {shares} of {asked} in stored training episodes")
  if c.thresholds:
    parts.append(f"thresholds {', '.join(f'{t:g}' for t in c.thresholds)}, {CONFIGURED}")
  return "points: " + ", ".join(parts)
