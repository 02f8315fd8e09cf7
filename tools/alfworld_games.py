"""Generate ALFWorld games: floor plans of the engine with random furniture and goals.

The package alfworld provides the floor plans, the lists of objects that fit into each
receptacle, the PDDL domain and the grammar. A split's name and a game's number seed all
random draws, so the same split and number always give the same game. This file runs in
the engine's Python.
"""

import itertools
import json
import random
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from alfworld.gen import constants, goal_library
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

from baar_jax.envs.alfworld.adapter import (
  GAME,
  LOOK,
  NO_TREATMENT,
  TASK_TYPES,
  TREATMENTS,
  TWO,
  ALFWorld,
  Options,
)
from baar_jax.envs.base import read_or_make
from baar_jax.episode import SPLITS

# Limits of one synthetic game. The medians of real games are 20 receptacles and 39
# objects.
MAX_RECEPTACLES = 14
MAX_OBJECTS = 26
MAX_STEPS = 30  # The expert must win a game within this number of steps.
LAMPS = {"DeskLamp", "FloorLamp"}
LAMP_STANDS = {"Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf"}
NEVER_TARGETS = ("SinkBasin", "BathtubBasin", "StoveBurner", "Microwave", "Fridge")
ABILITIES = ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
# The PDDL domain mentions these types, so the PDDL problem of each game must declare
# them.
DECLARED_RECEPTACLES = {"SinkBasin", "Microwave", "Fridge"}
DECLARED_OBJECTS = {"Knife", "ButterKnife"}
START = "loc|0|0|0|30"  # the agent's first location
# PDDL allows none of these four characters in names, so words such as _bar_ replace
# them. The engine translates the words back.
ENCODED = str.maketrans({"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_"})


class Room(NamedTuple):
  """The furnished room of a synthetic game.

  Attributes:
    locations: the location of each receptacle.
    container: the receptacle of each object.
  """

  locations: dict[str, str]
  container: dict[str, str]


def type_of(name: str) -> str:
  """Return the type of an object or receptacle.

  The type is the first part of a name such as "Mug|+00.1|...". Basins are an exception:
  their names end with the type.
  """
  first, *_, last = name.split("|")
  return last if last.endswith("Basin") else first


def fits(receptacle_type: str, object_type: str) -> bool:
  """Check whether receptacles of one type can contain objects of the other type."""
  return object_type in constants.VAL_RECEPTACLE_OBJECTS[receptacle_type]


