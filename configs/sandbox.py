"""Configure the sandbox, a small world of locks that needs no other program."""

from baar_jax import config


def get_config() -> config.Config:
  """Return the configuration of the sandbox."""
  c = config.Config(name="sandbox")
  c.models.prompt_cache = c.baselines.judge.prompt_cache = False
  c.env = config.EnvConfig("sandbox", 384, 128, 256, max_steps=18, live_per_process=16)
  c.references.plans = (
    config.SamplePlan("samples", c.references.samples, all_tasks=True),
  )
  c.value = config.ValueConfig(
    updates=5000,
    cost_weights=(0.0, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0),
    heads=3,
    widths=(128, 128),
    # The sandbox has enough episodes for the value heads not to overfit without noise
    # and weight decay.
    noise=0.0,
    weight_decay=0.0,
  )
  c.sft = config.SFTConfig(micro_episodes=64, learning_rate=3e-3)
  c.bopo = config.BoPOConfig(
    lam=(0.3,),
    learning_rate=3e-3,
    last_rate=0.05,
    vanilla_learning_rate=3e-3,
  )
  c.evaluate = config.EvaluateConfig(
    call_budgets=(1, 2, 4, 8), random_p=(0.5,), thresholds=(0.1, 0.2, 0.35, 0.65, 0.8)
  )
  return c
