"""Keep the sessions of clients on disk, and their budgets and open calls in memory."""

import asyncio
import contextlib
import dataclasses
import itertools
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter

from baar_jax.config import Config
from baar_jax.episode import SMALL, Call, Episode, Step, Usage
from baar_jax.llms.calls import INSERT, open_calls
from baar_jax.llms.wire import OPEN, PRESUMED
from baar_jax.rollout.budget import Cost, DollarBudget, reserve
from baar_jax.rollout.specs import PURPOSE_OF_SPLIT, Cap, seed_of
from baar_jax.serve.request import Cache
from baar_jax.store import Store
from baar_jax.train.jobs import BOUNDARY_KEYS, count_trials, stratified_spec


@dataclasses.dataclass
class Session:
  """One task of a client's agent, which becomes an episode.

  The attributes up to `began_s` are stored on disk. Those from `dollars` on are in
  memory only.

  Attributes:
    id: the session's id.
    rule: the policy that decides, a key of `Exchange.deciders`.
    cost_weight: units of score per normalised dollar; None if the policy has none.
    policy: the policy key that the episode is stored under.
    task_id: the task's name; without one from the client, a hash of the first messages.
    description: the task's text; "" unless texts are recorded.
    call_limit: the cap on LARGE calls; None is no cap.
    usd_limit: the cap in US dollars; None is no cap.
    large_calls: the number of LARGE calls that are billed or in flight.
    spent_usd: the US dollars of all settled attempts.
    switch_usd: the part of `spent_usd` that prompt caches would have saved if the model
      had not changed between steps.
    score: in [0, 1]; None until the session has ended.
    steps: one for each reply.
    places: for each step, the number of assistant messages in its call.
    caches: the messages that each model's prompt cache may hold, by model index.
    open: the worst case in US dollars of each attempt in flight, by the attempt's
      number.
    began_s: when the first request came, in seconds since 1970; 0 or None if an older
      version of this program stored the session, whose caches then count as cold.
    dollars: the session's dollar budget.
    deciding: the lock that admits one decision at a time.
    changed: an event that is set when an attempt has ended.
    reported: the numbers of the attempts whose usage the client will report.
  """

  id: str
  rule: str
  cost_weight: float | None
  policy: str
  task_id: str
  description: str
  call_limit: int | None
  usd_limit: float | None
  large_calls: int = 0
  spent_usd: float = 0.0
  switch_usd: float = 0.0
  score: float | None = None
  steps: list[Step] = dataclasses.field(default_factory=list)
  places: list[int] = dataclasses.field(default_factory=list)
  caches: dict[int, Cache] = dataclasses.field(default_factory=dict)
  open: dict[int, float] = dataclasses.field(default_factory=dict)
  began_s: float | None = 0.0

  def __post_init__(self) -> None:
    """Set the attributes that are not stored on disk."""
    self.dollars = DollarBudget(self.usd_limit, self.spent_usd)
    self.deciding = asyncio.Lock()
    self.changed = asyncio.Event()
    self.reported: set[int] = set()

  @property
  def cap(self) -> Cap:
    """Return the caps that the session's first call set."""
    return Cap(self.call_limit, self.usd_limit)

  @property
  def remaining_caps(self) -> Cap:
    """Return what remains of the caps; calls in flight count at their worst case."""
    calls = self.call_limit
    usd = self.usd_limit
    if calls is not None:
      calls = max(0, calls - self.large_calls)
    if usd is not None:
      usd = self.dollars.remaining
    return Cap(calls, usd)

  @property
  def is_busy(self) -> bool:
    """Tell whether this server is waiting for the answer of an attempt.

    Attempts that the client makes itself do not count.
    """
    return not self.open.keys() <= self.reported

  def make_episode(self, score: float) -> Episode:
    """Make an episode of this session, for training and evaluation.

    Its seed is 0 until `add_sessions` sets the right one.
    """
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
  """An attempt at a model call that has not ended.

  Attributes:
    step: the step that the reply will belong to.
    worst_case_usd: the reserved US dollars.
    number: the row of the attempt in the table `calls`.
    reservation: the reservation in all budgets; closing it replaces the worst case by
      `cost`.
    cost: the attempt's cost in US dollars, to be set before `reservation` is closed.
  """

  session: Session
  step: Step
  worst_case_usd: float
  number: int
  reservation: contextlib.ExitStack
  cost: Cost


