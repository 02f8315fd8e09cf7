"""Read Codex's rollout files: ~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl.

Source: codex-rs/protocol/src/protocol.rs (`RolloutLine`, `TokenUsageInfo`) and
codex-rs/core/src/tools (what a command's output begins with) of openai/codex.
"""

import re

from baar_jax.llms.history import Turn
from baar_serve.forms import FORMS
from baar_serve.forms.responses import join_replies
from baar_serve.logs.record import Calls, Entry, Log, write_calls

# What stands before the output of a command: its exit code, its seconds and the like.
HEAD = re.compile(r"\A(?:[A-Z].*\n){0,6}Output:\n")
CODE = re.compile(r'(?:Exit code:|exited with code|"exit_code":) ?(-?\d+)')


def read(log: Log) -> Calls:
  """Read the calls: a reply is all items between two results or texts of the user.

  The n-th usage is the n-th reply's. It may be repeated: then the total is the same.
  """
  entries = []
  usages = []
  total = None
  model = "unknown"
  for record in log.records:
    payload = record["payload"]
    if record["type"] == "turn_context":
      model = payload["model"]
    info = payload.get("info") or {}
    if info.get("total_token_usage", total) != total:
      total = info["total_token_usage"]
      counts = info["last_token_usage"]
      usage = dict(
        prompt_tokens=counts["input_tokens"],
        cached_tokens=counts["cached_input_tokens"],
        completion_tokens=counts["output_tokens"],
      )
      usages.append(usage)
    if record["type"] != "response_item":
      continue
    for turn in FORMS["responses"].read_entry(payload):
      if turn.role != "assistant":
        code = CODE.search(turn.text)
        turn = Turn(turn.role, HEAD.sub("", turn.text))
        entries.append(Entry(turn, return_code=code and int(code[1])))
      elif entries and entries[-1].turn.role == "assistant":
        (entries[-1].turn,) = join_replies([entries[-1].turn, turn])
      else:
        entries.append(Entry(turn, model, record["timestamp"]))
  replies = [entry for entry in entries if entry.turn.role == "assistant"]
  for entry, usage in zip(replies, usages):
    entry.usage = usage
  yield from write_calls(log.path.stem, "", entries)
