"""Generates ALFWorld games: the engine's floor plans with random furniture, objects and goals.

The floor plans, what fits where, the domain and the grammar come from the alfworld package. A
split's name and a game's number seed all that is random, so they always give the same game.
"""

import itertools
import json
import random
import sys
from pathlib import Path

from alfworld.gen import constants, goal_library
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

from baar_jax.envs.alfworld import GAME, LOOK, TASK_TYPES, TREATMENTS, TWO, USUAL_SPLITS, ALFWorld
from baar_jax.envs.base import keep

MOST_RECEPTACLES, MOST_OBJECTS = 14, 26  # the medians of real games are 20 and 39
LAMPS = {"DeskLamp", "FloorLamp"}
LAMP_STANDS = {"Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf"}
NEVER_TARGETS = ("SinkBasin", "BathtubBasin", "StoveBurner", "Microwave", "Fridge")
ABILITIES = ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
DECLARED = {"SinkBasin", "Microwave", "Fridge"}  # receptacle types that the domain itself names
START = "loc|0|0|0|30"
# PDDL does not allow these characters in names; the engine decodes them.
ENCODED = str.maketrans({"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_"})


def type_of(name: str) -> str:
  """The type in a name such as "Mug|+00.1|..."; a basin has its type at the end."""
  first, *_, last = name.split("|")
  return last if last.endswith("Basin") else first


def fits(receptacle_type: str, object_type: str) -> bool:
  return object_type in constants.VAL_RECEPTACLE_OBJECTS[receptacle_type]


class Scene:
  """A floor plan: its receptacles, each with where one stands to reach it, and its objects."""

  def __init__(self, number: int) -> None:
    plan = Path(constants.__file__).parent / "layouts" / f"FloorPlan{number}"
    poses = json.loads(Path(f"{plan}-openable.json").read_text())
    objects = set(json.loads(Path(f"{plan}-objects.json").read_text()))
    self.locations = {  # on the engine's grid of quarter metres and quarter turns
      r: f"loc|{round(x / 0.25)}|{round(z / 0.25)}|{int(rotation) // 90 % 4}|{int(horizon)}"
      for r, (x, z, rotation, horizon) in sorted(poses.items())
      if type_of(r) in constants.VAL_RECEPTACLE_OBJECTS
    }
    self.types = sorted({type_of(r) for r in self.locations})
    self.lamps = sorted(objects & LAMPS)
    portable = {o for o in objects if any(fits(kind, o) for kind in self.types)}
    portable -= {*constants.RECEPTACLES, *LAMPS}
    self.portable = sorted(o for o in portable if not o.endswith("Sliced"))

  def list_goals(self, task_type: str) -> list[tuple[str, str]]:
    """What can be asked for: types of objects, each with that of a target, or of a lamp."""
    command, _, place = TREATMENTS.get(task_type, ("", "", ""))
    treatable = constants.VAL_ACTION_OBJECTS.get(f"{command}able".title(), self.portable)
    things = [o for o in self.portable if o in treatable]
    if task_type == LOOK:
      return [(o, lamp) for o in things for lamp in self.lamps if {*self.types} & LAMP_STANDS]
    targets = [kind for kind in self.types if kind not in NEVER_TARGETS]
    return [
      (o, target)
      for o, target in itertools.product(things, targets if place in ("", *self.types) else [])
      if fits(target, o) and any(fits(kind, o) for kind in self.types if kind != target)
    ]

  def furnish(self, draw: random.Random, task_type: str, thing: str, target: str) -> list[dict]:
    """Draws a room for a goal: receptacle -> location, and object -> the receptacle it is in."""
    stands = [r for r in self.locations if type_of(r) in LAMP_STANDS]
    sources = [r for r in self.locations if fits(type_of(r), thing) and type_of(r) != target]
    needed = draw.sample(sources, min(2, len(sources)))
    for kind in (target, *TREATMENTS.get(task_type, ())[2:]):
      needed += [r for r in self.locations if type_of(r) == kind][:2]
    needed += draw.sample(stands, 1) if task_type == LOOK else []
    others = [r for r in self.locations if r not in needed]
    draw.shuffle(others)
    receptacles = {*needed, *others[: max(0, MOST_RECEPTACLES - len(needed))]}
    locations = {r: location for r, location in self.locations.items() if r in receptacles}
    container = {}

    def put(kind: str, places: list[str]) -> None:
      # An object is named after its type and a random point.
      x, y, z = draw.uniform(-4, 4), draw.uniform(0, 2), draw.uniform(-4, 4)
      name = f"{kind}|{x:+06.2f}|{y:+06.2f}|{z:+06.2f}"
      container[name] = draw.choice([r for r in locations if r in places])

    if task_type == LOOK:
      put(target, stands)
    for _ in range(2 if task_type == TWO else draw.randint(1, 3)):
      put(thing, sources)
    rest = [o for o in self.portable if o != thing]
    draw.shuffle(rest)
    for kind in rest * 2:
      places = [r for r in locations if fits(type_of(r), kind)]
      if places and len(container) < MOST_OBJECTS:
        put(kind, places)
    return [locations, container]


