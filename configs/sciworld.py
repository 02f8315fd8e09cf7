"""ScienceWorld with Qwen2.5-1.5B as the router, trained on GPUs; with :paper, API models."""

from baar_jax import config


def get_config(setting: str = "") -> config.Config:
  if setting not in ("", "paper"):
    raise ValueError(
      f"no setting {setting!r}: use configs/sciworld.py, or configs/sciworld.py:paper"
    )
  compared = config.BaselinesConfig(config.RIVALS, tuple(config.ABLATIONS), compared_lam=0.3)
  return config.Config(
    name="sciworld-paper" if setting else "sciworld",
    profile=config.ProfileConfig(robustness=(3, 10) if setting else ()),
    baselines=compared if setting else config.BaselinesConfig(),
    models=config.ModelsConfig(kind="chat" if setting else "scripted"),  # GPT-4.1 mini and GPT-4.1
    # The paper trains on 2,120 tasks; 1,783 of the engine's training split are short enough here.
    # 16 processes keep 64 episodes alive, whatever the machine: each has a row of the KV cache.
    env=config.EnvConfig(
      kind="scienceworld", train_tasks=1700, test_tasks=200, max_steps=40, processes=16
    ),
    router=config.RouterConfig(
      weights="weights/Qwen2.5-1.5B",  # a Hugging Face directory
      dtype="bfloat16",
      max_tokens=4096,
      buckets=4,
      description_tokens=256,
      action_tokens=32,
      result_tokens=64,
    ),
    # The paper's values are the defaults of baar_jax/config.py.
    sft=config.SFTConfig(micro_episodes=8),
    evaluate=config.EvaluateConfig(shares=(0.2, 0.4, 0.6)),
  )
