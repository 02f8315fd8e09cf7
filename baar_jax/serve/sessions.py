"""A session is an episode that a client plays: its budgets, its attempts and its steps, on disk."""

import asyncio
import collections
import contextlib
import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from baar_jax.config import REFERENCE_SEEDS, ROLLOUT_SEEDS, Config
from baar_jax.episode import SMALL, Call, Episode, Step, Usage
from baar_jax.llms.calls import OPEN, PRESUMED, Calls
from baar_jax.rollout.budget import CallBudget, Cost, DollarBudget, hold

DECIMALS = 12  # of dollars that are a difference of sums
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
  id TEXT PRIMARY KEY, rule TEXT, task_id TEXT, open INTEGER, changed_s REAL, state TEXT);
CREATE INDEX IF NOT EXISTS sessions_by_task ON sessions (rule, task_id);
"""


@dataclasses.dataclass
class Cache:
  """What a model's endpoint has read of a session, and may read again at the cached price."""

  messages: int  # of the conversation; `digest` tells them from others
  digest: str
  tokens: int  # of their prompt, as it was billed
  at_s: float  # seconds of the epoch


@dataclasses.dataclass
class Session:
  """A client's episode: its fields are on disk, its other attributes in memory."""

  id: str
  rule: str  # which policy decides: a key of `decide.open_policies`
  policy: str  # the name under which its episode is stored
  task_id: str
  description: str
  call_limit: int | None
  usd_limit: float | None
  named: bool = True  # its client gave it the id, which else is a fingerprint
  price: float | None = None  # of a dollar, for the router that knows its budget
  seed: int = 0
  large_calls: int = 0  # made or in flight
  spent_usd: float = 0.0  # settled
  switch_usd: float = 0.0  # of it, for what was read anew because another model had acted
  last_call: bool = False  # it has been made, from what is reserved for it
  score: float | None = None
  steps: list[Step] = dataclasses.field(default_factory=list)
  places: list[int] = dataclasses.field(default_factory=list)  # actions in the text of each step
  caches: dict[int, Cache] = dataclasses.field(default_factory=dict)  # by model
  open: dict[int, float] = dataclasses.field(default_factory=dict)  # attempts in flight: the most

  def __post_init__(self):
    self.dollars = DollarBudget(self.usd_limit, self.spent_usd)
    self.calls = CallBudget(self.call_limit)
    self.calls.remaining -= self.large_calls
    self.live = None  # as the router knows it, a `rollout.policies.Live`
    self.reported: dict[int, Turn] = {}  # in flight until the client reports their usage
    self.deciding = asyncio.Lock()  # one decision at a time
    self.changed = asyncio.Event()  # an attempt has ended

  @property
  def left_usd(self) -> float | None:
    return None if self.usd_limit is None else self.dollars.remaining

  @property
  def left_large_calls(self) -> int | None:
    return None if self.call_limit is None else max(0, self.calls.remaining)

  @property
  def busy(self) -> bool:
    """Whether an attempt is in flight that ends without a report."""
    return len(self.open) > len(self.reported)

  def acted(self, actions: int) -> list[Step]:
    """The steps of the text's newest actions; of several calls for one the last counts."""
    pairs = zip(self.steps, self.places, [*self.places[1:], actions])
    steps = [step for step, place, after in pairs if place != after]
    steps = steps[max(0, len(steps) - actions) :]
    return [Step("", SMALL, "")] * (actions - len(steps)) + steps


SESSION = TypeAdapter(Session)


@dataclasses.dataclass(eq=False)
class Turn:
  """A call of a client, from its decision to its step."""

  session: Session
  body: dict
  place: int  # actions in its text
  step: Step  # as far as it is known
  large_p: float  # the router's probability of a model dearer than SMALL
  most_usd: float  # that an attempt can cost
  p_A: Sequence[float]  # the router's probability of each model, where it has some
  number: int = 0  # of its last attempt, in `calls`
  held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
  cost: Cost = dataclasses.field(default_factory=Cost)
  start_s: float = dataclasses.field(default_factory=time.monotonic)
  usd: float | None = None  # of all attempts, once the turn has ended

  def lost(self) -> Call:
    """The call of an attempt without an answer, which may be billed."""
    return Call(self.step.model, Usage(0, 0, 0), self.most_usd, kind="presumed")


