"""ALFWorld: household text games on their PDDL engine, with the observations of AgentGym."""

import itertools
import json
import re
from pathlib import Path

from baar_jax.envs.alfworld_engine import TASK_TYPES, Engine, advise, mistake, read_goal
from baar_jax.envs.base import Env, Oracle, read_prompt
from baar_jax.episode import SPLITS, Task

GAMES = "json_2.1.1"  # the directory of the splits in the benchmark's download
GAME = "game.tw-pddl"
USUAL_SPLITS = {"train": "train", "dev": "valid_seen", "test": "valid_unseen"}
NO_TEXT_GAMES = ("movable", "Sliced")  # ALFWorld does not offer games with these names as text
MOVE = "move {o} to {r}"  # of the grammar since ALFWorld 0.4; an older one has other words
ARRIVED = re.compile(r"^You arrive at loc [^.]*\. ")
TASK = re.compile(r"Your task is to: (.+?)\s*\"")


class ALFWorld(Env):
  """The Env of ALFWorld; a task's id is its game's directory in the data, SPLIT/NAME/TRIAL."""

  system_prompt = read_prompt("alfworld")

  def __init__(
    self, data, train_tasks, dev_tasks, test_tasks, max_steps=30, splits=("", "", "")
  ) -> None:
    """`data` is the directory above json_2.1.1/, which has those of the splits.

    A split is a directory in there ("" is train, valid_seen or valid_unseen), or a file in `data`
    that lists games, as lines SPLIT/NAME/TRIAL or as AgentGym's JSON mappings.
    """
    self._root, self._data = Path(data), Path(data) / GAMES
    self._sources = {split: name or USUAL_SPLITS[split] for split, name in zip(SPLITS, splits)}
    self._sizes = dict(zip(SPLITS, (train_tasks, dev_tasks, test_tasks)))
    self._max_steps, self._engine = max_steps, Engine()

  def tasks(self, split: str) -> list[Task]:
    """Lists a split's games: the task types take turns, each with its trials in sorted order."""
    source, size, tasks = self._sources[split], self._sizes[split], []
    ids_by_type: dict[str, list[str]] = {name: [] for name in TASK_TYPES}
    for task_id in sorted(self._list_ids(source), key=lambda id_: id_.split("/")[-1]):
      ids_by_type[read_goal(Path(task_id).parent.name)[0]].append(task_id)
    for task_id in filter(None, itertools.chain(*itertools.zip_longest(*ids_by_type.values()))):
      if len(tasks) < size and (text := read_description(self._data / task_id / GAME)):
        tasks.append(Task(task_id, split, text, self._max_steps))
    if len(tasks) < size:
      problem = f"ALFWorld's {source} in {self._data} has {len(tasks)} games, {size} were asked for"
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
    games = sorted(self._data.glob(f"{directory}/*/*/{GAME}"))
    ids = [game.parent.relative_to(self._data).as_posix() for game in games]
    return [id_ for id_ in ids if not any(word in id_ for word in NO_TEXT_GAMES)]

  def reset(self, task_id: str) -> str:
    game = self._data / task_id / GAME
    welcome = self._engine.start(game, game.parents[1].name)
    return self._observe("\n".join(welcome.split("\n\n")[1:]))

  def step(self, action: str) -> tuple[str, bool]:
    admitted = action in self._engine.commands
    feedback = self._engine.step(action) if admitted else "Nothing happens."
    return self._observe(feedback), self._engine.won

  def _observe(self, feedback: str) -> str:
    commands = ",".join(self._engine.commands)
    return f"{ARRIVED.sub('', feedback.strip())}\nAVAILABLE ACTIONS: {commands}"

  def score(self) -> float:
    return float(self._engine.won)

  def oracle(self) -> Oracle:
    return advise(self._engine)

  def mistake(self, kind: str, key: str) -> str:
    return mistake(self._engine, kind, key)


def read_description(path: Path) -> str | None:
  """What a game asks for; None if nobody can win it. Raises ValueError if it cannot be played."""
  try:
    game = json.loads(path.read_text()) if path.is_file() else {}  # reading a pipe would never end
    if MOVE in game["grammar"]:
      return TASK.search(game["grammar"])[1] if game["solvable"] else None
  except (OSError, ValueError, KeyError, TypeError, RecursionError):
    pass  # the error below covers it
  raise ValueError(f"{path} is missing, damaged or older than ALFWorld 0.4: get another, or none")
