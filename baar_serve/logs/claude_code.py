"""Read Claude Code's session files: ~/.claude/projects/*/*.jsonl.

The format has no specification. Sources: the fixtures of daaain/claude-code-log, the
survey jeremedia/claude-code-log-format and the reader of ryoppippi/ccusage.
"""

from baar_serve.forms import FORMS
from baar_serve.forms.responses import join_replies
from baar_serve.logs.record import Calls, Entry, Log, write_calls


def read(log: Log) -> Calls:
  """Read the calls; those of a subagent are a file, and so a session, of their own.

  A reply has a record for each of its blocks, and the last one has the whole usage. A
  session that goes on from another one repeats its records, which are left out.
  """
  form = FORMS["messages"]
  entries = []
  replies = {}
  for record in log.load():
    # Claude Code itself writes records with isMeta and messages of "<synthetic>".
    message = record.get("message") or {}
    if record.get("isMeta") or message.get("model") == "<synthetic>":
      continue
    if record["type"] == "user":
      entries += map(Entry, form.read_entry(message))
    if record["type"] != "assistant":
      continue
    id_ = message["id"]
    if id_ in log.seen:
      entries = []
      continue
    turn = form.read_reply(message)
    if id_ in replies:
      (turn,) = join_replies([replies[id_].turn, turn])
    else:
      replies[id_] = Entry(turn, message["model"], record["timestamp"])
      entries.append(replies[id_])
    replies[id_].turn = turn
    replies[id_].usage = message.get("usage")
  log.seen.update(replies)
  yield from write_calls(log.path.stem, "", entries)
