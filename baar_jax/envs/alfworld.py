"""ALFWorld: household text games on their PDDL engine, with the observations of AgentGym.

The expert reads a game's whole state.
"""

import copy
import functools
import hashlib
import itertools
import json
import pickle
import random
import re
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

from baar_jax.envs.base import PROMPTS, Env, EnvDied, Oracle, keep, verb
from baar_jax.episode import SPLITS, Task

GAMES = "json_2.1.1"  # the directory of the splits in the benchmark's download
GAME = "game.tw-pddl"
USUAL_SPLITS = {"train": "train", "dev": "valid_seen", "test": "valid_unseen"}
NO_TEXT_GAMES = ("movable", "Sliced")  # ALFWorld does not offer games with these names as text
MOVE = "move {o} to {r}"  # of the grammar since ALFWorld 0.4; an older one has other words
ARRIVED = re.compile(r"^You arrive at loc [^.]*\. ")
TASK = re.compile(r"Your task is to: (.+?)\s*\"")

# Translation takes most of a game's loading time, so its results are kept beside the engine.
TRANSLATIONS = Path(sys.prefix) / "translated"

LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
# How an object is treated before it is put down: command, resulting fact, type of receptacle.
TREATMENTS = {
  "pick_clean_then_place_in_recep": ("clean", "isclean", "SinkBasin"),
  "pick_heat_then_place_in_recep": ("heat", "ishot", "Microwave"),
  "pick_cool_then_place_in_recep": ("cool", "iscool", "Fridge"),
}
TASK_TYPES = ("pick_and_place_simple", LOOK, *TREATMENTS, TWO)
ROUTINE_VERBS = ("go", "open", "close", "look", "inventory", "examine", "help")

# Unproductive actions, and how often each is taken; "wrong" is like "lost" at a routine step.
WASTED = ("go", "examine", "open", "close", "inventory", "look", "nonsense")
WEIGHTS = {
  "lost": (0.50, 0.12, 0.10, 0.05, 0.05, 0.08, 0.10),
  "hasty": (0.25, 0.15, 0.10, 0.10, 0.10, 0.10, 0.20),
}
NONSENSE = ("think about the {}", "search the {}", "find the {}", "check the {}")
# The engine evaluates what stands in braces in a game's text as Python: only names are let through.
NAME = r"(\w+(\.(name|id|indefinite))?|'[^']*')"
NAMES = re.compile(rf" *{NAME}( (or|\+) {NAME})* *")


