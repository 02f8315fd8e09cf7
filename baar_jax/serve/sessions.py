"""A client's episode, a session: its budgets, attempts and steps, on disk."""

import asyncio
import contextlib
import dataclasses
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from baar_jax.episode import SMALL, Call, Episode, Step, Usage
from baar_jax.llms.calls import INSERT, open_calls
from baar_jax.llms.wire import OPEN, PRESUMED
from baar_jax.rollout.budget import Cost, DollarBudget, hold
from baar_jax.rollout.specs import Cap
from baar_jax.serve.request import Cache


@dataclasses.dataclass
class Session:
  """A client's episode: its fields are on disk, its other attributes in memory."""

  id: str
  rule: str  # which policy decides: a key of `stages.serve.open_policies`
  price: float | None  # the cost weight, for the budget-conditioned router
  policy: str  # the key under which its episode is stored
  task_id: str
  description: str
  call_limit: int | None
  usd_limit: float | None
  large_calls: int = 0  # made or in flight
  spent_usd: float = 0.0  # settled
  switch_usd: float = 0.0  # of it, for reading anew after another model had acted
  score: float | None = None
  steps: list[Step] = dataclasses.field(default_factory=list)
  # How many actions the text of each step had.
  places: list[int] = dataclasses.field(default_factory=list)
  caches: dict[int, Cache] = dataclasses.field(default_factory=dict)  # by model
  # Worst cases of the attempts in flight.
  open: dict[int, float] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    self.dollars = DollarBudget(self.usd_limit, self.spent_usd)
    self.deciding = asyncio.Lock()  # one decision at a time
    self.changed = asyncio.Event()  # an attempt has ended
    # Attempts in flight that end when their clients report them.
    self.reported: set[int] = set()

  @property
  def cap(self) -> Cap:
    """Return the caps, which no call changes."""
    return Cap(self.call_limit, self.usd_limit)

  @property
  def left(self) -> Cap:
    """Return what is left of the caps beside the calls in flight."""
    calls = self.call_limit
    usd = self.usd_limit
    if calls is not None:
      calls = max(0, calls - self.large_calls)
    if usd is not None:
      usd = self.dollars.remaining
    return Cap(calls, usd)

  @property
  def is_busy(self) -> bool:
    """Tell whether an attempt is in flight that ends without a report."""
    return not self.open.keys() <= self.reported

  def make_episode(self, score: float) -> Episode:
    """Make the episode that training reads; its seed is given when it is stored."""
    return Episode(
      self.task_id,
      self.policy,
      seed=0,
      steps=self.steps,
      score=score,
      stop="done",
      call_budget=self.call_limit,
      usd_budget=self.usd_limit,
      lost_usd=self.dollars.lost_usd(self.steps),
    )


SESSION = TypeAdapter(Session)


@dataclasses.dataclass(eq=False)
class Attempt:
  """An attempt at a call, in flight."""

  session: Session
  step: Step  # that it is for
  most_usd: float
  number: int  # in `calls`
  held: contextlib.ExitStack  # its reservation in all budgets
  cost: Cost  # is set before the reservation is closed


class Tally(NamedTuple):
  """The attempts at calls of one model that had one outcome."""

  model: int
  outcome: str
  count: int
  usd: float


