"""ALFWorld: keyless on a CPU; with :paper the paper's setting, see configs/sciworld.py. Its tasks
are those of AgentGym's mappings_{train,test}.json, which have to be copied to $ALFWORLD_DATA."""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  config.check_setting(setting, "paper")
  c = sciworld.get_config(setting) if setting else quickstart.get_config()
  c.name = "alfworld-paper" if setting else "alfworld"
  sizes = {"train_tasks": 240, "dev_tasks": 100, "test_tasks": 60}
  c.env = config.EnvConfig(kind="alfworld", max_steps=30, **sizes)
  if setting:
    c.env.train_tasks, c.env.dev_tasks, c.env.test_tasks, c.env.processes = (
      2420,
      100,
      200,
      16,
    )
    for split in ("train", "test"):
      c.env.options[f"{split}_split"] = f"mappings_{split}.json"
  else:
    c.bopo.lam = (0.5,)
    c.references.plans = (  # lost games are learnt from, too
      config.SamplePlan("samples", c.references.samples, all_tasks=True),
      config.SamplePlan("together", 10, all_tasks=True),
      config.SamplePlan("repeats", 10, all_tasks=True),
    )
    prices = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
    c.value = config.ValueConfig(
      updates=10_000, prices=prices, noise=0.2, weight_decay=0.05
    )
  return c