class ALFWorld(Env):
  """The Env of ALFWorld; a task's id is its game's directory in the data, SPLIT/NAME/TRIAL."""

  system_prompt = (PROMPTS / "alfworld.txt").read_text()

  def __init__(self, data, train_tasks, dev_tasks, test_tasks, max_steps=30, splits=("", "", "")):
    """`data` is the directory above json_2.1.1/, which has those of the splits.

    A split is a directory in there ("" is train, valid_seen or valid_unseen), or a file in `data`
    that lists games, as lines SPLIT/NAME/TRIAL or as AgentGym's JSON mappings.
    """
    self._root, self.data = Path(data), Path(data) / GAMES
    self._sources = {split: name or USUAL_SPLITS[split] for split, name in zip(SPLITS, splits)}
    self._sizes = dict(zip(SPLITS, (train_tasks, dev_tasks, test_tasks)))
    self._max_steps, self._engine = max_steps, None

  def tasks(self, split: str) -> list[Task]:
    """Lists a split's games: the task types take turns, each with its trials in sorted order."""
    source, size, tasks = self._sources[split], self._sizes[split], []
    ids_by_type: dict[str, list[str]] = {name: [] for name in TASK_TYPES}
    for task_id in sorted(self._list_ids(source), key=lambda id_: id_.split("/")[-1]):
      ids_by_type[read_goal(Path(task_id).parent.name)[0]].append(task_id)
    for task_id in filter(None, itertools.chain(*itertools.zip_longest(*ids_by_type.values()))):
      if len(tasks) < size and (text := read_description(self.data / task_id / GAME)):
        tasks.append(Task(task_id, split, text, self._max_steps))
    if len(tasks) < size:
      problem = f"ALFWorld's {source} in {self.data} has {len(tasks)} games, {size} were asked for"
      raise ValueError(f"{problem}: set --config.env.{split}_tasks or {split}_split, or other data")
    return tasks

  def _list_ids(self, source: str) -> list[str]:
    """The ids of the games in a directory or in a list."""
    path = self._root / source
    if not path.is_file():
      return self._find_ids(source)
    try:
      text = path.read_text()
      if path.suffix != ".json":
        return text.split()
      names = [f"{entry['task_type']}/{entry['task_id']}" for entry in json.loads(text)]
    except (ValueError, KeyError, TypeError, RecursionError):
      form = "lines SPLIT/NAME/TRIAL, or JSON objects with task_type and task_id"
      raise ValueError(f"{source} is no list of games: {form}") from None
    # AgentGym's mappings do not name the split, so each game is searched for in all.
    ids = {id_.split("/", 1)[1]: id_ for id_ in self._find_ids("*")}
    return [ids.get(name, f"?/{name}") for name in names]

  def _find_ids(self, directory: str) -> list[str]:
    games = sorted(self.data.glob(f"{directory}/*/*/{GAME}"))
    ids = [game.parent.relative_to(self.data).as_posix() for game in games]
    return [id_ for id_ in ids if not any(word in id_ for word in NO_TEXT_GAMES)]

  def reset(self, task_id: str) -> str:
    game = self.data / task_id / GAME
    return self.start(game, game.parents[1].name)

  def start(self, game: Path | dict, name: str) -> str:
    """Starts a game, from its file or its contents, and returns the first observation.

    Raises EnvDied if the engine cannot play this game; other games of this process can be played.
    """
    self.goal = read_goal(name)
    import mementos.core

    self._engine = self._engine or import_engine()()
    mementos.core._memento_cache.clear()  # the library keeps 1 MB of every game it has seen
    try:
      self._engine.load(game)
      welcome = self._enter(self._engine.reset())
    except (Exception, SystemExit) as error:  # a damaged game fails in any of several parsers
      self._engine = None
      reason = str(error).split("\n")[0] or type(error).__name__
      raise EnvDied(f"the game cannot be played: {reason}") from error
    return self._observe("\n".join(welcome.split("\n\n")[1:]))

  def step(self, action: str) -> tuple[str, bool]:
    admitted = action in self.commands  # the engine understands no other wording
    feedback = self._enter(self._engine.step(action)[0]) if admitted else "Nothing happens."
    return self._observe(feedback), self.won

  def _enter(self, state: dict) -> str:
    self.won, self.commands = bool(state["won"]), sorted(state["admissible_commands"])
    self.facts = Facts(state["facts"])
    return state["feedback"]

  def _observe(self, feedback: str) -> str:
    return f"{ARRIVED.sub('', feedback.strip())}\nAVAILABLE ACTIONS: {','.join(self.commands)}"

  def score(self) -> float:
    return float(self.won)

  def oracle(self) -> Oracle:
    """The expert's next action in any state of a game."""
    facts, (task_type, object_type, target) = self.facts, self.goal
    treatment, treated, place_type = TREATMENTS.get(task_type, ("", "", ""))
    objects, targets = facts.objects(object_type), facts.receptacles(target)
    placed: list[str] = []
    if task_type == TWO:  # both go to one receptacle, the one that already holds most of them
      targets.sort(key=lambda r: -sum(facts.container.get(o) == r for o in objects))
      placed = [o for o in objects if facts.container.get(o) == targets[0]]
    position, held, recovering = 2 * bool(placed), facts.held, False
    if not held:  # prefers an object that is treated already, near, visible, and not put away yet
      receptacle = {o: facts.container.get(o) for o in objects if o not in placed}
      candidates = [
        ((o,) not in facts.rows[treated], bool(facts.walk(r)), r in facts.closed, r in targets, o)
        for o, r in receptacle.items()
        if r in facts.location
      ]
      *_, name = min(candidates, default=("",))
      place = receptacle.get(name)
      action = facts.reach(place) or f"take {name} from {place}" if place else "look"
    elif facts.object_type[held] != object_type:  # puts it down wherever it fits
      fitting = {r for r, kind in facts.rows["cancontain"] if kind == facts.object_type[held]}
      places = [r for r in facts.location if facts.furniture[r] in fitting]
      place = min(places, key=lambda r: (r in facts.closed, r), default=None)
      puts = [command for command in self.commands if command.startswith(f"move {held} to ")]
      action, recovering = puts[0] if puts else facts.reach(place) if place else "look", True
    elif task_type == LOOK:
      lamps = [o for o in facts.objects(target) if facts.container.get(o) in facts.location]
      position, action = 1, facts.reach(facts.container[lamps[0]]) or f"use {lamps[0]}"
    elif treatment and (held,) not in facts.rows[treated]:
      place = facts.receptacles(place_type.lower())[0]
      position, action = 1, facts.walk(place) or f"{treatment} {held} with {place}"
    else:
      position += 2 if treatment else 1
      # Others may share the target's place, as drawers do a dresser's.
      action = facts.reach(targets[0]) or f"move {held} to {targets[0]}"
    return Oracle(action, position, verb(action) not in ROUTINE_VERBS, recovering)

  def mistake(self, kind: str, key: str) -> str:
    draw, oracle = random.Random(key), self.oracle()
    others = [command for command in self.commands if command != oracle.action]
    choices: list[str] = []
    if kind == "wrong" and oracle.critical:
      choices = [command for command in others if verb(command) == verb(oracle.action)]
      choices = choices or [command for command in others if verb(command) not in ROUTINE_VERBS]
    if not choices:
      wasted = draw.choices(WASTED, WEIGHTS.get(kind, WEIGHTS["lost"]))[0]
      choices = [command for command in others if verb(command) == wasted]
    return draw.choice(choices) if choices else draw.choice(NONSENSE).format(self.goal[1])


