"""AppWorld: keyless on a CPU; with :paper the paper's setting, with Qwen2.5-1.5B and API models."""

import dataclasses

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  # An engine process has room for one world.
  env = config.EnvConfig(kind="appworld", max_steps=40, live_per_process=1)
  if setting == "paper":
    c = sciworld.get_config(setting)
    c.name = "appworld-paper"
    c.env = dataclasses.replace(env, train_tasks=105, test_tasks=168, processes=64)
    return c
  if setting:
    raise ValueError(
      f"no setting {setting!r}: use configs/appworld.py, or configs/appworld.py:paper"
    )
  c = quickstart.get_config()
  c.name = "appworld"
  # The tasks of dev have solutions, which the scripted pair follows.
  c.env = dataclasses.replace(env, train_tasks=36, test_tasks=24, processes=2, test_split="dev")
  c.router.max_tokens, c.router.action_tokens, c.router.result_tokens = 640, 20, 20
  c.bopo.lam = (0.1,)
  return c
