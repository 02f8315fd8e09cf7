"""ALFWorld: keyless on a CPU; with :paper the paper's setting, with Qwen2.5-1.5B and API models.

The paper's tasks are AgentGym's: its mappings_train.json lists 2,420 games of the split train, its
mappings_test.json 200 of valid_train. Both files belong into $ALFWORLD_DATA. Dev tasks are of
valid_seen. configs/sciworld.py says what else differs from the paper.
"""

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
