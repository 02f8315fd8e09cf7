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
  for record in log.load():
    session = str(record["session"])
    counts[session] += 1
    number = counts[session]
    *history, turn = FORMS["chat/completions"].read_turns(record)
    reply = Entry(
      turn,
      record["model"],
      record.get("created"),
      record.get("usage"),
      record.get("cost_usd"),
    )
    entries = [*map(Entry, history), reply]
    score = record.get("score")
    calls = [*write_calls(session, record.get("task"), entries, score)]
    if len(calls) != number or turn.role != "assistant":
      raise ValueError(f"call {number} must end with assistant message {number}")
    yield calls[-1]
