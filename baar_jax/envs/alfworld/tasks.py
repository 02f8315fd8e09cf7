"""Generates ALFWorld games: the engine's floor plans with random furniture and goals.

The floor plans, the rules of what fits, the domain and the grammar come from the
alfworld package. A split's name and a game's number seed all that is random, so they
always give the same game.
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

from baar_jax.envs.alfworld.adapter import GAME, ALFWorld, Options
from baar_jax.envs.alfworld.expert import LOOK, TASK_TYPES, TWO, treatment_of
from baar_jax.envs.base import keep
from baar_jax.episode import SPLITS

MOST_RECEPTACLES = 14  # the median of real games is 20
MOST_OBJECTS = 26  # the median of real games is 39
MOST_STEPS = 30
LAMPS = {"DeskLamp", "FloorLamp"}
LAMP_STANDS = {"Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf"}
NEVER_TARGETS = ("SinkBasin", "BathtubBasin", "StoveBurner", "Microwave", "Fridge")
ABILITIES = ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
# Types that the domain itself names.
DECLARED_RECEPTACLES = {"SinkBasin", "Microwave", "Fridge"}
DECLARED_OBJECTS = {"Knife", "ButterKnife"}
START = "loc|0|0|0|30"
# PDDL does not allow these characters in names; the engine decodes them.
ENCODED = str.maketrans({"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_"})


class Room(NamedTuple):
  locations: dict[str, str]  # of receptacles
  container: dict[str, str]  # object -> the receptacle that it is in


def type_of(name: str) -> str:
  """Read the type in a name such as "Mug|+00.1|..."; a basin has it at the end."""
  first, *_, last = name.split("|")
  return last if last.endswith("Basin") else first


def fits(receptacle_type: str, object_type: str) -> bool:
  """Tell whether objects of a type can be put into receptacles of a type."""
  return object_type in constants.VAL_RECEPTACLE_OBJECTS[receptacle_type]


class Scene:
  """A floor plan: its receptacles, each with its place to stand, and its objects."""

  def __init__(self, number: int) -> None:
    """Read a floor plan of the package."""
    plan = Path(constants.__file__).parent / "layouts" / f"FloorPlan{number}"
    poses = json.loads(Path(f"{plan}-openable.json").read_text())
    objects = set(json.loads(Path(f"{plan}-objects.json").read_text()))
    self.locations: dict[str, str] = {}  # in quarter metres and quarter turns
    for name, (x, z, rotation, horizon) in sorted(poses.items()):
      if type_of(name) in constants.VAL_RECEPTACLE_OBJECTS:
        place = f"{round(x / 0.25)}|{round(z / 0.25)}"
        view = f"{int(rotation) // 90 % 4}|{int(horizon)}"
        self.locations[name] = f"loc|{place}|{view}"
    self.types = sorted({*map(type_of, self.locations)})
    self.lamps = sorted(objects & LAMPS)
    portable = objects - {*constants.RECEPTACLES, *LAMPS}
    self.portable = sorted(name for name in portable if self._holds(name))

  def _holds(self, object_type: str) -> bool:
    """Tell whether a whole object can be put somewhere."""
    whole = not object_type.endswith("Sliced")
    return whole and any(fits(kind, object_type) for kind in self.types)

  def list_goals(self, task_type: str) -> list[tuple[str, str]]:
    """List what can be asked for: a type of object, with a target's or a lamp's."""
    treatment = treatment_of(task_type)
    ability = f"{treatment.command}able".title()
    treatable = constants.VAL_ACTION_OBJECTS.get(ability, self.portable)
    things = [name for name in self.portable if name in treatable]
    if task_type == LOOK:
      lamps = self.lamps if LAMP_STANDS.intersection(self.types) else []
      return [*itertools.product(things, lamps)]
    goals = []
    if treatment.place in ("", *self.types):
      for thing, target in itertools.product(things, self.types):
        sources = [kind for kind in self.types if fits(kind, thing)]
        if target not in NEVER_TARGETS and target in sources and len(sources) > 1:
          goals.append((thing, target))
    return goals

  def furnish(
    self, draw: random.Random, task_type: str, thing: str, target: str
  ) -> Room:
    """Draw a room for a goal."""
    receptacles = [*self.locations]
    stands = [r for r in receptacles if type_of(r) in LAMP_STANDS]
    holders = [r for r in receptacles if fits(type_of(r), thing)]
    sources = [r for r in holders if type_of(r) != target]
    needed = draw.sample(sources, min(2, len(sources)))
    for kind in (target, treatment_of(task_type).place):
      needed += [r for r in receptacles if type_of(r) == kind][:2]
    if task_type == LOOK:
      needed += draw.sample(stands, 1)
    others = [r for r in receptacles if r not in needed]
    draw.shuffle(others)
    chosen = {*needed, *others[: max(0, MOST_RECEPTACLES - len(needed))]}
    locations = {r: self.locations[r] for r in receptacles if r in chosen}
    room = Room(locations, {})
    if task_type == LOOK:
      _put(draw, room, target, stands)
    for _ in range(2 if task_type == TWO else draw.randint(1, 3)):
      _put(draw, room, thing, sources)
    rest = [name for name in self.portable if name != thing]
    draw.shuffle(rest)
    for kind in rest * 2:
      places = [r for r in locations if fits(type_of(r), kind)]
      if places and len(room.container) < MOST_OBJECTS:
        _put(draw, room, kind, places)
    return room


def _put(draw: random.Random, room: Room, kind: str, places: Sequence[str]) -> None:
  """Put a new object into one of the places that are in the room."""
  # An object is named after its type and a random point.
  point = [draw.uniform(-4, 4), draw.uniform(0, 2), draw.uniform(-4, 4)]
  name = "|".join([kind, *map("{:+06.2f}".format, point)])
  room.container[name] = draw.choice([r for r in room.locations if r in places])


def write_problem(name: str, room: Room, goal: str) -> str:
  """Write a room as a PDDL problem; `goal` is PDDL and closes its parenthesis."""
  things = {*map(type_of, room.container)}
  furniture = {*map(type_of, room.locations)}
  names = {
    "agent": ["agent1"],
    "otype": [f"{kind}Type" for kind in sorted(things | DECLARED_OBJECTS)],
    "rtype": [f"{kind}Type" for kind in sorted(furniture | DECLARED_RECEPTACLES)],
    "object": room.container,
    "receptacle": room.locations,
    "location": sorted({*room.locations.values(), START}),
  }
  lines = [f"(define (problem plan_{name})", "(:domain alfred)", "(:objects"]
  for kind, named in names.items():
    lines += [f"{other.translate(ENCODED)} - {kind}" for other in named]
  facts = [f"(atLocation agent1 {START})"]
  for r, location in room.locations.items():
    facts += [
      f"(receptacleType {r} {type_of(r)}Type)",
      f"(receptacleAtLocation {r} {location})",
    ]
    if type_of(r) in constants.OPENABLE_CLASS_SET:
      facts.append(f"(openable {r})")
  for kind, thing in itertools.product(sorted(furniture), sorted(things - LAMPS)):
    if fits(kind, thing):
      facts.append(f"(canContain {kind}Type {thing}Type)")
  for thing, r in room.container.items():
    kind = type_of(thing)
    facts += [
      f"(objectType {thing} {kind}Type)",
      f"(inReceptacle {thing} {r})",
      f"(objectAtLocation {thing} {room.locations[r]})",
    ]
    if kind not in LAMPS:
      facts.append(f"(pickupable {thing})")
    for ability in ABILITIES:
      if kind in constants.VAL_ACTION_OBJECTS[ability]:
        facts.append(f"({ability.lower()} {thing})")
  encoded = "\n".join(facts).translate(ENCODED)
  return "\n".join([*lines, ")", "(:init", encoded, ")", goal])


def make_game(env: ALFWorld, split: str, number: int) -> tuple[str, dict]:
  """Draw games until the expert wins one in 1 to 30 steps; the types take turns.

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
    while not env.won and len(actions) < MOST_STEPS:
      actions.append(env.oracle().action)
      env.step(actions[-1])
    if env.won and actions:
      return f"{name}/{trial}", game | {"walkthrough": actions}


