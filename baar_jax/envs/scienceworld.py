"""ScienceWorld on the real engine: tasks with solutions of at most 32 steps, or of any length."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from baar_jax.envs.base import PROMPTS, Env, Oracle, keep, spread
from baar_jax.envs.scienceworld_engine import Engine, Expert
from baar_jax.episode import SPLITS, Task

# The engine's own solutions finish most variations of these types well within 40 steps.
TASK_TYPES = ("use-thermometer", "measure-melting-point-known-substance", "power-component")
TASK_TYPES += ("power-component-renewable-vs-nonrenewable-energy", "test-conductivity")
TASK_TYPES += ("test-conductivity-of-unknown-substances", "find-living-thing")
TASK_TYPES += ("find-non-living-thing", "find-plant", "find-animal", "chemistry-mix")
TASK_TYPES += ("chemistry-mix-paint-secondary-color", "chemistry-mix-paint-tertiary-color")
TASK_TYPES += ("lifespan-longest-lived", "lifespan-shortest-lived")
TASK_TYPES += ("lifespan-longest-lived-then-shortest-lived", "identify-life-stages-2")
MAX_GOLD_STEPS = 32
# AgentGym has these types too; it leaves out those that grow, breed or use inclined planes.
LONGER_TYPES = ("boil", "melt", "freeze", "change-the-state-of-matter-of")
LONGER_TYPES += ("measure-melting-point-unknown-substance", "identify-life-stages-1")


class ScienceWorld(Env):
  """The Env of ScienceWorld; a task's id is "<task type>/<variation>"."""

  system_prompt = (PROMPTS / "scienceworld.txt").read_text()
  scores_steps = True

  def __init__(
    self, train_tasks=96, dev_tasks=34, test_tasks=60, max_steps=40, gold_dir="gold", short=True
  ) -> None:
    """The engine may find another solution each time: the first one is kept in `gold_dir`.

    If not `short`, tasks have any length and more types; there are no solutions to follow.
    """
    self._engine = Engine()
    self._sizes = dict(zip(SPLITS, (train_tasks, dev_tasks, test_tasks)))
    self._max_steps, self._short = max_steps, short
    self._gold_dir = Path(gold_dir)

  def tasks(self, split: str) -> list[Task]:
    """Lists tasks of one of the engine's own splits; the task types take turns.

    Within a type variations are spread evenly; a larger split starts with a smaller one's tasks.
    """
    size, types = self._sizes[split], TASK_TYPES if self._short else TASK_TYPES + LONGER_TYPES
    rounds = itertools.zip_longest(*(self._list_tasks(name, split) for name in types))
    tasks = list(itertools.islice(filter(None, itertools.chain.from_iterable(rounds)), size))
    if len(tasks) < size:
      missing = f"ScienceWorld has {len(tasks)} {split} tasks, {size} were asked for"
      raise ValueError(f"{missing}: set --config.env.{split}_tasks")
    return tasks

  def _list_tasks(self, task_type: str, split: str) -> Iterator[Task]:
    numbers = self._engine.list_variations(task_type, split)
    for place in spread(len(numbers)):
      task_id = f"{task_type}/{numbers[place]}"
      gold = self._read_gold(task_id)
      if len(gold["actions"]) <= MAX_GOLD_STEPS:
        yield Task(task_id, split, gold["description"], self._max_steps)

  def _read_gold(self, task_id: str) -> dict:
    """The task's solution and description."""
    if not self._short:
      return self._engine.describe(task_id)
    path = self._gold_dir / f"{task_id.replace('/', '-')}.json"
    gold = keep(path, lambda: json.dumps(self._engine.describe(task_id, solve=True)).encode())
    return json.loads(gold)

  def reset(self, task_id: str) -> str:
    plan = self._read_gold(task_id)["actions"]
    observation = self._engine.load(task_id)
    self._score, self._expert = 0.0, Expert(plan, observation, self._engine)
    return observation

  def step(self, action: str) -> tuple[str, bool]:
    # The engine admits "reset task", but that would clear the score of -100 of a fatal mistake.
    if {"reset", "task"} <= set(action.lower().split()):
      return "That action is not allowed here.", False
    # A model's reply may hold half a surrogate pair, which cannot be sent to the engine.
    action = action.encode("utf-8", "replace").decode().strip()
    observation, score, completed = self._engine.step(action)
    self._expert.observe(action, observation)
    self._score = max(0.0, round(score, 2))
    return observation, completed or score < 0

  def score(self) -> float:
    """The engine's points of 100 as a share; 0 after a fatal mistake."""
    return self._score

  def oracle(self) -> Oracle:
    return self._expert.oracle()

  def mistake(self, kind: str, key: str) -> str:
    return self._expert.mistake(kind, key)
