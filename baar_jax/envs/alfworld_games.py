"""Makes ALFWorld games: rooms of the engine's own scenes, furnished and filled at random.

Run in the engine's Python: MODULE DIRECTORY TRAIN_GAMES TEST_GAMES. The floor plans, what fits
where, the domain and the grammar are those of the alfworld package; which things lie where, and
what is asked for, is drawn from a seed: the same game for the same split, type and number.
"""

import dataclasses
import json
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from baar_jax.envs.alfworld import GAME, GAMES, USUAL_SPLITS
from baar_jax.envs.alfworld_engine import Engine, arguments_kept
from baar_jax.envs.alfworld_expert import LOOK, TASK_TYPES, TREATMENTS, TWO, Expert, Goal

with arguments_kept():
  from alfworld.gen import constants, goal_library
  from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

SCENES = (*range(1, 31), *range(201, 231), *range(301, 331), *range(401, 431))
MOST_RECEPTACLES, MOST_OBJECTS = 14, 26  # real games: medians of 20 and 39
PLAYED_STEPS = 30
# Per treatment: what an object must be, and where it is done.
NEEDED = {
  "clean": ("Cleanable", "SinkBasin"),
  "heat": ("Heatable", "Microwave"),
  "cool": ("Coolable", "Fridge"),
}
ABILITIES = ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
LAMPS = ("DeskLamp", "FloorLamp")
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "Shelf")
NO_PLACE_FOR_IT = ("SinkBasin", "BathtubBasin", "StoveBurner", "Microwave", "Fridge")
DECLARED = ("SinkBasin", "Microwave", "Fridge")  # types that the domain itself names
START = "loc|0|0|0|30"
CODES = {"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_"}


@dataclasses.dataclass(frozen=True)
class Scene:
  """A floor plan.

  Attributes:
    number: of the floor plan.
    poses: receptacle -> (x, z, rotation, horizon) from which it is reached.
    object_types: what may be found there.
  """

  number: int
  poses: dict[str, tuple[float, float, float, float]]
  object_types: set[str]


@dataclasses.dataclass
class Room:
  """A scene with furniture and things: each thing's receptacle, in the order they were put."""

  scene: Scene
  receptacles: list[str]
  container: dict[str, str]


def load_scene(number: int) -> Scene:
  layouts = Path(constants.__file__).parent / "layouts"
  poses = json.loads((layouts / f"FloorPlan{number}-openable.json").read_text())
  objects = json.loads((layouts / f"FloorPlan{number}-objects.json").read_text())
  known = constants.VAL_RECEPTACLE_OBJECTS.keys() & constants.RECEPTACLES
  return Scene(number, {r: tuple(p) for r, p in poses.items() if type_of(r) in known}, set(objects))


def type_of(name: str) -> str:
  """The type in a name such as "Mug|+00.1|..."; basins name theirs at the end."""
  last = name.split("|")[-1]
  return last if last.endswith("Basin") else name.split("|")[0]


def holds(receptacle_type: str, object_type: str) -> bool:
  return object_type in constants.VAL_RECEPTACLE_OBJECTS[receptacle_type]


def choose_goal(draw: random.Random, task_type: str) -> tuple[Scene, str, str]:
  """A scene in which the task can be set, the type of object, and that of the target or lamp."""
  command = TREATMENTS.get(task_type, (None,))[0]
  ability, place = NEEDED.get(command, (None, None))
  while True:
    scene = load_scene(draw.choice(SCENES))
    types = sorted({type_of(r) for r in scene.poses})
    things = [o for o in portable(scene) if ability is None or o in able(ability)]
    if task_type == LOOK:
      lamps = sorted(scene.object_types & set(LAMPS))
      choices = [(o, lamp) for o in things for lamp in lamps if set(types) & set(LAMP_STANDS)]
    elif place and place not in types:
      choices = []
    else:
      choices = [
        (o, target)
        for o in things
        for target in types
        if target not in NO_PLACE_FOR_IT and holds(target, o)
        if any(holds(other, o) for other in types if other != target)
      ]
    if choices:
      return scene, *draw.choice(choices)


