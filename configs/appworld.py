"""AppWorld, keyless on a CPU; with :paper in the setting of configs/sciworld.py."""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  """Configure AppWorld; the setting is "" or "paper"."""
  config.check_setting(setting, "paper")
  # An engine process has room for one world.
  env = {"kind": "appworld", "max_steps": 40, "live_per_process": 1}
  if setting:
    c = sciworld.get_config(setting)
    c.name = "appworld-paper"
    c.env = config.EnvConfig(
      train_tasks=105, dev_tasks=57, test_tasks=168, processes=64, **env
    )
    return c
  c = quickstart.get_config()
  c.name = "appworld"
  c.env = config.EnvConfig(
    train_tasks=36, dev_tasks=12, test_tasks=24, processes=2, **env
  )
  # Its tasks have solutions, which the scripted pair follows.
  c.env.options["test_split"] = "dev"
  c.router.max_tokens = 640
  c.router.action_tokens = 20
  c.router.result_tokens = 20
  c.bopo.lam = (0.1,)
  return c
