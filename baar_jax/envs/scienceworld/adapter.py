"""Connect ScienceWorld, text games of small science experiments in a house.

The paper plays through AgentGym. This adapter is our own, so that the same actions
always have the same results.
"""

import dataclasses
import functools
import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from scienceworld.constants import ID2TASK
from tqdm import tqdm

from baar_jax.envs.base import (
  Env,
  Oracle,
  check_size,
  interleave,
  read_or_make,
  read_verb,
  spread,
)
from baar_jax.envs.scienceworld.engine import Engine
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
# The types of tasks for `short_tasks=False` are AgentGym's, in the engine's order. They
# leave out the engine's types 5-x, 9-x and 10-x, which grow plants, breed, or use
# inclined planes.
AGENTGYM_TYPES = [
  name for key, name in ID2TASK.items() if key.split("-")[0] not in ("5", "9", "10")
]


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
      solution count too, so that no skipped task has to be solved. A split that is
      listed by `test_ids` leaves none out.
    train_ids: the file that lists the training tasks by AgentGym's ids, sciworld_N: a
      JSON list of ids or of objects with "item_id", or a text with an id per line. ""
      takes the engine's training split. A task of the test list is left out.
    test_ids: the same for the held-out test tasks. No split that is not listed has a
      task of a list.
  """

  short_tasks: bool = True
  gold_dir: str = ""
  skip_test_variations: int = 0
  train_ids: str = ""
  test_ids: str = ""

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
  """The Env of ScienceWorld; a task's id is TASK_TYPE/VARIATION.

  A success is the full score, and a fatal mistake ends the episode with score 0 (our
  choice; the paper defines no success here, and its episodes end at a success or at the
  last step).
  """

  Options = Options
  metric = "score"
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  scores_steps = True

  @functools.cached_property
  def _engine(self) -> Engine:
    """Create a game.

    Raises:
      ValueError: Java does not start.
    """
    return Engine()

  @classmethod
  def complete(cls, options: Options, runs: Path) -> Options:
    """Fill in the directory of the stored solutions; see Env.complete.

    A warning says if splits of the engine stand in for the paper's lists of tasks.
    """
    if not (options.short_tasks or options.train_ids and options.test_ids):
      print(
        "Without --config.env.options.train_ids and test_ids, tasks come from the "
        "engine's splits of these names, not from the paper's lists.",
        file=sys.stderr,
      )
    gold_dir = options.gold_dir or str(runs / "gold")
    return dataclasses.replace(options, gold_dir=gold_dir)

  def tasks(self, split: str) -> list[Task]:
    """Return tasks of a split; the types of tasks alternate.

    A listed split keeps the order of its list within a type. Otherwise the chosen
    variations of a type are spread evenly over its variations in the engine's split. A
    shorter list is the beginning of a longer one.

    Raises:
      ValueError: there are too few tasks, a list cannot be read, or the engine fails.
    """
    types = TASK_TYPES if self.options.short_tasks else AGENTGYM_TYPES
    candidates = interleave(self._list_tasks(name, split) for name in types)
    size = self.sizes[split]
    # The search for solutions can take minutes; a line each minute tells how far it is.
    chosen = tqdm(
      itertools.islice(candidates, size),
      desc=f"tasks of {split}",
      total=size,
      delay=60,
      mininterval=60,
    )
    tasks = [*chosen]
    check_size("ScienceWorld", tasks, split, size)
    return tasks

  def _list_tasks(self, task_type: str, split: str) -> Iterator[Task]:
    """Yield the tasks of a type; skip those whose solution is too long."""
    if getattr(self.options, f"{split}_ids", ""):
      ids = [
        task_id for task_id in self._split_of if task_id.startswith(task_type + "/")
      ]
    else:
      numbers = self._engine.list_variations(task_type, split)
      order = spread(len(numbers))
      if split == "test":
        order = order[self.options.skip_test_variations :]
      ids = [f"{task_type}/{numbers[index]}" for index in order]
    for task_id in ids:
      if self._split_of.get(task_id, split) == split:
        gold = self._read_gold(task_id)
        if len(gold["actions"]) <= MAX_GOLD_STEPS:
          yield Task(task_id, split, gold["description"], self.max_steps)

  @functools.cached_property
  def _split_of(self) -> dict[str, str]:
    """Return the split of each task in a list, the tasks in the order of the lists.

    The number N of AgentGym's id sciworld_N counts the variations of all of AgentGym's
    types, in the engine's order of types (AgentGym's agentenv-sciworld/environment.py).

    Raises:
      ValueError: a list cannot be read, or has a number that the engine does not have.
    """
    numbered = []
    for task_type in AGENTGYM_TYPES:
      variations = range(self._engine.count_variations(task_type))
      numbered += [f"{task_type}/{variation}" for variation in variations]
    split_of = {}
    # A task in both lists is a test task, so the test list is read last.
    for split in ("train", "test"):
      if path := getattr(self.options, f"{split}_ids"):
        try:
          for number in re.findall(r"sciworld_(\d+)", Path(path).read_text()):
            split_of[numbered[int(number)]] = split
        except (OSError, ValueError, IndexError) as error:
          ids = f"a list of ids from sciworld_0 to sciworld_{len(numbered) - 1}"
          raise ValueError(f"{path} is not {ids}: download it again") from error
    return split_of

  def _read_gold(self, task_id: str) -> dict:
    """Return a task's description and solution, from disk if they were stored.

    Returns:
      A "description" and the list of "actions" of the solution. With
      `short_tasks=False`, the list is empty.
    """
    if not self.options.short_tasks:
      return self._engine.describe(task_id)
    path = Path(self.options.gold_dir, f"{task_id.replace('/', '-')}.json")
    solve = lambda: json.dumps(self._engine.describe(task_id, solve=True)).encode()  # noqa: E731
    return json.loads(read_or_make(path, solve))

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
    if not self.options.short_tasks:
      raise NotImplementedError("scripted models need --config.env.options.short_tasks")
    return self._expert.oracle()

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong action in place of the expert's; see Env.mistake."""
    return self._expert.mistake(kind, key)


