"""The policies that a server decides by: rules, and the trained router of a run."""

import contextlib
from pathlib import Path
from types import SimpleNamespace

from jax.sharding import Mesh

from baar_jax.config import Config
from baar_jax.episode import SMALL
from baar_jax.rollout import policies
from baar_jax.rollout.policies import Policy, always, random_rule, stratified_rule
from baar_jax.router.policy import ConditionedPolicy, RouterPolicy, Sample, Threshold
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import open_view
from baar_jax.store import read_config
from baar_jax.train.checkpoint import Checkpoints, checkpoint_directory, load_router
from baar_jax.train.values import blind_view, load_heads, load_trunk

RANDOM_P = 0.5


def read_run(directory: Path) -> Config:
  """The configuration of a run's directory. Raises ValueError where it cannot be read."""
  if not (config := read_config(directory)):
    raise ValueError(f"{directory} is no directory of a run: it has no config.json")
  return config


def open_router(
  directory: Path, config: Config, mesh: Mesh, rows: int, sample: bool = False
) -> RouterPolicy:
  """The trained router of a run: the one that knows its budget, else BoPO's, else SFT's.

  To `sample` it is one of the last two, and samples for BoPO's next update.

  The first one decides at an episode's own price of a dollar, else at the least, as a cap says what
  may be spent; its name says none. Of several weights of cost the first is taken. At most `rows`
  episodes are live at once. Raises ValueError if there is none.
  """
  run = SimpleNamespace(dir=directory, config=config, mesh=mesh, train_seed=0, ablation="")
  run.tokenizer = directory / "tokenizer"
  parameters = dict(policies.routers(config))
  value = checkpoint_directory(directory, config, "value")
  if policies.CONDITIONED in parameters and value.exists() and not sample:
    name = policies.policy_name(policies.CONDITIONED, parameters[policies.CONDITIONED])
    parts = load_trunk(run), blind_view(run), load_heads(run), config.value.prices
    return ConditionedPolicy(name, *parts, rows, mesh)
  model, update = _load_newest(directory, config, mesh)
  view = open_view(config, run.tokenizer)
  if sample:
    name = policies.rollouts_name("bopo", config.bopo.lam[0], update + 1)
    return RouterPolicy(name, model, view, Sample(name), rows, mesh)
  settings = {"update": update, "lam": config.bopo.lam[0]} if update else {}
  family = "bopo" if update else "sft"
  settings = parameters[family] | settings | {"threshold": policies.ARGMAX}
  name = policies.policy_name(family, settings)
  return RouterPolicy(name, model, view, Threshold(policies.ARGMAX), rows, mesh)


def _load_newest(directory: Path, config: Config, mesh: Mesh) -> tuple[Qwen2, int]:
  """BoPO's router and its updates so far; without one SFT's, and 0."""
  place, lam = (directory, config, mesh), config.bopo.lam[0]
  bopo = checkpoint_directory(directory, config, "bopo", lam)
  if bopo.exists():
    with contextlib.closing(Checkpoints(bopo)) as checkpoints:
      update = checkpoints.update
    if update:  # it may have asked for sessions in vain
      return load_router(*place, "bopo", lam), update
  return load_router(*place, "sft"), 0


def open_policies(directory: Path, config: Config, mesh: Mesh) -> dict[str, Policy]:
  """The policies that a client can name, with the configured one.

  Raises ValueError if it needs a router and there is none.
  """
  c, rows = config.serve, config.serve.max_sessions
  name = policies.policy_name("random", {"p": RANDOM_P})
  named = {
    "small": always(SMALL, policies.ALWAYS_SMALL),
    "large": always(len(config.models.names) - 1, policies.ALWAYS_LARGE),
    "random": Policy(name, lambda live: random_rule(live, RANDOM_P)),
    "stratified": Policy(
      policies.stratified_name(config),
      lambda live: stratified_rule(live, config.references.samples),
    ),
  }
  if c.policy in ("router", "sample"):
    source = Path(c.router) if c.router else directory
    trained = read_run(source) if c.router else config
    if len(trained.models.names) != len(config.models.names):
      text = f"routes between {len(trained.models.names)} models"
      raise ValueError(f"--config.serve.router={c.router} {text}; name as many to be served")
    if not (source / "tokenizer").exists():
      text = f"{source} has no trained router: set --config.serve.router to a run that has one"
      raise ValueError(f"{text}, or --config.serve.policy=small")
    named[c.policy] = open_router(source, trained, mesh, rows, c.policy == "sample")
  return named
