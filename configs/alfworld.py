"""ALFWorld: keyless on a CPU; with :paper the paper's setting, with Qwen2.5-1.5B and API models."""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  config.check_setting(setting, "paper")
  c = sciworld.get_config(setting) if setting else quickstart.get_config()
  c.name = "alfworld-paper" if setting else "alfworld"
  c.env = config.EnvConfig(kind="alfworld", train_tasks=66, test_tasks=60, max_steps=30)
  if setting:
    c.env.train_tasks, c.env.test_tasks, c.env.processes = 2420, 200, 16
  else:
    c.bopo.lam = (0.5,)
  return c
