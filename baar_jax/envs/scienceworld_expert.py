"""ScienceWorld's expert: follows a known solution, undoes what went astray, and errs on request."""

import random
import re
from collections import deque
from collections.abc import Callable

from baar_jax.envs.base import Oracle

CRITICAL_VERBS = frozenset(
  ("focus", "connect", "disconnect", "pour", "mix", "use")
  + ("move", "dunk", "activate", "deactivate")
)
ROOMS = ("kitchen", "hallway", "workshop", "greenhouse", "bedroom")
ROOMS += ("art studio", "living room", "outside", "foundry")

# Unproductive actions and how often each is taken. A weak model looks around a lot, and those
# are long observations.
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


def verb(action: str) -> str:
  return action.split(" ", 1)[0]


class Expert:
  """Follows a plan during one episode, whatever else is done in between.

  An action that equals the expert's own takes the plan a step forward. Any other is a deviation;
  what it did is undone first where it can be: walking back, disconnecting. (The engine disconnects
  whole things only, so a wire joined at a wrong end mostly stays so, and the circuit is lost.)
  """

  def __init__(
    self, plan: list[str], observation: str, valid_actions: Callable[[], list[str]]
  ) -> None:
    self._plan = list(plan)
    self._position = 0
    self._recovery: deque[str] = deque()
    self._tries = 0  # failed ones at the plan's current step
    self._valid_actions = valid_actions
    room = _ROOM.search(observation)
    self._room = room.group(1) if room else None

  def oracle(self) -> Oracle:
    if self._recovery:
      action = self._recovery[0]
    elif self._position < len(self._plan):
      action = self._plan[self._position]
    else:
      action = "wait1"
    critical = verb(action) in CRITICAL_VERBS
    return Oracle(action, self._position, critical, recovering=bool(self._recovery))

  def observe(self, action: str, observation: str) -> None:
    """Takes note of a step that was made."""
    expected = self.oracle()
    came_from = self._room
    moved = _MOVED.search(observation)
    if moved:
      self._room = moved.group(1)
    if action == expected.action:
      if expected.recovering:
        self._recovery.popleft()
      else:
        self._advance(expected, observation)
      return
    if moved and came_from:
      self._recovery.appendleft(f"go to {came_from}")
    if "is now connected to" in observation:
      connected = _TWO_OBJECTS.match(action)
      if connected:
        self._recovery.appendleft(f"disconnect {connected.group(2)}")

  def _advance(self, expected: Oracle, observation: str) -> None:
    action = expected.action
    unknown = "No known action" in observation
    if "Ambiguous request" in observation:
      self._position += 1
      if self._plan[self._position : self._position + 1] != ["0"]:
        self._recovery.append("0")
    elif unknown and expected.critical and self._tries < REPAIRS:
      self._tries += 1
      self._repair(action)
    elif (unknown and verb(action) == "go") or "door is not open" in observation:
      if self._tries > DOORS:
        self._position += 1
      self._tries += 1
      self._recovery.append(f"open door to {action.removeprefix('go to ')}")
    else:
      self._position += 1
      self._tries = 0

  def _repair(self, action: str) -> None:
    """Puts the valid action in the plan that shares most words with one that is not."""
    words = set(action.split())

    def likeness(other: str) -> float:
      others = set(other.split())
      return len(words & others) - 0.3 * len(others - words)

    candidates = [other for other in self._valid_actions() if verb(other) == verb(action)]
    if candidates:
      self._plan[self._position] = max(candidates, key=likeness)
    else:
      self._position += 1

  def mistake(self, kind: str, key: str, objects: Callable[[], list[str]]) -> str:
    """A wrong action in place of the expert's; see Env.mistake."""
    if kind != "wrong" and kind not in WEIGHTS:
      raise ValueError(f"unknown kind of mistake {kind!r}; known: wrong, {', '.join(WEIGHTS)}")
    draw = random.Random(key)
    action = self.oracle().action
    here = [name for name in objects() if name not in ("agent", "air")] or ["table"]
    wrong = _wrong_object(action, here, draw) if kind == "wrong" else None
    if wrong is None:
      wrong = _wasted_step(action, here, draw, WEIGHTS.get(kind, WEIGHTS["lost"]))
    # The expert looks around and walks, too: a mistake must not do its work by chance.
    return wrong if wrong != action else f"examine {draw.choice(here)}"


def _wrong_object(action: str, here: list[str], draw: random.Random) -> str | None:
  """The same verb on the wrong thing; None if the step is not critical or has another form."""
  name = verb(action)
  others = [thing for thing in here if thing not in action] or here
  if name == "focus":
    return f"focus on {draw.choice(others)}"
  if name in ("mix", "activate", "deactivate", "disconnect"):
    return f"{name} {draw.choice(others)}"
  parts = _TWO_OBJECTS.match(action)
  if name not in CRITICAL_VERBS or not parts:
    return None
  _, thing, preposition, target = parts.groups()
  boxes = [other for other in others if "box" in other]
  if name == "move" and "box" in target and boxes and draw.random() < 0.6:
    return f"move {thing} to {draw.choice(boxes)}"
  if name == "connect":
    ends = ("terminal", "anode", "cathode")
    return f"connect {thing} to {draw.choice(_naming(ends, others) or others)}"
  if draw.random() < 0.5:
    return f"{name} {draw.choice(others)} {preposition} {target}"
  return f"{name} {thing} {preposition} {draw.choice(others)}"


def _naming(words: tuple[str, ...], things: list[str]) -> list[str]:
  return [thing for thing in things if any(word in thing for word in words)]


def _wasted_step(
  action: str, here: list[str], draw: random.Random, weights: tuple[float, ...]
) -> str:
  kind = draw.choices(WASTED, weights)[0]
  thing = draw.choice(here)
  if kind in ("examine", "look at"):
    return f"{kind} {thing}"
  if kind == "use":
    return f"use {thing} on {draw.choice(here)}" if verb(action) != "use" else "task"
  if kind == "go to":
    return f"go to {draw.choice(ROOMS)}"
  if kind == "nonsense":
    name = verb(action)
    return f"{name if name not in ('focus', 'move', 'pour', 'connect') else 'open'} the {thing}"
  return kind
