"""Configure a small run on a CPU: ScienceWorld with scripted models.

The run needs no key.
"""

from baar_jax import config


def get_config() -> config.Config:
  """Return the configuration."""
  c = config.Config(name="quickstart")
  c.env = config.EnvConfig(train_tasks=68, dev_tasks=40, test_tasks=80)
  # None of these 80 test tasks is one of configs/reproduce.py:sciworld.
  c.env.options["skip_test_variations"] = 50
  # Fewer episodes than the paper's, to save time.
  c.profile.trials = 3
  c.references.samples = 8
  c.value = config.ValueConfig(updates=2000, cost_weights=(0.0, 0.1, 1.0))
  c.sft = config.SFTConfig(updates=100, micro_episodes=64, learning_rate=3e-3)
  # Chosen on dev tasks of examples/sandbox.py, for vanilla RL too.
  c.bopo = config.BoPOConfig(
    lam=(0.3,),
    learning_rate=3e-3,
    last_rate=0.05,
    vanilla_learning_rate=3e-3,
    updates=30,
  )
  c.evaluate = config.EvaluateConfig(
    seeds=1, random_p=(), shares=(0.3, 0.6), call_budgets=(3, 5, 10)
  )
  return c
