"""Record the replies of models to functions, after every sequence of models.

    python -m tools.record --out=FILE.jsonl.gz --config=configs/code.py \\
      --config.models.names=small,large --config.models.base_urls=... --config.max_usd=1

It asks for all that the configured tickets need, trial by trial. From then on every run
with --config.models.kind=recorded --config.models.recording=FILE is free. The same
command goes on after a stop; what was paid for is in the file or in the run's ledger.
"""

import concurrent.futures
import contextlib
import dataclasses
import datetime
import functools
import gzip
import hashlib
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx2
from absl import app, flags, logging
from tqdm import tqdm

import main as program
from baar_jax.config import Config, fail, read_flags, require
from baar_jax.envs.base import EnvDied, make
from baar_jax.envs.code.adapter import (
  FORMAT,
  TRIES,
  Code,
  Function,
  Node,
  Recording,
  deal,
  hash_functions,
  hash_texts,
  read_recording,
  run_tests,
)
from baar_jax.episode import SPLITS, Task, Usage
from baar_jax.llms.chat import ChatAgent, ChatPair
from baar_jax.llms.history import (
  NoAnswer,
  open_conversation,
  parse_action,
)
from baar_jax.llms.prices import check_models, prices_of
from baar_jax.llms.provider import Endpoint, endpoints
from baar_jax.rollout.budget import CapReached, DollarBudget, reserve
from baar_jax.rollout.source import env_arguments
from baar_jax.store import Calls, lock, read_spent

SAVE_S = 60.0  # Seconds between two writings of the file.
# Assumed by a dry run: the tokens of a conversation and of a reply, the share of first
# tries that fail, and the seconds of a call.
ASSUMED = Usage(330, 0, 120)
FAILED_SHARE = 0.6
CALL_S = 4.0


class Command(NamedTuple):
  """Hold a command line.

  Attributes:
    config: the configuration.
    out: the file of the recording.
    trials: the trials of each function.
    in_flight: the most calls in flight of each model.
  """

  config: Config
  out: Path
  trials: int
  in_flight: int


# An agent's conversation begins with the function, so its task is not told.
NO_TASK = Task("", "", "", TRIES)


