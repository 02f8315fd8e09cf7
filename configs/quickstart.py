"""The default: the whole pipeline in the real ScienceWorld with the scripted pair, on a CPU."""

from baar_jax import config


def get_config() -> config.Config:
  return config.Config(
    name="quickstart",
    env=config.EnvConfig(kind="scienceworld", train_tasks=96, test_tasks=60, max_steps=40),
    router=config.RouterConfig(
      show_budget=False, max_tokens=512, result_tokens=16, description_tokens=64
    ),
    sft=config.SFTConfig(updates=150, learning_rate=2e-3),
    bopo=config.BoPOConfig(
      lam=(0.1, 0.3),
      learning_rate=5e-4,
      updates=16,
      tasks_per_update=8,
      ratio_level="decision",
      clip_low=0.2,
      clip_high=0.28,
      epochs=2,
    ),
  )