class Sessions(Calls):
  """The sessions of a run, and the attempts at their calls, in the file of its store.

  An attempt and its session change in one transaction, before the attempt is made and when it has
  ended; what a killed process had in flight counts at its worst case. One thread calls all of it.
  """

  def __init__(self, path: Path, config: Config, run_budget: DollarBudget | None, keep: Callable):
    """Idle sessions over `serve.max_sessions` leave the memory, and are read when asked for.

    `keep(mark, episode, description)` stores the episode of a session that was scored, unless it
    has stored one with this mark: a kill may come between the episode and its session.
    """
    super().__init__(path)
    self._config, self._run_budget, self._keep_episode = config, run_budget, keep
    self._recent: collections.OrderedDict[str, Session] = collections.OrderedDict()
    self._alive = weakref.WeakValueDictionary()  # also those that somebody still holds
    self._db.executescript(_SCHEMA)
    for state in self._db.execute("SELECT state FROM sessions WHERE open > 0").fetchall():
      session = SESSION.validate_json(*state)
      session.spent_usd += sum(session.open.values())
      attempts = [(PRESUMED, number) for number in session.open]
      session.open.clear()
      with self._db:
        self._db.executemany("UPDATE calls SET kind = ? WHERE id = ?", attempts)
        self._save(session)

  def find(self, id_: str) -> Session | None:
    """The session of this id, if there is one."""
    session = self._alive.get(id_)
    if session is None:
      row = self._db.execute("SELECT state FROM sessions WHERE id = ?", (id_,)).fetchone()
      if row is None:
        return None
      session = SESSION.validate_json(*row)
    self._remember(session)
    return session

  def newest(self, count: int) -> list[Session]:
    """The sessions that have changed last."""
    select = "SELECT id FROM sessions ORDER BY changed_s DESC LIMIT ?"
    return [self.find(*id_) for id_ in self._db.execute(select, (count,)).fetchall()]

  def add(self, session: Session) -> None:
    """Stores a new session. Its seed tells it from others of its task, and is a stratified
    session's number: k of N, and then from 1 on again."""
    select = "SELECT count(*) FROM sessions WHERE rule = ? AND task_id = ?"
    ((count,),) = self._db.execute(select, (session.rule, session.task_id))
    number = REFERENCE_SEEDS + 1 + count % self._config.references.samples
    session.seed = number if session.rule == "stratified" else ROLLOUT_SEEDS + count
    with self._db:
      self._save(session)
    self._remember(session)

  def fits(self, session: Session, model: int, usd: float) -> bool:
    """Whether a call of at most `usd` fits what is left now of all budgets."""
    run = self._run_budget
    fits = session.calls.allows(model) and session.dollars.allows(usd)
    return fits and (run is None or run.allows(usd))

  def begin(self, turn: Turn) -> None:
    """Takes the next attempt of a turn from all budgets, into which it fits."""
    session, model = turn.session, turn.step.model
    turn.cost = turn.held.enter_context(hold(session.dollars, self._run_budget, turn.most_usd))
    if not turn.number:
      session.calls.reserve(model)
      session.large_calls += model != SMALL
    insert = "INSERT INTO calls (model, kind, usd, request) VALUES (?, ?, ?, ?)"
    row = model, OPEN, turn.most_usd, f"session {session.id}"
    try:
      with self._db:
        turn.number = self._db.execute(insert, row).lastrowid
        session.open[turn.number] = turn.most_usd
        self._save(session)
    except BaseException:  # such as a disk that is full: nothing is sent
      session.open.pop(turn.number, None)
      turn.held.close()
      raise
    self._remember(session)  # others may have taken its place while it was decided

  def end(self, turn: Turn, kind: str, call: Call | None) -> None:
    """Closes an attempt, with its call where it may be billed, and saves all of its session."""
    session = turn.session
    turn.step.calls += [] if call is None else [call]
    turn.cost.usd = 0.0 if call is None else call.cost_usd
    turn.held.close()
    del session.open[turn.number]
    session.reported.pop(turn.number, None)
    session.spent_usd = session.dollars.settled_usd
    session.changed.set()
    with self._db:
      update = "UPDATE calls SET kind = ?, usd = ? WHERE id = ?"
      self._db.execute(update, (kind, turn.cost.usd, turn.number))
      self._save(session)

  def finish(self, session: Session, score: float) -> None:
    """Ends a session with its score and stores its episode; what is not reported counts in full."""
    for turn in [*session.reported.values()]:
      self.end(turn, PRESUMED, turn.lost())
    lost_usd = session.spent_usd - sum(step.spent_usd for step in session.steps)
    fields = session.task_id, session.policy, session.seed, session.steps, score, "done"
    caps = session.call_limit, session.usd_limit
    episode = Episode(*fields, *caps, lost_usd=max(0.0, round(lost_usd, DECIMALS)))
    self._keep_episode(f"session {session.id}", episode, session.description)
    session.score = score
    with self._db:
      self._save(session)

  def _remember(self, session: Session) -> None:
    self._alive[session.id] = self._recent[session.id] = session
    self._recent.move_to_end(session.id)
    surplus = max(0, len(self._recent) - self._config.serve.max_sessions)
    for id_ in [id_ for id_, other in self._recent.items() if not other.open][:surplus]:
      del self._recent[id_]

  def _save(self, session: Session) -> None:
    s = session
    row = s.id, s.rule, s.task_id, len(s.open), time.time(), SESSION.dump_json(s).decode()
    self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?)", row)
