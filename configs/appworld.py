"""Configure AppWorld without a key on a CPU, or in the paper's setting.

The setting :paper is the paper's setting, with the differences that docs/evaluation.md
and the docstrings name. It has the paper's 105 training tasks; other programs count 90
in the public data, for which --config.env.train_tasks=90 is right.
"""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  """Return the configuration of AppWorld.

  Args:
    setting: "" or "paper".
  """
  config.check_setting(setting, "paper")
  if setting:
    c = sciworld.get_config(setting)
    c.name = "appworld-paper"
    # AppWorld's engine can play only one episode per process.
    c.env = config.EnvConfig(
      "appworld",
      train_tasks=105,
      dev_tasks=57,
      test_tasks=168,
      processes=64,
      live_per_process=1,
    )
    return c
  c = quickstart.get_config()
  c.name = "appworld"
  c.env = config.EnvConfig(
    "appworld",
    train_tasks=36,
    dev_tasks=12,
    test_tasks=24,
    processes=2,
    live_per_process=1,
  )
  # The test tasks are taken from AppWorld's split dev, whose tasks have solutions.
  # Scripted models need them.
  c.env.options["test_split"] = "dev"
  return c