def write_problem(name: str, locations: dict, container: dict, goal: str) -> str:
  """A room as a PDDL problem; `goal` is PDDL and closes the problem's parenthesis."""
  things, furniture = {type_of(o) for o in container}, {type_of(r) for r in locations}
  names = {
    "agent": ["agent1"],
    "otype": [f"{kind}Type" for kind in sorted(things | {"Knife", "ButterKnife"})],
    "rtype": [f"{kind}Type" for kind in sorted(furniture | DECLARED)],
    "object": container,
    "receptacle": locations,
    "location": sorted({*locations.values(), START}),
  }
  declared = [f"{n.translate(ENCODED)} - {kind}" for kind in names for n in names[kind]]
  facts = [f"(atLocation agent1 {START})"]
  for r, location in locations.items():
    facts += [f"(receptacleType {r} {type_of(r)}Type)", f"(receptacleAtLocation {r} {location})"]
    facts += [f"(openable {r})"] if type_of(r) in constants.OPENABLE_CLASS_SET else []
  pairs = itertools.product(sorted(furniture), sorted(things - LAMPS))
  facts += [f"(canContain {kind}Type {o}Type)" for kind, o in pairs if fits(kind, o)]
  for o, r in container.items():
    facts += [f"(objectType {o} {type_of(o)}Type)", f"(inReceptacle {o} {r})"]
    facts += [f"(objectAtLocation {o} {locations[r]})"]
    facts += [f"(pickupable {o})"] if type_of(o) not in LAMPS else []
    abilities = [a for a in ABILITIES if type_of(o) in constants.VAL_ACTION_OBJECTS[a]]
    facts += [f"({ability.lower()} {o})" for ability in abilities]
  lines = [f"(define (problem plan_{name})", "(:domain alfred)", "(:objects", *declared, ")"]
  return "\n".join([*lines, "(:init", "\n".join(facts).translate(ENCODED), ")", goal])


def make_game(env: ALFWorld, split: str, number: int) -> tuple[str, dict]:
  """Draws games until the expert wins one in 1 to 30 steps; the types take turns by number.

  Returns the game's directory, as NAME/TRIAL, and its contents.
  """
  task_type = TASK_TYPES[number % len(TASK_TYPES)]
  templates, attempts = goal_library.gdict[task_type], itertools.count()
  while True:
    draw, goals = random.Random(f"{split}/{task_type}/{number}/{next(attempts)}"), []
    while not goals:
      floor_plan = draw.choice(sorted(constants.SCENE_NUMBERS))
      goals = Scene(floor_plan).list_goals(task_type)
    thing, target = draw.choice(goals)
    locations, container = Scene(floor_plan).furnish(draw, task_type, thing, target)
    trial = f"trial_T{number:06d}_{draw.randrange(10**6):06d}_{draw.randrange(10**6):06d}"
    words = {"obj": thing, "recep": target, "toggle": target}
    sentence = draw.choice(templates["templates"]).format(**words).lower()
    pddl = templates["pddl"].format(**words).replace("#", "-")
    game = {
      "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
      "grammar": Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", f"{sentence}."),
      "pddl_problem": write_problem(trial, locations, container, pddl),
      "solvable": True,
    }
    name, actions = f"{task_type}-{thing}-None-{target}-{floor_plan}", []
    env.start(game, name)
    while not env.won and len(actions) < 30:
      actions.append(env.oracle().action)
      env.step(actions[-1])
    if env.won and actions:
      return f"{name}/{trial}", game | {"walkthrough": actions}


def main(root: Path, sizes: dict[str, int]) -> None:
  """Generates each split's first games, except those that are there already."""
  env = ALFWorld(root, 0, 0, 0)
  for split, size in sizes.items():
    directory = env.data / USUAL_SPLITS[split]
    present = {path.parent.name.split("_")[1] for path in directory.glob(f"*/*/{GAME}")}
    for number in range(size):
      if f"T{number:06d}" not in present:
        name, game = make_game(env, split, number)
        keep(directory / name / GAME, json.dumps(game).encode)


if __name__ == "__main__":
  main(Path(sys.argv[1]), dict(zip(USUAL_SPLITS, map(int, sys.argv[2:]))))
