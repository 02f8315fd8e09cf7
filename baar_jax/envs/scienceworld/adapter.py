"""Connect ScienceWorld, text games of small science experiments in a house."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from baar_jax.envs.base import (
  Env,
  Oracle,
  check_size,
  interleave,
  read_or_make,
  spread,
)
from baar_jax.envs.scienceworld.engine import Engine
from baar_jax.envs.scienceworld.expert import Expert
from baar_jax.episode import Task

# The engine solves most variations of these types of tasks in less than 40 steps.
TASK_TYPES = (
  "use-thermometer",
  "measure-melting-point-known-substance",
  "power-component",
  "power-component-renewable-vs-nonrenewable-energy",
  "test-conductivity",
  "test-conductivity-of-unknown-substances",
  "find-living-thing",
  "find-non-living-thing",
  "find-plant",
  "find-animal",
  "chemistry-mix",
  "chemistry-mix-paint-secondary-color",
  "chemistry-mix-paint-tertiary-color",
  "lifespan-longest-lived",
  "lifespan-shortest-lived",
  "lifespan-longest-lived-then-shortest-lived",
  "identify-life-stages-2",
)
MAX_GOLD_STEPS = 32  # With `short_tasks`, longer solutions are skipped.
# Further types of tasks for `short_tasks=False`. Like AgentGym, the list leaves out
# types that grow plants, breed, or use inclined planes.
LONGER_TYPES = (
  "boil",
  "melt",
  "freeze",
  "change-the-state-of-matter-of",
  "measure-melting-point-unknown-substance",
  "identify-life-stages-1",
)


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of ScienceWorld.

  Attributes:
    short_tasks: whether to list only tasks with a solution of at most MAX_GOLD_STEPS
      steps. Otherwise tasks have any length and more types, but no solution.
    gold_dir: the directory of stored solutions. The engine may find another solution
      next time, so the first one is stored and used again. "" is the directory gold/ in
      the directory of all runs.
    skip_test_variations: the number of variations of each type that the test split
      leaves out, counted from the first in the order of choice. Those with a long
      solution count too, so that no skipped task has to be solved.
  """

  short_tasks: bool = True
  gold_dir: str = ""
  skip_test_variations: int = 0

  def __post_init__(self) -> None:
    """Check the number of skipped variations.

    Raises:
      ValueError: the number is negative.
    """
    if self.skip_test_variations < 0:
      raise ValueError(
        f"skip_test_variations is {self.skip_test_variations}, but must be at least 0"
      )


class ScienceWorld(Env):
  """The Env of ScienceWorld; a task's id is TASK_TYPE/VARIATION."""

  Options = Options
  metric = "score"
  remembered = True
  scripted_options = {"short_tasks": True}
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  scores_steps = True

  def __init__(self, *args: int, **kwargs: int | Options) -> None:
    """Create a game; the arguments are those of Env.

    Raises:
      ValueError: Java does not start.
    """
    super().__init__(*args, **kwargs)
    self._engine = Engine()

  @classmethod
  def complete(cls, options: Options, runs: Path) -> Options:
    """Fill in the directory of the stored solutions; see Env.complete."""
    gold_dir = options.gold_dir or str(runs / "gold")
    return dataclasses.replace(options, gold_dir=gold_dir)

  def tasks(self, split: str) -> list[Task]:
    """Return tasks of a split of the engine; the types of tasks alternate.

    The chosen variations of a type are spread evenly over all of its variations. A
    shorter list is the beginning of a longer one.

    Raises:
      ValueError: the engine has too few tasks, or fails.
    """
    types = TASK_TYPES if self.options.short_tasks else TASK_TYPES + LONGER_TYPES
    candidates = interleave(self._list_tasks(name, split) for name in types)
    tasks = [*itertools.islice(candidates, self.sizes[split])]
    check_size("ScienceWorld", tasks, split, self.sizes[split])
    return tasks

  def _list_tasks(self, task_type: str, split: str) -> Iterator[Task]:
    """Yield the tasks of a type; skip those whose solution is too long."""
    numbers = self._engine.list_variations(task_type, split)
    order = spread(len(numbers))
    if split == "test":
      order = order[self.options.skip_test_variations :]
    for index in order:
      task_id = f"{task_type}/{numbers[index]}"
      gold = self._read_gold(task_id)
      if len(gold["actions"]) <= MAX_GOLD_STEPS:
        yield Task(task_id, split, gold["description"], self.max_steps)

  def _read_gold(self, task_id: str) -> dict:
    """Return a task's description and solution, from disk if they were stored.

    Returns:
      A "description" and the list of "actions" of the solution. With
      `short_tasks=False`, the list is empty.
    """
    if not self.options.short_tasks:
      return self._engine.describe(task_id)

    def solve() -> bytes:
      """Let the engine solve the task, and write the result as JSON."""
      return json.dumps(self._engine.describe(task_id, solve=True)).encode()

    name = f"{task_id.replace('/', '-')}.json"
    return json.loads(read_or_make(Path(self.options.gold_dir) / name, solve))

  def reset(self, task_id: str) -> str:
    """Start a task and return the first observation.

    Raises:
      ValueError: the task does not exist.
    """
    plan = self._read_gold(task_id)["actions"]
    observation = self._engine.load(task_id)
    self._score = 0.0
    self._expert = Expert(plan, observation, self._engine)
    return observation

  def step(self, action: str) -> tuple[str, bool]:
    """Execute an action.

    Returns:
      The observation, and whether the task is completed or has failed.
    """
    # The action "reset task" of the engine would clear the score of a fatal mistake.
    if {"reset", "task"} <= {*action.lower().split()}:
      return "That action is not allowed here.", False
    # A model's reply may contain half of a surrogate pair, a character that cannot be
    # sent to the engine.
    action = action.encode("utf-8", "replace").decode().strip()
    observation, score, completed = self._engine.step(action)
    self._expert.observe(action, observation)
    self._score = max(0.0, round(score, 2))
    return observation, completed or score < 0

  def score(self) -> float:
    """Return the engine's points divided by 100; 0 after a fatal mistake."""
    return self._score

  def oracle(self) -> Oracle:
    """Return the expert's next step; see Env.oracle."""
    return self._expert.oracle()

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong action in place of the expert's; see Env.mistake."""
    return self._expert.mistake(kind, key)