class AttemptTotal(NamedTuple):
  """The number and the US dollars of all attempts with the same model and outcome."""

  model: int
  outcome: str
  count: int
  usd: float


class Sessions:
  """Store the sessions of a run and their attempts in the run's database file.

  An attempt and its session are stored in one transaction: before the attempt is made,
  and again after it has ended. If the process is killed, its attempts in flight count
  at their worst case. All methods must be called from one thread.
  """

  def __init__(self, path: Path, run_budget: DollarBudget | None):
    """Open the database file, and settle the calls that a killed process left open.

    Args:
      path: the database file of the run's store.
      run_budget: the dollar budget of the whole run; None without a cap.
    """
    self._db = open_calls(path)
    self._run_budget = run_budget
    # Sessions that a call in progress is using. All other sessions are read from disk
    # when they are needed.
    self._alive: Mapping[str, Session] = weakref.WeakValueDictionary()
    columns = "id TEXT PRIMARY KEY, open INTEGER, changed_s REAL, state TEXT"
    self._db.execute(f"CREATE TABLE IF NOT EXISTS sessions ({columns})")
    interrupted = self._db.execute("SELECT state FROM sessions WHERE open > 0")
    for (state,) in interrupted.fetchall():
      session = SESSION.validate_json(state)
      for number, worst_case_usd in session.open.items():
        self._close(number, PRESUMED, worst_case_usd)
        session.spent_usd += worst_case_usd
      session.open.clear()
      self._save(session)

  def find(self, id_: str) -> Session | None:
    """Return the session with this id, or None if there is none."""
    session = self._alive.get(id_)
    if session is None:
      select = "SELECT state FROM sessions WHERE id = ?"
      row = self._db.execute(select, (id_,)).fetchone()
      if row:
        session = SESSION.validate_json(*row)
        self._alive[id_] = session
    return session

  def choose_id(self, fingerprint: str, is_new: bool) -> str:
    """Choose the id of the session for a call without an id.

    Calls with the same fingerprint belong to the same session. If that session has a
    score and the call begins a task, a new session begins. Its id has the next number,
    such as "fingerprint-...-2".

    Args:
      fingerprint: the hash `Conversation.fingerprint`.
      is_new: True if the call begins a task: it has no assistant message.
    """
    first_id = f"fingerprint-{fingerprint}"
    select = (
      "SELECT count(*), max(rowid), id FROM sessions WHERE id >= ?1 AND id < ?1 || '~'"
    )
    count, _, newest_id = self._db.execute(select, (first_id,)).fetchone()
    if is_new and count and self.find(newest_id).score is not None:
      return f"{first_id}-{count + 1}"
    return newest_id or first_id

  def list_newest(self, count: int) -> list[Session]:
    """Find the `count` sessions that changed last, the newest first."""
    select = "SELECT id FROM sessions ORDER BY changed_s DESC LIMIT ?"
    return [self.find(id_) for (id_,) in self._db.execute(select, (count,)).fetchall()]

  def count_attempts(self) -> list[AttemptTotal]:
    """Count all attempts and their dollars by model and outcome.

    An attempt in flight counts with the dollars of its worst case.
    """
    select = "SELECT model, kind, count(*), sum(usd) FROM calls GROUP BY model, kind"
    return [AttemptTotal(*row) for row in self._db.execute(select).fetchall()]

  def add(self, session: Session) -> None:
    """Store a new session."""
    self._alive[session.id] = session
    self._save(session)

  def list_affordable(
    self, session: Session, worst_case_usd_A: Sequence[float], keep_usd: float
  ) -> list[int]:
    """Find the models whose call fits all budgets now, in ascending order.

    Args:
      session: the session of the call.
      worst_case_usd_A: the worst case of the call at each model.
      keep_usd: the US dollars that the call must leave of the session's cap.
    """
    models = []
    for model, usd in enumerate(worst_case_usd_A):
      has_call = model == SMALL or session.remaining_caps.calls != 0
      run_allows = self._run_budget is None or self._run_budget.allows(usd)
      if has_call and run_allows and session.dollars.allows(usd + keep_usd):
        models.append(model)
    return models

  def begin(
    self, session: Session, step: Step, worst_case_usd: float, reported: bool = False
  ) -> Attempt:
    """Begin an attempt: reserve its worst case in all budgets, and store it.

    The caller must have checked that the worst case fits the budgets.

    Args:
      session: the session that pays.
      step: the step that the reply will belong to.
      worst_case_usd: the worst case of the attempt.
      reported: True if the client makes the attempt itself, and reports its usage.
    """
    reservation = contextlib.ExitStack()
    cost = reservation.enter_context(
      reserve(session.dollars, self._run_budget, worst_case_usd)
    )
    session.large_calls += step.model != SMALL
    row = (step.model, OPEN, worst_case_usd, f"session {session.id}")
    number = self._db.execute(INSERT, row).lastrowid
    session.open[number] = worst_case_usd
    if reported:
      session.reported.add(number)
    self._save(session)
    return Attempt(session, step, worst_case_usd, number, reservation, cost)

  def end(self, attempt: Attempt, kind: str, call: Call | None = None) -> None:
    """End an attempt: settle its cost in all budgets, and save its session.

    Args:
      attempt: the attempt.
      kind: the outcome, one of the constants of llms/wire.py. PRESUMED without a call
        books the worst case.
      call: the billed call; None if the attempt had no answer.
    """
    session = attempt.session
    step = attempt.step
    if call is None and kind == PRESUMED:
      call = Call(step.model, Usage(0, 0, 0), attempt.worst_case_usd, kind=PRESUMED)
    if call is None:
      session.large_calls -= step.model != SMALL
    else:
      step.calls.append(call)
      attempt.cost.usd = call.cost_usd
    attempt.reservation.close()
    del session.open[attempt.number]
    session.reported.discard(attempt.number)
    session.spent_usd = session.dollars.settled_usd
    session.changed.set()
    self._close(attempt.number, kind, attempt.cost.usd)
    self._save(session)

  def finish(self, session: Session, score: float) -> None:
    """End a session: store its score."""
    session.score = score
    self._save(session)

  def _close(self, number: int, kind: str, usd: float) -> None:
    """Write an attempt's outcome and cost. `_save` must commit them."""
    update = "UPDATE calls SET kind = ?, usd = ? WHERE id = ?"
    self._db.execute(update, (kind, usd, number))

  def _save(self, session: Session) -> None:
    """Write a session, and commit it with everything written before."""
    state = SESSION.dump_json(session).decode()
    row = (session.id, len(session.open), time.time(), state)
    with self._db:
      self._db.execute("INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?)", row)


