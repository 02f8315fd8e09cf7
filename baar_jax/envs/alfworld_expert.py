"""ALFWorld's expert: does what the goal still lacks, by the game's facts; errs on request."""

import dataclasses
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence

from baar_jax.envs.base import Oracle

LOOK, TWO = "look_at_obj_in_light", "pick_two_obj_and_place"
# What is done to the object before it is put down: the command, the fact it makes, and where.
TREATMENTS = {
  "pick_clean_then_place_in_recep": ("clean", "isclean", "sinkbasin"),
  "pick_heat_then_place_in_recep": ("heat", "ishot", "microwave"),
  "pick_cool_then_place_in_recep": ("cool", "iscool", "fridge"),
}
TASK_TYPES = ("pick_and_place_simple", LOOK, *TREATMENTS, TWO)
ROUTINE_VERBS = ("go", "open", "close", "look", "inventory", "examine")

# Unproductive actions and how often each is taken.
WASTED = ("go", "examine", "open", "close", "inventory", "look", "nonsense")
WEIGHTS = {
  "lost": (0.50, 0.12, 0.10, 0.05, 0.05, 0.08, 0.10),
  "hasty": (0.25, 0.15, 0.10, 0.10, 0.10, 0.10, 0.20),
}
NONSENSE = ("think about the {}", "search the {}", "find the {}", "check the {}")


def verb(action: str) -> str:
  return action.split(" ", 1)[0]


@dataclasses.dataclass(frozen=True)
class Goal:
  """What a game asks for, as its directory's name says it.

  Attributes:
    task_type: one of TASK_TYPES.
    object: type of the things to be handled.
    target: type of the receptacle they go to, or of the lamp to look at them by.
  """

  task_type: str
  object: str
  target: str

  @classmethod
  def of(cls, name: str) -> "Goal":
    """Reads "<task type>-<object>-<container>-<target>-<scene>". Raises ValueError."""
    parts = name.rsplit("-", 4)
    if len(parts) != 5 or parts[0] not in TASK_TYPES:
      raise ValueError(
        f"{name!r} does not name an ALFWorld game; expected TYPE-OBJECT-CONTAINER-TARGET-SCENE "
        f"with a type of {', '.join(TASK_TYPES)}"
      )
    return cls(parts[0], parts[1].lower(), parts[3].lower())


class Facts:
  """The facts of a game's state, by what they are asked for."""

  def __init__(self, facts: Iterable) -> None:
    """Args: the engine's propositions, each with a name and arguments that have names."""
    self._rows: dict[str, list[tuple[str, ...]]] = defaultdict(list)
    for fact in facts:
      self._rows[fact.name].append(tuple(argument.name.strip() for argument in fact.arguments))
    self.container = dict(sorted(self._rows["inreceptacle"]))  # of an object
    self.location = dict(sorted(self._rows["receptacleatlocation"]))  # of a receptacle
    self.kind = {name: kind.removesuffix("type") for name, kind in self._rows["objecttype"]}
    self.furniture = {
      name: kind.removesuffix("type") for name, kind in self._rows["receptacletype"]
    }
    self.here = self._rows["atlocation"][0][1]
    held = [row[1] for row in self._rows["holds"]]
    self.held = held[0] if held else None

  def holds(self, fact: str, name: str) -> bool:
    return (name,) in self._rows[fact]

  def closed(self, receptacle: str) -> bool:
    return self.holds("openable", receptacle) and not self.holds("opened", receptacle)

  def fits(self, receptacle: str, kind: str) -> bool:
    return (f"{self.furniture[receptacle]}type", f"{kind}type") in self._rows["cancontain"]


