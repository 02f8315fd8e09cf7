"""Configure ScienceWorld with Qwen2.5-1.5B as the router, trained on GPUs.

The models are scripted. Settings:

- paper: the paper's models, GPT-4.1 mini and GPT-4.1.
- llama: the paper's Llama 3.1 models, at upstream endpoints of your own. The paper has
  72B as LARGE, which does not exist; here it is 70B.

docs/evaluation.md and the docstrings name where the :paper settings depart from the
paper. Its ScienceWorld tasks are AgentGym's, whose lists have to be downloaded and
named: env.options.train_ids and env.options.test_ids (docs/reproduce.md). Without
them, the same number of tasks of AgentGym's types comes from the engine's own splits.
"""

from baar_jax import config

RIVALS = ("zero-shot", "cascade", "single-turn", "vanilla")
ABLATIONS = ("no-stratified", "no-reference", "no-hard-bonus")
LLAMA = {
  "names": ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
  # Many providers sell these two models, at different prices. These are the prices of
  # the provider Together for its Turbo versions (our choice).
  "prices": ((0.18, 0.18, 0.18), (0.88, 0.88, 0.88)),
  "base_urls": ("http://localhost:8000/v1", "http://localhost:8001/v1"),
}


def get_config(setting: str = "") -> config.Config:
  """Return the configuration of ScienceWorld.

  Args:
    setting: one of the settings in this file's docstring, or "" for Qwen2.5-1.5B with
      scripted models.
  """
  config.check_setting(setting, "paper", "llama")
  # Fields that are not set here keep the defaults of baar_jax/config.py.
  c = config.Config(
    name="sciworld",
    # The scripted models can play 1,783 tasks of the engine's training split. The
    # number of processes is fixed, because each live episode needs memory for a row of
    # the router's KV cache.
    env=config.EnvConfig("scienceworld", 1700, 100, 200, processes=16),
    # The weights are in a local directory in Hugging Face's format.
    router=config.RouterConfig(
      weights="weights/Qwen2.5-1.5B-Instruct",
      dtype="bfloat16",
      max_tokens=4096,
      description_tokens=256,
      action_tokens=32,
      result_tokens=64,
    ),
    sft=config.SFTConfig(micro_episodes=8),
    evaluate=config.EvaluateConfig(shares=(0.2, 0.4, 0.6)),
  )
  if setting:
    c.name = f"sciworld-{setting}"
    c.env.train_tasks = 2120
    c.env.options["short_tasks"] = False
    c.router.max_tokens = 2048
    models = LLAMA if setting == "llama" else {}
    c.models = config.ModelsConfig(kind="chat", prompt_cache=False, **models)
    c.profile.robustness = (3, 10)
    c.bopo.lam = (0.3, 0.1, 0.5, 0.7, 0.9)
    c.train_seeds = 3
    c.baselines = config.BaselinesConfig(RIVALS, ABLATIONS)
    c.baselines.judge.prompt_cache = False
  return c
