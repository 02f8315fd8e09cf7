"""The default: the whole pipeline in the real ScienceWorld with the scripted pair.

It is keyless and runs on a CPU.
"""

from baar_jax import config

# A tied row would feed each decision back into the next. A text about budgets would be
# new to the router.
RANDOM_WEIGHTS = {"tie_word_embeddings": False, "show_budget": False}
TEXTS = {
  "max_tokens": 512,
  "description_tokens": 48,
  "action_tokens": 12,
  "result_tokens": 16,
}
TRIO = ("gpt-4.1-nano", "gpt-4.1-mini", "gpt-4.1")


def get_config() -> config.Config:
  """Configure the default run."""
  c = config.Config(name="quickstart")
  tasks = {"train_tasks": 68, "dev_tasks": 16, "test_tasks": 40}
  c.env = config.EnvConfig(kind="scienceworld", max_steps=40, **tasks)
  c.router = config.RouterConfig(**RANDOM_WEIGHTS, **TEXTS)
  c.pretrain = config.PretrainConfig(epochs=1, batch_episodes=16, learning_rate=1e-2)
  rates = {"learning_rates": (1e-2,), "adam_eps": 1e-2}
  c.value = config.ValueConfig(updates=2000, prices=(0.0, 0.1, 1.0))
  c.sft = config.SFTConfig(updates=60, check_every=3, micro_episodes=8, **rates)
  c.bopo = config.BoPOConfig(
    # At this cost weight a short run spends on some steps.
    lam=(0.7,),
    # A group that fails as a whole tells little about the wrong step.
    advantage_eps=0.5,
    advantage_clip=2.0,
    learning_rate=1.5e-2,
    # With this eps AdamW nearly follows the gradient itself; see SFTConfig.
    adam_eps=0.1,
    updates=8,
  )
  c.baselines = config.BaselinesConfig(updates=60)
  c.evaluate = config.EvaluateConfig(seeds=2, random_p=(), call_budgets=(3, 5, 10))
  return c