CRITICAL_VERBS = (
  "focus",
  "connect",
  "disconnect",
  "pour",
  "mix",
  "use",
  "move",
  "dunk",
  "activate",
  "deactivate",
)
# Senseless actions use the verb "open" instead of these verbs.
VAGUE_VERBS = ("focus", "move", "pour", "connect")
ONE_OBJECT_VERBS = ("focus", "mix", "activate", "deactivate", "disconnect")
ROOMS = (
  "kitchen",
  "hallway",
  "workshop",
  "greenhouse",
  "bedroom",
  "art studio",
  "living room",
  "outside",
  "foundry",
)
# Actions that waste a step, drawn evenly.
WASTED = (
  "look around",
  "inventory",
  "examine",
  "look at",
  "use",
  "go to",
  "nonsense",
)
# If the engine does not understand a critical action of the plan, the expert replaces
# the action, but at most this number of times.
MAX_REPAIRS = 3
# If the same door has failed to open more than this number of times, the expert goes on
# to the plan's next action.
MAX_DOOR_FAILURES = 6
# If the expert's action moves an object into a box, a wrong action moves it into
# another box with this probability.
BOXED = 0.6
MOVED = re.compile(r"You move to the ([a-z ]+)\.")
ROOM = re.compile(r"called the ([a-z ]+)\.")
TWO_OBJECTS = re.compile(r"(\w+) (.+) (to|into|in|on) (.+)$")
ENDS = re.compile("terminal|anode|cathode")


