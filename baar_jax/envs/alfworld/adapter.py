"""Connect ALFWorld's household text games; observations have AgentGym's format.

The expert, which scripted models follow, reads the whole state of a game, including
hidden objects.
"""

import contextlib
import copy
import dataclasses
import functools
import hashlib
import json
import pickle
import random
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from baar_jax.envs.base import (
  Env,
  EnvDied,
  Errors,
  Oracle,
  check_size,
  interleave,
  read_or_make,
  read_verb,
)
from baar_jax.envs.engines import Engine
from baar_jax.episode import Task

# The benchmark's download has a directory of this name with a directory per split.
GAMES = "json_2.1.1"
GAME = "game.tw-pddl"  # the name of each game's file
# ALFWorld's text engine cannot run games whose names contain one of these words.
NO_TEXT_GAMES = ("movable", "Sliced")
MOVE = "move {o} to {r}"  # Only games of ALFWorld 0.4 or later contain this text.
ARRIVED = re.compile(r"^You arrive at loc [^.]*\. ")
TASK = re.compile(r"Your task is to: (.+?)\s*\"")


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of ALFWorld.

  A split is a directory in `data`/json_2.1.1, or a file in `data` that lists games. The
  file has lines SPLIT/NAME/TRIAL, or it is one of AgentGym's JSON lists of games.

  Attributes:
    data: the directory that contains json_2.1.1. "" is $ALFWORLD_DATA if set, else the
      synthetic games that --stage=setup generates.
    train_split: the training games.
    dev_split: the validation games.
    test_split: the held-out test games.
  """

  data: str = ""
  train_split: str = "train"
  dev_split: str = "valid_seen"
  test_split: str = "valid_unseen"


class ALFWorld(Env):
  """The Env of ALFWorld.

  A task's id is the directory of its game: SPLIT/NAME/TRIAL.
  """

  Options = Options
  # A real model has to search for objects, so routine steps have high error rates.
  errors = Errors(ability=(0.3, 0.9), routine=(0.45, 0.45), task_type=r"(?<=/)\w+")
  engine = Engine(
    packages=("alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4"),
    data_variable="ALFWORLD_DATA",
    download="alfworld-download --data-dir $ALFWORLD_DATA",
    needs=", which takes a C++ compiler and make (Debian: apt-get install g++ make),",
  )
  prompt_growth = 210  # tokens: each observation lists all possible commands
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  _game = None

  @property
  def data(self) -> Path:
    """Return the directory that contains the directories of the splits."""
    return Path(self.options.data) / GAMES

  def tasks(self, split: str) -> list[Task]:
    """Return a split's games as tasks; the types of tasks alternate.

    The games of each type are sorted by the name of the trial. A game that cannot be
    won is skipped.

    Raises:
      ValueError: there are too few games, or a list or a game cannot be read.
    """
    source = getattr(self.options, f"{split}_split")
    size = self.sizes[split]
    ids_by_type: dict[str, list[str]] = {name: [] for name in TASK_TYPES}
    for task_id in sorted(self._list_ids(source), key=lambda id_: id_.split("/")[-1]):
      goal = read_goal(Path(task_id).parent.name)
      ids_by_type[goal.task_type].append(task_id)
    tasks: list[Task] = []
    for task_id in interleave(ids_by_type.values()):
      if len(tasks) < size:
        text = read_description(self.data / task_id / GAME)
        if text:
          tasks.append(Task(task_id, split, text, self.max_steps))
    check_size(f"ALFWorld's {source} in {self.data}", tasks, split, size)
    return tasks

  def _list_ids(self, source: str) -> Sequence[str]:
    """Return the ids of the games of a split.

    Args:
      source: the option of the split: a directory of games or a file that lists them.

    Raises:
      ValueError: the file is not a list of games.
    """
    path = Path(self.options.data) / source
    if not path.is_file():
      return self._find_ids(source)
    try:
      text = path.read_text()
      if path.suffix != ".json":
        return text.split()
      names = [f"{entry['task_type']}/{entry['task_id']}" for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError, RecursionError):
      form = "lines SPLIT/NAME/TRIAL, or JSON objects with task_type and task_id"
      raise ValueError(
        f"{source} is not a list of games; it must have {form}"
      ) from None
    # AgentGym's lists do not name the split of a game, so all splits are searched.
    ids = {id_.split("/", 1)[1]: id_ for id_ in self._find_ids("*")}
    return [ids.get(name, f"?/{name}") for name in names]

  def _find_ids(self, directory: str) -> list[str]:
    """Return the ids of the games below a split's directory; "*" is all splits."""
    ids = []
    for game in sorted(self.data.glob(f"{directory}/*/*/{GAME}")):
      task_id = game.parent.relative_to(self.data).as_posix()
      if not any(word in task_id for word in NO_TEXT_GAMES):
        ids.append(task_id)
    return ids

  def reset(self, task_id: str) -> str:
    """Start the game of a task and return the first observation; see `start`."""
    path = self.data / task_id / GAME
    return self.start(path, path.parents[1].name)

  def start(self, game: Path | dict, name: str) -> str:
    """Start a game and return the first observation.

    Args:
      game: the file of the game, or its contents.
      name: the name of the game, which states its goal; see `read_goal`.

    Raises:
      EnvDied: the engine cannot load this game. Other games can still be started.
      ValueError: the name states no goal.
    """
    self.goal = read_goal(name)
    import mementos.core

    self._game = self._game or import_engine()()
    # A library of the engine caches 1 MB for every game: free this memory.
    mementos.core._memento_cache.clear()
    try:
      self._game.load(game)
      welcome = self._enter(self._game.reset())
    except (Exception, SystemExit) as error:  # The engine raises errors of many kinds.
      self._game = None
      reason = str(error).split("\n")[0] or type(error).__name__
      raise EnvDied(
        f"the game {name} cannot be loaded ({reason}): download or generate it again"
      ) from error
    return self._observe(welcome.partition("\n\n")[2].replace("\n\n", "\n"))

  def step(self, action: str) -> tuple[str, bool]:
    """Execute a command if it is possible now; any other command changes nothing.

    Returns:
      The observation, and whether the game is won.
    """
    feedback = "Nothing happens."
    if action in self.commands:
      feedback = self._enter(self._game.step(action)[0])
    return self._observe(feedback), self.won

  def _enter(self, state: dict) -> str:
    """Store the engine's new state and return the engine's text."""
    self.won = bool(state["won"])
    self.commands = sorted(state["admissible_commands"])
    self.facts = Scene(state["facts"])
    return state["feedback"]

  def _observe(self, feedback: str) -> str:
    """Write an observation: the engine's text and the possible commands."""
    text = ARRIVED.sub("", feedback.strip())
    return f"{text}\nAVAILABLE ACTIONS: {','.join(self.commands)}"

  def score(self) -> float:
    """Return 1 if the game is won, else 0."""
    return float(self.won)

  def oracle(self) -> Oracle:
    """Return the expert's next step; see Env.oracle."""
    return find_next_step(self.facts, self.goal, self.commands)

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong command in place of the expert's; see Env.mistake."""
    step = self.oracle()
    return draw_mistake(kind, key, step, self.commands, self.goal.object_type)