def draw_game(
  draw: random.Random, task_type: str, number: int
) -> tuple[str, str, dict]:
  """Draw a game's name, its trial and its contents, which may be impossible to win."""
  goals: list[tuple[str, str]] = []
  while not goals:
    floor_plan = draw.choice(sorted(constants.SCENE_NUMBERS))
    scene = Scene(floor_plan)
    goals = scene.list_goals(task_type)
  thing, target = draw.choice(goals)
  room = scene.furnish(draw, task_type, thing, target)
  numbers = f"{draw.randrange(10**6):06d}_{draw.randrange(10**6):06d}"
  trial = f"trial_T{number:06d}_{numbers}"
  templates = goal_library.gdict[task_type]
  words = {"obj": thing, "recep": target, "toggle": target}
  sentence = draw.choice(templates["templates"]).format(**words).lower()
  pddl = templates["pddl"].format(**words).replace("#", "-")
  grammar = Path(ALFRED_TWL2_PATH).read_text()
  game = {
    "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
    "grammar": grammar.replace("UNKNOWN GOAL", f"{sentence}."),
    "pddl_problem": write_problem(trial, room, pddl),
    "solvable": True,
  }
  return f"{task_type}-{thing}-None-{target}-{floor_plan}", trial, game


def main(root: str, sizes: Iterable[str]) -> None:
  """Generate each split's first games, except those that are there already."""
  env = ALFWorld(options=Options(root))
  for split, size in zip(SPLITS, sizes):
    directory = env.data / getattr(env.options, f"{split}_split")
    games = directory.glob(f"*/*/{GAME}")
    present = {path.parent.name.split("_")[1] for path in games}
    for number in range(int(size)):
      if f"T{number:06d}" not in present:
        name, game = make_game(env, split, number)
        keep(directory / name / GAME, json.dumps(game).encode)


if __name__ == "__main__":
  main(sys.argv[1], sys.argv[2:])