class Expert:
  """An expert that follows a plan during one episode.

  The expert's own action advances the plan. After any other action, the expert first
  tries to undo it, by walking back or disconnecting. The engine disconnects whole
  objects only. So a wire that was connected at a wrong end mostly stays connected, and
  the circuit is lost.
  """

  def __init__(self, plan: Sequence[str], observation: str, engine: Engine) -> None:
    """Start at the beginning of a plan.

    Args:
      plan: the actions of a solution.
      observation: the first observation; it names the room.
      engine: lists the objects and the possible actions.
    """
    self._plan = list(plan)
    self._position = 0
    self._engine = engine
    self._recovery: list[str] = []  # actions to execute before the plan goes on
    self._failures = 0  # how often the plan's next action has failed
    self._room = ROOM.search(observation)[1]

  def oracle(self) -> Oracle:
    """Return the next step: it undoes a mistake if needed, else follows the plan.

    After the end of the plan, the action is "wait1".
    """
    action = [*self._recovery, *self._plan[self._position :], "wait1"][0]
    critical = read_verb(action) in CRITICAL_VERBS
    return Oracle(action, self._position, critical, recovering=bool(self._recovery))

  def observe(self, action: str, observation: str) -> None:
    """Update the plan, and the actions that undo mistakes, after a step.

    Args:
      action: the action that was executed.
      observation: the engine's answer to it.
    """
    expected = self.oracle()
    previous_room = self._room
    moved = MOVED.search(observation)
    two_objects = TWO_OBJECTS.match(action)
    if moved:
      self._room = moved[1]
    if action == expected.action and expected.recovering:
      self._recovery.pop(0)
    elif action == expected.action:
      self._advance(expected, observation)
    elif moved:
      self._recovery.insert(0, f"go to {previous_room}")
    elif two_objects and "is now connected to" in observation:
      self._recovery.insert(0, f"disconnect {two_objects[2]}")

  def _advance(self, expected: Oracle, observation: str) -> None:
    """Go to the plan's next action, or prepare another try of the executed action.

    Args:
      expected: the plan's step that was executed.
      observation: the engine's answer to it.
    """
    is_unknown = "No known action" in observation
    if "Ambiguous request" in observation:
      self._position += 1
      if self._plan[self._position : self._position + 1] != ["0"]:
        self._recovery.append("0")
    elif is_unknown and expected.critical and self._failures < MAX_REPAIRS:
      self._failures += 1
      self._repair(expected.action)
    elif (
      is_unknown
      and read_verb(expected.action) == "go"
      or "door is not open" in observation
    ):
      self._position += self._failures > MAX_DOOR_FAILURES
      self._failures += 1
      self._recovery.append(f"open door to {expected.action.removeprefix('go to ')}")
    else:
      self._position += 1
      self._failures = 0

  def _repair(self, action: str) -> None:
    """Replace an action of the plan by the valid action that is most similar.

    Similar actions share their words with the old action. If no valid action has the
    same verb, the step is skipped.

    Args:
      action: the action that the engine does not understand.
    """
    words = {*action.split()}

    def likeness(candidate: str) -> float:
      """Return the number of words shared with the old action, minus 0.3 per other."""
      candidate_words = {*candidate.split()}
      return len(words & candidate_words) - 0.3 * len(candidate_words - words)

    valid = self._engine.list_valid_actions()
    similar = [
      candidate for candidate in valid if read_verb(candidate) == read_verb(action)
    ]
    if similar:
      self._plan[self._position] = max(similar, key=likeness)
    else:
      self._position += 1

  def mistake(self, kind: str, key: str) -> str:
    """Draw a wrong action on the objects in sight; see Env.mistake.

    If a "wrong" action is not possible at a step, the step is wasted.
    """
    draw = random.Random(key)
    action = self.oracle().action
    names = self._engine.list_objects()
    objects = [name for name in names if name not in ("agent", "air")] or ["table"]
    wrong = _act_wrongly(action, objects, draw) if kind == "wrong" else None
    if wrong is None:
      wrong = _waste_step(action, objects, draw)
    # A mistake that equals the expert's action would do the expert's work by chance.
    return wrong if wrong != action else f"examine {draw.choice(objects)}"


def _act_wrongly(action: str, objects: list[str], draw: random.Random) -> str | None:
  """Apply the verb of a critical action to a wrong object.

  Args:
    action: the expert's action.
    objects: the names of the objects in sight.
    draw: the random generator.

  Returns:
    The wrong action; None if the action is routine, or names no second object.
  """
  verb = read_verb(action)
  others = [name for name in objects if name not in action] or objects
  if verb in ONE_OBJECT_VERBS:
    return f"{verb}{' on' * (verb == 'focus')} {draw.choice(others)}"
  two_objects = TWO_OBJECTS.match(action)
  if verb not in CRITICAL_VERBS or not two_objects:
    return None
  _, item, preposition, target = two_objects.groups()
  boxes = [name for name in others if "box" in name]
  if verb == "move" and "box" in target and boxes and draw.random() < BOXED:
    return f"move {item} to {draw.choice(boxes)}"
  if verb == "connect":
    ends = [name for name in others if ENDS.search(name)]
    return f"connect {item} to {draw.choice(ends or others)}"
  if draw.random() < 0.5:
    return f"{verb} {draw.choice(others)} {preposition} {target}"
  return f"{verb} {item} {preposition} {draw.choice(others)}"


def _waste_step(action: str, objects: list[str], draw: random.Random) -> str:
  """Draw an action that wastes the step.

  Args:
    action: the expert's action.
    objects: the names of the objects in sight.
    draw: the random generator.
  """
  verb = read_verb(action)
  kind = draw.choice(WASTED)
  item = draw.choice(objects)
  if kind in ("examine", "look at"):
    return f"{kind} {item}"
  if kind == "use":
    return f"use {item} on {draw.choice(objects)}" if verb != "use" else "task"
  if kind == "go to":
    return f"go to {draw.choice(ROOMS)}"
  if kind == "nonsense":
    return f"{'open' if verb in VAGUE_VERBS else verb} the {item}"
  return kind