def keep_on_disk(function: Callable, *texts: str, **named: str):
  """A function's result, which is kept in a file of 30 to 60 kB."""
  key = hashlib.sha256(repr((function.__name__, texts, named)).encode()).hexdigest()[:40]
  make = functools.partial(function, *texts, **named)
  kept = keep(TRANSLATIONS / key, lambda: zlib.compress(pickle.dumps(make()), 1))
  return pickle.loads(zlib.decompress(kept))


@functools.cache
def import_engine() -> Callable:
  """Imports and patches the engine on first use; returns a function that opens an environment.

  Unpatched, each load and reset translates the game twice, once for the planner (up to a minute and
  a GB), and each command parses the same few templates. Patched, a game is translated once for all
  processes, never for the planner, and a text is parsed once. What a game says stays the same.
  """
  import fast_downward
  import textworld
  from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
  from textworld.envs import PddlEnv
  from textworld.envs.pddl import logic, textgen

  translate, read = fast_downward.pddl2sas, logic._parse_and_convert
  fast_downward.pddl2sas = lambda *texts, **_: keep_on_disk(translate, *texts)
  logic._parse_and_convert = functools.partial(keep_on_disk, read)
  parse = functools.cache(textgen._parse_and_convert)
  textgen._parse_and_convert = lambda text, rule_name, trace=False: copy.deepcopy(
    parse(text, rule_name=rule_name)  # a copy, because deriving a text writes into its symbols
  )
  # The engine replaces variables and mappings but never changes one, so a shallow copy is enough.
  textgen.copy_context = lambda context: (
    context | {name: dict(context[name]) for name in ("variables", "mapping")}
  )
  rule = textgen.Rule
  rule.parse_conjunctive_query = staticmethod(functools.cache(rule.parse_conjunctive_query))
  evaluate = textgen.EvalSymbol.derive

  def evaluate_names(symbol, context: dict | None = None) -> list:
    if not NAMES.fullmatch(symbol.expression):
      raise RuntimeError(f"{symbol.expression!r} is no name of a thing")
    return evaluate(symbol, context)

  textgen.EvalSymbol.derive = evaluate_names
  infos = textworld.EnvInfos(won=True, admissible_commands=True, facts=True)
  return lambda: AlfredDemangler(PddlEnv(infos), shuffle=False)


class Facts:
  """The facts of a game's state, from the engine's propositions, indexed for the expert."""

  def __init__(self, propositions: Iterable) -> None:
    rows = self.rows = defaultdict(list)  # the fact's name -> the arguments of each
    for fact in propositions:
      names = (argument.name.strip().removesuffix("type") for argument in fact.arguments)
      rows[fact.name].append(tuple(names))
    self.container = dict(sorted(rows["inreceptacle"]))  # object -> receptacle
    self.location = dict(sorted(rows["receptacleatlocation"]))  # receptacle -> location
    self.object_type = dict(rows["objecttype"])
    self.furniture = dict(rows["receptacletype"])  # receptacle -> type
    self.closed = {name for (name,) in rows["openable"] if (name,) not in rows["opened"]}
    self.here = rows["atlocation"][0][1]
    self.held = rows["holds"][0][1] if rows["holds"] else None

  def objects(self, kind: str) -> list[str]:
    return sorted(name for name, other in self.object_type.items() if other == kind)

  def receptacles(self, kind: str) -> list[str]:
    """The receptacles of a type, as far as the agent can go to them."""
    return sorted(r for r in self.location if self.furniture.get(r) == kind)

  def walk(self, receptacle: str) -> str | None:
    """The action that goes there; None if the agent is there."""
    return None if self.location[receptacle] == self.here else f"go to {receptacle}"

  def reach(self, receptacle: str) -> str | None:
    """The next action on the way to what a receptacle holds; None if that is at hand."""
    return self.walk(receptacle) or (f"open {receptacle}" if receptacle in self.closed else None)


def read_goal(name: str) -> tuple[str, str, str]:
  """Reads the types of task, object, and target or lamp in a game's name. Raises ValueError."""
  fields = name.split("-")
  if len(fields) != 5 or fields[0] not in TASK_TYPES:
    raise ValueError(f"{name!r} names no ALFWorld game: TYPE-OBJECT-CONTAINER-TARGET-SCENE")
  return fields[0], fields[1].lower(), fields[3].lower()


def read_description(path: Path) -> str | None:
  """What a game asks for; None if nobody can win it. Raises ValueError if it cannot be played."""
  try:
    game = json.loads(path.read_text()) if path.is_file() else {}  # reading a pipe would never end
    if MOVE in game["grammar"]:
      return TASK.search(game["grammar"])[1] if game["solvable"] else None
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    pass  # the error below covers it
  raise ValueError(f"{path} is missing, damaged or older than ALFWorld 0.4: get another, or none")
