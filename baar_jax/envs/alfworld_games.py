"""Generates ALFWorld games: the engine's floor plans with random furniture, objects and goals.

It runs in the engine's Python: MODULE DIRECTORY TRAIN_GAMES TEST_GAMES. The floor plans, what fits
where, the domain and the grammar come from the alfworld package. A split's name and a game's number
seed all that is random, so they always give the same game.
"""

import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from alfworld.gen import constants, goal_library
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

from baar_jax.envs.alfworld import GAME, GAMES, USUAL_SPLITS
from baar_jax.envs.alfworld_engine import Engine
from baar_jax.envs.alfworld_expert import LOOK, TASK_TYPES, TREATMENTS, TWO, Goal, expert_step

SCENES = (*range(1, 31), *range(201, 231), *range(301, 331), *range(401, 431))
MOST_RECEPTACLES, MOST_OBJECTS = 14, 26  # the medians of real games are 20 and 39
PLAYED_STEPS = 30
ABILITIES = ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
LAMPS = {"DeskLamp", "FloorLamp"}
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf")
NEVER_TARGETS = ("SinkBasin", "BathtubBasin", "StoveBurner", "Microwave", "Fridge")
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
    usable = constants.VAL_RECEPTACLE_OBJECTS.keys() & constants.RECEPTACLES
    self.number = number
    self.locations = {  # on the engine's grid of quarter metres and quarter turns
      r: f"loc|{round(x / 0.25)}|{round(z / 0.25)}|{int(rotation) // 90 % 4}|{int(horizon)}"
      for r, (x, z, rotation, horizon) in poses.items()
      if type_of(r) in usable
    }
    self.types = sorted({type_of(r) for r in self.locations})
    self.lamps = sorted(objects & LAMPS)
    portable = objects - set(constants.RECEPTACLES) - LAMPS
    self.portable = sorted(
      o for o in portable if not o.endswith("Sliced") and any(fits(kind, o) for kind in self.types)
    )

  def receptacles(self, types: Sequence[str]) -> list[str]:
    return sorted(r for r in self.locations if type_of(r) in types)


def choose_goal(draw: random.Random, task_type: str) -> tuple[Scene, str, str]:
  """Draws a scene, the object's type, and the type of the target, or of the lamp."""
  command, _, place = TREATMENTS.get(task_type, ("", "", ""))
  while True:
    scene = Scene(draw.choice(SCENES))
    treatable = constants.VAL_ACTION_OBJECTS.get(f"{command}able".title(), scene.portable)
    things = [o for o in scene.portable if o in treatable]
    if task_type == LOOK:
      goals = [(o, lamp) for o in things for lamp in scene.lamps if scene.receptacles(LAMP_STANDS)]
    else:
      goals = [
        (o, target)
        for o in things
        for target in scene.types
        if target not in NEVER_TARGETS and place in ("", *scene.types) and fits(target, o)
        if any(fits(other, o) for other in scene.types if other != target)
      ]
    if goals:
      return scene, *draw.choice(goals)


