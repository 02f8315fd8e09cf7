"""Read the logs of other programs: one call after the other, in every known format."""

import json
import re
from pathlib import Path

from baar_jax.store import require_file
from baar_serve.config import ServeConfig
from baar_serve.logs import atif, chat, claude_code, codex, litellm, mini_swe_agent
from baar_serve.logs.record import Calls, Log

# The readers, by a field that records of their formats have; the last one that fits
# reads. Chat lines have none of these fields.
READERS = {
  "type": claude_code,
  "schema_version": atif,
  "trajectory_format": mini_swe_agent,
  "call_type": litellm,
  "payload": codex,
}
# The names of a directory's logs. Claude Code keeps other files beside them.
NAMES = re.compile(r"(?<!\.meta)(?<!-index)\.jsonl?$")


def read_logs(config: ServeConfig, broken: list[str]) -> Calls:
  """Read the calls of `--config.traces`, which may be a directory, with all below it.

  The scores of `--config.scores` replace those of the logs.

  Args:
    broken: gets a line for each file with a wrong record, which says where and why. The
      calls before that record are read.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: no path is named, or the scores are no JSON.
  """
  if not config.traces:
    raise ValueError("Set --config.traces to the file that is to be read.")
  scores = {}
  if config.scores:
    scores = json.loads(Path(config.scores).read_text())
  path = Path(config.traces)
  files = [path]
  if path.is_dir():
    files = [file for file in sorted(path.rglob("*")) if NAMES.search(file.name)]
  seen = set()
  for file in files:
    log = Log(require_file(file), seen)
    try:
      for call in read_calls(log):
        call.score = scores.get(call.session, scores.get(call.task, call.score))
        yield call
    except (
      LookupError,
      TypeError,
      AttributeError,
      ValueError,
      RecursionError,
    ) as error:
      broken.append(
        f"{file}, {log.place}: a field is missing or wrong, or the format is unknown "
        f"({error})"
      )


def read_calls(log: Log) -> Calls:
  """Read the calls of a file, whose first record tells its format."""
  first = next(log.load(), {})
  reader = chat
  for field, known in READERS.items():
    if field in first:
      reader = known
  yield from reader.read(log)
