"""Read recordings: the replies of real models after each sequence of models.

A recording is a compressed file of JSON lines. The first line tells how it was made;
each of the others is a node, one model's reply at one try at a function.
"""

import dataclasses
import functools
import gzip
import hashlib
import json
import zlib
from pathlib import Path

FORMAT = "baar_jax recording 1"


@dataclasses.dataclass(frozen=True)
class Node:
  """One model's reply at one try at a function.

  Attributes:
    function: the id of the function.
    trial: number of the trial, from 0. Trials are independent draws.
    path: the indices of the models that have tried so far, this one last, such as "01".
    prompt: a hash of the conversation that the model has read.
    reply: the text of the reply.
    code: a hash of the reply's code; see `hash_text`.
    prompt_tokens: tokens of the conversation, as the server counted them.
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
    header: how it was made: models, prompts, sampling, server, date, prices, and the
      number of complete trials.
    nodes: the nodes by key.
    results: the results of the tests, by function and hash of the code.
  """

  header: dict
  nodes: dict[tuple[str, int, str], Node]
  results: dict[tuple[str, str], tuple[str, ...]]


def hash_text(*texts: str) -> str:
  """Return a short hash of texts."""
  return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16]


@functools.cache
def read_recording(path: str) -> Recording:
  """Read a recording.

  Args:
    path: the file, or the name of one beside this file.

  Raises:
    ValueError: the file is missing, damaged, or something else.
  """
  nodes = {}
  results = {}
  file_path = Path(path) if Path(path).exists() else Path(__file__).parent / path
  try:
    with gzip.open(file_path, "rt", encoding="utf-8") as file:
      header = json.loads(next(file, "null"))
      if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError("it is none")
      for line in file:
        fields = json.loads(line)
        node = Node(**fields | {"results": tuple(fields["results"])})
        nodes[node.key] = node
        results[node.function, node.code] = node.results
  except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
    raise ValueError(
      f"cannot read the recording {path} ({error}): restore it, or make it with python "
      "-m tools.record"
    ) from None
  return Recording(header, nodes, results)


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