class Sessions:
  """The sessions of a run, and the attempts at their calls, in the file of its store.

  An attempt and its session change in one transaction, before the attempt is made and
  when it has ended. The attempts of a killed process count at their worst case. One
  thread calls all of it.
  """

  def __init__(self, path: Path, run_budget: DollarBudget | None):
    self._db = open_calls(path)
    self._run_budget = run_budget
    # While a call of a client holds them.
    self._alive: Mapping[str, Session] = weakref.WeakValueDictionary()
    columns = "id TEXT PRIMARY KEY, open INTEGER, changed_s REAL, state TEXT"
    self._db.execute(f"CREATE TABLE IF NOT EXISTS sessions ({columns})")
    interrupted = self._db.execute("SELECT state FROM sessions WHERE open > 0")
    for (state,) in interrupted.fetchall():
      session = SESSION.validate_json(state)
      for number, most_usd in session.open.items():
        self._close(number, PRESUMED, most_usd)
        session.spent_usd += most_usd
      session.open.clear()
      self._save(session)

  def find(self, id_: str) -> Session | None:
    """Find the session of this id."""
    session = self._alive.get(id_)
    if session is None:
      select = "SELECT state FROM sessions WHERE id = ?"
      row = self._db.execute(select, (id_,)).fetchone()
      if row:
        session = SESSION.validate_json(*row)
        self._alive[id_] = session
    return session

  def choose_id(self, fingerprint: str, is_new: bool) -> str:
    """Return the id of a fingerprint's newest session.

    A new call begins the next one if that is scored, with a number in its id.
    """
    first = f"fingerprint-{fingerprint}"
    select = (
      "SELECT count(*), max(rowid), id FROM sessions WHERE id >= ?1 AND id < ?1 || '~'"
    )
    count, _, newest = self._db.execute(select, (first,)).fetchone()
    if is_new and count and self.find(newest).score is not None:
      return f"{first}-{count + 1}"
    return newest or first

  def list_newest(self, count: int) -> list[Session]:
    """List the sessions that have changed last."""
    select = "SELECT id FROM sessions ORDER BY changed_s DESC LIMIT ?"
    return [self.find(id_) for (id_,) in self._db.execute(select, (count,)).fetchall()]

  def count_attempts(self) -> list[Tally]:
    """Count all attempts; those in flight count at their worst case."""
    select = "SELECT model, kind, count(*), sum(usd) FROM calls GROUP BY model, kind"
    return [Tally(*row) for row in self._db.execute(select).fetchall()]

  def add(self, session: Session) -> None:
    """Store a new session."""
    self._alive[session.id] = session
    self._save(session)

  def fit(
    self, session: Session, bounds_usd: Sequence[float], keep_usd: float
  ) -> list[int]:
    """List the models whose call fits all budgets now, ascending.

    Args:
      bounds_usd: each model's worst case.
      keep_usd: what it must leave of the session's dollars.
    """
    models = []
    for model, usd in enumerate(bounds_usd):
      has_call = model == SMALL or session.left.calls != 0
      run_allows = self._run_budget is None or self._run_budget.allows(usd)
      if has_call and run_allows and session.dollars.allows(usd + keep_usd):
        models.append(model)
    return models

  def begin(
    self, session: Session, step: Step, most_usd: float, reported: bool = False
  ) -> Attempt:
    """Begin an attempt, and take it from all budgets, into which it fits.

    Args:
      reported: it ends when its client reports it.
    """
    held = contextlib.ExitStack()
    reservation = hold(session.dollars, self._run_budget, most_usd)
    cost = held.enter_context(reservation)
    session.large_calls += step.model != SMALL
    row = (step.model, OPEN, most_usd, f"session {session.id}")
    number = self._db.execute(INSERT, row).lastrowid
    session.open[number] = most_usd
    if reported:
      session.reported.add(number)
    self._save(session)
    return Attempt(session, step, most_usd, number, held, cost)

  def end(self, attempt: Attempt, kind: str, call: Call | None = None) -> None:
    """Close an attempt, and save all of its session.

    Args:
      call: of an attempt with an answer. Without it one that may be billed counts at
        its worst case.
    """
    session = attempt.session
    step = attempt.step
    if call is None and kind == PRESUMED:
      call = Call(step.model, Usage(0, 0, 0), attempt.most_usd, kind=PRESUMED)
    if call is None:
      session.large_calls -= step.model != SMALL
    else:
      step.calls.append(call)
      attempt.cost.usd = call.cost_usd
    attempt.held.close()
    del session.open[attempt.number]
    session.reported.discard(attempt.number)
    session.spent_usd = session.dollars.settled_usd
    session.changed.set()
    self._close(attempt.number, kind, attempt.cost.usd)
    self._save(session)

  def finish(self, session: Session, score: float) -> None:
    """End a session with its score."""
    session.score = score
    self._save(session)

  def _close(self, number: int, kind: str, usd: float) -> None:
    update = "UPDATE calls SET kind = ?, usd = ? WHERE id = ?"
    self._db.execute(update, (kind, usd, number))

  def _save(self, session: Session) -> None:
    """Write the session, and commit it with what was written of its attempt."""
    state = SESSION.dump_json(session).decode()
    row = (session.id, len(session.open), time.time(), state)
    with self._db:
      self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)", row)
