"""ScienceWorld with Qwen2.5-1.5B as the router, trained on GPUs, and the scripted pair; with :paper
the paper's GPT-4.1 mini and GPT-4.1, with :llama its Llama 3.1 at any compatible endpoint. With
:trio the default run, on a CPU, with three scripted models; :nano-mini, :nano-full and :mini-full
are two of these three, which err as they do there.

What differs from the paper, in the :paper of each environment: dev tasks choose what is shown; the
router reads our own transcript (--config.router.view=paper is the paper's prompt); the paper does
not state the numbers of updates; its 2,120 and 200 ScienceWorld tasks are not public, and these are
as many of AgentGym's 23 types, from the engine's own splits."""

from baar_jax import config
from configs import quickstart

RIVALS = ("zero-shot", "cascade", "single-turn", "vanilla")
LLAMA = {
  "names": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
  # Many sell this pair, each at its own price. Our choice is Together's for its Turbo endpoints.
  "prices": ((0.18, 0.18, 0.18), (0.88, 0.88, 0.88)),
  "base_urls": ("http://localhost:8000/v1", "http://localhost:8001/v1"),
}
TRIOS = {  # names and skills of the settings with two or all of the three models
  "trio": (quickstart.TRIO, ()),
  "nano-mini": (quickstart.TRIO[:2], (0.0, 0.5)),
  "nano-full": (quickstart.TRIO[::2], (0.0, 1.0)),
  "mini-full": (quickstart.TRIO[1:], (0.5, 1.0)),
}


def get_config(setting: str = "") -> config.Config:
  config.check_setting(setting, "paper", "llama", *TRIOS)
  if setting in TRIOS:
    c = quickstart.get_config()
    c.name = f"sciworld-{setting}"
    c.models.names, c.models.skills = TRIOS[setting]
    return c
  # 1,783 tasks of the engine's training split are short enough for the scripted pair.
  # 16 processes keep 64 episodes alive, whatever the machine: each has a row of the KV cache.
  sizes = {"train_tasks": 1700, "dev_tasks": 100, "test_tasks": 200, "processes": 16}
  texts = {"description_tokens": 256, "action_tokens": 32, "result_tokens": 64}
  c = config.Config(  # the paper's values are the defaults of baar_jax/config.py
    name=f"sciworld-{setting}" if setting else "sciworld",
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
    c.env.train_tasks = 2120
    c.env.options["short_tasks"] = False
    c.router.weights, c.router.max_tokens = "weights/Qwen2.5-1.5B-Instruct", 2048
    c.models = config.ModelsConfig(kind="chat", **(LLAMA if setting == "llama" else {}))
    c.profile.robustness = (3, 10)
    c.baselines = config.BaselinesConfig(
      RIVALS, tuple(config.ABLATIONS), compared_lam=0.3
    )
  return c
