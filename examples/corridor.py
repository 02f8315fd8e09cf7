"""An environment in one file: a corridor of doors, of which a weak model seldom opens a red one.

python main.py --config=examples/corridor.py
"""

import dataclasses
import random

from baar_jax.config import Config, EnvConfig
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import Task
from configs import sandbox


class Corridor(Env):
  system_prompt = (
    "Name each door's colour.\n\nExample:\nThought: It is red.\n\nAction: open red"
  )

  def tasks(self, split):
    return [
      Task(f"{split}-{i}", split, "Go.", self.max_steps)
      for i in range(self.sizes[split])
    ]

  def reset(self, task_id):
    self.doors = random.Random(task_id).choices(("red", "blue", "green"), k=6)
    return f"A {self.doors[0]} door."

  def step(self, action):
    self.doors = self.doors[action == f"open {self.doors[0]}" :]
    return f"A {self.doors[0]} door." if self.doors else "The exit.", not self.doors

  def score(self):
    return float(not self.doors)

  # Only the scripted models need an expert and its mistakes.
  def oracle(self):
    red = self.doors[0] == "red"
    return Oracle(
      f"open {self.doors[0]}", len(self.doors), critical=red, recovering=False
    )

  def mistake(self, kind, key):
    return "open yellow"


def get_config() -> Config:
  env = EnvConfig(f"{__file__}:Corridor", 96, 34, 48, max_steps=12)
  return dataclasses.replace(sandbox.get_config(), name="corridor", env=env)
