"""A session is an episode that a client plays: its budgets, attempts and steps, on disk."""

import asyncio
import contextlib
import dataclasses
import itertools
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import TypeAdapter

from baar_jax.config import PROFILE_SEEDS, REFERENCE_SEEDS, ROLLOUT_SEEDS, Config, evaluation_seeds
from baar_jax.episode import SMALL, Call, Episode, Step, Usage
from baar_jax.llms.calls import Calls
from baar_jax.llms.wire import OPEN, PRESUMED
from baar_jax.rollout.budget import Cost, DollarBudget, hold
from baar_jax.rollout.policies import BOUNDARIES, STRATIFIED, samples_name
from baar_jax.serve.request import Cache
from baar_jax.store import Store


@dataclasses.dataclass
class Session:
  """A client's episode: its fields are on disk, its other attributes in memory."""

  id: str
  rule: str  # which policy decides: a key of `router.open_policies`
  price: float | None  # of a dollar, for the router that knows its budget
  policy: str  # the name under which its episode is stored
  task_id: str
  description: str
  call_limit: int | None
  usd_limit: float | None
  large_calls: int = 0  # made or in flight
  spent_usd: float = 0.0  # settled
  switch_usd: float = 0.0  # of it, for what was read anew because another model had acted
  score: float | None = None
  steps: list[Step] = dataclasses.field(default_factory=list)
  places: list[int] = dataclasses.field(default_factory=list)  # actions in the text of each step
  caches: dict[int, Cache] = dataclasses.field(default_factory=dict)  # by model
  open: dict[int, float] = dataclasses.field(default_factory=dict)  # attempts in flight: the most

  def __post_init__(self):
    self.dollars = DollarBudget(self.usd_limit, self.spent_usd)
    self.deciding = asyncio.Lock()  # one decision at a time
    self.changed = asyncio.Event()  # an attempt has ended

  @property
  def left_usd(self) -> float | None:
    return None if self.usd_limit is None else self.dollars.remaining

  @property
  def left_large_calls(self) -> int | None:
    return None if self.call_limit is None else max(0, self.call_limit - self.large_calls)


SESSION = TypeAdapter(Session)


@dataclasses.dataclass(eq=False)
class Turn:
  """A call of a client, from its decision to its step."""

  session: Session
  body: dict
  place: int  # actions in its text
  step: Step  # as far as it is known
  p_A: Sequence[float]  # the router's probability of each model, where it has some
  most_usd: float  # that an attempt can cost
  number: int = 0  # of its last attempt, in `calls`
  held: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
  cost: Cost = dataclasses.field(default_factory=Cost)
  start_s: float = dataclasses.field(default_factory=time.monotonic)
  usd: float | None = None  # of all attempts, once the turn has ended

  @property
  def large_p(self) -> float:
    """The router's probability of a model dearer than SMALL; of a rule 0 or 1."""
    return 1 - self.p_A[SMALL] if self.p_A else float(self.step.model != SMALL)


