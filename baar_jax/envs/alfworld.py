"""ALFWorld: household text games on the PDDL engine, in the words of AgentGym."""

import itertools
import json
import re
import sys
from pathlib import Path

from baar_jax.envs import engines
from baar_jax.envs.alfworld_engine import Engine
from baar_jax.envs.alfworld_expert import TASK_TYPES, Expert, Goal
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import Task

GAMES = "json_2.1.1"  # where the benchmark's own download has its splits
GAME = "game.tw-pddl"
USUAL_SPLITS = {"train": "train", "test": "valid_unseen"}
NO_TEXT_GAMES = ("movable", "Sliced")  # in names that ALFWorld's text games leave out as well
NOTHING = "Nothing happens."

# Games of two grammars differ in how a thing is put down, and each admits its own words alone.
_PUTTING = {"move": "move OBJECT to RECEPTACLE", "put": "put OBJECT in/on RECEPTACLE"}
_PUT_EXAMPLE = {"move": "move apple 1 to sidetable 1", "put": "put apple 1 in/on sidetable 1"}
_PROMPT = """\
You are in a house, and you are given one task in it. Each turn you take ONE action and then read \
what happened. Your turns are limited.

Reply in exactly this form, with the action on one line and nothing after it:
Thought: what you know so far and what to do next.

Action: one action

Actions (OBJECT and RECEPTACLE are names with their numbers, such as mug 2 or cabinet 4):
go to RECEPTACLE | open RECEPTACLE | close RECEPTACLE
take OBJECT from RECEPTACLE | {putting}
clean OBJECT with RECEPTACLE | heat OBJECT with RECEPTACLE | cool OBJECT with RECEPTACLE
use LAMP | slice OBJECT with OBJECT | examine THING | look | inventory

Rules of the house:
- Every observation ends with the actions that are possible now. Any other wording is answered \
with "Nothing happens." and the turn is lost.
- You can carry one object. You see what a receptacle holds once you are there and it is open.
- Things are cleaned with a sinkbasin, heated with a microwave and cooled with a fridge, while you \
hold them. To look at an object under a lamp, hold it and use the lamp.

An example.
You are in the middle of a room. Looking quickly around you, you see a drawer 1, a fridge 1, \
a sidetable 1, and a sinkbasin 1.
Your task is to: put a clean apple in sidetable.
AVAILABLE ACTIONS: go to drawer 1,go to fridge 1,go to sidetable 1,go to sinkbasin 1,inventory,look

Thought: Apples are kept cold, so I look in the fridge first.

Action: go to fridge 1
You arrive at fridge 1. The fridge 1 is closed.

Thought: It is closed; I open it.

Action: open fridge 1
You open the fridge 1. The fridge 1 is open. In it, you see a apple 1, and a egg 2.

Thought: Here is an apple.

Action: take apple 1 from fridge 1
You pick up the apple 1 from the fridge 1.

Thought: It has to be clean before I put it down.

Action: go to sinkbasin 1
You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing.

Thought: I am at the sinkbasin with the apple.

Action: clean apple 1 with sinkbasin 1
You clean the apple 1 using the sinkbasin 1.

Thought: It is clean. Now it goes to the sidetable.

Action: go to sidetable 1
You arrive at sidetable 1. On the sidetable 1, you see a desklamp 1.

Thought: I put the apple down here.

Action: {put_example}
"""
_ARRIVED = re.compile(r"^You arrive at loc [^.]*\. ")
_PUT_TEMPLATE = re.compile(r'template\s*::\s*"put .* in/on ')
_TASK = re.compile(r"Your task is to: (.+?)\s*\"")