class Scene:
  """A floor plan of the package alfworld.

  Attributes:
    locations: where the agent stands to use each receptacle, in quarter metres and
      quarter turns.
    types: the types of receptacles in the scene.
    lamps: the types of lamps in the scene.
    portable: the types of objects that fit into one of the receptacles.
  """

  def __init__(self, number: int) -> None:
    """Read the floor plan with this number."""
    plan = Path(constants.__file__).parent / "layouts" / f"FloorPlan{number}"
    poses = json.loads(Path(f"{plan}-openable.json").read_text())
    objects = set(json.loads(Path(f"{plan}-objects.json").read_text()))
    self.locations: dict[str, str] = {}
    for name, (x, z, rotation, horizon) in sorted(poses.items()):
      if type_of(name) in constants.VAL_RECEPTACLE_OBJECTS:
        point = f"{round(x / 0.25)}|{round(z / 0.25)}"
        view = f"{int(rotation) // 90 % 4}|{int(horizon)}"
        self.locations[name] = f"loc|{point}|{view}"
    self.types = sorted({*map(type_of, self.locations)})
    self.lamps = sorted(objects & LAMPS)
    portable = objects - {*constants.RECEPTACLES, *LAMPS}
    self.portable = sorted(name for name in portable if self._holds(name))

  def _holds(self, object_type: str) -> bool:
    """Check whether an unsliced object of a type fits into one of the receptacles."""
    is_whole = not object_type.endswith("Sliced")
    return is_whole and any(fits(kind, object_type) for kind in self.types)

  def list_goals(self, task_type: str) -> list[tuple[str, str]]:
    """Return the possible goals of a type of task.

    Returns:
      Pairs of a type of object and the type of the target receptacle or lamp.
    """
    treatment = TREATMENTS.get(task_type, NO_TREATMENT)
    ability = f"{treatment.command}able".title()
    treatable = constants.VAL_ACTION_OBJECTS.get(ability, self.portable)
    object_types = [name for name in self.portable if name in treatable]
    if task_type == LOOK:
      lamps = self.lamps if LAMP_STANDS.intersection(self.types) else []
      return [*itertools.product(object_types, lamps)]
    goals = []
    if treatment.receptacle_type in ("", *self.types):
      for object_type, target in itertools.product(object_types, self.types):
        sources = [source for source in self.types if fits(source, object_type)]
        if target not in NEVER_TARGETS and target in sources and len(sources) > 1:
          goals.append((object_type, target))
    return goals

  def furnish(
    self, draw: random.Random, task_type: str, object_type: str, target: str
  ) -> Room:
    """Choose at random the contents of a room in which a goal can be reached.

    Args:
      draw: the random generator.
      task_type: the type of task.
      object_type: the type of object in the goal.
      target: the type of the goal's receptacle or lamp.
    """
    receptacles = [*self.locations]
    stands = [name for name in receptacles if type_of(name) in LAMP_STANDS]
    holders = [name for name in receptacles if fits(type_of(name), object_type)]
    sources = [name for name in holders if type_of(name) != target]
    needed = draw.sample(sources, min(2, len(sources)))
    treatment = TREATMENTS.get(task_type, NO_TREATMENT)
    for kind in (target, treatment.receptacle_type):
      needed += [name for name in receptacles if type_of(name) == kind][:2]
    if task_type == LOOK:
      needed += draw.sample(stands, 1)
    others = [name for name in receptacles if name not in needed]
    draw.shuffle(others)
    chosen = {*needed, *others[: max(0, MAX_RECEPTACLES - len(needed))]}
    locations = {name: self.locations[name] for name in receptacles if name in chosen}
    room = Room(locations, {})
    if task_type == LOOK:
      _put(draw, room, target, stands)
    for _ in range(2 if task_type == TWO else draw.randint(1, 3)):
      _put(draw, room, object_type, sources)
    other_types = [name for name in self.portable if name != object_type]
    draw.shuffle(other_types)
    for kind in other_types * 2:
      fitting = [name for name in locations if fits(type_of(name), kind)]
      if fitting and len(room.container) < MAX_OBJECTS:
        _put(draw, room, kind, fitting)
    return room


def _put(
  draw: random.Random, room: Room, kind: str, receptacles: Sequence[str]
) -> None:
  """Put a new object into a random receptacle.

  Args:
    draw: the random generator.
    room: the room that gets the object.
    kind: the type of the object.
    receptacles: the candidates; those that are not in the room are ignored.
  """
  # The name of an object has its type and a random point.
  point = [draw.uniform(-4, 4), draw.uniform(0, 2), draw.uniform(-4, 4)]
  name = "|".join([kind, *map("{:+06.2f}".format, point)])
  room.container[name] = draw.choice(
    [place for place in room.locations if place in receptacles]
  )


def write_problem(name: str, room: Room, goal: str) -> str:
  """Write a room as a PDDL problem.

  Args:
    name: the name of the problem.
    room: the room with its objects.
    goal: the goal in PDDL, with the parenthesis that closes the problem.
  """
  object_types = {*map(type_of, room.container)}
  furniture = {*map(type_of, room.locations)}
  names = {
    "agent": ["agent1"],
    "otype": [f"{kind}Type" for kind in sorted(object_types | DECLARED_OBJECTS)],
    "rtype": [f"{kind}Type" for kind in sorted(furniture | DECLARED_RECEPTACLES)],
    "object": room.container,
    "receptacle": room.locations,
    "location": sorted({*room.locations.values(), START}),
  }
  lines = [f"(define (problem plan_{name})", "(:domain alfred)", "(:objects"]
  for kind, members in names.items():
    lines += [f"{member.translate(ENCODED)} - {kind}" for member in members]
  facts = [f"(atLocation agent1 {START})"]
  for receptacle, location in room.locations.items():
    facts += [
      f"(receptacleType {receptacle} {type_of(receptacle)}Type)",
      f"(receptacleAtLocation {receptacle} {location})",
    ]
    if type_of(receptacle) in constants.OPENABLE_CLASS_SET:
      facts.append(f"(openable {receptacle})")
  for kind, object_type in itertools.product(
    sorted(furniture), sorted(object_types - LAMPS)
  ):
    if fits(kind, object_type):
      facts.append(f"(canContain {kind}Type {object_type}Type)")
  for item, receptacle in room.container.items():
    kind = type_of(item)
    facts += [
      f"(objectType {item} {kind}Type)",
      f"(inReceptacle {item} {receptacle})",
      f"(objectAtLocation {item} {room.locations[receptacle]})",
    ]
    if kind not in LAMPS:
      facts.append(f"(pickupable {item})")
    for ability in ABILITIES:
      if kind in constants.VAL_ACTION_OBJECTS[ability]:
        facts.append(f"({ability.lower()} {item})")
  encoded = "\n".join(facts).translate(ENCODED)
  return "\n".join([*lines, ")", "(:init", encoded, ")", goal])