def read_description(path: Path) -> str | None:
  """Read the instruction of a game.

  Args:
    path: the file of the game.

  Returns:
    The instruction; None if the game cannot be won.

  Raises:
    ValueError: the file is missing, damaged or older than ALFWorld 0.4.
  """
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
    if path.is_file():  # Reading a named pipe would never end.
      game = json.loads(path.read_text())
      if MOVE in game["grammar"]:
        return TASK.search(game["grammar"])[1] if game["solvable"] else None
  problem = f"{path} is missing, damaged or older than ALFWorld 0.4"
  raise ValueError(f"{problem}: remove its directory or download the games again")


# Most of the time to load a game is spent on the translation of its PDDL. So
# translations are stored in this directory of the engine's Python environment.
TRANSLATIONS = Path(sys.prefix) / "translated"
# The engine evaluates each text between braces in a game's file as Python code. A text
# that does not match NAMES is refused, so that a game cannot execute any other code.
NAME = r"(\w+(\.(name|id|indefinite))?|'[^']*')"
NAMES = re.compile(rf" *{NAME}( (or|\+) {NAME})* *")


def translate_once(translate: Callable, *texts: str) -> Any:
  """Translate a game, or read its translation from disk.

  A translation is stored as a file of 30 to 60 kB in TRANSLATIONS.

  Args:
    translate: the engine's function.
    *texts: its arguments, which determine the file.
  """
  key = hashlib.sha256(repr(texts).encode()).hexdigest()

  def compute() -> bytes:
    """Return the translation, pickled and compressed."""
    return zlib.compress(pickle.dumps(translate(*texts)), 1)

  return pickle.loads(zlib.decompress(read_or_make(TRANSLATIONS / key[:40], compute)))


