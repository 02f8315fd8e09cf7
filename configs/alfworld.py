"""ALFWorld: keyless on a CPU; with :paper the paper's setting, with Qwen2.5-1.5B and API models."""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  if setting == "paper":
    c = sciworld.get_config(setting)
    c.name = "alfworld-paper"
    c.env = config.EnvConfig(
      kind="alfworld", train_tasks=2420, test_tasks=200, max_steps=30, processes=16
    )
    return c
  if setting:
    raise ValueError(
      f"no setting {setting!r}: use configs/alfworld.py, or configs/alfworld.py:paper"
    )
  c = quickstart.get_config()
  c.name = "alfworld"
  c.env = config.EnvConfig(kind="alfworld", train_tasks=66, test_tasks=60, max_steps=30)
  c.bopo.lam = (0.5,)
  return c
