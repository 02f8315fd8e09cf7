"""The default: the whole pipeline in the real ScienceWorld with the scripted pair, on a CPU."""

from baar_jax import config


def get_config() -> config.Config:
  return config.Config(
    name="quickstart",
    env=config.EnvConfig(kind="scienceworld", train_tasks=68, test_tasks=60, max_steps=40),
    router=config.RouterConfig(
      tie_word_embeddings=False,  # a tied row would feed each decision back into the next
      show_budget=False,  # a router from random weights has never read such a text
      max_tokens=512,
      description_tokens=48,
      action_tokens=12,
      result_tokens=16,
    ),
    pretrain=config.PretrainConfig(epochs=1, batch_episodes=16, learning_rate=1e-2),
    sft=config.SFTConfig(updates=6, micro_episodes=8, learning_rate=1e-2, adam_eps=1e-2),
    bopo=config.BoPOConfig(
      lam=(0.7,),  # where a short run spends on some steps
      advantage_eps=0.5,  # a group that fails as a whole says little about which step was wrong
      advantage_clip=2.0,
      learning_rate=1.5e-2,
      adam_eps=0.1,  # so high that AdamW nearly follows the gradient itself; see SFTConfig
      updates=12,
    ),
    baselines=config.BaselinesConfig(updates=24),
    evaluate=config.EvaluateConfig(random_p=(0.5,), thresholds=(0.15, 0.3)),
  )