@functools.cache
def import_engine() -> Callable[[], Any]:
  """Import the engine, patch it, and return a function that creates a game.

  Without the patch, each load and reset translates the game twice. The translation for
  the planner takes up to a minute and 1 GB. Each command also parses the same few
  templates of texts again. With the patch, a game is translated once for all processes,
  and never for the planner. Each process parses a template once. The engine's output
  stays the same.
  """
  import fast_downward
  import textworld
  from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
  from textworld.envs import PddlEnv
  from textworld.envs.pddl import textgen

  translate = fast_downward.pddl2sas
  fast_downward.pddl2sas = lambda *texts, **_: translate_once(translate, *texts)
  parse = functools.cache(textgen._parse_and_convert)
  evaluate = textgen.EvalSymbol.derive

  def parse_once(text: str, rule_name: str, trace: bool = False) -> Any:
    """Parse a template once; return a copy, because the engine changes the result."""
    return copy.deepcopy(parse(text, rule_name=rule_name))

  def copy_context(context: dict) -> dict:
    """Copy the dicts "variables" and "mapping" of a context, but not their values.

    That is enough, because the engine replaces these values but never changes one.
    """
    copied = {name: dict(context[name]) for name in ("variables", "mapping")}
    return context | copied

  def evaluate_names(symbol: Any, context: dict | None = None) -> list:
    """Evaluate an expression of a game's text if it consists of names only."""
    if not NAMES.fullmatch(symbol.expression):
      raise RuntimeError(f"the text {symbol.expression!r} is not a name")
    return evaluate(symbol, context)

  textgen._parse_and_convert = parse_once
  textgen.copy_context = copy_context
  textgen.EvalSymbol.derive = evaluate_names
  rule = textgen.Rule
  rule.parse_conjunctive_query = staticmethod(
    functools.cache(rule.parse_conjunctive_query)
  )
  infos = textworld.EnvInfos(won=True, admissible_commands=True, facts=True)
  return lambda: AlfredDemangler(PddlEnv(infos), shuffle=False)


LOOK = "look_at_obj_in_light"
TWO = "pick_two_obj_and_place"


class Treatment(NamedTuple):
  """A treatment of an object: cleaning, heating or cooling.

  Attributes:
    command: the verb of the command.
    fact: the engine's name of the fact that holds afterwards.
    receptacle_type: the type of receptacle that treats objects.
  """

  command: str = ""
  fact: str = ""
  receptacle_type: str = ""


TREATMENTS = {
  "pick_clean_then_place_in_recep": Treatment("clean", "isclean", "SinkBasin"),
  "pick_heat_then_place_in_recep": Treatment("heat", "ishot", "Microwave"),
  "pick_cool_then_place_in_recep": Treatment("cool", "iscool", "Fridge"),
}
NO_TREATMENT = Treatment()
TASK_TYPES = ("pick_and_place_simple", LOOK, *TREATMENTS, TWO)
ROUTINE_VERBS = ("go", "open", "close", "look", "inventory", "examine", "help")