class Recorder:
  """Record every missing node of some functions."""

  def __init__(self, config: Config, env: Code, out: Path):
    """Open the recording, the ledger and the models.

    Args:
      config: the configuration, with API models.
      env: the environment.
      out: the file of the recording.

    Raises:
      ValueError: the file has other models or functions, or a model has no price.
    """
    self.env = env
    self.out = out
    self.recording = open_recording(config, env, out)
    # The results of the tests, by function and hash of the code.
    self.results = self.recording.results
    directory = Path(config.runs) / config.name
    # As in a run, two commands must not spend the same dollars twice, nor write one file.
    self._locks = [lock(directory / "lock"), lock(Path(f"{out}.lock"))]
    self.pair = ChatPair(config.models, Calls(directory / "episodes.sqlite"))
    spent_usd = read_spent(directory).total()
    budget = DollarBudget(config.max_usd, spent_usd) if config.max_usd else None
    self.reserve = functools.partial(reserve, None, budget)
    self._lock = threading.Lock()
    self._saved_s = time.monotonic()

  @contextlib.contextmanager
  def open_pools(
    self, in_flight: int
  ) -> Iterator[list[concurrent.futures.ThreadPoolExecutor]]:
    """Yield the threads of each model's calls; afterwards close all.

    After an error calls in flight are stopped. If only the dollars have run out they
    end, because their dollars are reserved.

    Args:
      in_flight: the most calls in flight of each model.
    """
    pools = []
    for _ in self.pair.names:
      pools.append(concurrent.futures.ThreadPoolExecutor(in_flight))
    try:
      yield pools
    except CapReached:
      raise
    except BaseException:
      self.pair.stop()
      raise
    finally:
      for pool in pools:
        pool.shutdown(cancel_futures=True)
      self.pair.close()

  def record(self, wanted: Sequence[Function], trials: int, in_flight: int) -> int:
    """Ask for all trials of functions, one trial after the other.

    Args:
      wanted: the functions.
      trials: the number of trials.
      in_flight: the most calls in flight of each model.

    Returns:
      The number of replies that were left out, because a model gave no answer.
    """
    left_out = 0
    self.save()  # A file that cannot be written is noticed before any call.
    with contextlib.ExitStack() as stack:
      stack.callback(self.save)
      pools = stack.enter_context(self.open_pools(in_flight))

      def submit(function: Function, path: str, failure: str) -> set:
        """Ask each model for its try after a sequence of models."""
        futures = set()
        for model, pool in enumerate(pools):
          after = f"{path}{model}"
          futures.add(pool.submit(self.ask, function, trial, after, failure))
        return futures

      for trial in range(trials):
        waiting = set()
        left = [*wanted]
        title = f"trial {trial + 1} of {trials}"
        with tqdm(desc=title, unit="reply") as bar:
          while waiting or left:
            # Few functions are open at a time, so that second tries come soon and the
            # servers still have their prompts in the cache.
            while left and len(waiting) < 2 * in_flight * len(pools):
              waiting |= submit(left.pop(0), "", "")
            done, waiting = concurrent.futures.wait(
              waiting, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in done:
              bar.update()
              try:
                function, node = future.result()
              except NoAnswer as error:
                print(f"left out: {error}", file=sys.stderr)
                left_out += 1
                continue
              if node.observation and len(node.path) < TRIES:
                waiting |= submit(function, node.path, node.observation)
            bar.set_postfix_str(f"{len(left)} functions left", refresh=False)
        self.save()
    return left_out

  def ask(
    self, function: Function, trial: int, path: str, failure: str
  ) -> tuple[Function, Node]:
    """Ask a model for one try, unless it is recorded, and run the function's tests.

    Args:
      function: the function.
      trial: number of the trial.
      path: the models of the tries so far, this one last.
      failure: what the agent is told of the try before; "" at the first.
    """
    if node := self.recording.nodes.get((function.id, trial, path)):
      return function, node
    prompt = function.prompt(failure)
    messages = open_conversation(self.env.system_prompt, NO_TASK, prompt, prompt)
    # Each sequence of models has a task, and so a draw, of its own.
    task = Task(f"{function.id} {path}", function.split, "", TRIES)
    agent = ChatAgent(self.pair.models[int(path[-1])], task, trial, self.reserve)
    reply = agent.reply(messages, 0)
    usage = reply.call.usage
    code = parse_action(reply.text, code=True) or ""
    digest = hash_texts(code)
    results = self.results.get((function.id, digest))
    if results is None:
      results = run_tests(code, function.tests, not self.env.options.trusted)
    with self._lock:
      # Equal code has one result, also if two models wrote it at the same time.
      known = self.results.setdefault((function.id, digest), tuple(results))
      node = Node(
        function=function.id,
        trial=trial,
        path=path,
        prompt=hash_texts(*(message["content"] for message in messages)),
        reply=reply.text,
        code=digest,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        results=known,
        observation=function.describe_failure(known),
        seconds=round(reply.call.latency_s, 3),
      )
      self.recording.nodes[node.key] = node
      if time.monotonic() - self._saved_s > SAVE_S:
        self._saved_s = time.monotonic()
        write_recording(self.out, self.recording)
    return function, node

  def save(self) -> None:
    """Write the file."""
    with self._lock:
      write_recording(self.out, self.recording)


def open_recording(config: Config, env: Code, out: Path) -> Recording:
  """Read the recording that is to be continued, or begin one.

  Raises:
    ValueError: the file was recorded with other models, functions or sampling.
  """
  models = config.models
  header = {
    "format": FORMAT,
    "models": [*models.names],
    "functions": hash_functions(env.functions),
    "temperature": models.temperature,
    "max_completion_tokens": models.max_completion_tokens,
    "reasoning_effort": models.reasoning_effort,
    "wall": "none" if env.options.trusted else "bubblewrap",
  }
  servers = [describe_server(endpoint) for endpoint in endpoints(models)]
  if out.exists():
    recording = read_recording(str(out))
    for name, value in header.items():
      if recording.header.get(name) != value:
        raise ValueError(
          f"{out} was recorded with {name}={recording.header.get(name)!r:.80}, not "
          f"{value!r:.80}: give another --out"
        )
    for name, before, now in zip(models.names, recording.header["servers"], servers):
      if now and now != before:
        raise ValueError(
          f"{out} was recorded with another server or file for {name}: start that one "
          "again, or give another --out"
        )
    recording.check_prompts(env.functions)
    return recording
  header |= {
    "date": datetime.date.today().isoformat(),
    "prices": [dataclasses.astuple(price)[:3] for price in prices_of(models)],
    "servers": servers,
  }
  return Recording(header, {})


def write_recording(path: Path, recording: Recording) -> None:
  """Write a recording, in place of an earlier one; a crash leaves the earlier one."""
  lines = [json.dumps(recording.header, ensure_ascii=False)]
  for key in sorted(recording.nodes):
    fields = vars(recording.nodes[key])
    lines.append(json.dumps(fields, ensure_ascii=False))
  draft = path.with_name(f"{path.name}.part")
  # Without a time, equal recordings are equal files.
  draft.write_bytes(gzip.compress("\n".join([*lines, ""]).encode(), mtime=0))
  draft.replace(path)


def describe_server(endpoint: Endpoint) -> dict[str, str]:
  """Return what a llama.cpp server tells of itself; {} for other servers.

  Returns:
    The server's build, and the name and sha256 of its file if this machine has it.
  """
  url = endpoint.base_url.rstrip("/").removesuffix("/v1")
  try:
    props = httpx2.get(f"{url}/props", timeout=5).json()
    build = props["build_info"]
    path = Path(props["model_path"])
  except (httpx2.HTTPError, ValueError, LookupError, TypeError):
    return {}
  digest = ""
  if path.is_file():
    with path.open("rb") as file:
      digest = hashlib.file_digest(file, "sha256").hexdigest()
  return {"build": build, "file": path.name, "sha256": digest}


def list_wanted(env: Code) -> list[Function]:
  """Return the functions of the configured tickets, each once.

  The splits are interleaved, so that a part of a trial has a part of each split.
  """
  place_of = {}
  for split in SPLITS:
    listed = env.tasks(split)
    for number, task in enumerate(listed):
      place_of[task.id] = number / len(listed)
  wanted = {}
  for task_id in sorted(place_of, key=place_of.get):
    for function in deal(env.functions, task_id):
      wanted[function.id] = function
  return [*wanted.values()]


def estimate(config: Config, calls: float, in_flight: int) -> str:
  """Say what calls would cost.

  Args:
    config: supplies the prices.
    calls: the expected number of calls that are missing.
    in_flight: the most calls in flight of each model.
  """
  calls = max(0.0, calls)
  usd = 0.0
  for price in prices_of(config.models):
    usd += calls / len(config.models.names) * price.cost_usd(ASSUMED)
  # A machine of one's own answers calls no faster if more of them are in flight.
  if any(endpoint.is_private for endpoint in endpoints(config.models)):
    in_flight = 1
  minutes = round(calls * CALL_S / len(config.models.names) / in_flight / 60)
  return (
    f"about {calls:,.0f} more calls, ${usd:.2f} and {minutes} minutes, at "
    f"{CALL_S:.0f} seconds a call"
  )


def main(command: Command) -> int:
  """Record what is missing; see this file's docstring."""
  logging.set_verbosity(logging.WARNING)
  config = command.config
  out = command.out
  trials = command.trials
  in_flight = command.in_flight
  try:
    program.validate(config)
    require(config.env.kind == "code", "config.env.kind", "code")
    env = make(config.env.kind, **env_arguments(config))
    wanted = list_wanted(env)
    models = len(config.models.names)
    calls = len(wanted) * trials * models * (1 + FAILED_SHARE * models)
    if config.dry_run:
      if out.exists():
        ids = {function.id for function in wanted}
        for id_, trial, _ in open_recording(config, env, out).nodes:
          calls -= id_ in ids and trial < trials
      print(f"dry run: {len(wanted)} functions, {estimate(config, calls, in_flight)}")
      return 0
    check_models(config)
    if not config.max_usd and any(
      row.input or row.output for row in prices_of(config.models)
    ):
      raise ValueError("set --config.max_usd to the most dollars to spend")
    recorder = Recorder(config, env, out)
    left_out = recorder.record(wanted, trials, in_flight)
    print(f"{out} has {len(recorder.recording.nodes):,} replies")
    if left_out:
      problem = f"replies left out: {left_out}; their trials are not played"
      print(f"{problem}: run again to ask again", file=sys.stderr)
      return 1
  except CapReached as cap:
    print(f"stopped by --config.max_usd: {cap}; raise it and go on", file=sys.stderr)
    return 3
  except (ValueError, OSError, EnvDied, NoAnswer, sqlite3.Error) as error:
    return fail(error)
  except KeyboardInterrupt:
    print("stopped; the same command goes on", file=sys.stderr)
    return 130
  return 0


def parse(argv: Sequence[str]) -> Command:
  """Read the configuration and the flags from a command line."""
  out = flags.DEFINE_string("out", None, "The file of the recording.", required=True)
  trials = flags.DEFINE_integer("trials", 3, "Trials of each function.", 1)
  in_flight = flags.DEFINE_integer("in_flight", 8, "Calls in flight per model.", 1)
  try:
    usual = program.load_config("configs/code.py")
    config = read_flags(argv, usual, flags.FLAGS, program.load_config)
  except ValueError as error:
    sys.exit(fail(error))
  config.models.kind = "chat"
  return Command(config, Path(out.value), trials.value, in_flight.value)


if __name__ == "__main__":
  app.run(main, flags_parser=parse)
