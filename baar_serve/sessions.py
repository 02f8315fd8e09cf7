"""Keep clients' purses and conversations on disk, and their open calls in memory."""

import asyncio
import contextlib
import dataclasses
import math
import os
import secrets
import sqlite3
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from baar_jax.episode import FAILED, PRESUMED, SMALL, Call, Step
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.specs import Cap
from baar_jax.store import INSERT, OPEN, open_calls
from baar_serve.meter import NO_USAGE
from baar_serve.records import (
  RECORD,
  SESSIONS_SCHEMA,
  STATE,
  Attempt,
  Conversation,
  Purse,
  Record,
  State,
)

# A conversation that may continue a call has one of the call's last replies. This many
# hashes of them are looked up, and this many conversations are compared.
NEWEST_ATOMS = 32
MOST_MATCHES = 200
# A conversation that has waited longer than these seconds has probably ended.
LONGEST_WAIT_S = 3600.0
DAY_S = 86_400
# Most conversations that stay in memory after their last call.
MOST_KEPT = 5000


class Sessions:
  """Store the purses, conversations and attempts of a run in its database file.

  An attempt is stored before it is made, and again after it has ended. If the process
  is killed, its attempts in flight count at their worst case. A commit does not wait
  for the disk; `reach_disk` does. All methods must be called from one thread.

  Attributes:
    changed: an event that is set when an attempt has ended, or caps have changed.
  """

  def __init__(self, path: Path, run_budget: DollarBudget | None):
    """Open the database file, and settle the calls that a killed process left open.

    Args:
      path: the database file of the run's store.
      run_budget: the dollar budget of the whole run; None without a cap.
    """
    self._db = open_calls(path)
    self._db.execute("PRAGMA synchronous=NORMAL")
    self._log = Path(f"{path}-wal")
    self._disk = asyncio.Lock()
    self.changed = asyncio.Event()
    # The number of commits, and how many of them are on the disk.
    self._commits = 0
    self._safe_commits = 0
    self._run_budgets = [run_budget] if run_budget else []
    # Purses and conversations that a call in progress is using. All others are read
    # from disk when they are needed.
    self._purses: Mapping[int, Purse] = weakref.WeakValueDictionary()
    self._conversations: Mapping[int, Conversation] = weakref.WeakValueDictionary()
    self._kept: dict[int, Conversation] = {}
    # The statements of ended attempts, which wait for room on the disk.
    self._late: list[tuple] = []
    self._db.executescript(SESSIONS_SCHEMA)
    with self._db:
      self._db.execute("UPDATE calls SET kind = ? WHERE kind = ?", (PRESUMED, OPEN))

  def close(self) -> None:
    """Close the database file."""
    self._db.close()

  def commit(self, *statements: tuple) -> list[int]:
    """Commit what waits and then these statements; return the row of each.

    Raises:
      sqlite3.OperationalError: the file cannot be written; nothing has changed then.
    """
    with self._db:
      rows = self._execute([*self._late, *statements])
    self._commits += 1
    new_rows = rows[len(self._late) :]
    self._late.clear()
    return new_rows

  async def reach_disk(self) -> None:
    """Wait until the disk has all commits, so that a power loss does not forget them.

    One wait serves all calls that have committed before it began.

    Raises:
      sqlite3.OperationalError: the disk fails.
    """
    wanted = self._commits
    async with self._disk:
      if self._safe_commits < wanted:
        commits = self._commits
        await asyncio.to_thread(sync_file, self._log)
        self._safe_commits = commits

  def _execute(self, statements: Sequence[tuple]) -> list[int]:
    """Execute statements, and return the row of each."""
    return [self._db.execute(*statement).lastrowid for statement in statements]

  def list_purses(self, condition: str, *values: object) -> list[Purse]:
    """Find the purses for which an SQL condition holds.

    Args:
      condition: the condition, perhaps with an order and a limit.
      values: the values of the condition.
    """
    select = (
      "SELECT id, client, name, call_limit, usd_limit, changed_s FROM purses "
      f"WHERE {condition}"
    )
    purses = []
    for id_, client, name, calls, usd_limit, changed_s in self.read(select, *values):
      purse = self._purses.get(id_)
      if purse is None:
        budget = self._add_up(usd_limit, "purse = ?", id_)
        purse = Purse(id_, client, name, calls, budget, changed_s)
        count = (
          "SELECT count(*) FROM calls JOIN attempts USING (id) "
          "WHERE purse = ? AND model > ? AND kind <> ?"
        )
        purse.large_calls = self.read(count, id_, SMALL, FAILED)[0][0]
        select_aside = "SELECT aside_usd FROM last_turns WHERE purse = ?"
        for (aside_usd,) in self.read(select_aside, id_):
          purse.set_aside(aside_usd)
        self._purses[id_] = purse
      purses.append(purse)
    return purses

  def find_purse(self, client: str | None, name: str) -> Purse | None:
    """Return the newest purse of a session, or None if there is none.

    Args:
      client: the name of the client's key; None looks in the sessions of all clients.
      name: the session's name.
    """
    condition = "name = ? AND client = ifnull(?, client) ORDER BY changed_s DESC"
    return next(iter(self.list_purses(condition, name, client)), None)

  def _add_up(
    self, limit_usd: float | None, condition: str, *values: object
  ) -> DollarBudget:
    """Make a budget with a cap that has settled the dollars of some attempts."""
    select = f"SELECT usd FROM calls JOIN attempts USING (id) WHERE {condition}"
    budget = DollarBudget(None)
    for (usd,) in self.read(select, *values):
      budget.settle(budget.reserve(usd), usd)
    budget.change_limit(limit_usd)
    return budget

  def open_purse(self, client: str, name: str, cap: Cap) -> Purse:
    """Store a new purse. Without a name it gets a random one."""
    insert = "INSERT INTO purses VALUES (NULL, ?, ?, ?, ?, ?)"
    name = name or f"auto-{secrets.token_hex(8)}"
    values = (client, name, cap.calls, cap.usd, time.time())
    (row,) = self.commit((insert, values))
    return self.list_purses("id = ?", row)[0]

  def change_caps(self, purse: Purse, cap: Cap) -> None:
    """Store new caps of a purse; more dollars let a session go on."""
    old_usd = purse.cap.usd
    update = "UPDATE purses SET call_limit = ?, usd_limit = ? WHERE id = ?"
    statements = [(update, (cap.calls, cap.usd, purse.id))]
    is_raised = cap.usd is None or old_usd is not None and cap.usd > old_usd
    if is_raised:
      statements.append(("DELETE FROM last_turns WHERE purse = ?", (purse.id,)))
    self.commit(*statements)
    purse.call_limit = cap.calls
    purse.dollars.change_limit(cap.usd)
    if is_raised:
      purse.set_aside(0.0)
    self.changed.set()

  def is_led_by(self, conversation: Conversation | None) -> bool:
    """Tell whether a conversation is the main agent's of a session with dollars."""
    if not conversation or conversation.purse.cap.usd is None:
      return False
    select = "SELECT name FROM conversations WHERE purse = ? ORDER BY id LIMIT 1"
    return self.read(select, conversation.purse.id) == [(conversation.name,)]

  def begin_conversation(self, purse: Purse, name: str, state: State) -> Conversation:
    """Store a new conversation of a purse."""
    insert = "INSERT INTO conversations VALUES (NULL, ?, ?, ?, ?, NULL)"
    text = STATE.dump_json(state).decode()
    (row,) = self.commit((insert, (purse.id, text, name, state.began_s)))
    return self.list_conversations("id = ?", row)[0]

  def list_conversations(self, condition: str, *values: object) -> list[Conversation]:
    """Find the conversations for which an SQL condition holds, the newest first."""
    select = (
      f"SELECT id, purse, name, state, changed_s, score FROM conversations "
      f"WHERE {condition} ORDER BY id DESC"
    )
    conversations = []
    for id_, purse, name, state, changed_s, score in self.read(select, *values):
      conversation = self._conversations.get(id_)
      if conversation is None:
        (own_purse,) = self.list_purses("id = ?", purse)
        read_state = STATE.validate_json(state)
        conversation = Conversation(id_, own_purse, name, read_state, changed_s, score)
        records = (
          "SELECT record FROM attempts WHERE conversation = ? AND record IS NOT NULL "
          "ORDER BY id"
        )
        for (record,) in self.read(records, id_):
          conversation.records.append(RECORD.validate_json(record))
        self._conversations[id_] = conversation
      conversations.append(conversation)
      # The newest ones stay in memory, with their purses.
      self._kept.pop(id_, None)
      self._kept[id_] = conversation
      if len(self._kept) > MOST_KEPT:
        del self._kept[next(iter(self._kept))]
    return conversations

  def find_matches(
    self, client: str, purse: Purse | None, atoms: Sequence[str], place: int
  ) -> list[Conversation]:
    """Find a client's open conversations that gave most of a call's last replies.

    Of equal ones, these are the longest that are not ahead of the call, then those
    without a refusal, then those that have waited longest, but not too long.

    Args:
      client: the name of the client's key.
      purse: the purse that the call names; None if it names none.
      atoms: the hashes of the replies in the call's history.
      place: the number of these replies.
    """
    newest = atoms[-NEWEST_ATOMS:]
    select = (
      "SELECT conversation, (SELECT count(record) FROM attempts "
      "WHERE attempts.conversation = conversations.id) AS steps FROM atoms "
      "JOIN conversations ON conversations.id = conversation "
      "JOIN purses ON purses.id = purse "
      f"WHERE atom IN ({', '.join('?' * len(newest))}) "
      "AND client = ? AND purse = ifnull(?, purse) AND conversations.changed_s > 0 "
      "GROUP BY 1 ORDER BY count(DISTINCT atom) DESC, steps > ?, steps DESC, "
      "EXISTS (SELECT 1 FROM refusals WHERE refusals.purse = purses.id), "
      "conversations.changed_s < ?, conversations.changed_s LIMIT ?"
    )
    matches = []
    for id_, _ in self.read(
      select,
      *newest,
      client,
      purse and purse.id,
      place,
      time.time() - LONGEST_WAIT_S,
      MOST_MATCHES,
    ):
      matches += self.list_conversations("id = ?", id_)
    return matches

  def read(self, select: str, *values: object) -> list[tuple]:
    """Read rows of the ledger's tables by an SQL statement."""
    return self._db.execute(select, values).fetchall()

  def _budgets(self, purse: Purse) -> list[DollarBudget]:
    """Return the budgets that pay for an attempt: the purse's, and a capped run's."""
    return [purse.dollars, *self._run_budgets]

  def unspent_usd(self, purse: Purse) -> float:
    """Return what a call of a purse might cost if no attempt were in flight."""
    limits = []
    for budget in self._budgets(purse):
      limit_usd = math.inf if budget.limit_usd is None else budget.limit_usd
      limits.append(limit_usd - budget.settled_usd)
    limits[0] -= purse.aside_usd or 0.0
    return min(limits)

  def room_usd(self, purse: Purse) -> float:
    """Return the dollars that a call of a purse may cost now."""
    return min(budget.remaining for budget in self._budgets(purse))

  def allows(self, purse: Purse, model: int, worst_case_usd: float) -> bool:
    """Tell whether a call of a model with this worst case fits all budgets now."""
    if model != SMALL and purse.remaining_caps.calls == 0:
      return False
    return all(budget.allows(worst_case_usd) for budget in self._budgets(purse))

  def begin(
    self,
    purse: Purse,
    conversation: Conversation | None,
    step: Step,
    worst_case_usd: float,
    aside_usd: float | None = 0.0,
  ) -> Attempt:
    """Begin an attempt: store it, and reserve its worst case in all budgets.

    The caller must have checked that the worst case fits the budgets beside what is set
    aside.

    Args:
      purse: the purse that pays.
      conversation: the conversation of the call; None for a side call.
      step: the step that the reply will belong to.
      worst_case_usd: the worst case of the attempt.
      aside_usd: what is set aside for the last turn; None if the attempt is this turn.

    Raises:
      sqlite3.OperationalError: the file cannot be written; nothing has changed then.
    """
    now_s = time.time()
    id_ = conversation and conversation.id
    number, *_ = self.commit(
      (INSERT, (step.model, OPEN, worst_case_usd, None)),
      (
        "INSERT INTO attempts VALUES (last_insert_rowid(), ?, ?, ?, NULL)",
        (purse.id, id_, now_s),
      ),
      ("UPDATE conversations SET changed_s = ? WHERE id = ?", (now_s, id_)),
      ("UPDATE purses SET changed_s = ? WHERE id = ?", (now_s, purse.id)),
      *self._set_aside(purse, aside_usd),
    )
    old_aside_usd = purse.aside_usd
    purse.set_aside(aside_usd)
    reservations = []
    for budget in self._budgets(purse):
      reservations.append((budget, budget.reserve(worst_case_usd)))
    purse.changed_s = now_s
    purse.large_calls += step.model != SMALL
    purse.open[number] = id_
    if conversation:
      conversation.changed_s = now_s
    return Attempt(
      purse, conversation, step, worst_case_usd, old_aside_usd, number, reservations
    )

  def _set_aside(self, purse: Purse, aside_usd: float | None) -> list[tuple]:
    """Return the statements that store what is set aside, if it has changed."""
    if aside_usd == purse.aside_usd:
      return []
    replace = "INSERT OR REPLACE INTO last_turns VALUES (?, ?)"
    return [(replace, (purse.id, aside_usd))]

  def end(
    self,
    attempt: Attempt,
    kind: str,
    call: Call | None = None,
    record: Record | None = None,
    large_usd: float | None = None,
  ) -> None:
    """End an attempt: store its outcome, and settle its cost in all budgets.

    If the database file cannot be written now, the next commit stores it.

    Args:
      attempt: the attempt.
      kind: the outcome, one of the constants of episode.py. PRESUMED without a
        call books the worst case.
      call: the billed call; None if the attempt had no answer.
      record: the step that the attempt completed; None if there is none.
      large_usd: the dollars of the same tokens at LARGE; None is the call's dollars.
    """
    step = attempt.step
    if call is None and kind == PRESUMED:
      call = Call(step.model, NO_USAGE, attempt.worst_case_usd, kind=PRESUMED)
    usd = 0.0
    if call is not None:
      step.calls.append(call)
      usd = call.cost_usd
    update = "UPDATE calls SET kind = ?, usd = ? WHERE id = ?"
    self._late.append((update, (kind, usd, attempt.number)))
    if large_usd is not None:
      insert = "INSERT INTO large_costs VALUES (?, ?)"
      self._late.append((insert, (attempt.number, large_usd)))
    if record:
      record.number = attempt.number
      self._late.append(self._update_record(record))
      for atom in record.atoms:
        insert = "INSERT INTO atoms VALUES (?, ?)"
        self._late.append((insert, (atom, attempt.conversation.id)))
      attempt.conversation.records.append(record)
      attempt.conversation.records.sort(key=lambda record: record.number)
    purse = attempt.purse
    if call is None and purse.is_over:
      # The last turn was not made.
      self._late += self._set_aside(purse, attempt.aside_usd)
    with contextlib.suppress(sqlite3.OperationalError):
      self.commit()
    for budget, reservation in attempt.reservations:
      budget.settle(reservation, usd)
    del purse.open[attempt.number]
    if call is None:
      purse.large_calls -= step.model != SMALL
      if purse.is_over:
        purse.set_aside(attempt.aside_usd)
    self.changed.set()

  def forget(self, purse: Purse) -> None:
    """End a call that was refused: store its time, or delete what it has begun.

    A purse without an attempt is deleted, so that the next call of its name sets the
    caps, and so is a conversation without one.

    Raises:
      sqlite3.OperationalError: the file cannot be written; nothing has changed then.
    """
    statements = [
      (
        "INSERT INTO refusals SELECT DISTINCT purse, ? FROM attempts WHERE purse = ?",
        (time.time(), purse.id),
      )
    ]
    if not purse.callers:
      for delete in (
        "DELETE FROM conversations WHERE purse = ? AND NOT EXISTS "
        "(SELECT 1 FROM attempts WHERE conversation = conversations.id)",
        "DELETE FROM purses WHERE id = ? AND NOT EXISTS "
        "(SELECT 1 FROM attempts WHERE purse = purses.id)",
      ):
        statements.append((delete, (purse.id,)))
    self.commit(*statements)

  def count_refusals(self, purse: Purse) -> int:
    """Count the calls of a purse that were refused after its first attempt."""
    select = "SELECT count(*) FROM refusals WHERE purse = ?"
    return self.read(select, purse.id)[0][0]

  def _update_record(self, record: Record) -> tuple:
    """Return the statement that writes the record of an attempt."""
    text = RECORD.dump_json(record).decode()
    return "UPDATE attempts SET record = ? WHERE id = ?", (text, record.number)

  def complete_step(
    self, conversation: Conversation, action: str, score: float | None
  ) -> None:
    """Store the action and the score of a conversation's last step.

    Raises:
      sqlite3.OperationalError: the file cannot be written; nothing has changed then.
    """
    record = conversation.records[-1]
    step = dataclasses.replace(record.step, action=action, score=score)
    if step != record.step:
      self.commit(self._update_record(dataclasses.replace(record, step=step)))
      record.step = step

  def total(self, client: str | None, today_s: float) -> list[tuple]:
    """Add up the attempts that may have cost dollars: all, today's, and by what acted.

    Args:
      client: the name of the client's key; None adds up those of all clients.
      today_s: when today began, in seconds since 1970.

    Returns:
      What was added up: a text, or the index of a model; then the number of attempts,
      their dollars, and the dollars of the same tokens at LARGE.
    """
    sums = "ifnull(sum(n), 0), total(usd), total(large_usd)"
    select = (
      "WITH made AS (SELECT model, conversation, at_s >= ? AS is_today, "
      "count(*) AS n, sum(usd) AS usd, sum(ifnull(large_usd, usd)) AS large_usd "
      "FROM calls JOIN attempts USING (id) LEFT JOIN large_costs USING (id) "
      "JOIN purses ON purses.id = purse WHERE kind <> ? AND client = ifnull(?, client) "
      "GROUP BY 1, 2, 3), named AS "
      "(SELECT *, json_extract(state, '$.policy') AS policy "
      "FROM made LEFT JOIN conversations ON id = conversation) "
      f"SELECT 'all', {sums} FROM named "
      f"UNION ALL SELECT 'today (UTC)', {sums} FROM named WHERE is_today "
      f"UNION ALL SELECT model, {sums} FROM named GROUP BY model "
      f"UNION ALL SELECT ifnull(policy, 'side calls'), {sums} FROM named GROUP BY 1"
    )
    return self.read(select, today_s, FAILED, client)

  def lost_usd(self, conversation: Conversation) -> float:
    """Compute the dollars of a conversation's attempts that no step has."""
    budget = self._add_up(None, "conversation = ?", conversation.id)
    return budget.lost_usd(conversation.steps)

  def finish(self, conversation: Conversation, score: float | None = None) -> None:
    """End a conversation, with a score or without one."""
    update = "UPDATE conversations SET score = ?, changed_s = -1 WHERE id = ?"
    self.commit((update, (score, conversation.id)))
    conversation.score = score
    conversation.changed_s = -1.0


def sync_file(path: Path) -> None:
  """Wait until the disk has a file's contents.

  Raises:
    sqlite3.OperationalError: the disk fails.
  """
  try:
    file = os.open(path, os.O_RDWR)
    try:
      os.fsync(file)
    finally:
      os.close(file)
  except OSError as error:
    raise sqlite3.OperationalError(str(error)) from None