class Goal(NamedTuple):
  """The goal of a game, as stated by its name.

  Attributes:
    task_type: one of TASK_TYPES.
    object_type: the type of object that has to be placed or looked at.
    target: the type of the receptacle in which the object belongs, or of the lamp.
  """

  task_type: str
  object_type: str
  target: str


def read_goal(name: str) -> Goal:
  """Read the goal in a game's name.

  Raises:
    ValueError: the name does not have the form of a game's name.
  """
  fields = name.split("-")
  if len(fields) != 5 or fields[0] not in TASK_TYPES:
    form = "TYPE-OBJECT-CONTAINER-TARGET-SCENE"
    raise ValueError(f"{name!r} is not the name of an ALFWorld game; it must be {form}")
  return Goal(fields[0], fields[1].lower(), fields[3].lower())


class Scene:
  """The facts of a game's state, indexed for the expert.

  Attributes:
    rows: for each kind of fact, by its name, the arguments of all facts of that kind.
    container: the receptacle of each object.
    location: the location of each receptacle.
    object_type: the type of each object.
    receptacle_type: the type of each receptacle.
    closed: the receptacles that have to be opened first.
    agent_location: the location of the agent.
    held: the object in the agent's hand; None if there is none.
  """

  def __init__(self, propositions: Iterable[Any]) -> None:
    """Sort the engine's propositions about the current state into the attributes."""
    rows = defaultdict(list)
    for fact in propositions:
      names = (a.name.strip().removesuffix("type") for a in fact.arguments)
      rows[fact.name].append(tuple(names))
    self.rows = rows
    self.container = dict(sorted(rows["inreceptacle"]))
    self.location = dict(sorted(rows["receptacleatlocation"]))
    self.object_type = dict(rows["objecttype"])
    self.receptacle_type = dict(rows["receptacletype"])
    opened = rows["opened"]
    self.closed = {row[0] for row in rows["openable"] if row not in opened}
    self.agent_location = rows["atlocation"][0][1]
    self.held = rows["holds"][0][1] if rows["holds"] else None

  def objects(self, object_type: str) -> list[str]:
    """Return the objects of a type."""
    return sorted(
      name for name, kind in self.object_type.items() if kind == object_type
    )

  def receptacles(self, receptacle_type: str) -> list[str]:
    """Return the receptacles of a type to which the agent can go."""
    return sorted(
      name
      for name in self.location
      if self.receptacle_type.get(name) == receptacle_type
    )

  def walk(self, receptacle: str) -> str | None:
    """Return the action that goes to a receptacle; None if the agent is there."""
    if self.location[receptacle] == self.agent_location:
      return None
    return f"go to {receptacle}"

  def reach(self, receptacle: str) -> str | None:
    """Return the next action that makes a receptacle's contents accessible.

    The agent first goes to the receptacle, then opens it if it is closed.

    Returns:
      The action; None if the contents are within reach now.
    """
    opening = f"open {receptacle}" if receptacle in self.closed else None
    return self.walk(receptacle) or opening


def find_next_step(facts: Scene, goal: Goal, commands: Sequence[str]) -> Oracle:
  """Find the expert's next step in any state of a game.

  Args:
    facts: the state.
    goal: the goal of the game.
    commands: the commands that are possible now.

  Returns:
    The step. Its position in the plan increases when an object is taken, treated (or
    looked at under a lamp), and put down.
  """
  treatment = TREATMENTS.get(goal.task_type, NO_TREATMENT)
  objects = facts.objects(goal.object_type)
  targets = facts.receptacles(goal.target)
  placed: list[str] = []
  if goal.task_type == TWO:
    # Both objects go to one receptacle: the one with most objects of the goal's type.
    held_by = Counter(map(facts.container.get, objects))
    targets.sort(key=lambda target: -held_by[target])
    placed = [name for name in objects if facts.container.get(name) == targets[0]]
  position = 2 * bool(placed)
  recovering = False
  if not facts.held:
    missing = [name for name in objects if name not in placed]
    action = _fetch(facts, missing, treatment, targets)
  elif facts.object_type[facts.held] != goal.object_type:
    action = _drop(facts, commands)
    recovering = True
  elif goal.task_type == LOOK:
    position = 1
    action = _light(facts, goal.target)
  elif treatment.command and (facts.held,) not in facts.rows[treatment.fact]:
    position = 1
    station = facts.receptacles(treatment.receptacle_type.lower())[0]
    action = facts.walk(station) or f"{treatment.command} {facts.held} with {station}"
  else:
    position += 2 if treatment.command else 1
    # The action names the receptacle, because other receptacles may be at the same
    # location, such as a dresser's drawers.
    action = facts.reach(targets[0]) or f"move {facts.held} to {targets[0]}"
  return Oracle(action, position, read_verb(action) not in ROUTINE_VERBS, recovering)


