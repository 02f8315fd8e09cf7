"""AppWorld tasks of this project's own, for --stage=setup: DIRECTORY TRAIN_TASKS TEST_TASKS.

Sixteen scenarios over six apps, at three levels of difficulty. A scenario has any number of
variants: other people, amounts, titles and records. Training and test tasks share the scenarios
and take different variants, so a test task asks for something that was asked before with other
values. (AppWorld's own datasets do not share scenarios.)

Run by the engine's own Python. What is there already is kept; the same task is made the same way
every time.
"""

import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from baar_jax.envs import appworld_chores as chores
from baar_jax.envs import appworld_joins as joins
from baar_jax.envs import appworld_questions as questions
from baar_jax.envs.appworld_made import Life, Made
from baar_jax.envs.appworld_people import PEOPLE

VERSION = 1  # of the tasks; others are made anew
# By difficulty. A task's id is d<difficulty><scenario>_<variant>.
SCENARIOS: dict[int, tuple[Callable[[Life], Made], ...]] = {
  1: (
    chores.pay_friend,
    questions.long_songs,
    chores.extend_note,
    questions.yearly_bills,
    chores.add_todos,
  ),
  2: (
    questions.favourite_artist,
    chores.birthday_texts,
    chores.complete_todos,
    chores.tidy_downloads,
    questions.sent_to,
  ),
  3: (
    joins.trip_shares,
    questions.unpaid_by,
    chores.genre_playlist,
    joins.approve_requests,
    joins.split_bill,
    joins.texted_artists,
  ),
}
DATASETS = (("train",), ("test_normal", "dev"))


def main(directory: str, train_tasks: str, test_tasks: str) -> None:
  """Makes what is missing and says in one line how many tasks there are."""
  root = Path(directory).absolute()
  if "memory" in str(root):
    raise ValueError(f"AppWorld cannot use {root}, whose name contains 'memory'; choose another")
  os.environ["APPWORLD_ROOT"] = str(root)
  wanted = [int(train_tasks), int(test_tasks)]
  marker = root / "made.json"
  made = _made(marker)
  if made is None:
    shutil.rmtree(root, ignore_errors=True)
    made = [0, 0]
  new = [name for name in _names(wanted) if name not in set(_names(made))]
  counts = [max(pair) for pair in zip(made, wanted)]
  if new:
    _make(root, new, base=not made[0])
  lists = [root / "data" / "datasets" / f"{name}.txt" for names in DATASETS for name in names]
  if new or not all(path.exists() for path in lists):
    _write_datasets(root, counts)
    _replace(marker, json.dumps({"version": VERSION, "tasks": counts}))
  total = len(list((root / "data" / "tasks").glob("d*_*[0-9]")))
  print(f"{total} tasks in {root}, {len(new)} of them new")


def _made(marker: Path) -> list[int] | None:
  """How many tasks of each dataset there are; None where nothing usable is."""
  if not marker.exists():
    return None
  made = json.loads(marker.read_text())
  return made["tasks"] if made["version"] == VERSION else None


def scenarios() -> list[tuple[str, int, Callable[[Life], Made]]]:
  """(id, difficulty, function), the difficulties in turn."""
  found = []
  for turn in range(max(map(len, SCENARIOS.values()))):
    for difficulty, functions in SCENARIOS.items():
      if turn < len(functions):
        found.append((f"d{difficulty}a{turn:04x}", difficulty, functions[turn]))
  return found


def _ids(dataset: int, count: int) -> Iterator[str]:
  """Task ids of a dataset (0 or 1): the scenarios in turn, with every other variant."""
  known = scenarios()
  for number in range(count):
    variant = 2 * (number // len(known)) + 1 + dataset
    yield f"{known[number % len(known)][0]}_{variant}"


def _names(counts: list[int]) -> list[str]:
  return [name for dataset, count in enumerate(counts) for name in _ids(dataset, count)]


def _make(root: Path, names: list[str], base: bool) -> None:
  # The engine takes a second to import, which a run that makes nothing does not need.
  from baar_jax.envs import appworld_data as data

  if base:
    data.make_base(root)
  known = {scenario: (difficulty, function) for scenario, difficulty, function in scenarios()}
  for name in names:
    scenario, _, variant = name.partition("_")
    difficulty, function = known[scenario]
    draw = random.Random(f"{scenario}|{variant}|{VERSION}")
    me = draw.choice(PEOPLE)
    if not (root / "data" / "tasks" / name).exists():
      with data.task_databases(root, name) as models:
        made = function(Life(models, me, draw))
        data.write_task(root, name, models, me, difficulty, made)


def _write_datasets(root: Path, counts: list[int]) -> None:
  directory = root / "data" / "datasets"
  directory.mkdir(exist_ok=True)
  for dataset, (names, count) in enumerate(zip(DATASETS, counts)):
    for name in names:
      _replace(directory / f"{name}.txt", "".join(f"{task}\n" for task in _ids(dataset, count)))


def _replace(path: Path, text: str) -> None:
  draft = path.with_name(f"{path.name}.tmp")
  draft.write_text(text)
  os.replace(draft, path)


if __name__ == "__main__":
  main(*sys.argv[1:])
