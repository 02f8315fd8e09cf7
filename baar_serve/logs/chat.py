"""Read OpenAI chat lines: one call a line, with the whole history and the reply."""

import collections

from baar_serve.forms import FORMS
from baar_serve.logs.record import Calls, Entry, Log, write_calls


def read(log: Log) -> Calls:
  """Read the calls; the calls of several sessions may alternate.

  Raises:
    ValueError: the n-th call of a session does not end with its n-th reply.
  """
  counts = collections.Counter()
  tasks = {}
  for record in log.records:
    session = str(record["session"])
    log.place = f"session {session!r:.80}"
    counts[session] += 1
    number = counts[session]
    tasks[session] = str(record.get("task") or tasks.get(session, ""))
    *history, reply = map(Entry, FORMS["chat/completions"].read_turns(record))
    reply.model = record["model"]
    reply.at = record.get("created")
    reply.usage = record.get("usage")
    reply.cost_usd = record.get("cost_usd")
    score = record.get("score")
    calls = [*write_calls(session, tasks[session], [*history, reply], score)]
    if len(calls) != number or reply.turn.role != "assistant":
      raise ValueError(f"call {number} must end with assistant message {number}")
    yield calls[-1]