class Expert:
  """Plays a game from the state it is in, whatever was done before; keeps nothing in mind."""

  def __init__(self, goal: Goal) -> None:
    self.goal = goal

  def oracle(self, facts: Facts, commands: Sequence[str]) -> Oracle:
    """The next action, from privileged facts and the commands that the game admits."""
    position, action, recovering = self._next(facts, commands)
    return Oracle(action, position, verb(action) not in ROUTINE_VERBS, recovering)

  def _next(self, facts: Facts, commands: Sequence[str]) -> tuple[int, str, bool]:
    goal = self.goal
    treatment = TREATMENTS.get(goal.task_type)
    mine = sorted(o for o, kind in facts.kind.items() if kind == goal.object)
    targets = sorted(r for r, kind in facts.furniture.items() if kind == goal.target)
    targets = [r for r in targets if r in facts.location]
    placed: list[str] = []
    if goal.task_type == TWO:  # both go to the same receptacle: the one that has one already
      targets.sort(key=lambda r: -sum(facts.container.get(o) == r for o in mine))
      placed = [o for o in mine if facts.container.get(o) == targets[0]]
    first = 2 * bool(placed)  # the plan's steps so far
    held = facts.held
    if held and facts.kind[held] != goal.object:
      return first, self._put_away(facts, commands, held), True
    if not held:
      return first, self._fetch(facts, [o for o in mine if o not in placed], targets), False
    if goal.task_type == LOOK:
      lamps = sorted(o for o, kind in facts.kind.items() if kind == goal.target)
      lamp = next(o for o in lamps if facts.container.get(o) in facts.location)
      return 1, _reach(facts, facts.container[lamp]) or f"use {lamp}", False
    if treatment and not facts.holds(treatment[1], held):
      places = sorted(r for r, kind in facts.furniture.items() if kind == treatment[2])
      place = next(r for r in places if r in facts.location)
      return 1, _walk(facts, place) or f"{treatment[0]} {held} with {place}", False
    action = _reach(facts, targets[0]) or _putting(commands, held)
    return first + (2 if treatment else 1), action, False

  def _fetch(self, facts: Facts, mine: Sequence[str], targets: Sequence[str]) -> str:
    """Takes one of the objects: best one that needs no more treatment, near, and not put away."""
    _, done, _ = TREATMENTS.get(self.goal.task_type, ("", "", ""))

    def effort(name: str) -> tuple:
      place = facts.container[name]
      treated = bool(done) and facts.holds(done, name)
      far = facts.location[place] != facts.here
      return not treated, far, facts.closed(place), place in targets, name

    reachable = [o for o in mine if facts.container.get(o) in facts.location]
    if not reachable:
      return "look"
    name = min(reachable, key=effort)
    place = facts.container[name]
    return _reach(facts, place) or f"take {name} from {place}"

  def _put_away(self, facts: Facts, commands: Sequence[str], held: str) -> str:
    if _putting(commands, held):
      return _putting(commands, held)
    places = [r for r in facts.location if facts.fits(r, facts.kind[held])]
    places.sort(key=lambda r: (facts.closed(r), r))
    return _reach(facts, places[0]) if places else "look"

  def mistake(self, kind: str, key: str, oracle: Oracle, commands: Sequence[str]) -> str:
    """A wrong action in place of the expert's; see Env.mistake."""
    if kind != "wrong" and kind not in WEIGHTS:
      raise ValueError(f"unknown kind of mistake {kind!r}; known: wrong, {', '.join(WEIGHTS)}")
    draw = random.Random(key)
    others = [command for command in commands if command != oracle.action]
    if kind == "wrong" and oracle.critical:
      same = [command for command in others if verb(command) == verb(oracle.action)]
      acting = [command for command in others if verb(command) not in ROUTINE_VERBS]
      if same or acting:
        return draw.choice(same or acting)
    wasted = draw.choices(WASTED, WEIGHTS.get(kind, WEIGHTS["lost"]))[0]
    choices = [command for command in others if verb(command) == wasted]
    if choices:
      return draw.choice(choices)
    return draw.choice(NONSENSE).format(self.goal.object)


def _walk(facts: Facts, receptacle: str) -> str | None:
  """The way there; None if that is here."""
  return None if facts.location[receptacle] == facts.here else f"go to {receptacle}"


def _reach(facts: Facts, receptacle: str) -> str | None:
  """The way to what is in it or on it; None if it is at hand."""
  return _walk(facts, receptacle) or (f"open {receptacle}" if facts.closed(receptacle) else None)


def _putting(commands: Sequence[str], held: str) -> str | None:
  """The command that puts down what is held here, in the words of the game's grammar."""
  return next(
    (c for c in commands if c.startswith((f"move {held} to ", f"put {held} in/on "))), None
  )
