"""Configure tickets of functions with two real models, whose replies were recorded.

The run needs no key, and it executes nothing of what the models wrote.
"""

from baar_jax import config
from configs import quickstart


def get_config() -> config.Config:
  """Return the configuration; its trainings are those of configs/quickstart.py."""
  c = quickstart.get_config()
  c.name = "code"
  c.env = config.EnvConfig(
    "code",
    train_tasks=120,
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
    # For recording models that run on this machine.
    max_completion_tokens=512,
    timeout_s=600,
  )
  c.baselines.rivals = ("escalate",)
  c.evaluate.seeds = 3
  c.evaluate.call_budgets = (1, 2, 4)
  return c
