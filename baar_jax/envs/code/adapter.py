"""Play tickets: a few Python functions to write, with two tries at each.

A try is the code of one reply; the tests of the function decide. Each try is a new
conversation for the agent, which sees one function, and what went wrong in a failed
try, but not its code. With a recording, outcomes are looked up and nothing is executed.

A recording is a compressed file of JSON lines. The first line tells how it was made;
each of the others is a node, one model's reply at one try at a function.
"""

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from baar_jax.envs import engines
from baar_jax.envs.base import Env, EnvDied, check_size
from baar_jax.envs.code import runner
from baar_jax.episode import SPLITS, Task

FUNCTIONS = Path(__file__).with_name("functions.jsonl")
TICKET = 4  # functions of a ticket
TRIES = 2  # the most tries at a function
OPENING = "Write this Python function."
# The published splits of MBPP by number of problem: train, validation and test.
MBPP = {"train": range(601, 975), "dev": range(511, 601), "test": range(11, 511)}
FORMAT = "baar_jax recording 1"
# Seconds after which the process of the tests is killed, on however busy a machine; its
# CPU has a lower limit of its own.
LIMIT_S = 120
FAILED = "The first try failed."
NO_BLOCK = "It had no code: reply with one fenced block that begins with ```python."
NO_END = "It did not end in time, or it used too much memory."


@dataclasses.dataclass(frozen=True)
class Function:
  """A function to write.

  Attributes:
    id: unique within the file.
    split: "train", "dev" or "test".
    text: what the function has to do.
    signature: the line that begins with "def".
    shown: the tests that agents see.
    tests: all tests, the shown ones first. Each is source text that ends with an
      assert.
  """

  id: str
  split: str
  text: str
  signature: str
  shown: Sequence[str]
  tests: Sequence[str]

  def prompt(self, failure: str = "") -> str:
    """Write what an agent is asked.

    Args:
      failure: what went wrong in an earlier try; see `describe_failure`.
    """
    tests = "\n".join(self.shown)
    prompt = f"{OPENING}\n\n{self.text}\n\n{self.signature}\n\nIt must pass:\n{tests}"
    return f"{prompt}\n\n{failure}" if failure else prompt

  def describe_failure(self, results: Sequence[str]) -> str:
    """Say what went wrong in a try: its first failed test and what came out.

    Args:
      results: the result of `run_tests`.

    Returns:
      A text; "" if all tests passed.
    """
    for test, result in zip(self.tests, results):
      if result:
        what = "" if result == NO_BLOCK else f" This test failed:\n{test}\n"
        return f"An earlier try was wrong.{what or ' '}{result}"
    return ""


@functools.cache
def read_functions(path: str) -> list[Function]:
  """Read the functions of train, dev and test, from a file of ours or of MBPP.

  Args:
    path: the file; "" is our own.

  Raises:
    ValueError: the file is missing, or is neither.
  """
  functions = []
  try:
    for line in Path(path or FUNCTIONS).read_text("utf-8").splitlines():
      fields = json.loads(line)
      function = read_problem(fields) if "test_list" in fields else read_row(fields)
      if function.split in SPLITS:
        functions.append(function)
  except (OSError, ValueError, LookupError, TypeError) as error:
    raise ValueError(
      f"cannot read functions from {path} ({type(error).__name__}: {error}): set "
      "--config.env.options.data to a file of MBPP's problems, or leave it out"
    ) from None
  return sorted(functions, key=lambda function: SPLITS.index(function.split))


def read_row(fields: dict) -> Function:
  """Read a function of our own file."""
  names = ("id", "split", "text", "signature", "shown")
  return Function(
    *(fields[name] for name in names), [*fields["shown"], *fields["hidden"]]
  )


def read_problem(fields: dict) -> Function:
  """Read a problem of MBPP, of which all but the last test are shown."""
  number = fields["task_id"]
  split = next((name for name, numbers in MBPP.items() if number in numbers), "")
  tests = []
  for test in fields["test_list"]:
    tests.append("\n".join(filter(None, [fields["test_setup_code"], test])))
  called = re.findall(r"\w+(?=\s*\()", " ".join(tests))
  defined = re.findall(r"(?m)^(def\s+(\w+)\s*\(.*\)\s*:)", fields["code"])
  signature = [line for line, name in defined if name in called][0]
  return Function(f"mbpp-{number}", split, fields["text"], signature, tests[:-1], tests)