def _fetch(
  facts: Scene, objects: Sequence[str], treatment: Treatment, targets: Sequence[str]
) -> str:
  """Return the next action towards taking an object that the goal needs.

  Of several objects, the expert prefers, in this order: a treated object, one at the
  agent's location, a visible one, and one outside the receptacles of the goal.

  Args:
    facts: the state of the game.
    objects: the objects that fit the goal.
    treatment: the treatment that the goal asks for.
    targets: the receptacles in which the object belongs.
  """
  reachable = [name for name in objects if facts.container.get(name) in facts.location]
  if not reachable:
    return "look"

  def rank(name: str) -> tuple:
    """Return an object's sort key; the expert takes the object with the lowest key."""
    receptacle = facts.container[name]
    is_untreated = (name,) not in facts.rows[treatment.fact]
    is_far = facts.walk(receptacle) is not None
    return is_untreated, is_far, receptacle in facts.closed, receptacle in targets, name

  name = min(reachable, key=rank)
  receptacle = facts.container[name]
  return facts.reach(receptacle) or f"take {name} from {receptacle}"


def _drop(facts: Scene, commands: Sequence[str]) -> str:
  """Return the next action towards putting down an object that the goal does not need.

  The action moves the object into any receptacle at hand, or goes to a receptacle that
  can contain the object. The action is "look" if the object fits nowhere.
  """
  for command in commands:
    if command.startswith(f"move {facts.held} to "):
      return command
  pairs = facts.rows["cancontain"]
  held_type = facts.object_type[facts.held]
  fitting = [
    name for name in facts.location if (facts.receptacle_type[name], held_type) in pairs
  ]
  if not fitting:
    return "look"
  return facts.reach(min(fitting, key=lambda name: (name in facts.closed, name)))


def _light(facts: Scene, lamp_type: str) -> str:
  """Return the next action towards using a lamp.

  The action goes to the place of a lamp, makes the lamp accessible, or uses it.
  """
  lamps = facts.objects(lamp_type)
  lamp = next(name for name in lamps if facts.container.get(name) in facts.location)
  return facts.reach(facts.container[lamp]) or f"use {lamp}"


def draw_mistake(
  kind: str, key: str, step: Oracle, commands: Sequence[str], object_type: str
) -> str:
  """Draw a wrong command in place of the expert's.

  At a routine step, a "wrong" mistake wastes the step. A wasted step goes to another
  place, or tries to take an object from there, which has no effect, with equal chances.

  Args:
    kind: "wrong" or "wasted"; see Env.mistake.
    key: the seed of the random draw.
    step: the expert's step.
    commands: the commands that are possible now.
    object_type: the type of object in the goal.
  """
  draw = random.Random(key)
  others = [command for command in commands if command != step.action]
  choices: list[str] = []
  if kind == "wrong" and step.critical:
    acting = [command for command in others if read_verb(command) not in ROUTINE_VERBS]
    alike = [
      command for command in acting if read_verb(command) == read_verb(step.action)
    ]
    choices = alike or acting
  if choices:
    return draw.choice(choices)
  walks = [name for name in others if read_verb(name) == "go"]
  walk = draw.choice(walks or ["go to nowhere"])
  if draw.random() < 0.5:
    return walk
  place = walk.removeprefix("go to ")
  return f"take {object_type} {draw.randint(1, 5)} from {place}"
