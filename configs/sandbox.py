"""The whole pipeline on the sandbox, whose exact optimum is known: minutes on a laptop."""

from baar_jax import config


def get_config() -> config.Config:
  return config.Config(
    name="sandbox",
    env=config.EnvConfig(
      kind="sandbox", train_tasks=480, test_tasks=256, max_steps=18, live_per_process=16
    ),
    router=config.RouterConfig(
      vocab_size=512,
      tie_word_embeddings=False,  # a tied row would feed each decision back into the next
      show_budget=False,  # a router from random weights has never read such a text
      max_tokens=320,
      description_tokens=16,
      action_tokens=8,
      result_tokens=16,
    ),
    pretrain=config.PretrainConfig(epochs=1, batch_episodes=64),
    sft=config.SFTConfig(updates=16, micro_episodes=32, learning_rate=3e-3),
    bopo=config.BoPOConfig(
      lam=(0.3,),
      learning_rate=1e-3,
      updates=24,
      tasks_per_update=16,
      ratio_level="decision",
      clip_low=0.2,
      clip_high=0.28,
      epochs=2,
    ),
    baselines=config.BaselinesConfig(updates=24),
    evaluate=config.EvaluateConfig(
      random_p=(0.5,), call_budgets=(1, 2, 4), thresholds=(0.1, 0.2, 0.35, 0.65, 0.8)
    ),
  )