def run_tests(code: str, tests: Sequence[str], walled: bool = True) -> list[str]:
  """Run a function's tests in a process of their own.

  Args:
    code: an agent's code; "" if the reply had none.
    tests: the tests; see `Function`.
    walled: whether bubblewrap keeps the code from the machine.

  Returns:
    A text for each test: "" if it passed, else what went wrong.

  Raises:
    EnvDied: the process did not start, so that nothing is known of the code.
  """
  if not code:
    return [NO_BLOCK] * len(tests)
  # No keys; and sets have one order, so that equal code has equal results.
  environ = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONHASHSEED": "0"}
  command = [sys.executable, "-s", "-P", "-B", runner.__file__]
  if walled:
    for variable in environ.items():
      command = ["--setenv", *variable, *command]
    command = engines.confine(None, runner.__file__, "/scratch") + command
  request = json.dumps({"code": code, "tests": tests}).encode()
  try:
    # What code writes as errors is dropped: it could fill the memory of this process.
    done = subprocess.run(
      command,
      input=request,
      stdout=subprocess.PIPE,
      stderr=subprocess.DEVNULL,
      env=environ,
      timeout=LIMIT_S,
    )
    output = done.stdout
  except subprocess.TimeoutExpired as error:
    output = error.stdout or b""
  started, *lines = output.split(b"\n")
  if started != runner.READY.encode():
    raise EnvDied("the process of the tests did not start")
  # A process that is killed leaves its last line incomplete, and code may print lines.
  results = []
  for line in lines[: len(tests)]:
    with contextlib.suppress(ValueError):
      results.append(str(json.loads(line)))
  return [*results, *[NO_END] * (len(tests) - len(results))]


@dataclasses.dataclass(frozen=True)
class Node:
  """One model's reply at one try at a function.

  Attributes:
    function: the id of the function.
    trial: number of the trial, from 0. Trials are independent draws.
    path: the indices of the models that have tried so far, this one last, such as "01".
    prompt: a hash of the conversation that the model has read.
    reply: the text of the reply.
    code: a hash of the reply's code; see `hash_texts`.
    prompt_tokens: tokens of the conversation, as counted by what ran the model.
    completion_tokens: tokens of the reply.
    results: a text for each test: "" if it passed, else what went wrong.
    observation: what the next agent is told of the failed try; "" after a success.
    seconds: seconds from the request to the reply.
  """

  function: str
  trial: int
  path: str
  prompt: str
  reply: str
  code: str
  prompt_tokens: int
  completion_tokens: int
  results: tuple[str, ...]
  observation: str
  seconds: float

  @property
  def key(self) -> tuple[str, int, str]:
    """Return function, trial and path, which no other node has."""
    return self.function, self.trial, self.path


@dataclasses.dataclass(frozen=True)
class Recording:
  """A recording in memory.

  Attributes:
    header: how it was made: models, functions, sampling, program, date, prices.
    nodes: the nodes by key.
  """

  header: dict
  nodes: dict[tuple[str, int, str], Node]

  @functools.cached_property
  def results(self) -> dict[tuple[str, str], tuple[str, ...]]:
    """Collect the results of the tests, by function and hash of the code."""
    return {(node.function, node.code): node.results for node in self.nodes.values()}

  @functools.cached_property
  def trials(self) -> int:
    """Count the trials to draw from: those that all functions have, but at least 1."""
    functions = {function for function, _, _ in self.nodes}
    count = 1
    while functions and all(self.is_complete(name, count) for name in functions):
      count += 1
    return count

  @property
  def digest(self) -> str:
    """Return a hash of all that may be drawn."""
    texts = []
    for (function, trial, path), node in sorted(self.nodes.items()):
      if trial < self.trials:
        texts += [function, str(trial), path, node.code]
    return hash_texts(*texts)

  def check_prompts(self, functions: Iterable[Function]) -> None:
    """Check that the models were asked what they would be asked now.

    Args:
      functions: all functions of the environment.

    Raises:
      ValueError: a model was asked something else.
    """
    function_of = {function.id: function for function in functions}
    for (name, trial, path), node in self.nodes.items():
      before = self.nodes.get((name, trial, path[:-1]))
      prompt = function_of[name].prompt(before.observation if before else "")
      if node.prompt != hash_texts(Code.system_prompt, prompt):
        raise ValueError(
          f"the recording has another prompt for {name}, trial {trial}, models {path}: "
          "record again with python -m tools.record"
        )

  def is_complete(self, function: str, trial: int) -> bool:
    """Tell whether a trial of a function has each try of each model."""
    models = range(len(self.header["models"]))
    for first in models:
      node = self.nodes.get((function, trial, f"{first}"))
      if node is None:
        return False
      for second in models if node.observation else ():
        if (function, trial, f"{first}{second}") not in self.nodes:
          return False
    return True


def hash_functions(functions: Iterable[Function]) -> str:
  """Return a short hash of what agents are asked, and of the tests."""
  return hash_texts(*([function.prompt(), *function.tests] for function in functions))


def hash_texts(*texts: str | Sequence[str]) -> str:
  """Return a short hash of texts, or of lists of texts."""
  return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


