"""Configure the default run: functions to write, and two real models, recorded.

The run needs no key, and it executes nothing of what the models wrote.
"""

from baar_jax import config


def get_config() -> config.Config:
  """Return the configuration of the default run."""
  c = config.Config(name="code")
  c.env = config.EnvConfig(
    "code",
    train_tasks=60,
    dev_tasks=20,
    test_tasks=40,
    max_steps=8,
    live_per_process=32,
  )
  c.models = config.ModelsConfig(
    "recorded",
    names=("qwen2.5-coder-0.5b", "qwen2.5-coder-1.5b"),
    # LARGE costs five times as much, as in the paper.
    prices=((0.02, 0.02, 0.08), (0.1, 0.1, 0.4)),
    max_completion_tokens=512,
    timeout_s=600,
  )
  c.profile.trials = 3
  return c
