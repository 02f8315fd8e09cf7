"""ALFWorld with the scripted pair and a small router from random weights, on a CPU."""

from baar_jax import config


def get_config() -> config.Config:
  return config.Config(
    name="alfworld",
    env=config.EnvConfig(kind="alfworld", train_tasks=66, test_tasks=60, max_steps=30),
    router=config.RouterConfig(
      tie_word_embeddings=False,  # as in quickstart.py, also below
      show_budget=False,
      max_tokens=512,
      description_tokens=48,
      action_tokens=12,
      result_tokens=16,
    ),
    pretrain=config.PretrainConfig(epochs=1, batch_episodes=16, learning_rate=1e-2),
    sft=config.SFTConfig(updates=6, micro_episodes=8, learning_rate=1e-2, adam_eps=1e-2),
    bopo=config.BoPOConfig(
      lam=(0.5,),
      advantage_eps=0.5,
      advantage_clip=2.0,
      learning_rate=1.5e-2,
      adam_eps=0.1,
      updates=12,
    ),
    evaluate=config.EvaluateConfig(random_p=(0.5,), thresholds=(0.15, 0.3)),
  )
