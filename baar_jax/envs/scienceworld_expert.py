"""ScienceWorld's expert: follows a solution, undoes deviations from it, and makes mistakes."""

import random
import re
from collections import deque
from collections.abc import Callable

from baar_jax.envs.base import Oracle, verb

CRITICAL_VERBS = ("focus", "connect", "disconnect", "pour", "mix", "use")
CRITICAL_VERBS += ("move", "dunk", "activate", "deactivate")
ROOMS = ("kitchen", "hallway", "workshop", "greenhouse", "bedroom")
ROOMS += ("art studio", "living room", "outside", "foundry")

# Unproductive actions, and how often each is taken; "wrong" is like "lost" at a step that has no
# wrong object. A weak model looks around a lot, and those are long observations.
WASTED = ("look around", "inventory", "examine", "look at", "use", "go to", "nonsense")
WEIGHTS = {
  "lost": (0.42, 0.06, 0.20, 0.08, 0.08, 0.10, 0.06),
  "hasty": (0.18, 0.12, 0.18, 0.12, 0.12, 0.14, 0.14),
}
REPAIRS = 3  # of one critical step that the engine does not understand
DOORS = 6  # tries at a door before the step is given up

_MOVED = re.compile(r"You move to the ([a-z ]+)\.")
_ROOM = re.compile(r"called the ([a-z ]+)\.")
_TWO_OBJECTS = re.compile(r"(\w+) (.+) (to|into|in|on) (.+)$")


class Expert:
  """Follows a plan during one episode, whatever else is done in between.

  The expert's action advances the plan. Any other action is a deviation, which the expert undoes
  first where it can: by walking back or disconnecting. (The engine disconnects only whole things,
  so a wire that is joined at a wrong end mostly stays so, and the circuit is lost.)
  """

  def __init__(self, plan: list[str], observation: str, valid_actions: Callable[[], list[str]]):
    self._plan, self._position = list(plan), 0
    self._recovery: deque[str] = deque()
    self._failures = 0  # at the plan's current step
    self._valid_actions = valid_actions
    room = _ROOM.search(observation)
    self._room = room[1] if room else None

  def oracle(self) -> Oracle:
    action = [*self._recovery, *self._plan[self._position :], "wait1"][0]
    critical = verb(action) in CRITICAL_VERBS
    return Oracle(action, self._position, critical, recovering=bool(self._recovery))

  def observe(self, action: str, observation: str) -> None:
    """Advances the plan after a step of the expert, else prepares to undo a deviation."""
    expected, previous_room = self.oracle(), self._room
    moved, two_objects = _MOVED.search(observation), _TWO_OBJECTS.match(action)
    if moved:
      self._room = moved[1]
    if action == expected.action and expected.recovering:
      self._recovery.popleft()
    elif action == expected.action:
      self._advance(expected, observation)
    elif moved and previous_room:
      self._recovery.appendleft(f"go to {previous_room}")
    elif two_objects and "is now connected to" in observation:
      self._recovery.appendleft(f"disconnect {two_objects[2]}")

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
    """Replaces an invalid action of the plan by the valid one that shares most words with it."""
    words = set(action.split())

    def likeness(other: str) -> float:
      return len(words & {*other.split()}) - 0.3 * len({*other.split()} - words)

    candidates = [other for other in self._valid_actions() if verb(other) == verb(action)]
    if candidates:
      self._plan[self._position] = max(candidates, key=likeness)
    else:
      self._position += 1

  def mistake(self, kind: str, key: str, objects: list[str]) -> str:
    """A wrong action in place of the expert's, on the objects that are here; see Env.mistake."""
    draw, action = random.Random(key), self.oracle().action
    here = [name for name in objects if name not in ("agent", "air")] or ["table"]
    wrong = _wrong_object(action, here, draw) if kind == "wrong" else None
    wrong = wrong or _wasted_step(action, here, draw, WEIGHTS.get(kind, WEIGHTS["lost"]))
    # The expert looks around and walks, too: a mistake must not do its work by chance.
    return wrong if wrong != action else f"examine {draw.choice(here)}"


def _wrong_object(action: str, here: list[str], draw: random.Random) -> str | None:
  """The same verb on the wrong thing; None if the step is not critical or has another form."""
  name = verb(action)
  others = [thing for thing in here if thing not in action] or here
  if name in ("focus", "mix", "activate", "deactivate", "disconnect"):
    return f"{'focus on' if name == 'focus' else name} {draw.choice(others)}"
  two_objects = _TWO_OBJECTS.match(action)
  if name not in CRITICAL_VERBS or not two_objects:
    return None
  _, thing, preposition, target = two_objects.groups()
  boxes = [other for other in others if "box" in other]
  if name == "move" and "box" in target and boxes and draw.random() < 0.6:
    return f"move {thing} to {draw.choice(boxes)}"
  if name == "connect":
    ends = [other for other in others if re.search("terminal|anode|cathode", other)]
    return f"connect {thing} to {draw.choice(ends or others)}"
  if draw.random() < 0.5:
    return f"{name} {draw.choice(others)} {preposition} {target}"
  return f"{name} {thing} {preposition} {draw.choice(others)}"


def _wasted_step(action: str, here: list[str], draw: random.Random, weights: tuple) -> str:
  kind = draw.choices(WASTED, weights)[0]
  thing = draw.choice(here)
  if kind in ("examine", "look at"):
    return f"{kind} {thing}"
  if kind == "use":
    return f"use {thing} on {draw.choice(here)}" if verb(action) != "use" else "task"
  if kind == "go to":
    return f"go to {draw.choice(ROOMS)}"
  if kind == "nonsense":
    vague = verb(action) in ("focus", "move", "pour", "connect")
    return f"{'open' if vague else verb(action)} the {thing}"
  return kind
