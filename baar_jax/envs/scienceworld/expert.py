"""ScienceWorld's expert, who follows a task's kept solution, and models' mistakes."""

import random
import re
from collections.abc import Sequence

from baar_jax.envs.base import Oracle, verb
from baar_jax.envs.scienceworld.engine import Engine

CRITICAL_VERBS = (
  "focus",
  "connect",
  "disconnect",
  "pour",
  "mix",
  "use",
  "move",
  "dunk",
  "activate",
  "deactivate",
)
VAGUE_VERBS = ("focus", "move", "pour", "connect")  # in nonsense they become "open"
ONE_OBJECT_VERBS = ("focus", "mix", "activate", "deactivate", "disconnect")
ROOMS = (
  "kitchen",
  "hallway",
  "workshop",
  "greenhouse",
  "bedroom",
  "art studio",
  "living room",
  "outside",
  "foundry",
)
# Unproductive actions, and how often each is taken; "wrong" is like "lost" at a step
# that has no wrong object. A weak model looks around a lot, and those are long
# observations.
WASTED = (
  "look around",
  "inventory",
  "examine",
  "look at",
  "use",
  "go to",
  "nonsense",
)
LOST = (0.42, 0.06, 0.20, 0.08, 0.08, 0.10, 0.06)
HASTY = (0.18, 0.12, 0.18, 0.12, 0.12, 0.14, 0.14)
REPAIRS = 3  # of one critical step that the engine does not understand
DOORS = 6  # tries at a door before the step is given up
BOXED = 0.6  # share of wrong moves to another box
MOVED = re.compile(r"You move to the ([a-z ]+)\.")
ROOM = re.compile(r"called the ([a-z ]+)\.")
TWO_OBJECTS = re.compile(r"(\w+) (.+) (to|into|in|on) (.+)$")
ENDS = re.compile("terminal|anode|cathode")


class Expert:
  """Follows a plan during one episode, whatever else is done in between.

  The expert's action advances the plan. Any other action is a deviation, which the
  expert undoes first where it can: by walking back or disconnecting. (The engine
  disconnects only whole things, so a wire that is joined at a wrong end mostly stays
  so, and the circuit is lost.)
  """

  def __init__(self, plan: Sequence[str], observation: str, engine: Engine) -> None:
    self._plan = list(plan)
    self._position = 0
    self._engine = engine
    self._recovery: list[str] = []  # done before the plan goes on
    self._failures = 0  # at the plan's current step
    self._room = ROOM.search(observation)[1]

  def oracle(self) -> Oracle:
    """Return the next action: of the recovery, else of the plan."""
    action = [*self._recovery, *self._plan[self._position :], "wait1"][0]
    critical = verb(action) in CRITICAL_VERBS
    return Oracle(action, self._position, critical, recovering=bool(self._recovery))

  def observe(self, action: str, observation: str) -> None:
    """Advance the plan after a step of the expert, else prepare to undo a deviation."""
    expected = self.oracle()
    previous_room = self._room
    moved = MOVED.search(observation)
    two_objects = TWO_OBJECTS.match(action)
    if moved:
      self._room = moved[1]
    if action == expected.action and expected.recovering:
      self._recovery.pop(0)
    elif action == expected.action:
      self._advance(expected, observation)
    elif moved:
      self._recovery.insert(0, f"go to {previous_room}")
    elif two_objects and "is now connected to" in observation:
      self._recovery.insert(0, f"disconnect {two_objects[2]}")

  def _advance(self, expected: Oracle, observation: str) -> None:
    unknown = "No known action" in observation
    if "Ambiguous request" in observation:
      self._position += 1
      if self._plan[self._position : self._position + 1] != ["0"]:
        self._recovery.append("0")
    elif unknown and expected.critical and self._failures < REPAIRS:
      self._failures += 1
      self._repair(expected.action)
    elif unknown and verb(expected.action) == "go" or "door is not open" in observation:
      self._position += self._failures > DOORS
      self._failures += 1
      self._recovery.append(f"open door to {expected.action.removeprefix('go to ')}")
    else:
      self._position += 1
      self._failures = 0

  def _repair(self, action: str) -> None:
    """Replace an invalid action of the plan by the valid one that shares most words."""
    words = {*action.split()}

    def likeness(other: str) -> float:
      others = {*other.split()}
      return len(words & others) - 0.3 * len(others - words)

    valid = self._engine.list_valid_actions()
    similar = [other for other in valid if verb(other) == verb(action)]
    if similar:
      self._plan[self._position] = max(similar, key=likeness)
    else:
      self._position += 1

  def mistake(self, kind: str, key: str) -> str:
    """Return a wrong action on the objects that are here; see Env.mistake."""
    draw = random.Random(key)
    action = self.oracle().action
    objects = self._engine.list_objects()
    here = [name for name in objects if name not in ("agent", "air")] or ["table"]
    wrong = _act_wrongly(action, here, draw) if kind == "wrong" else None
    if wrong is None:
      wrong = _waste_step(action, here, draw, HASTY if kind == "hasty" else LOST)
    # The expert looks around and walks, too: a mistake must not do its work by chance.
    return wrong if wrong != action else f"examine {draw.choice(here)}"


def _act_wrongly(action: str, here: list[str], draw: random.Random) -> str | None:
  """Apply the verb to a wrong thing; None if the step is of no critical form."""
  name = verb(action)
  others = [thing for thing in here if thing not in action] or here
  if name in ONE_OBJECT_VERBS:
    return f"{name}{' on' * (name == 'focus')} {draw.choice(others)}"
  two_objects = TWO_OBJECTS.match(action)
  if name not in CRITICAL_VERBS or not two_objects:
    return None
  _, thing, preposition, target = two_objects.groups()
  boxes = [other for other in others if "box" in other]
  if name == "move" and "box" in target and boxes and draw.random() < BOXED:
    return f"move {thing} to {draw.choice(boxes)}"
  if name == "connect":
    ends = [other for other in others if ENDS.search(other)]
    return f"connect {thing} to {draw.choice(ends or others)}"
  if draw.random() < 0.5:
    return f"{name} {draw.choice(others)} {preposition} {target}"
  return f"{name} {thing} {preposition} {draw.choice(others)}"


def _waste_step(
  action: str, here: list[str], draw: random.Random, weights: Sequence[float]
) -> str:
  """Draw an unproductive action."""
  kind = draw.choices(WASTED, weights)[0]
  thing = draw.choice(here)
  if kind in ("examine", "look at"):
    return f"{kind} {thing}"
  if kind == "use":
    return f"use {thing} on {draw.choice(here)}" if verb(action) != "use" else "task"
  if kind == "go to":
    return f"go to {draw.choice(ROOMS)}"
  if kind == "nonsense":
    return f"{'open' if verb(action) in VAGUE_VERBS else verb(action)} the {thing}"
  return kind
