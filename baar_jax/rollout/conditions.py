"""Tell what the episodes of untrained policies depend on, and reuse episodes."""

import json
from pathlib import Path

from baar_jax.config import RECORDED, SEEDS, Config
from baar_jax.envs import base
from baar_jax.envs.code.adapter import read_recording
from baar_jax.episode import Task
from baar_jax.llms.history import NO_ACTION, NO_CODE, open_conversation
from baar_jax.llms.prices import prices_of
from baar_jax.rollout.specs import FIRST_SEED, UNTRAINED
from baar_jax.store import CHANGEABLE, CONDITIONS, Store, flatten


def read_conditions(config: Config) -> dict[str, object]:
  """Return what the episodes of an untrained policy depend on, beside the policy.

  Returns:
    Values as in JSON, by the names of settings: those of the environment and the
    models, today's prices, and the prompts.
  """
  conditions = {}
  for name, value in flatten(config).items():
    is_changeable = f"{name}.".startswith(CHANGEABLE)
    if name.startswith(("env.", "models.")) and not is_changeable:
      conditions[name] = value
  conditions["models.prices"] = prices_of(config.models)
  env = base.load(config.env.kind)
  prompt = getattr(env, "system_prompt", "")
  opening = open_conversation(prompt, Task("", "", "", 1), "")
  remark = NO_CODE if env.code_actions else NO_ACTION
  conditions["prompts"] = [*opening, remark]
  if config.models.kind == RECORDED:
    conditions["recording"] = read_recording(config.models.recording).digest
  return json.loads(json.dumps(conditions, default=vars))


def adopt_episodes(config: Config, store: Store) -> None:
  """Copy tasks and episodes from the run that --config.reuse names to a new store.

  The episodes are the trials and samples that no trained policy plays.

  Raises:
    ValueError: the other run has other conditions, or no episodes to copy.
  """
  seeds = [FIRST_SEED[purpose] // SEEDS for purpose in UNTRAINED]
  store.adopt(Path(config.reuse), read_conditions(config), seeds)


def write_conditions(config: Config, directory: Path) -> None:
  """Write the conditions of a run into its directory."""
  text = json.dumps(read_conditions(config), indent=2)
  (directory / CONDITIONS).write_text(text)


def check_recording(config: Config, directory: Path) -> None:
  """Check that the recording is the one that a run's episodes were played with.

  Raises:
    ValueError: it is another one.
  """
  if config.models.kind == RECORDED:
    before = json.loads((directory / CONDITIONS).read_text()).get("recording")
    if before != read_recording(config.models.recording).digest:
      raise ValueError(
        f"{directory} was played with another state of the recording "
        f"{config.models.recording}: choose another --config.name"
      )
