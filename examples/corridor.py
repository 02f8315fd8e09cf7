"""Define an environment in one file: a corridor with six coloured doors.

Red doors are critical steps: the cheaper model often fails to open them. This command
trains a router:

    python main.py --config=examples/corridor.py
"""

import dataclasses
import random

from baar_jax.config import Config, EnvConfig
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import Task
from configs import quickstart


class Corridor(Env):
  """A corridor with six doors; the action "open COLOUR" opens the next door."""

  system_prompt = (
    "Name each door's colour.\n\nExample:\nThought: It is red.\n\nAction: open red"
  )

  def tasks(self, split: str) -> list[Task]:
    """Return the tasks of a split."""
    return [
      Task(f"{split}-{i}", split, "Go.", self.max_steps)
      for i in range(self.sizes[split])
    ]

  def reset(self, task_id: str) -> str:
    """Draw the doors of a task and return the first observation."""
    self.doors = random.Random(task_id).choices(("red", "blue", "green"), k=6)
    return f"A {self.doors[0]} door."

  def step(self, action: str) -> tuple[str, bool]:
    """Open the next door if the action names its colour.

    Returns:
      The observation, and whether all doors are open.
    """
    self.doors = self.doors[action == f"open {self.doors[0]}" :]
    observation = f"A {self.doors[0]} door." if self.doors else "The exit."
    return observation, not self.doors

  def score(self) -> float:
    """Return 1 if all doors are open, else 0."""
    return float(not self.doors)

  # Only scripted models need the next two methods.
  def oracle(self) -> Oracle:
    """Return the expert's next step; red doors are critical."""
    is_red = self.doors[0] == "red"
    return Oracle(
      f"open {self.doors[0]}", len(self.doors), critical=is_red, recovering=False
    )

  def mistake(self, kind: str, key: str) -> str:
    """Return an action that opens no door; every mistake is the same.

    Args:
      kind: not used.
      key: not used.
    """
    return "open yellow"


def get_config() -> Config:
  """Return the configuration of a run in the corridor, with the default trainings."""
  env = EnvConfig(f"{__file__}:Corridor", 96, 34, 48, max_steps=12)
  return dataclasses.replace(quickstart.get_config(), name="corridor", env=env)