def portable(scene: Scene) -> list[str]:
  """Types of things that can be carried and have a place in the scene."""
  types = {type_of(r) for r in scene.poses}
  fitting = {o for kind in types for o in constants.VAL_RECEPTACLE_OBJECTS[kind]}
  fitting &= scene.object_types - set(constants.RECEPTACLES) - set(LAMPS)
  return sorted(o for o in fitting if not o.endswith("Sliced"))


def able(ability: str) -> set[str]:
  return constants.VAL_ACTION_OBJECTS[ability]


def furnish(draw: random.Random, scene: Scene, task_type: str, thing: str, target: str) -> Room:
  """Chooses receptacles, and puts the thing, the lamp and others in or on them."""
  all_of = sorted(scene.poses)
  look = task_type == LOOK
  _, place = NEEDED.get(TREATMENTS.get(task_type, (None,))[0], (None, None))
  stands = [r for r in all_of if type_of(r) in LAMP_STANDS]
  sources = [r for r in all_of if holds(type_of(r), thing) and (look or type_of(r) != target)]
  needed = draw.sample(sources, min(2, len(sources)))
  for kind in (target, place):
    needed += [r for r in all_of if type_of(r) == kind][:2]
  needed += draw.sample(stands, 1) if look else []
  others = [r for r in all_of if r not in needed]
  draw.shuffle(others)
  room = Room(scene, sorted({*needed, *others[: max(0, MOST_RECEPTACLES - len(needed))]}), {})
  if look:
    put(draw, room, target, [r for r in room.receptacles if type_of(r) in LAMP_STANDS])
  copies = 2 if task_type == TWO else draw.randint(1, 3)
  for _ in range(copies):
    put(draw, room, thing, [r for r in room.receptacles if r in sources])
  rest = [o for o in portable(scene) if o != thing]
  draw.shuffle(rest)
  for kind in rest * 2:
    fitting = [r for r in room.receptacles if holds(type_of(r), kind)]
    if fitting and len(room.container) < MOST_OBJECTS:
      put(draw, room, kind, fitting)
  return room


def put(draw: random.Random, room: Room, kind: str, places: Sequence[str]) -> None:
  """Makes a thing of a type, at a point that serves as its name, in or on one of the places."""
  x, y, z = (draw.uniform(low, high) for low, high in ((-4, 4), (0, 2), (-4, 4)))
  room.container[f"{kind}|{x:+06.2f}|{y:+06.2f}|{z:+06.2f}"] = draw.choice(places)


def problem(room: Room, name: str, goal: str) -> str:
  """The room as a PDDL problem of the package's domain.

  Args:
    goal: the goal's own PDDL, with the parenthesis that closes the problem.
  """
  locations = {r: location(room.scene.poses[r]) for r in room.receptacles}
  object_types = sorted({type_of(o) for o in room.container} | {"Knife", "ButterKnife"})
  receptacle_types = sorted({type_of(r) for r in room.receptacles} | set(DECLARED))
  objects = ["agent1 - agent"]
  objects += [f"{kind}Type - otype" for kind in object_types]
  objects += [f"{kind}Type - rtype" for kind in receptacle_types]
  objects += [f"{encoded(o)} - object" for o in room.container]
  objects += [f"{encoded(r)} - receptacle" for r in room.receptacles]
  objects += [f"{encoded(at)} - location" for at in sorted({*locations.values(), START})]
  facts = "\n".join(f"({' '.join(map(encoded, fact))})" for fact in _facts(room, locations))
  listed = "\n".join(objects)
  return (
    f"(define (problem plan_{name})\n(:domain alfred)\n(:objects\n{listed}\n)\n"
    f"(:init\n{facts}\n)\n{goal}"
  )


