"""AppWorld: keyless on a CPU; with :paper the paper's setting, see configs/sciworld.py."""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  config.check_setting(setting, "paper")
  c = sciworld.get_config(setting) if setting else quickstart.get_config()
  c.name = "appworld-paper" if setting else "appworld"
  # An engine process has room for one world.
  c.env = config.EnvConfig(kind="appworld", max_steps=40, live_per_process=1)
  if setting:
    c.env.train_tasks, c.env.dev_tasks, c.env.test_tasks, c.env.processes = (
      105,
      57,
      168,
      64,
    )
  else:
    c.env.train_tasks, c.env.dev_tasks, c.env.test_tasks, c.env.processes = (
      36,
      12,
      24,
      2,
    )
    c.env.options["test_split"] = (
      "dev"  # its tasks have solutions, which the scripted pair follows
    )
    c.router.max_tokens, c.router.action_tokens, c.router.result_tokens = 640, 20, 20
    c.bopo.lam = (0.1,)
  return c
