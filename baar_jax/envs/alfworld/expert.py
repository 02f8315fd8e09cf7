"""Find the expert's next step in ALFWorld, and draw the mistakes of scripted models.

The expert reads the whole state of a game, including hidden objects.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from baar_jax.envs.base import Oracle, read_verb

LOOK = "look_at_obj_in_light"
TWO = "pick_two_obj_and_place"


class Treatment(NamedTuple):
  """A treatment of an object: cleaning, heating or cooling.

  Attributes:
    command: the verb of the command.
    fact: the engine's name of the fact that holds afterwards.
    receptacle_type: the type of receptacle that treats objects.
  """

  command: str
  fact: str
  receptacle_type: str


TREATMENTS = {
  "pick_clean_then_place_in_recep": Treatment("clean", "isclean", "SinkBasin"),
  "pick_heat_then_place_in_recep": Treatment("heat", "ishot", "Microwave"),
  "pick_cool_then_place_in_recep": Treatment("cool", "iscool", "Fridge"),
}
TASK_TYPES = ("pick_and_place_simple", LOOK, *TREATMENTS, TWO)
ROUTINE_VERBS = ("go", "open", "close", "look", "inventory", "examine", "help")


class Goal(NamedTuple):
  """The goal of a game, as stated by its name.

  Attributes:
    task_type: one of TASK_TYPES.
    object_type: the type of object that has to be placed or looked at.
    target: the type of the receptacle in which the object belongs, or of the lamp.
  """

  task_type: str
  object_type: str
  target: str


def treatment_of(task_type: str) -> Treatment:
  """Return the treatment of the object that a type of task asks for.

  All fields of the result are "" if the type of task asks for no treatment.
  """
  return TREATMENTS.get(task_type, Treatment("", "", ""))


def read_goal(name: str) -> Goal:
  """Read the goal in a game's name.

  Raises:
    ValueError: the name does not have the form of a game's name.
  """
  fields = name.split("-")
  if len(fields) != 5 or fields[0] not in TASK_TYPES:
    form = "TYPE-OBJECT-CONTAINER-TARGET-SCENE"
    raise ValueError(f"{name!r} is not the name of an ALFWorld game; it must be {form}")
  return Goal(fields[0], fields[1].lower(), fields[3].lower())


class Scene:
  """The facts of a game's state, indexed for the expert.

  Attributes:
    rows: for each kind of fact, by its name, the arguments of all facts of that kind.
    container: the receptacle of each object.
    location: the location of each receptacle.
    object_type: the type of each object.
    receptacle_type: the type of each receptacle.
    closed: the receptacles that have to be opened first.
    agent_location: the location of the agent.
    held: the object in the agent's hand; None if there is none.
  """

  def __init__(self, propositions: Iterable[Any]) -> None:
    """Sort the engine's propositions about the current state into the attributes."""
    rows = defaultdict(list)
    for fact in propositions:
      names = (a.name.strip().removesuffix("type") for a in fact.arguments)
      rows[fact.name].append(tuple(names))
    self.rows = rows
    self.container = dict(sorted(rows["inreceptacle"]))
    self.location = dict(sorted(rows["receptacleatlocation"]))
    self.object_type = dict(rows["objecttype"])
    self.receptacle_type = dict(rows["receptacletype"])
    opened = rows["opened"]
    self.closed = {row[0] for row in rows["openable"] if row not in opened}
    self.agent_location = rows["atlocation"][0][1]
    self.held = rows["holds"][0][1] if rows["holds"] else None

  def objects(self, object_type: str) -> list[str]:
    """Return the objects of a type."""
    return sorted(
      name for name, kind in self.object_type.items() if kind == object_type
    )

  def receptacles(self, receptacle_type: str) -> list[str]:
    """Return the receptacles of a type to which the agent can go."""
    return sorted(
      name
      for name in self.location
      if self.receptacle_type.get(name) == receptacle_type
    )

  def walk(self, receptacle: str) -> str | None:
    """Return the action that goes to a receptacle; None if the agent is there."""
    if self.location[receptacle] == self.agent_location:
      return None
    return f"go to {receptacle}"

  def reach(self, receptacle: str) -> str | None:
    """Return the next action that makes a receptacle's contents accessible.

    The agent first goes to the receptacle, then opens it if it is closed.

    Returns:
      The action; None if the contents are within reach now.
    """
    opening = f"open {receptacle}" if receptacle in self.closed else None
    return self.walk(receptacle) or opening


