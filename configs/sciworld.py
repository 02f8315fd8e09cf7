"""ScienceWorld with Qwen2.5-1.5B as the router, trained on GPUs, and the scripted pair.

Settings:
  paper: the paper's GPT-4.1 mini and GPT-4.1.
  llama: the paper's Llama 3.1, at any compatible endpoint.
  trio: the default run, on a CPU, with three scripted models.
  nano-mini, nano-full, mini-full: two of these three, with the errors they have there.

The :paper of each environment differs from the paper in these points:
  - Dev tasks choose the reported policies.
  - The router reads our own transcript. --config.router.view=paper is the paper's
    prompt.
  - The paper does not state the numbers of updates.
  - The paper's ScienceWorld tasks are not public. These are the same number of tasks of
    AgentGym's types, from the engine's own splits.
"""

from baar_jax import config
from configs import quickstart

RIVALS = ("zero-shot", "cascade", "single-turn", "vanilla")
LLAMA = {
  "names": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
  # Many sell this pair, at different prices. These are Together's for its Turbo
  # endpoints (our choice).
  "prices": ((0.18, 0.18, 0.18), (0.88, 0.88, 0.88)),
  "base_urls": ("http://localhost:8000/v1", "http://localhost:8001/v1"),
}
# Names and skills of the settings with two or all of the three models.
TRIOS = {
  "trio": (quickstart.TRIO, ()),
  "nano-mini": (quickstart.TRIO[:2], (0.0, 0.5)),
  "nano-full": (quickstart.TRIO[::2], (0.0, 1.0)),
  "mini-full": (quickstart.TRIO[1:], (0.5, 1.0)),
}


def get_config(setting: str = "") -> config.Config:
  """Configure ScienceWorld in a setting of this file."""
  config.check_setting(setting, "paper", "llama", *TRIOS)
  if setting in TRIOS:
    c = quickstart.get_config()
    c.name = f"sciworld-{setting}"
    c.models.names, c.models.skills = TRIOS[setting]
    return c
  # 1,783 tasks of the engine's training split are short enough for the scripted pair.
  # Each live episode has a row of the KV cache, so every machine gets the same number.
  sizes = {"train_tasks": 1700, "dev_tasks": 100, "test_tasks": 200, "processes": 16}
  texts = {"description_tokens": 256, "action_tokens": 32, "result_tokens": 64}
  # The defaults of baar_jax/config.py are the paper's values.
  c = config.Config(
    name="sciworld",
    env=config.EnvConfig(kind="scienceworld", **sizes),
    # The weights are a Hugging Face directory.
    router=config.RouterConfig(
      weights="weights/Qwen2.5-1.5B",
      dtype="bfloat16",
      max_tokens=4096,
      buckets=4,
      **texts,
    ),
    sft=config.SFTConfig(micro_episodes=8),
    evaluate=config.EvaluateConfig(shares=(0.2, 0.4, 0.6)),
  )
  if setting:
    c.name = f"sciworld-{setting}"
    c.env.train_tasks = 2120
    c.env.options["short_tasks"] = False
    c.router.weights = "weights/Qwen2.5-1.5B-Instruct"
    c.router.max_tokens = 2048
    models = LLAMA if setting == "llama" else {}
    c.models = config.ModelsConfig(kind="chat", **models)
    c.profile.robustness = (3, 10)
    c.baselines = config.BaselinesConfig(
      RIVALS, tuple(config.ABLATIONS), compared_lam=0.3
    )
  return c
