"""Configure ALFWorld without a key on a CPU, or in the paper's setting.

The setting :paper is the paper's setting, with the differences that docs/evaluation.md
and the docstrings name. The paper's tasks are listed in AgentGym's files
mappings_train.json and mappings_test.json. Copy these files to $ALFWORLD_DATA.
"""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  """Return the configuration of ALFWorld.

  Args:
    setting: "" or "paper".
  """
  config.check_setting(setting, "paper")
  if setting:
    c = sciworld.get_config(setting)
    c.name = "alfworld-paper"
    c.env = config.EnvConfig(
      "alfworld",
      train_tasks=2420,
      dev_tasks=100,
      test_tasks=200,
      max_steps=30,
      processes=16,
    )
    for split in ("train", "test"):
      c.env.options[f"{split}_split"] = f"mappings_{split}.json"
    return c
  c = quickstart.get_config()
  c.name = "alfworld"
  c.env = config.EnvConfig(
    "alfworld", train_tasks=240, dev_tasks=100, test_tasks=60, max_steps=30
  )
  # These samples are played in all training games, not only in hard ones. The value
  # heads learn from them too, whether they succeed or not.
  c.references.plans = (
    config.SamplePlan("samples", c.references.samples, all_tasks=True),
    config.SamplePlan("steps", 10, all_tasks=True),
    config.SamplePlan("repeats", 10, all_tasks=True),
  )
  c.value = config.ValueConfig(
    updates=10_000,
    cost_weights=(0.0, 0.1, 0.2, 0.5, 1.0, 2.0),
    capped_cost_weights=(0.0, 0.5, 1.0, 2.0),
    noise=0.2,
    weight_decay=0.05,
  )
  return c