def find_next_step(facts: Scene, goal: Goal, commands: Sequence[str]) -> Oracle:
  """Find the expert's next step in any state of a game.

  Args:
    facts: the state.
    goal: the goal of the game.
    commands: the commands that are possible now.

  Returns:
    The step. Its position in the plan increases when an object is taken, treated (or
    looked at under a lamp), and put down.
  """
  treatment = treatment_of(goal.task_type)
  objects = facts.objects(goal.object_type)
  targets = facts.receptacles(goal.target)
  placed: list[str] = []
  if goal.task_type == TWO:
    # Both objects go to one receptacle: the one with most objects of the goal's type.
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
    station = facts.receptacles(treatment.receptacle_type.lower())[0]
    action = facts.walk(station) or f"{treatment.command} {facts.held} with {station}"
  else:
    position += 2 if treatment.command else 1
    # The action names the receptacle, because other receptacles may be at the same
    # location, such as a dresser's drawers.
    action = facts.reach(targets[0]) or f"move {facts.held} to {targets[0]}"
  return Oracle(action, position, read_verb(action) not in ROUTINE_VERBS, recovering)


def _fetch(
  facts: Scene, objects: Sequence[str], treatment: Treatment, targets: Sequence[str]
) -> str:
  """Return the next action towards taking an object that the goal needs.

  Of several objects, the expert prefers, in this order: a treated object, one at the
  agent's location, a visible one, and one outside the receptacles of the goal.

  Args:
    facts: the state of the game.
    objects: the objects that fit the goal.
    treatment: the treatment that the goal asks for.
    targets: the receptacles in which the object belongs.
  """
  reachable = [name for name in objects if facts.container.get(name) in facts.location]
  if not reachable:
    return "look"

  def rank(name: str) -> tuple:
    """Return an object's sort key; the expert takes the object with the lowest key."""
    receptacle = facts.container[name]
    is_untreated = (name,) not in facts.rows[treatment.fact]
    is_far = facts.walk(receptacle) is not None
    return is_untreated, is_far, receptacle in facts.closed, receptacle in targets, name

  name = min(reachable, key=rank)
  receptacle = facts.container[name]
  return facts.reach(receptacle) or f"take {name} from {receptacle}"


def _drop(facts: Scene, commands: Sequence[str]) -> str:
  """Return the next action towards putting down an object that the goal does not need.

  The action moves the object into any receptacle at hand, or goes to a receptacle that
  can contain the object. The action is "look" if the object fits nowhere.
  """
  for command in commands:
    if command.startswith(f"move {facts.held} to "):
      return command
  pairs = facts.rows["cancontain"]
  held_type = facts.object_type[facts.held]
  fitting = [
    name for name in facts.location if (facts.receptacle_type[name], held_type) in pairs
  ]
  if not fitting:
    return "look"
  return facts.reach(min(fitting, key=lambda name: (name in facts.closed, name)))


def _light(facts: Scene, lamp_type: str) -> str:
  """Return the next action towards using a lamp.

  The action goes to the place of a lamp, makes the lamp accessible, or uses it.
  """
  lamps = facts.objects(lamp_type)
  lamp = next(name for name in lamps if facts.container.get(name) in facts.location)
  return facts.reach(facts.container[lamp]) or f"use {lamp}"


def draw_mistake(
  kind: str, key: str, step: Oracle, commands: Sequence[str], object_type: str
) -> str:
  """Draw a wrong command in place of the expert's.

  At a routine step, a "wrong" mistake wastes the step. A wasted step goes to another
  place, or tries to take an object from there, which has no effect, with equal chances.

  Args:
    kind: "wrong" or "wasted"; see Env.mistake.
    key: the seed of the random draw.
    step: the expert's step.
    commands: the commands that are possible now.
    object_type: the type of object in the goal.
  """
  draw = random.Random(key)
  others = [command for command in commands if command != step.action]
  choices: list[str] = []
  if kind == "wrong" and step.critical:
    acting = [command for command in others if read_verb(command) not in ROUTINE_VERBS]
    alike = [
      command for command in acting if read_verb(command) == read_verb(step.action)
    ]
    choices = alike or acting
  if choices:
    return draw.choice(choices)
  walks = [name for name in others if read_verb(name) == "go"]
  walk = draw.choice(walks or ["go to nowhere"])
  if draw.random() < 0.5:
    return walk
  place = walk.removeprefix("go to ")
  return f"take {object_type} {draw.randint(1, 5)} from {place}"
