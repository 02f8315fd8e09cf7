"""ALFWorld: household text games on their PDDL engine, with the observations of AgentGym."""

import itertools
import json
import re
import sys
from pathlib import Path

from baar_jax.envs import engines
from baar_jax.envs.alfworld_engine import Engine
from baar_jax.envs.alfworld_expert import TASK_TYPES, Goal, expert_step, mistake
from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import Task

GAMES = "json_2.1.1"  # the directory of the splits in the benchmark's download
GAME = "game.tw-pddl"
USUAL_SPLITS = {"train": "train", "test": "valid_unseen"}
NO_TEXT_GAMES = ("movable", "Sliced")  # ALFWorld's text games leave these names out, too
NOTHING = "Nothing happens."
MADE_HERE = "take games made here with --config.env.data=own"

# There are two grammars of games, each of which admits only its own words for putting down.
PUT = {"move": "move {} to {}", "put": "put {} in/on {}"}
PROMPT = """\
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
ARRIVED = re.compile(r"^You arrive at loc [^.]*\. ")
PUT_TEMPLATE = re.compile(r'template\s*::\s*"put .* in/on ')
TASK = re.compile(r"Your task is to: (.+?)\s*\"")


class ALFWorld(Env):
  """The Env of ALFWorld; a task's id is its game's directory in the data, SPLIT/NAME/TRIAL."""

  def __init__(
    self,
    data: str,
    train_tasks: int,
    test_tasks: int,
    max_steps: int = 30,
    train_split: str = "",
    test_split: str = "",
  ) -> None:
    """Opens nothing yet. Raises ValueError if another version of ALFWorld is installed.

    Args:
      data: the directory of the splits, or the one above its json_2.1.1/.
      train_tasks, test_tasks: the number of tasks in each split.
      max_steps: limit of an episode, which the caller enforces.
      train_split, test_split: a directory in the data ("" is train or valid_unseen), or a file that
        lists games, either as lines SPLIT/NAME/TRIAL or as AgentGym's JSON mappings.
    """
    engines.check_version("alfworld")
    nested = Path(data) / GAMES
    self._data = nested if nested.is_dir() else Path(data)
    self._sizes = {"train": train_tasks, "test": test_tasks}
    sources = {"train": train_split, "test": test_split}
    self._splits = {split: sources[split] or usual for split, usual in USUAL_SPLITS.items()}
    self._max_steps = max_steps
    self.system_prompt = _prompt("move")
    self._engine: Engine | None = None
    self._goal: Goal | None = None  # of the episode in progress

  def tasks(self, split: str) -> list[Task]:
    """Lists a split's games: the task types take turns, each with its trials in sorted order.

    Games that are unreadable or missing are left out, and stderr says how many.
    """
    if split not in self._sizes:
      raise ValueError(f"unknown split {split!r}; known: {', '.join(self._sizes)}")
    source, size = self._splits[split], self._sizes[split]
    ids = self._ids(source)
    ids_by_type: dict[str, list[str]] = {name: [] for name in TASK_TYPES}
    errors: list[str] = []
    for task_id in sorted(ids, key=lambda id_: id_.split("/")[-1]):
      try:
        ids_by_type[Goal.of(Path(task_id).parent.name).task_type].append(task_id)
      except ValueError as error:
        errors.append(str(error))
    tasks: list[Task] = []
    for task_id in itertools.chain(*itertools.zip_longest(*ids_by_type.values())):
      if task_id and len(tasks) < size:
        try:
          tasks.append(Task(task_id, split, self._read(task_id)[0], self._max_steps))
        except ValueError as error:
          errors.append(str(error))
    if errors:
      print(f"ALFWorld: left out {len(errors)} of {len(ids)} games: {errors[0]}", file=sys.stderr)
    if len(tasks) < size:
      raise ValueError(
        f"ALFWorld's {source} in {self._data} has {len(tasks)} games, {size} were asked for: set "
        f"--config.env.{split}_tasks"
      )
    return tasks

  def _ids(self, source: str) -> list[str]:
    """The ids of the games in a directory or in a list, in a fixed order."""
    directory, listed = self._data / source, Path(source)
    splits = sorted(place.name for place in self._data.iterdir() if place.is_dir())
    if directory.is_dir() and directory.is_relative_to(self._data):
      games = sorted(directory.glob(f"*/*/{GAME}"))
      ids = [game.parent.relative_to(self._data).as_posix() for game in games]
      ids = [id_ for id_ in ids if not any(word in id_ for word in NO_TEXT_GAMES)]
    elif listed.is_file():
      entries = (
        self._agentgym(listed, splits) if listed.suffix == ".json" else listed.read_text().split()
      )
      ids = [id_ for id_ in entries if (self._data / id_ / GAME).is_file()]
      if len(ids) < len(entries):
        missing = len(entries) - len(ids)
        print(f"ALFWorld: {missing} games of {source} are not in {self._data}", file=sys.stderr)
    else:
      raise ValueError(
        f"ALFWorld's split {source!r} is neither a directory in {self._data} nor a file (that "
        f"directory has: {', '.join(splits) or 'none'}); set --config.env.train_split and "
        f"test_split, or {MADE_HERE}"
      )
    if not ids:
      raise ValueError(
        f"{self._data} has no games of {source} (SPLIT/NAME/TRIAL/{GAME}); get some, or {MADE_HERE}"
      )
    return ids

  def _agentgym(self, mappings: Path, splits: list[str]) -> list[str]:
    """The ids in AgentGym's mappings, which do not name the split: each game is searched for."""
    try:
      entries = json.loads(mappings.read_text())
      names = [f"{entry['task_type']}/{entry['task_id']}" for entry in entries]
    except (ValueError, KeyError, TypeError):
      raise ValueError(f"{mappings} is no list of objects with task_type and task_id") from None
    ids = []
    for name in names:
      places = [split for split in splits if (self._data / split / name / GAME).is_file()]
      ids.append(f"{(places or ['?'])[0]}/{name}")
    return ids

  def _read(self, task_id: str) -> tuple[str, str]:
    """A game's task and its grammar, "move" or "put". Raises ValueError if it cannot be used."""
    path = self._data / task_id / GAME
    if not path.is_file() or task_id.count("/") != 2:
      raise ValueError(
        f"{task_id!r} is not an ALFWorld game; expected SPLIT/NAME/TRIAL in {self._data}"
      )
    try:
      game = json.loads(path.read_text())
      task = TASK.search(game["grammar"])
      complete = task and game["pddl_domain"] and game["pddl_problem"] and game["solvable"]
    except (ValueError, KeyError, TypeError):
      complete = False
    if not complete:
      raise ValueError(f"{path} is damaged or has no solution; delete it or get it again")
    return task[1], "put" if PUT_TEMPLATE.search(game["grammar"]) else "move"

  def reset(self, task_id: str) -> str:
    self.system_prompt = _prompt(self._read(task_id)[1])
    self._engine = self._engine or Engine()
    self._goal = None
    welcome = self._engine.start(self._data / task_id / GAME)
    self._goal = Goal.of(Path(task_id).parent.name)
    return self._observation("\n".join(welcome.split("\n\n")[1:]))

  def step(self, action: str) -> tuple[str, bool]:
    engine = self._current()
    feedback = engine.step(action) if action in engine.commands else NOTHING
    return self._observation(feedback), engine.won

  def _observation(self, feedback: str) -> str:
    commands = ",".join(self._engine.commands)
    return f"{ARRIVED.sub('', feedback.strip())}\nAVAILABLE ACTIONS: {commands}"

  def score(self) -> float:
    """1 if the game is won, else 0."""
    return float(self._current().won)

  def oracle(self) -> Oracle:
    engine = self._current()
    return expert_step(self._goal, engine.facts(), engine.commands)

  def mistake(self, kind: str, key: str) -> str:
    return mistake(self._goal, kind, key, self.oracle(), self._engine.commands)

  def _current(self) -> Engine:
    if self._goal is None:
      raise RuntimeError("no episode has been started: call reset() first")
    return self._engine

  def close(self) -> None:
    self._engine = self._goal = None


def _prompt(grammar: str) -> str:
  put = PUT[grammar]
  example = put.format("apple 1", "sidetable 1")
  return PROMPT.format(putting=put.format("OBJECT", "RECEPTACLE"), put_example=example)
