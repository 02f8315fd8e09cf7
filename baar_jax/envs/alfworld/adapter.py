"""ALFWorld: household text games with the observations of AgentGym."""

import contextlib
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from baar_jax.envs.alfworld.engine import import_engine
from baar_jax.envs.alfworld.errors import ALFWorldErrors
from baar_jax.envs.alfworld.expert import (
  TASK_TYPES,
  Facts,
  find_next_step,
  make_mistake,
  read_goal,
)
from baar_jax.envs.base import Env, EnvDied, Oracle, check_size, take_turns
from baar_jax.envs.engines import Engine
from baar_jax.episode import Task

GAMES = "json_2.1.1"  # the directory of the splits in the benchmark's download
GAME = "game.tw-pddl"
NO_TEXT_GAMES = ("movable", "Sliced")  # no text games in ALFWorld
MOVE = "move {o} to {r}"  # in the grammar since ALFWorld 0.4; an older one differs
ARRIVED = re.compile(r"^You arrive at loc [^.]*\. ")
TASK = re.compile(r"Your task is to: (.+?)\s*\"")


@dataclasses.dataclass(frozen=True)
class Options:
  # The directory above json_2.1.1/, which has those of the splits; "" is
  # $ALFWORLD_DATA if set, else the games that --stage=setup makes.
  data: str = ""
  # A split is a directory in there, or a file in `data` that lists games, as lines
  # SPLIT/NAME/TRIAL or as AgentGym's JSON mappings.
  train_split: str = "train"
  dev_split: str = "valid_seen"
  test_split: str = "valid_unseen"


class ALFWorld(Env):
  """The Env of ALFWorld; a task's id is its game's directory, SPLIT/NAME/TRIAL."""

  Options = Options
  Errors = ALFWorldErrors
  engine = Engine(
    packages=("alfworld==0.4.2", "textworld==1.7.0", "fast-downward-textworld==20.6.4"),
    data_variable="ALFWORLD_DATA",
    download="alfworld-download --data-dir $ALFWORLD_DATA",
    needs=", which takes a C++ compiler and make (Debian: apt-get install g++ make),",
  )
  prompt_growth = 210  # each observation lists all possible commands
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  _game = None

  @property
  def data(self) -> Path:
    return Path(self.options.data) / GAMES

  def tasks(self, split: str) -> list[Task]:
    """List a split's games: the task types take turns, each with its trials sorted."""
    source = getattr(self.options, f"{split}_split")
    size = self.sizes[split]
    ids_by_type: dict[str, list[str]] = {name: [] for name in TASK_TYPES}
    for task_id in sorted(self._list_ids(source), key=lambda id_: id_.split("/")[-1]):
      goal = read_goal(Path(task_id).parent.name)
      ids_by_type[goal.task_type].append(task_id)
    tasks: list[Task] = []
    for task_id in take_turns(ids_by_type.values()):
      if len(tasks) < size:
        text = read_description(self.data / task_id / GAME)
        if text:
          tasks.append(Task(task_id, split, text, self.max_steps))
    check_size(f"ALFWorld's {source} in {self.data}", tasks, split, size)
    return tasks

  def _list_ids(self, source: str) -> Sequence[str]:
    """List the ids of the games in a directory or in a list."""
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
      raise ValueError(f"{source} is no list of games: {form}") from None
    # AgentGym's mappings do not name the split, so each game is searched for in all.
    ids = {id_.split("/", 1)[1]: id_ for id_ in self._find_ids("*")}
    return [ids.get(name, f"?/{name}") for name in names]

  def _find_ids(self, directory: str) -> list[str]:
    ids = []
    for game in sorted(self.data.glob(f"{directory}/*/*/{GAME}")):
      task_id = game.parent.relative_to(self.data).as_posix()
      if not any(word in task_id for word in NO_TEXT_GAMES):
        ids.append(task_id)
    return ids

  def reset(self, task_id: str) -> str:
    game = self.data / task_id / GAME
    return self.start(game, game.parents[1].name)

  def start(self, game: Path | dict, name: str) -> str:
    """Start a game, from its file or its contents, and return the first observation.

    Raises:
      EnvDied: the engine cannot play this game; it can play others in this process.
    """
    self.goal = read_goal(name)
    import mementos.core

    self._game = self._game or import_engine()()
    mementos.core._memento_cache.clear()  # the library keeps 1 MB of every game
    try:
      self._game.load(game)
      welcome = self._enter(self._game.reset())
    except (Exception, SystemExit) as error:  # a damaged game fails in several parsers
      self._game = None
      reason = str(error).split("\n")[0] or type(error).__name__
      raise EnvDied(f"the game cannot be played: {reason}") from error
    return self._observe(welcome.partition("\n\n")[2].replace("\n\n", "\n"))

  def step(self, action: str) -> tuple[str, bool]:
    feedback = "Nothing happens."
    if action in self.commands:  # the engine understands no other wording
      feedback = self._enter(self._game.step(action)[0])
    return self._observe(feedback), self.won

  def _enter(self, state: dict) -> str:
    self.won = bool(state["won"])
    self.commands = sorted(state["admissible_commands"])
    self.facts = Facts(state["facts"])
    return state["feedback"]

  def _observe(self, feedback: str) -> str:
    text = ARRIVED.sub("", feedback.strip())
    return f"{text}\nAVAILABLE ACTIONS: {','.join(self.commands)}"

  def score(self) -> float:
    return float(self.won)

  def oracle(self) -> Oracle:
    return find_next_step(self.facts, self.goal, self.commands)

  def mistake(self, kind: str, key: str) -> str:
    step = self.oracle()
    return make_mistake(kind, key, step, self.commands, self.goal.object_type)


def read_description(path: Path) -> str | None:
  """Read what a game asks for; None if nobody can win it.

  Raises:
    ValueError: the game cannot be played.
  """
  with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
    if path.is_file():  # reading a pipe would never end
      game = json.loads(path.read_text())
      if MOVE in game["grammar"]:
        return TASK.search(game["grammar"])[1] if game["solvable"] else None
  problem = f"{path} is missing, damaged or older than ALFWorld 0.4"
  raise ValueError(f"{problem}: get another, or none")