class Room:
  """A scene with some of its receptacles, and objects in or on them."""

  def __init__(self, draw: random.Random, scene: Scene, task_type: str, thing: str, target: str):
    """Furnishes a room in which the goal can be reached."""
    look, everything = task_type == LOOK, sorted(scene.locations)
    sources = [r for r in everything if fits(type_of(r), thing) and (look or type_of(r) != target)]
    needed = draw.sample(sources, min(2, len(sources)))
    for kind in (target, *TREATMENTS.get(task_type, ())[2:]):
      needed += scene.receptacles((kind,))[:2]
    needed += draw.sample(scene.receptacles(LAMP_STANDS), 1) if look else []
    others = [r for r in everything if r not in needed]
    draw.shuffle(others)
    receptacles = {*needed, *others[: max(0, MOST_RECEPTACLES - len(needed))]}
    self.locations = {r: scene.locations[r] for r in sorted(receptacles)}
    self.container: dict[str, str] = {}  # object -> receptacle
    if look:
      self._put(draw, target, [r for r in self.locations if type_of(r) in LAMP_STANDS])
    for _ in range(2 if task_type == TWO else draw.randint(1, 3)):
      self._put(draw, thing, [r for r in self.locations if r in sources])
    rest = [o for o in scene.portable if o != thing]
    draw.shuffle(rest)
    for kind in rest * 2:
      places = [r for r in self.locations if fits(type_of(r), kind)]
      if places and len(self.container) < MOST_OBJECTS:
        self._put(draw, kind, places)

  def _put(self, draw: random.Random, kind: str, places: Sequence[str]) -> None:
    """Puts a new object, named after its type and a random point, into one of the places."""
    x, y, z = draw.uniform(-4, 4), draw.uniform(0, 2), draw.uniform(-4, 4)
    self.container[f"{kind}|{x:+06.2f}|{y:+06.2f}|{z:+06.2f}"] = draw.choice(places)

  def problem(self, name: str, goal: str) -> str:
    """The room as a PDDL problem; `goal` is PDDL and closes the problem's parenthesis."""
    things, furniture = {type_of(o) for o in self.container}, {type_of(r) for r in self.locations}
    names = {
      "agent": ["agent1"],
      "otype": [f"{kind}Type" for kind in sorted(things | {"Knife", "ButterKnife"})],
      "rtype": [f"{kind}Type" for kind in sorted(furniture | DECLARED)],
      "object": self.container,
      "receptacle": self.locations,
      "location": sorted({*self.locations.values(), START}),
    }
    declared = [f"{n.translate(ENCODED)} - {kind}" for kind in names for n in names[kind]]
    facts = [f"({' '.join(fact).translate(ENCODED)})" for fact in self._facts()]
    head = [f"(define (problem plan_{name})", "(:domain alfred)", "(:objects"]
    return "\n".join([*head, *declared, ")", "(:init", *facts, ")", goal])

  def _facts(self) -> Iterator[tuple[str, ...]]:
    yield "atLocation", "agent1", START
    for receptacle, location in self.locations.items():
      yield "receptacleType", receptacle, f"{type_of(receptacle)}Type"
      yield "receptacleAtLocation", receptacle, location
      if type_of(receptacle) in constants.OPENABLE_CLASS_SET:
        yield "openable", receptacle
    things = sorted({type_of(o) for o in self.container} - LAMPS)
    for kind in sorted({type_of(r) for r in self.locations}):
      yield from (("canContain", f"{kind}Type", f"{o}Type") for o in things if fits(kind, o))
    for name, receptacle in self.container.items():
      kind = type_of(name)
      yield "objectType", name, f"{kind}Type"
      yield "inReceptacle", name, receptacle
      yield "objectAtLocation", name, self.locations[receptacle]
      if kind not in LAMPS:
        yield "pickupable", name
      for ability in ABILITIES:
        if kind in constants.VAL_ACTION_OBJECTS[ability]:
          yield ability.lower(), name


def draw_game(task_type: str, number: int, seed: str) -> tuple[str, str, dict]:
  """Draws a game: its directory's name, its trial's, and its contents without a walkthrough."""
  draw = random.Random(seed)
  scene, thing, target = choose_goal(draw, task_type)
  room = Room(draw, scene, task_type, thing, target)
  trial = f"trial_T{number:06d}_{draw.randrange(10**6):06d}_{draw.randrange(10**6):06d}"
  goal = goal_library.gdict[task_type]
  pddl = goal["pddl"].format(obj=thing, recep=target, toggle=target).replace("#", "-")
  sentence = draw.choice(goal["templates"]).format(obj=thing, recep=target, toggle=target).lower()
  game = {
    "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
    "grammar": Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", f"{sentence}."),
    "pddl_problem": room.problem(trial, pddl),
    "solvable": True,
  }
  return f"{task_type}-{thing}-None-{target}-{scene.number}", trial, game


def make_game(engine: Engine, split: str, number: int) -> tuple[str, str, dict]:
  """Draws games until the expert wins one in 1 to 30 steps; the types take turns by number."""
  task_type = TASK_TYPES[number % len(TASK_TYPES)]
  for attempt in range(100):
    name, trial, game = draw_game(task_type, number, f"{split}/{task_type}/{number}/{attempt}")
    engine.start(game)
    actions: list[str] = []
    while not engine.won and len(actions) < PLAYED_STEPS:
      actions.append(expert_step(Goal.of(name), engine.facts, engine.commands).action)
      engine.step(actions[-1])
    if engine.won and actions:
      return name, trial, game | {"walkthrough": actions}
  raise RuntimeError(f"no {task_type} game could be made")


def main(root: Path, sizes: dict[str, int]) -> None:
  """Generates each split's first games, except those that are there already."""
  engine = Engine()
  for split, size in sizes.items():
    directory = root / GAMES / USUAL_SPLITS[split]
    present = {path.parent.name.split("_")[1] for path in directory.glob(f"*/*/{GAME}")}
    for number in range(size):
      if f"T{number:06d}" not in present:
        name, trial, game = make_game(engine, split, number)
        draft = directory / name / trial / "draft"
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(game))
        os.replace(draft, draft.with_name(GAME))  # atomic: a game file is complete or absent


if __name__ == "__main__":
  main(Path(sys.argv[1]), {"train": int(sys.argv[2]), "test": int(sys.argv[3])})