class Sessions(Calls):
  """The sessions of a run, and the attempts at their calls, in the file of its store.

  An attempt and its session change in one transaction, before the attempt is made and when it has
  ended; what a killed process had in flight counts at its worst case. One thread calls all of it.
  """

  def __init__(self, path: Path, config: Config, store: Store, run_budget: DollarBudget | None):
    super().__init__(path)
    self._config, self._store, self._run_budget = config, store, run_budget
    self._alive = weakref.WeakValueDictionary()  # while a call of a client holds them
    columns = "id TEXT PRIMARY KEY, open INTEGER, changed_s REAL, state TEXT"
    self._db.execute(f"CREATE TABLE IF NOT EXISTS sessions ({columns})")
    for state in self._db.execute("SELECT state FROM sessions WHERE open > 0").fetchall():
      session = SESSION.validate_json(*state)
      session.spent_usd += sum(session.open.values())
      attempts = [(PRESUMED, number) for number in session.open]
      session.open.clear()
      self._db.executemany("UPDATE calls SET kind = ? WHERE id = ?", attempts)
      self._save(session)

  def find(self, id_: str) -> Session | None:
    """The session of this id, if there is one."""
    session, select = self._alive.get(id_), "SELECT state FROM sessions WHERE id = ?"
    if session is None and (row := self._db.execute(select, (id_,)).fetchone()):
      session = self._alive[id_] = SESSION.validate_json(*row)
    return session

  def name(self, fingerprint: str, is_new: bool) -> str:
    """The id of the newest session of a fingerprint, of which a new call may begin the next one:
    with a number behind it where the newest one is scored."""
    first = f"fingerprint-{fingerprint}"
    select = "SELECT count(*), max(rowid), id FROM sessions WHERE id >= ?1 AND id < ?1 || '~'"
    count, _, newest = self._db.execute(select, (first,)).fetchone()
    if is_new and count and self.find(newest).score is not None:
      return f"{first}-{count + 1}"
    return newest or first

  def newest(self, count: int) -> list[Session]:
    """The sessions that have changed last."""
    select = "SELECT id FROM sessions ORDER BY changed_s DESC LIMIT ?"
    return [self.find(*id_) for id_ in self._db.execute(select, (count,)).fetchall()]

  def count(self) -> list[tuple[int, str, int, float]]:
    """Model, outcome, number and dollars of all attempts, those in flight at their most."""
    select = "SELECT model, kind, count(*), sum(usd) FROM calls GROUP BY model, kind"
    return self._db.execute(select).fetchall()

  def add(self, session: Session) -> None:
    self._alive[session.id] = session
    self._save(session)

  def fits(self, session: Session, model: int, usd: float, keep_usd: float) -> bool:
    """Whether a call of at most `usd` fits what is left now of all budgets, and leaves as much of
    the session's."""
    calls = model == SMALL or session.left_large_calls != 0
    run = self._run_budget is None or self._run_budget.allows(usd)
    return calls and run and session.dollars.allows(usd + keep_usd)

  def begin(self, turn: Turn) -> None:
    """Takes an attempt of a turn from all budgets, into which it fits."""
    session, model = turn.session, turn.step.model
    turn.cost = turn.held.enter_context(hold(session.dollars, self._run_budget, turn.most_usd))
    session.large_calls += model != SMALL
    insert = "INSERT INTO calls (model, kind, usd, request) VALUES (?, ?, ?, ?)"
    row = model, OPEN, turn.most_usd, f"session {session.id}"
    turn.number = self._db.execute(insert, row).lastrowid
    session.open[turn.number] = turn.most_usd
    self._save(session)

  def end(self, turn: Turn, kind: str, call: Call | None = None) -> None:
    """Closes an attempt, with its call where it has an answer, and saves all of its session. One
    that may be billed counts at its most."""
    session = turn.session
    if call is None and kind == PRESUMED:
      call = Call(turn.step.model, Usage(0, 0, 0), turn.most_usd, kind="presumed")
    if call is None:
      session.large_calls -= turn.step.model != SMALL
    else:
      turn.step.calls.append(call)
      turn.cost.usd = call.cost_usd
    turn.held.close()
    del session.open[turn.number]
    session.spent_usd = session.dollars.settled_usd
    session.changed.set()
    update = "UPDATE calls SET kind = ?, usd = ? WHERE id = ?"
    self._db.execute(update, (kind, turn.cost.usd, turn.number))
    self._save(session)

  def finish(self, session: Session, score: float) -> None:
    """Ends a session with its score, and stores its episode; once, also where a kill comes between
    the two."""
    fields = session.task_id, session.policy, 0, session.steps, score, "done"
    caps = session.call_limit, session.usd_limit
    episode = Episode(*fields, *caps, lost_usd=session.dollars.lost_usd(session.steps))
    scored = {f"session {session.id}": (episode, session.description)}
    add_sessions(self._store, self._config, scored)
    session.score = score
    self._save(session)

  def _save(self, session: Session) -> None:
    """Writes the session, and commits it with what was written of its attempt."""
    row = session.id, len(session.open), time.time(), SESSION.dump_json(session).decode()
    with self._db:
      self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)", row)


def add_sessions(store: Store, config: Config, sessions: Mapping[str, tuple[Episode, str]]) -> int:
  """Stores scored sessions by their marks, each with its task's text; of those that `Store.finish`
  has marked none again. Returns how many are new.

  A task is fixed to a split when it is first named; a session's seed is the first free one among
  those that a stage reads.
  """
  new = {mark: sessions[mark] for mark in sessions if not store.finished(mark)}
  episodes, taken = [], {e.policy: store.keys(e.policy) for e, _ in new.values()}
  for episode, description in new.values():
    task = store.name_task(episode.task_id, description, config.env.max_steps)
    seeds = list_seeds(config, episode.policy, task.split)
    seed = next(seed for seed in seeds if (task.id, seed) not in taken[episode.policy])
    taken[episode.policy].add((task.id, seed))
    episodes.append(dataclasses.replace(episode, seed=seed))
  store.add(*episodes, finished=new)
  return len(new)


def list_seeds(config: Config, policy: str, split: str) -> Iterator[int]:
  """The seeds of a policy's sessions of a task, in the order in which they are given out.

  They are those by which the stages tell the profile's trials, stratified samples, rollouts and
  the evaluation apart.
  """
  c, trials = config, max(config.profile.trials, *config.profile.robustness, 0)
  if policy == samples_name(c, STRATIFIED):
    return itertools.count(REFERENCE_SEEDS + 1)
  profile = range(PROFILE_SEEDS, PROFILE_SEEDS + trials) if policy in BOUNDARIES else ()
  first = ROLLOUT_SEEDS if split == "train" else evaluation_seeds(c, split).start
  return itertools.chain(profile if split != "test" else (), itertools.count(first))
