"""Read Claude Code's session files: ~/.claude/projects/*/*.jsonl.

The format has no specification. Sources: the fixtures of daaain/claude-code-log, the
survey jeremedia/claude-code-log-format and the reader of ryoppippi/ccusage.
"""

from baar_jax.llms.history import Turn
from baar_serve.forms import FORMS
from baar_serve.logs.record import Calls, Entry, Log, write_calls


def read(log: Log) -> Calls:
  """Read the calls; those of a subagent are a session of their own.

  A reply has a record for each of its blocks, and the last one has the whole usage. A
  session that goes on from another one repeats its records, which are left out.
  """
  form = FORMS["messages"]
  names = []
  entries = []
  blocks_by_id = {}
  for record in log.records:
    # Claude Code itself writes records with isMeta and messages of "<synthetic>".
    message = record.get("message") or {}
    if record.get("isMeta") or message.get("model") == "<synthetic>":
      continue
    if record["type"] == "user":
      code = None
      for block in message["content"]:
        if "tool_use_id" in block:
          code = code or int(bool(block.get("is_error")))
      for turn in form.read_entry(message):
        entries.append(Entry(turn, return_code=code))
    if record["type"] != "assistant":
      continue
    names = filter(None, [record["sessionId"], record.get("agentId")])
    id_ = message["id"]
    if id_ in log.seen:
      entries = []
      continue
    blocks = blocks_by_id.setdefault(id_, [])
    if not blocks:
      reply = Entry(Turn("assistant", ""), message["model"], record["timestamp"])
      entries.append(reply)
    blocks += message["content"]
    reply.turn = form.read_reply({"content": blocks})
    reply.usage = message.get("usage")
    reply.cost_usd = record.get("costUSD")
  log.seen.update(blocks_by_id)
  yield from write_calls("/".join(names), "", entries)