class ALFWorld(Env):
  """The Env of ALFWorld. A task's id is its game's directory below the data's: SPLIT/NAME/TRIAL."""

  def __init__(
    self,
    data: str,
    train_tasks: int,
    test_tasks: int,
    max_steps: int = 30,
    train_split: str = "",
    test_split: str = "",
  ) -> None:
    """Opens nothing yet.

    Args:
      data: the directory of the games, or the one above it that has them in json_2.1.1/.
      train_tasks, test_tasks: how many tasks each split has.
      max_steps: of each task's episodes; the caller counts them.
      train_split, test_split: a directory of games in the data, or a file that lists games: lines
        SPLIT/NAME/TRIAL, or AgentGym's mappings as JSON; "" is train or valid_unseen.

    Raises:
      ValueError: another version of ALFWorld is installed.
    """
    engines.check_version("alfworld")
    below = Path(data) / GAMES
    self._data = below if below.is_dir() else Path(data)
    self._sizes = {"train": train_tasks, "test": test_tasks}
    named = {"train": train_split, "test": test_split}
    self._splits = {split: named[split] or USUAL_SPLITS[split] for split in named}
    self._max_steps = max_steps
    self._engine: Engine | None = None
    self._expert: Expert | None = None
    self._grammar = "move"

  @property
  def system_prompt(self) -> str:
    """In the words of the game under way."""
    words = self._grammar
    return _PROMPT.format(putting=_PUTTING[words], put_example=_PUT_EXAMPLE[words])

  def tasks(self, split: str) -> list[Task]:
    """The games of a split, the task types in turn, each type's in the order of their trials.

    Games that cannot be read are left out and counted on stderr; so are listed ones that are not
    there.
    """
    if split not in self._sizes:
      raise ValueError(f"unknown split {split!r}; known: {', '.join(self._sizes)}")
    source, wanted = self._splits[split], self._sizes[split]
    ids = self._ids(source)
    by_type: dict[str, list[str]] = {name: [] for name in TASK_TYPES}
    damaged: list[str] = []
    for task_id in sorted(ids, key=lambda id_: id_.split("/")[-1]):
      try:
        by_type[_goal(task_id).task_type].append(task_id)
      except ValueError as error:
        damaged.append(str(error))
    in_turn = [id_ for row in itertools.zip_longest(*by_type.values()) for id_ in row if id_]
    found: list[Task] = []
    for task_id in in_turn:
      if len(found) == wanted:
        break
      try:
        found.append(Task(task_id, split, self._read(task_id)[0], self._max_steps))
      except ValueError as error:
        damaged.append(str(error))
    if damaged:
      print(f"ALFWorld: left out {len(damaged)} of {len(ids)} games: {damaged[0]}", file=sys.stderr)
    if len(found) < wanted:
      raise ValueError(
        f"ALFWorld's {source} in {self._data} has {len(found)} games, {wanted} were asked for: set "
        f"--config.env.{split}_tasks"
      )
    return found

  def _ids(self, source: str) -> list[str]:
    """Of the games in a directory or a list, in a fixed order."""
    if (self._data / source).is_dir() and (self._data / source).is_relative_to(self._data):
      paths = sorted((self._data / source).glob(f"*/*/{GAME}"))
      ids = [path.parent.relative_to(self._data).as_posix() for path in paths]
      ids = [i for i in ids if not any(word in i for word in NO_TEXT_GAMES)]
      if not ids:
        raise ValueError(
          f"{self._data / source} has no games (NAME/TRIAL/{GAME}); get some, or take those made "
          "here with --config.env.data=own"
        )
      return ids
    if not Path(source).is_file():
      raise ValueError(
        f"ALFWorld's split {source!r} is neither a directory in {self._data} nor a file (that "
        f"directory has: {', '.join(self._directories()) or 'none'}); set --config.env.train_split "
        "and test_split, or take games made here with --config.env.data=own"
      )
    listed = self._listed(Path(source))
    ids = [i for i in listed if (self._data / i / GAME).is_file()]
    if len(ids) < len(listed):
      print(f"ALFWorld: {len(listed) - len(ids)} games of {source} are not there", file=sys.stderr)
    if not ids:
      raise ValueError(f"no game that {source} lists is in {self._data}")
    return ids

  def _directories(self) -> list[str]:
    return sorted(place.name for place in self._data.iterdir() if place.is_dir())

  def _listed(self, path: Path) -> list[str]:
    """The ids in a list file; AgentGym's mappings do not say the split, so it is looked up."""
    text = path.read_text()
    if path.suffix != ".json":
      return text.split()
    try:
      names = [f"{entry['task_type']}/{entry['task_id']}" for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError):
      raise ValueError(f"{path} is no list of objects with task_type and task_id") from None
    splits = self._directories()
    there = {n: [s for s in splits if (self._data / s / n / GAME).is_file()] for n in names}
    return [f"{(there[name] or ['?'])[0]}/{name}" for name in names]

  def _read(self, task_id: str) -> tuple[str, str]:
    """A game's task and the words of its grammar. Raises ValueError if there is none."""
    path = self._data / task_id / GAME
    if not path.is_file() or task_id.count("/") != 2:
      raise ValueError(
        f"{task_id!r} is no ALFWorld game in {self._data}; expected SPLIT/NAME/TRIAL"
      )
    try:
      game = json.loads(path.read_text())
      task = _TASK.search(game["grammar"])
      complete = task and game["pddl_domain"] and game["pddl_problem"] and game["solvable"]
    except (ValueError, KeyError, TypeError):
      complete = False
    if not complete:
      raise ValueError(f"{path} is damaged or has no solution; delete it or get it again")
    grammar = "put" if _PUT_TEMPLATE.search(game["grammar"]) else "move"
    return task[1], grammar

  def reset(self, task_id: str) -> str:
    _, self._grammar = self._read(task_id)
    self._engine = self._engine or Engine()
    self._expert = None
    welcome = self._engine.start(self._data / task_id / GAME)
    self._expert = Expert(_goal(task_id))
    return self._observe("\n".join(welcome.split("\n\n")[1:]))

  def step(self, action: str) -> tuple[str, bool]:
    engine = self._current()
    feedback = engine.step(action) if action in engine.commands else NOTHING
    return self._observe(feedback), engine.won

  def _observe(self, feedback: str) -> str:
    commands = ",".join(self._engine.commands)
    return f"{_ARRIVED.sub('', feedback.strip())}\nAVAILABLE ACTIONS: {commands}"

  def score(self) -> float:
    """1 if the game is won, else 0."""
    return float(self._current().won)

  def oracle(self) -> Oracle:
    engine = self._current()
    return self._expert.oracle(engine.facts(), engine.commands)

  def mistake(self, kind: str, key: str) -> str:
    return self._expert.mistake(kind, key, self.oracle(), self._current().commands)

  def _current(self) -> Engine:
    if self._expert is None:
      raise RuntimeError("no episode has been started: call reset() first")
    return self._engine

  def close(self) -> None:
    self._engine = self._expert = None


def _goal(task_id: str) -> Goal:
  return Goal.of(task_id.split("/")[1] if task_id.count("/") == 2 else task_id)
