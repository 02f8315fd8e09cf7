"""Follow a stored solution of ScienceWorld, and draw scripted models' mistakes."""

import random
import re
from collections.abc import Sequence

from baar_jax.envs.base import Oracle, read_verb
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
# Senseless actions use the verb "open" instead of these verbs.
VAGUE_VERBS = ("focus", "move", "pour", "connect")
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
# Actions that waste a step, drawn evenly.
WASTED = (
  "look around",
  "inventory",
  "examine",
  "look at",
  "use",
  "go to",
  "nonsense",
)
# If the engine does not understand a critical action of the plan, the expert replaces
# the action, but at most this number of times.
MAX_REPAIRS = 3
# If the same door has failed to open more than this number of times, the expert goes on
# to the plan's next action.
MAX_DOOR_FAILURES = 6
# If the expert's action moves an object into a box, a wrong action moves it into
# another box with this probability.
BOXED = 0.6
MOVED = re.compile(r"You move to the ([a-z ]+)\.")
ROOM = re.compile(r"called the ([a-z ]+)\.")
TWO_OBJECTS = re.compile(r"(\w+) (.+) (to|into|in|on) (.+)$")
ENDS = re.compile("terminal|anode|cathode")


class Expert:
  """An expert that follows a plan during one episode.

  The expert's own action advances the plan. After any other action, the expert first
  tries to undo it, by walking back or disconnecting. The engine disconnects whole
  objects only. So a wire that was connected at a wrong end mostly stays connected, and
  the circuit is lost.
  """

  def __init__(self, plan: Sequence[str], observation: str, engine: Engine) -> None:
    """Start at the beginning of a plan.

    Args:
      plan: the actions of a solution.
      observation: the first observation; it names the room.
      engine: lists the objects and the possible actions.
    """
    self._plan = list(plan)
    self._position = 0
    self._engine = engine
    self._recovery: list[str] = []  # actions to execute before the plan goes on
    self._failures = 0  # how often the plan's next action has failed
    self._room = ROOM.search(observation)[1]

  def oracle(self) -> Oracle:
    """Return the next step: it undoes a mistake if needed, else follows the plan.

    After the end of the plan, the action is "wait1".
    """
    action = [*self._recovery, *self._plan[self._position :], "wait1"][0]
    critical = read_verb(action) in CRITICAL_VERBS
    return Oracle(action, self._position, critical, recovering=bool(self._recovery))

  def observe(self, action: str, observation: str) -> None:
    """Update the plan, and the actions that undo mistakes, after a step.

    Args:
      action: the action that was executed.
      observation: the engine's answer to it.
    """
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
    """Go to the plan's next action, or prepare another try of the executed action.

    Args:
      expected: the plan's step that was executed.
      observation: the engine's answer to it.
    """
    is_unknown = "No known action" in observation
    if "Ambiguous request" in observation:
      self._position += 1
      if self._plan[self._position : self._position + 1] != ["0"]:
        self._recovery.append("0")
    elif is_unknown and expected.critical and self._failures < MAX_REPAIRS:
      self._failures += 1
      self._repair(expected.action)
    elif (
      is_unknown
      and read_verb(expected.action) == "go"
      or "door is not open" in observation
    ):
      self._position += self._failures > MAX_DOOR_FAILURES
      self._failures += 1
      self._recovery.append(f"open door to {expected.action.removeprefix('go to ')}")
    else:
      self._position += 1
      self._failures = 0

  def _repair(self, action: str) -> None:
    """Replace an action of the plan by the valid action that is most similar.

    Similar actions share their words with the old action. If no valid action has the
    same verb, the step is skipped.

    Args:
      action: the action that the engine does not understand.
    """
    words = {*action.split()}

    def likeness(candidate: str) -> float:
      """Return the number of words shared with the old action, minus 0.3 per other."""
      candidate_words = {*candidate.split()}
      return len(words & candidate_words) - 0.3 * len(candidate_words - words)

    valid = self._engine.list_valid_actions()
    similar = [
      candidate for candidate in valid if read_verb(candidate) == read_verb(action)
    ]
    if similar:
      self._plan[self._position] = max(similar, key=likeness)
    else:
      self._position += 1

  def mistake(self, kind: str, key: str) -> str:
    """Draw a wrong action on the objects in sight; see Env.mistake.

    If a "wrong" action is not possible at a step, the step is wasted.
    """
    draw = random.Random(key)
    action = self.oracle().action
    names = self._engine.list_objects()
    objects = [name for name in names if name not in ("agent", "air")] or ["table"]
    wrong = _act_wrongly(action, objects, draw) if kind == "wrong" else None
    if wrong is None:
      wrong = _waste_step(action, objects, draw)
    # A mistake that equals the expert's action would do the expert's work by chance.
    return wrong if wrong != action else f"examine {draw.choice(objects)}"


def _act_wrongly(action: str, objects: list[str], draw: random.Random) -> str | None:
  """Apply the verb of a critical action to a wrong object.

  Args:
    action: the expert's action.
    objects: the names of the objects in sight.
    draw: the random generator.

  Returns:
    The wrong action; None if the action is routine, or names no second object.
  """
  verb = read_verb(action)
  others = [name for name in objects if name not in action] or objects
  if verb in ONE_OBJECT_VERBS:
    return f"{verb}{' on' * (verb == 'focus')} {draw.choice(others)}"
  two_objects = TWO_OBJECTS.match(action)
  if verb not in CRITICAL_VERBS or not two_objects:
    return None
  _, item, preposition, target = two_objects.groups()
  boxes = [name for name in others if "box" in name]
  if verb == "move" and "box" in target and boxes and draw.random() < BOXED:
    return f"move {item} to {draw.choice(boxes)}"
  if verb == "connect":
    ends = [name for name in others if ENDS.search(name)]
    return f"connect {item} to {draw.choice(ends or others)}"
  if draw.random() < 0.5:
    return f"{verb} {draw.choice(others)} {preposition} {target}"
  return f"{verb} {item} {preposition} {draw.choice(others)}"


def _waste_step(action: str, objects: list[str], draw: random.Random) -> str:
  """Draw an action that wastes the step.

  Args:
    action: the expert's action.
    objects: the names of the objects in sight.
    draw: the random generator.
  """
  verb = read_verb(action)
  kind = draw.choice(WASTED)
  item = draw.choice(objects)
  if kind in ("examine", "look at"):
    return f"{kind} {item}"
  if kind == "use":
    return f"use {item} on {draw.choice(objects)}" if verb != "use" else "task"
  if kind == "go to":
    return f"go to {draw.choice(ROOMS)}"
  if kind == "nonsense":
    return f"{'open' if verb in VAGUE_VERBS else verb} the {item}"
  return kind
