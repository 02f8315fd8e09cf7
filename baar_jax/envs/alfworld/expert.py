"""ALFWorld's expert, who reads a game's whole state, and models' mistakes."""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from baar_jax.envs.base import Oracle, verb

LOOK = "look_at_obj_in_light"
TWO = "pick_two_obj_and_place"


class Treatment(NamedTuple):
  """How an object is treated before it is put down."""

  command: str
  fact: str  # that results
  place: str  # the type of receptacle


TREATMENTS = {
  "pick_clean_then_place_in_recep": Treatment("clean", "isclean", "SinkBasin"),
  "pick_heat_then_place_in_recep": Treatment("heat", "ishot", "Microwave"),
  "pick_cool_then_place_in_recep": Treatment("cool", "iscool", "Fridge"),
}
TASK_TYPES = ("pick_and_place_simple", LOOK, *TREATMENTS, TWO)
ROUTINE_VERBS = ("go", "open", "close", "look", "inventory", "examine", "help")

# Unproductive actions, and how often each is taken; "wrong" is like "lost" at a routine
# step.
WASTED = ("go", "examine", "open", "close", "inventory", "look", "nonsense")
LOST = (0.50, 0.12, 0.10, 0.05, 0.05, 0.08, 0.10)
HASTY = (0.25, 0.15, 0.10, 0.10, 0.10, 0.10, 0.20)
NONSENSE = ("think about the {}", "search the {}", "find the {}", "check the {}")


class Goal(NamedTuple):
  """The types that a game's name states."""

  task_type: str
  object_type: str
  target: str  # a receptacle, or a lamp


def treatment_of(task_type: str) -> Treatment:
  """Return the treatment that a type of task asks for; its fields are "" if none."""
  return TREATMENTS.get(task_type, Treatment("", "", ""))


def read_goal(name: str) -> Goal:
  """Read the goal in a game's name. Raises ValueError if it has none."""
  fields = name.split("-")
  if len(fields) != 5 or fields[0] not in TASK_TYPES:
    form = "TYPE-OBJECT-CONTAINER-TARGET-SCENE"
    raise ValueError(f"{name!r} names no ALFWorld game: {form}")
  return Goal(fields[0], fields[1].lower(), fields[3].lower())


class Facts:
  """The facts of a game's state, indexed for the expert."""

  def __init__(self, propositions: Iterable[Any]) -> None:
    """Index the engine's propositions."""
    rows = defaultdict(list)  # the fact's name -> the arguments of each
    for fact in propositions:
      names = (a.name.strip().removesuffix("type") for a in fact.arguments)
      rows[fact.name].append(tuple(names))
    self.rows = rows
    self.container = dict(sorted(rows["inreceptacle"]))  # object -> receptacle
    self.location = dict(sorted(rows["receptacleatlocation"]))  # receptacle -> location
    self.object_type = dict(rows["objecttype"])
    self.furniture = dict(rows["receptacletype"])  # receptacle -> type
    opened = rows["opened"]
    self.closed = {row[0] for row in rows["openable"] if row not in opened}
    self.here = rows["atlocation"][0][1]
    self.held = rows["holds"][0][1] if rows["holds"] else None

  def objects(self, kind: str) -> list[str]:
    """List the objects of a type."""
    return sorted(name for name, other in self.object_type.items() if other == kind)

  def receptacles(self, kind: str) -> list[str]:
    """List the receptacles of a type to which the agent can go."""
    return sorted(r for r in self.location if self.furniture.get(r) == kind)

  def walk(self, receptacle: str) -> str | None:
    """Return the action that goes there; None if the agent is there."""
    return None if self.location[receptacle] == self.here else f"go to {receptacle}"

  def reach(self, receptacle: str) -> str | None:
    """Return the next action towards a receptacle's contents; None at hand."""
    opening = f"open {receptacle}" if receptacle in self.closed else None
    return self.walk(receptacle) or opening


def find_next_step(facts: Facts, goal: Goal, commands: Sequence[str]) -> Oracle:
  """Find the expert's next step in any state of a game.

  The position counts taking, treating or lighting, and putting down, for each object.
  """
  treatment = treatment_of(goal.task_type)
  objects = facts.objects(goal.object_type)
  targets = facts.receptacles(goal.target)
  placed: list[str] = []
  if goal.task_type == TWO:  # both go to the receptacle that holds most of them
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
    place = facts.receptacles(treatment.place.lower())[0]
    action = facts.walk(place) or f"{treatment.command} {facts.held} with {place}"
  else:
    position += 2 if treatment.command else 1
    # Others may share the target's place, as drawers do a dresser's.
    action = facts.reach(targets[0]) or f"move {facts.held} to {targets[0]}"
  return Oracle(action, position, verb(action) not in ROUTINE_VERBS, recovering)


def _fetch(
  facts: Facts, objects: Sequence[str], treatment: Treatment, targets: Sequence[str]
) -> str:
  """Go and take an object: a treated one, near, visible and not put away, if any."""
  reachable = [name for name in objects if facts.container.get(name) in facts.location]
  if not reachable:
    return "look"

  def rank(name: str) -> tuple:
    place = facts.container[name]
    raw = (name,) not in facts.rows[treatment.fact]
    far = facts.walk(place) is not None
    return raw, far, place in facts.closed, place in targets, name

  name = min(reachable, key=rank)
  place = facts.container[name]
  return facts.reach(place) or f"take {name} from {place}"


def _drop(facts: Facts, commands: Sequence[str]) -> str:
  """Put a wrong object down where it fits."""
  for command in commands:
    if command.startswith(f"move {facts.held} to "):
      return command
  pairs = facts.rows["cancontain"]
  held_type = facts.object_type[facts.held]
  places = [r for r in facts.location if (facts.furniture[r], held_type) in pairs]
  if not places:
    return "look"
  return facts.reach(min(places, key=lambda r: (r in facts.closed, r)))


def _light(facts: Facts, lamp_type: str) -> str:
  """Go to a lamp and use it."""
  lamps = facts.objects(lamp_type)
  lamp = next(name for name in lamps if facts.container.get(name) in facts.location)
  return facts.reach(facts.container[lamp]) or f"use {lamp}"


def make_mistake(
  kind: str, key: str, step: Oracle, commands: Sequence[str], word: str
) -> str:
  """Return a wrong command in place of the expert's; see Env.mistake.

  Args:
    kind: of the mistake.
    key: seeds the draw.
    step: the expert's.
    commands: those that are possible.
    word: the asked type of object, for nonsense.
  """
  draw = random.Random(key)
  others = [command for command in commands if command != step.action]
  choices: list[str] = []
  if kind == "wrong" and step.critical:
    acting = [command for command in others if verb(command) not in ROUTINE_VERBS]
    alike = [command for command in acting if verb(command) == verb(step.action)]
    choices = alike or acting
  if not choices:
    wasted = draw.choices(WASTED, HASTY if kind == "hasty" else LOST)[0]
    choices = [command for command in others if verb(command) == wasted]
  if not choices:
    return draw.choice(NONSENSE).format(word)
  return draw.choice(choices)
