"""ALFWorld's expert: derives the next action from the game's facts, and makes mistakes."""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from baar_jax.envs.base import Oracle, verb

LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
# How an object is treated before it is put down: command, resulting fact, type of receptacle.
TREATMENTS = {
  "pick_clean_then_place_in_recep": ("clean", "isclean", "SinkBasin"),
  "pick_heat_then_place_in_recep": ("heat", "ishot", "Microwave"),
  "pick_cool_then_place_in_recep": ("cool", "iscool", "Fridge"),
}
TASK_TYPES = ("pick_and_place_simple", LOOK, *TREATMENTS, TWO)
ROUTINE_VERBS = ("go", "open", "close", "look", "inventory", "examine")

# Unproductive actions, and how often each is taken; "wrong" is like "lost" at a routine step.
WASTED = ("go", "examine", "open", "close", "inventory", "look", "nonsense")
WEIGHTS = {
  "lost": (0.50, 0.12, 0.10, 0.05, 0.05, 0.08, 0.10),
  "hasty": (0.25, 0.15, 0.10, 0.10, 0.10, 0.10, 0.20),
}
NONSENSE = ("think about the {}", "search the {}", "find the {}", "check the {}")


class Goal(NamedTuple):
  """What a game asks for: a task type, the type of its objects, and that of the target or lamp."""

  task_type: str
  object: str
  target: str

  @classmethod
  def of(cls, name: str) -> "Goal":
    """Reads "<task type>-<object>-<container>-<target>-<scene>". Raises ValueError."""
    fields = name.split("-")
    if len(fields) != 5 or fields[0] not in TASK_TYPES:
      raise ValueError(f"{name!r} names no ALFWorld game: TYPE-OBJECT-CONTAINER-TARGET-SCENE")
    return cls(fields[0], fields[1].lower(), fields[3].lower())


class Facts:
  """The facts of a game's state, from the engine's propositions, indexed for the expert."""

  def __init__(self, propositions: Iterable) -> None:
    self.rows: dict[str, list[tuple[str, ...]]] = defaultdict(list)  # arguments by the fact's name
    for fact in propositions:
      names = (argument.name.strip().removesuffix("type") for argument in fact.arguments)
      self.rows[fact.name].append(tuple(names))
    rows = self.rows
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


def expert_step(goal: Goal, facts: Facts, commands: Sequence[str]) -> Oracle:
  """The expert's next action in any state, given the commands that the game admits in it."""
  command, treated, place_type = TREATMENTS.get(goal.task_type, ("", "", ""))
  objects, targets = facts.objects(goal.object), facts.receptacles(goal.target)
  placed: list[str] = []
  if goal.task_type == TWO:  # both go to one receptacle, the one that already holds most of them
    targets.sort(key=lambda r: -sum(facts.container.get(o) == r for o in objects))
    placed = [o for o in objects if facts.container.get(o) == targets[0]]
  position, held, recovering = 2 * bool(placed), facts.held, False
  # The command that puts down the held object here, in the words of the game's grammar, if any.
  words = (f"move {held} to ", f"put {held} in/on ")
  put = next((admitted for admitted in commands if admitted.startswith(words)), None)
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
  elif facts.object_type[held] != goal.object:  # puts it down wherever it fits
    fitting = {r for r, kind in facts.rows["cancontain"] if kind == facts.object_type[held]}
    places = [r for r in facts.location if facts.furniture[r] in fitting]
    place = min(places, key=lambda r: (r in facts.closed, r), default=None)
    action, recovering = put or (facts.reach(place) if place else "look"), True
  elif goal.task_type == LOOK:
    lamps = facts.objects(goal.target)
    lamp = next(o for o in lamps if facts.container.get(o) in facts.location)
    position, action = 1, facts.reach(facts.container[lamp]) or f"use {lamp}"
  elif command and (held,) not in facts.rows[treated]:
    place = facts.receptacles(place_type.lower())[0]
    position, action = 1, facts.walk(place) or f"{command} {held} with {place}"
  else:
    position += 2 if command else 1
    action = facts.reach(targets[0]) or put
  return Oracle(action, position, verb(action) not in ROUTINE_VERBS, recovering)


def mistake(goal: Goal, kind: str, key: str, oracle: Oracle, commands: Sequence[str]) -> str:
  """A wrong action in place of the expert's; see Env.mistake."""
  draw = random.Random(key)
  others = [command for command in commands if command != oracle.action]
  choices: list[str] = []
  if kind == "wrong" and oracle.critical:
    choices = [command for command in others if verb(command) == verb(oracle.action)]
    choices = choices or [command for command in others if verb(command) not in ROUTINE_VERBS]
  if not choices:
    wasted = draw.choices(WASTED, WEIGHTS.get(kind, WEIGHTS["lost"]))[0]
    choices = [command for command in others if verb(command) == wasted]
  return draw.choice(choices) if choices else draw.choice(NONSENSE).format(goal.object)
