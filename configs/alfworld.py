"""ALFWorld: keyless on a CPU; with :paper the paper's setting, see configs/sciworld.py. Its tasks
are those of AgentGym's mappings_{train,test}.json, which have to be copied to $ALFWORLD_DATA."""

from baar_jax import config
from configs import quickstart, sciworld


def get_config(setting: str = "") -> config.Config:
  config.check_setting(setting, "paper")
  c = sciworld.get_config(setting) if setting else quickstart.get_config()
  c.name = "alfworld-paper" if setting else "alfworld"
  c.env = config.EnvConfig(kind="alfworld", train_tasks=66, test_tasks=60, max_steps=30)
  if setting:
    c.env.train_tasks, c.env.dev_tasks, c.env.test_tasks, c.env.processes = 2420, 100, 200, 16
    c.env.train_split, c.env.test_split = "mappings_train.json", "mappings_test.json"
  else:
    c.bopo.lam = (0.5,)
  return c