@functools.cache
def read_recording(path: str) -> Recording:
  """Read a recording.

  Args:
    path: the file, or the name of one beside this file.

  Raises:
    ValueError: the file is missing, damaged, or something else.
  """
  file_path = Path(path) if Path(path).exists() else Path(__file__).parent / path
  try:
    with gzip.open(file_path, "rt", encoding="utf-8") as file:
      header = json.loads(next(file, "null"))
      if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it is none")
      if lost := {"models", "functions", "max_completion_tokens"} - header.keys():
        raise ValueError(f"its first line lacks {', '.join(sorted(lost))}")
      recording = Recording(header, {})
      for line in file:
        fields = json.loads(line)
        node = Node(**fields | {"results": tuple(fields["results"])})
        recording.nodes[node.key] = node
  except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f"cannot read the recording {path} ({error}): restore it, or make it with python "
      "-m tools.record"
    ) from None
  return recording


@dataclasses.dataclass(frozen=True)
class Options:
  """The options of the environment.

  Attributes:
    data: a file of functions, such as MBPP's problems; "" is our own functions.
    recording: a recording whose outcomes are looked up; each run sets it by its models.
      "" executes agents' code.
    trusted: whether agents' code runs without a wall, with all rights of the user.
  """

  data: str = ""
  recording: str = ""
  trusted: bool = False


class Code(Env):
  """The Env of tickets."""

  Options = Options
  metric = "score"
  prompt_growth = 0
  system_prompt = Path(__file__).with_name("prompt.txt").read_text().strip()
  code_actions = True
  needs_process = False  # Agents' code has a process of its own; see `run_tests`.
  opening = OPENING
  success_score = 0.5
  scores_steps = True

  @classmethod
  def complete(cls, options: Options, runs: Path) -> Options:
    """Check that agents' code can be confined; see Env.complete.

    Raises:
      ValueError: agents' code would run, and it cannot be confined here.
    """
    if not options.recording and not options.trusted:
      engines.check_walls(None)
    return options

  @property
  def waits(self) -> bool:
    """Tell whether code is executed; recorded outcomes go with recorded models."""
    return not self.options.recording

  @property
  def functions(self) -> list[Function]:
    """Return the functions of all splits."""
    return read_functions(self.options.data)

  def tasks(self, split: str) -> list[Task]:
    """Return the tickets of a split.

    Each function is in one ticket. Training functions are shuffled and dealt again, as
    often as the number of tickets needs.
    """
    tickets = sum(f.split == split for f in self.functions) // TICKET
    size = self.sizes[split]
    least = 1 if split == "train" else size
    check_size("the file of functions", range(tickets), split, least)
    tasks = []
    for number in range(size):
      task_id = f"{split}-{number}"
      texts = [function.text for function in deal(self.functions, task_id)]
      listing = "\n".join(f"{n}. {text}" for n, text in enumerate(texts, 1))
      description = f"Write {TICKET} Python functions.\n{listing}"
      tasks.append(Task(task_id, split, description, self.max_steps))
    return tasks

  def reset(self, task_id: str) -> str:
    """Start a ticket at its first function, and return the first observation."""
    self._functions = deal(self.functions, task_id)
    self._place = self._tries = self._solved = 0
    return self._observe("")

  def step(self, action: str) -> tuple[str, bool]:
    """Try the code of a reply at the function; "" is a reply without code."""
    function = self._functions[self._place]
    if self.options.recording:
      recording = read_recording(self.options.recording)
      results = recording.results[function.id, hash_texts(action)]
    else:
      results = run_tests(action, function.tests, not self.options.trusted)
    failure = function.describe_failure(results)
    self._tries += 1
    if failure and self._tries < TRIES:
      first_failed = next(filter(None, results))
      problem = first_failed.partition(":")[0][:30].rstrip(".")
      return self._observe(f"{FAILED} {problem}.", failure), False
    self._solved += not failure
    self._place += 1
    self._tries = 0
    event = "It is not solved." if failure else "It is solved."
    done = self._place == len(self._functions)
    return event if done else self._observe(event), done

  def _observe(self, event: str, failure: str = "") -> str:
    """Write an observation: the ticket's state, then what the agent sees."""
    prompt = self._functions[self._place].prompt(failure)
    return f"{event} Function {self._place + 1} of {len(self._functions)}.\n\n{prompt}"

  def score(self) -> float:
    """Return the share of the functions that are solved."""
    return self._solved / len(self._functions)


def deal(functions: Iterable[Function], task_id: str) -> list[Function]:
  """Return the functions of a ticket.

  Args:
    functions: the functions of all splits.
    task_id: the split and the number of the ticket.
  """
  split, _, number = task_id.partition("-")
  dealt = [function for function in functions if function.split == split]
  turn, place = divmod(int(number), len(dealt) // TICKET)
  random.Random(f"{split}|{turn}").shuffle(dealt)
  return dealt[place * TICKET : (place + 1) * TICKET]


def find_place(observation: str) -> tuple[int, bool]:
  """Read where a ticket stands: the place of the function, and if a try has failed."""
  head = observation.partition(OPENING)[0]
  return int(re.findall(r"Function (\d+) of", head)[-1]) - 1, head.startswith(FAILED)
