"""The whole pipeline on the sandbox, whose exact optimum is known: minutes on a laptop."""

from baar_jax import config


def get_config() -> config.Config:
  return config.Config(
    name="sandbox",
    env=config.EnvConfig(
      kind="sandbox", train_tasks=160, test_tasks=256, max_steps=18, live_per_process=16
    ),
    router=config.RouterConfig(
      vocab_size=512, max_tokens=512, description_tokens=32, action_tokens=8, result_tokens=24
    ),
    sft=config.SFTConfig(updates=150, learning_rate=2e-3),
    bopo=config.BoPOConfig(
      lam=(0.1, 0.3, 0.6),
      learning_rate=1e-3,
      updates=20,
      tasks_per_update=16,
      ratio_level="decision",
      clip_low=0.2,
      clip_high=0.28,
      epochs=2,
    ),
    evaluate=config.EvaluateConfig(call_budgets=(1, 2, 4)),
  )
