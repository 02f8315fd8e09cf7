"""The default: the whole pipeline in the real ScienceWorld with the scripted pair, on a CPU."""

from baar_jax import config


def get_config() -> config.Config:
  return config.Config(
    name="quickstart",
    env=config.EnvConfig(kind="scienceworld", train_tasks=68, test_tasks=60, max_steps=40),
    router=config.RouterConfig(
      show_budget=False,  # a router from random weights has never read such a text
      max_tokens=512,
      description_tokens=48,
      action_tokens=12,
      result_tokens=16,
    ),
    pretrain=config.PretrainConfig(epochs=1, batch_episodes=64),
    sft=config.SFTConfig(updates=12, learning_rate=3e-3),
    bopo=config.BoPOConfig(
      lam=(0.1, 0.3),
      learning_rate=1e-3,
      updates=12,
      tasks_per_update=8,
      ratio_level="decision",
      clip_low=0.2,
      clip_high=0.28,
      epochs=2,
      batch_episodes=32,
    ),
    evaluate=config.EvaluateConfig(random_p=(0.25, 0.5), thresholds=(0.3, 0.7)),
  )
