"""ScienceWorld on the real engine: tasks with short solutions, or of any length."""

import dataclasses
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

from baar_jax.envs.base import Env, Oracle, check_size, keep, spread, take_turns
from baar_jax.envs.scienceworld.engine import Engine
from baar_jax.envs.scienceworld.errors import ScienceWorldErrors
from baar_jax.envs.scienceworld.expert import Expert
from baar_jax.episode import Task

# The engine's own solutions finish most variations of these types well within 40 steps.
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
MAX_GOLD_STEPS = 32
# AgentGym has these types too; it leaves out those that grow, breed or use inclined
# planes.
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
  # Whether tasks are those that are solved in 32 steps; else they have any length and
  # more types, and there are no solutions to follow.
  short_tasks: bool = True
  # The engine may find another solution each time: the first one is kept here; "" is
  # gold/ beside the runs.
  gold_dir: str = ""


class ScienceWorld(Env):
  """The Env of ScienceWorld; a task's id is "<task type>/<variation>"."""

  Options = Options
  Errors = ScienceWorldErrors
  metric = "score"
  scripted_options = {"short_tasks": True}
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  scores_steps = True

  def __init__(self, *args: int, **kwargs: int | Options) -> None:
    super().__init__(*args, **kwargs)
    self._engine = Engine()

  @classmethod
  def complete(cls, options: Options, runs: Path) -> Options:
    gold_dir = options.gold_dir or str(runs / "gold")
    return dataclasses.replace(options, gold_dir=gold_dir)

  def tasks(self, split: str) -> list[Task]:
    """List tasks of one of the engine's own splits; the task types take turns.

    Within a type variations are spread evenly; a larger split starts with a smaller
    one's tasks.
    """
    types = TASK_TYPES if self.options.short_tasks else TASK_TYPES + LONGER_TYPES
    listed = take_turns(self._list_tasks(name, split) for name in types)
    tasks = [*itertools.islice(listed, self.sizes[split])]
    check_size("ScienceWorld", tasks, split, self.sizes[split])
    return tasks

  def _list_tasks(self, task_type: str, split: str) -> Iterator[Task]:
    numbers = self._engine.list_variations(task_type, split)
    for place in spread(len(numbers)):
      task_id = f"{task_type}/{numbers[place]}"
      gold = self._read_gold(task_id)
      if len(gold["actions"]) <= MAX_GOLD_STEPS:
        yield Task(task_id, split, gold["description"], self.max_steps)

  def _read_gold(self, task_id: str) -> dict:
    """Read the task's solution and description, or let the engine make them."""
    if not self.options.short_tasks:
      return self._engine.describe(task_id)

    def solve() -> bytes:
      return json.dumps(self._engine.describe(task_id, solve=True)).encode()

    name = f"{task_id.replace('/', '-')}.json"
    return json.loads(keep(Path(self.options.gold_dir) / name, solve))

  def reset(self, task_id: str) -> str:
    plan = self._read_gold(task_id)["actions"]
    observation = self._engine.load(task_id)
    self._score = 0.0
    self._expert = Expert(plan, observation, self._engine)
    return observation

  def step(self, action: str) -> tuple[str, bool]:
    # The engine admits "reset task", but that would clear the score of -100 of a fatal
    # mistake.
    if {"reset", "task"} <= {*action.lower().split()}:
      return "That action is not allowed here.", False
    # A reply may hold half a surrogate pair, which cannot be sent to the engine.
    action = action.encode("utf-8", "replace").decode().strip()
    observation, score, completed = self._engine.step(action)
    self._expert.observe(action, observation)
    self._score = max(0.0, round(score, 2))
    return observation, completed or score < 0

  def score(self) -> float:
    """Return the engine's points of 100 as a share; 0 after a fatal mistake."""
    return self._score

  def oracle(self) -> Oracle:
    return self._expert.oracle()

  def mistake(self, kind: str, key: str) -> str:
    return self._expert.mistake(kind, key)