class ScoredSession(NamedTuple):
  """An ended session that is to be stored as an episode.

  Attributes:
    mark: the session's unique name in `Store.finished`, which prevents storing it
      twice.
    episode: the episode; `add_sessions` replaces its seed.
    description: the text of the task.
  """

  mark: str
  episode: Episode
  description: str


def add_sessions(
  store: Store, config: Config, sessions: Sequence[ScoredSession]
) -> int:
  """Store the episodes of ended sessions, except of those that were stored before.

  A task whose name is new gets its split here. An episode gets the first seed of
  `list_seeds` that its policy and task do not have yet.

  Returns:
    The number of sessions that were stored now.
  """
  new_sessions = [session for session in sessions if not store.finished(session.mark)]
  episodes = []
  keys_by_policy = {}
  for session in new_sessions:
    episode = session.episode
    description = session.description
    task = store.name_task(episode.task_id, description, config.env.max_steps)
    keys = keys_by_policy.setdefault(episode.policy, store.keys(episode.policy))
    for seed in list_seeds(config, episode.policy, task.split):
      if (task.id, seed) not in keys:
        break
    keys.add((task.id, seed))
    episodes.append(dataclasses.replace(episode, seed=seed))
  store.add(*episodes, finished=[session.mark for session in new_sessions])
  return len(new_sessions)


def list_seeds(config: Config, policy: str, split: str) -> Iterator[int]:
  """Return the seeds for a policy's sessions of one task, in the order of use.

  The stages read episodes by their seeds. The sessions of a boundary policy become
  trials of the profile first, then of the evaluation.

  Args:
    policy: the key of the policy.
    split: the task's split.
  """
  if policy == stratified_spec(config).key:
    return itertools.count(seed_of("reference", 1))
  trials = 0
  if policy in BOUNDARY_KEYS and split != "test":
    trials = count_trials(config)
  profile_seeds = range(seed_of("profile", 0), seed_of("profile", trials))
  later_seeds = itertools.count(seed_of(PURPOSE_OF_SPLIT[split], 0))
  return itertools.chain(profile_seeds, later_seeds)
