"""Configure tickets of functions with two real models, whose replies were recorded.

The run needs no key, and it executes nothing of what the models wrote.
"""

from baar_jax import config


def get_config() -> config.Config:
  """Return the configuration."""
  c = config.Config(name="code")
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
  c.profile.trials = 3
  c.references.samples = 8
  c.value = config.ValueConfig(updates=2000, cost_weights=(0.0, 0.1, 1.0))
  c.sft = config.SFTConfig(updates=100, micro_episodes=64, learning_rate=3e-3)
  c.bopo = config.BoPOConfig(
    lam=(0.3,),
    learning_rate=3e-3,
    last_rate=0.05,
    vanilla_learning_rate=3e-3,
    updates=30,
  )
  c.baselines.rivals = ("escalate",)
  c.evaluate = config.EvaluateConfig(
    seeds=3, random_p=(), shares=(0.3, 0.6), call_budgets=(1, 2, 4)
  )
  return c
