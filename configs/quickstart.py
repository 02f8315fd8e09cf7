"""Configure the default run: ScienceWorld with scripted models, on a CPU.

The run needs no key.
"""

from baar_jax import config


def get_config() -> config.Config:
  """Return the configuration of the default run."""
  c = config.Config(name="quickstart")
  c.env = config.EnvConfig(train_tasks=68, dev_tasks=24, test_tasks=60)
  # The test tasks of configs/reproduce.py are left out, and all that it leaves out.
  c.env.options["skip_test_variations"] = 51
  c.value = config.ValueConfig(updates=2000, cost_weights=(0.0, 0.1, 1.0))
  c.sft = config.SFTConfig(
    updates=60, check_every=3, micro_episodes=8, learning_rate=1e-2, adam_eps=1e-2
  )
  c.bopo = config.BoPOConfig(
    # This weight and the optimizer's settings, also those of vanilla RL, were chosen on
    # dev; see docs/evaluation.md.
    lam=(0.3,),
    # If no episode of a group succeeds, the rewards say little about which decision was
    # wrong. A larger eps and a lower clip than BoPOConfig's make advantages smaller.
    advantage_eps=0.5,
    advantage_clip=2.0,
    learning_rate=5e-3,
    # With a large eps, AdamW's step is nearly in the direction of the gradient; see
    # SFTConfig.adam_eps.
    adam_eps=1e-2,
    vanilla_learning_rate=1.5e-2,
    vanilla_adam_eps=0.1,
    updates=8,
  )
  c.evaluate = config.EvaluateConfig(seeds=2, random_p=(), call_budgets=(3, 5, 10))
  return c