def make_game(env: ALFWorld, split: str, number: int) -> tuple[str, dict]:
  """Generate random games until the expert wins one in 1 to MAX_STEPS steps.

  Args:
    env: the environment that runs the games.
    split: the game's split.
    number: the number of the game in the split. The number also determines the type of
      task.

  Returns:
    The game's directory, as NAME/TRIAL, and its contents.
  """
  task_type = TASK_TYPES[number % len(TASK_TYPES)]
  attempts = itertools.count()
  while True:
    draw = random.Random(f"{split}/{task_type}/{number}/{next(attempts)}")
    name, trial, game = draw_game(draw, task_type, number)
    env.start(game, name)
    actions: list[str] = []
    while not env.won and len(actions) < MAX_STEPS:
      actions.append(env.oracle().action)
      env.step(actions[-1])
    if env.won and actions:
      return f"{name}/{trial}", game | {"walkthrough": actions}


def draw_game(
  draw: random.Random, task_type: str, number: int
) -> tuple[str, str, dict]:
  """Generate a random game; winning the game may be impossible.

  Args:
    draw: the random generator.
    task_type: the type of task.
    number: the number of the game in its split.

  Returns:
    The name of the game, the name of its trial, and its contents.
  """
  goals: list[tuple[str, str]] = []
  while not goals:
    floor_plan = draw.choice(sorted(constants.SCENE_NUMBERS))
    scene = Scene(floor_plan)
    goals = scene.list_goals(task_type)
  object_type, target = draw.choice(goals)
  room = scene.furnish(draw, task_type, object_type, target)
  numbers = f"{draw.randrange(10**6):06d}_{draw.randrange(10**6):06d}"
  trial = f"trial_T{number:06d}_{numbers}"
  templates = goal_library.gdict[task_type]
  words = {"obj": object_type, "recep": target, "toggle": target}
  sentence = draw.choice(templates["templates"]).format(**words).lower()
  pddl = templates["pddl"].format(**words).replace("#", "-")
  grammar = Path(ALFRED_TWL2_PATH).read_text()
  game = {
    "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
    "grammar": grammar.replace("UNKNOWN GOAL", f"{sentence}."),
    "pddl_problem": write_problem(trial, room, pddl),
    "solvable": True,
  }
  return f"{task_type}-{object_type}-None-{target}-{floor_plan}", trial, game


def main(root: str, sizes: Iterable[str]) -> None:
  """Generate the missing games of each split.

  Args:
    root: the directory of ALFWorld's data; the games are written below it.
    sizes: number of games in the splits train, dev and test.
  """
  env = ALFWorld(options=Options(root))
  for split, size in zip(SPLITS, sizes):
    directory = env.data / getattr(env.options, f"{split}_split")
    games = directory.glob(f"*/*/{GAME}")
    present = {path.parent.name.split("_")[1] for path in games}
    for number in range(int(size)):
      if f"T{number:06d}" not in present:
        name, game = make_game(env, split, number)
        read_or_make(directory / name / GAME, json.dumps(game).encode)


if __name__ == "__main__":
  main(sys.argv[1], sys.argv[2:])
