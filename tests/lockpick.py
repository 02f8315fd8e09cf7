"""How the tests' API models play the sandbox: they recognise the building, then pull its levers."""

import hashlib
import re

from baar_jax.envs.sandbox import PLAIN, Sandbox, build
from baar_jax.episode import SPLITS

LARGE = "large"


class Lockpick:
  """Answers a request with the right lever; SMALL mostly fails at locks that are not plain."""

  def __init__(self, train_tasks: int, dev_tasks: int, test_tasks: int, max_steps: int):
    self._env = Sandbox(train_tasks, dev_tasks, test_tasks, max_steps)
    self._tasks = [task for split in SPLITS for task in self._env.tasks(split)]

  def __call__(self, request: dict) -> str:
    texts = [message["content"] for message in request["messages"][1:]]
    draw = hashlib.sha256(repr((request["model"], request["seed"], texts)).encode()).digest()[0]
    for task in self._tasks:
      if self._replays(task, texts):
        building, lock = build(task.id), self._env._lock
        hard = building.hardness[lock] != PLAIN
        errs = draw < (180 if request["model"] != LARGE and hard else 13)
        return f"Thought: I know this one.\n\nAction: pull {building.levers[lock][errs]}"
    return "Thought: I have never been here."

  def _replays(self, task, texts: list[str]) -> bool:
    """Whether a conversation is of this task; if so the environment is left where it stands."""
    if texts[0] != f"Task: {task.description}\n\n{self._env.reset(task.id)}":
      return False
    actions = [re.search(r"Action: (.*)", reply) for reply in texts[1::2]]
    return all(
      action is None or self._env.step(action[1])[0] == observation
      for action, observation in zip(actions, texts[2::2])
    )
