"""AppWorld with the scripted pair and a small router from random weights, on a CPU."""

from baar_jax import config


def get_config() -> config.Config:
  return config.Config(
    name="appworld",
    env=config.EnvConfig(
      kind="appworld",
      train_tasks=36,
      test_tasks=24,
      max_steps=40,
      processes=2,
      live_per_process=1,  # an engine process has room for one world
      test_split="dev",  # whose tasks have solutions, which the scripted pair follows
    ),
    router=config.RouterConfig(
      tie_word_embeddings=False,  # as in quickstart.py, also below
      show_budget=False,
      max_tokens=640,
      description_tokens=48,
      action_tokens=20,
      result_tokens=20,
    ),
    pretrain=config.PretrainConfig(epochs=1, batch_episodes=16, learning_rate=1e-2),
    sft=config.SFTConfig(updates=6, micro_episodes=8, learning_rate=1e-2, adam_eps=1e-2),
    bopo=config.BoPOConfig(
      lam=(0.1,),
      advantage_eps=0.5,
      advantage_clip=2.0,
      learning_rate=1.5e-2,
      adam_eps=0.1,
      updates=12,
    ),
    evaluate=config.EvaluateConfig(random_p=(0.5,), thresholds=(0.15, 0.3)),
  )