def _facts(room: Room, locations: dict[str, str]) -> Iterator[tuple[str, ...]]:
  yield "atLocation", "agent1", START
  for receptacle, at in locations.items():
    kind = type_of(receptacle)
    yield "receptacleType", receptacle, f"{kind}Type"
    yield "receptacleAtLocation", receptacle, at
    if kind in constants.OPENABLE_CLASS_SET:
      yield "openable", receptacle
  things = sorted({type_of(o) for o in room.container} - set(LAMPS))
  for kind in sorted({type_of(r) for r in room.receptacles}):
    for thing in things:
      if holds(kind, thing):
        yield "canContain", f"{kind}Type", f"{thing}Type"
  for name, receptacle in room.container.items():
    kind = type_of(name)
    yield "objectType", name, f"{kind}Type"
    yield "inReceptacle", name, receptacle
    yield "objectAtLocation", name, locations[receptacle]
    if kind not in LAMPS:
      yield "pickupable", name
    for ability in ABILITIES:
      if kind in able(ability):
        yield ability.lower(), name


def location(pose: Sequence[float]) -> str:
  """Where to stand, on the engine's grid of quarter metres."""
  x, z, rotation, horizon = pose
  return f"loc|{round(x / 0.25)}|{round(z / 0.25)}|{int(rotation) // 90 % 4}|{int(horizon)}"


def encoded(name: str) -> str:
  """A name in the letters that PDDL takes, which the engine decodes; a type stays as it is."""
  if "|" not in name:
    return name
  return "".join(CODES.get(letter, letter) for letter in name)


def make_game(task_type: str, number: int, seed: str) -> tuple[str, str, dict]:
  """A game that is not won from the start.

  Returns:
    The directory's two names, of which the trial's starts with the number, and the game file's
    contents.
  """
  draw = random.Random(seed)
  scene, thing, target = choose_goal(draw, task_type)
  room = furnish(draw, scene, task_type, thing, target)
  trial = f"trial_T{number:06d}_{draw.randrange(10**6):06d}_{draw.randrange(10**6):06d}"
  asked = goal_library.gdict[task_type]
  words = {"obj": thing, "recep": target, "toggle": target}
  goal = asked["pddl"].format(**words).replace("#", "-")
  sentence = draw.choice(asked["templates"]).format(**{k: v.lower() for k, v in words.items()})
  grammar = Path(ALFRED_TWL2_PATH).read_text().replace("UNKNOWN GOAL", f"{sentence}.")
  game = {
    "pddl_domain": Path(ALFRED_PDDL_PATH).read_text(),
    "grammar": grammar,
    "pddl_problem": problem(room, trial, goal),
    "solvable": True,
    "walkthrough": None,
  }
  return f"{task_type}-{thing}-None-{target}-{scene.number}", trial, game


def walkthrough(engine: Engine, name: str, game: dict) -> list[str] | None:
  """The expert's way through; None if it does not win, or has nothing to do."""
  engine.start(game)
  expert, actions = Expert(Goal.of(name)), []
  while not engine.won and len(actions) < PLAYED_STEPS:
    actions.append(expert.oracle(engine.facts(), engine.commands).action)
    engine.step(actions[-1])
  return actions if engine.won and actions else None


def make(root: Path, sizes: dict[str, int]) -> None:
  """Makes games, the types in turn, where a split has none of a number below its size."""
  engine = Engine()
  for split, size in sizes.items():
    directory = root / GAMES / USUAL_SPLITS[split]
    there = {path.parent.name.split("_")[1] for path in directory.glob(f"*/*/{GAME}")}
    for number in range(size):
      if f"T{number:06d}" not in there:
        name, trial, game = winnable_game(engine, split, number)
        place = directory / name / trial
        place.mkdir(parents=True, exist_ok=True)
        draft = place / "draft"
        draft.write_text(json.dumps(game))
        os.replace(draft, place / GAME)  # a game is there as a whole or not at all


def winnable_game(engine: Engine, split: str, number: int) -> tuple[str, str, dict]:
  """The first game of a split's number that the expert wins, as `make_game` gives it."""
  task_type = TASK_TYPES[number % len(TASK_TYPES)]
  for attempt in range(100):
    name, trial, game = make_game(task_type, number, f"{split}/{task_type}/{number}/{attempt}")
    game["walkthrough"] = walkthrough(engine, name, game)
    if game["walkthrough"]:
      return name, trial, game
  raise RuntimeError(f"no {task_type} game could be made")


if __name__ == "__main__":
  _, place, train, test = sys.argv
  make(Path(place), {"train": int(train), "test": int(test)})
