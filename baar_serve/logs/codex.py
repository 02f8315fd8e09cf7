"""Read Codex's rollout files: ~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl.

Source: codex-rs/protocol/src/protocol.rs (`RolloutLine`, `TokenUsageInfo`) and
codex-rs/core/src/tools (what a command's output begins with) of openai/codex.
"""

import re

from baar_jax.llms.history import Turn
from baar_serve.forms import FORMS
from baar_serve.forms.responses import join_replies
from baar_serve.logs.record import Calls, Entry, Log, write_calls

# What differs before equal outputs of a command.
CLOCK = re.compile(r"^(?:Chunk ID|Wall time): .*\n", re.MULTILINE)


def read(log: Log) -> Calls:
  """Read the calls: a reply is all items between two results or texts of the user.

  The usage of a reply follows it, and may be repeated.
  """
  entries = []
  reply = Entry(Turn("assistant", ""))
  model = "unknown"
  for record in log.load():
    payload = record["payload"]
    if record["type"] == "turn_context":
      model = payload["model"]
    if payload.get("info"):
      usage = payload["info"]["last_token_usage"]
      reply.usage = usage | dict(cached_tokens=usage["cached_input_tokens"])
    if record["type"] != "response_item":
      continue
    for turn in FORMS["responses"].read_entry(payload):
      if turn.role != "assistant":
        entries.append(Entry(Turn(turn.role, CLOCK.sub("", turn.text))))
      elif entries[-1:] == [reply]:
        (reply.turn,) = join_replies([reply.turn, turn])
      else:
        reply = Entry(turn, model, record["timestamp"])
        entries.append(reply)
  yield from write_calls(log.path.stem, "", entries)
