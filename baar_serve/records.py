"""Define purses, conversations, attempts and their records; sessions.py keeps them."""

import asyncio
import dataclasses
from collections.abc import Sequence

from pydantic import TypeAdapter

from baar_jax.episode import Step
from baar_jax.llms.prices import ROUNDING
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.specs import Cap

# The tables of clients' purses and conversations.
SESSIONS_SCHEMA = """
CREATE TABLE IF NOT EXISTS purses (
  id INTEGER PRIMARY KEY AUTOINCREMENT, client TEXT, name TEXT, call_limit INTEGER,
  usd_limit REAL, changed_s REAL, UNIQUE (client, name));
CREATE INDEX IF NOT EXISTS purses_by_name ON purses (name);
CREATE TABLE IF NOT EXISTS conversations (
  id INTEGER PRIMARY KEY AUTOINCREMENT, purse INTEGER, state TEXT, name TEXT,
  changed_s REAL, score REAL);
CREATE INDEX IF NOT EXISTS conversations_by_purse ON conversations (purse);
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY, purse INTEGER, conversation INTEGER, at_s REAL, record TEXT);
CREATE INDEX IF NOT EXISTS attempts_by_purse ON attempts (purse);
CREATE INDEX IF NOT EXISTS attempts_by_conversation ON attempts (conversation);
CREATE TABLE IF NOT EXISTS refusals (purse INTEGER, at_s REAL);
CREATE INDEX IF NOT EXISTS refusals_by_purse ON refusals (purse);
CREATE TABLE IF NOT EXISTS last_turns (purse INTEGER PRIMARY KEY, aside_usd REAL);
CREATE TABLE IF NOT EXISTS large_costs (id INTEGER PRIMARY KEY, large_usd REAL);
CREATE TABLE IF NOT EXISTS atoms (atom TEXT, conversation INTEGER);
CREATE INDEX IF NOT EXISTS atoms_by_atom ON atoms (atom);
"""


@dataclasses.dataclass
class Cache:
  """The beginning of a conversation's prompts that a model may have in its cache.

  Attributes:
    messages: the number of messages in this prefix.
    digest: a hash of the prefix; see `hash_prefix`.
    tokens: the prompt tokens of the prefix, as billed.
  """

  messages: int
  digest: str
  tokens: int


@dataclasses.dataclass
class Record:
  """A step of a conversation, as it is stored.

  Attributes:
    place: the number of replies in the call's history.
    cache: what the call left in its model's prompt cache; None if that is unknown.
    atoms: hashes of the reply; see `hash_turn`.
    bound_tokens: an upper bound on the prompt tokens of a call that offered tools; 0 of
      another one.
    number: the number of the attempt that completed the step.
  """

  step: Step
  place: int
  cache: Cache | None
  atoms: list[str]
  bound_tokens: int = 0
  number: int = 0


RECORD = TypeAdapter(Record)


@dataclasses.dataclass
class State:
  """What a conversation keeps from its first call on.

  Attributes:
    rule: the policy that decides, a key of `Exchange.deciders`.
    cost_weight: units of score per normalised dollar; None if the policy has none.
    policy: the policy key that the episode is stored under.
    task_id: the task's name; without one from the client, a hash of its text.
    description: the task's text; "" unless texts are recorded.
    opening: a hash of the task's text.
    began_s: when the first call came, in seconds since 1970.
  """

  rule: str
  cost_weight: float | None
  policy: str
  task_id: str
  description: str
  opening: str
  began_s: float


STATE = TypeAdapter(State)


@dataclasses.dataclass(eq=False)
class Purse:
  """The caps of a client's session, on which its conversations draw.

  Attributes:
    id: the number of the purse.
    client: the name of the client's key; "" without `keys`.
    name: the session's name, by which clients know it.
    call_limit: the cap on LARGE calls; None is no cap.
    dollars: the budget in US dollars.
    changed_s: when the last attempt began, in seconds since 1970.
    large_calls: the number of LARGE calls that are billed or in flight.
    open: the conversation of each attempt in flight, by the attempt's number; None for
      a side call.
    callers: the number of calls that are being answered.
    aside_usd: the US dollars that are set aside for the last turn; None once that has
      begun.
  """

  id: int
  client: str
  name: str
  call_limit: int | None
  dollars: DollarBudget
  changed_s: float
  large_calls: int = 0
  open: dict[int, int | None] = dataclasses.field(default_factory=dict)
  callers: int = 0
  aside_usd: float | None = 0.0
  _aside: object | None = None

  def set_aside(self, usd: float | None) -> None:
    """Set dollars aside for the last turn, as far as they are left.

    They take the place of those that were set aside before.
    """
    if self._aside:
      self.dollars.settle(self._aside, 0.0)
      self._aside = None
    if usd:
      usd = min(usd, self.dollars.remaining * (1 - ROUNDING))
    if usd:
      self._aside = self.dollars.reserve(usd)
    self.aside_usd = usd

  @property
  def is_over(self) -> bool:
    """Tell whether the last turn has begun, so that no further call is answered."""
    return self.aside_usd is None

  @property
  def cap(self) -> Cap:
    """Return the caps."""
    return Cap(self.call_limit, self.dollars.limit_usd)

  @property
  def remaining_caps(self) -> Cap:
    """Return what remains of the caps; calls in flight count at their worst case."""
    calls = self.call_limit
    usd = self.dollars.limit_usd
    if calls is not None:
      calls = max(0, calls - self.large_calls)
    if usd is not None:
      usd = self.dollars.remaining
    return Cap(calls, usd)

  @property
  def used_share(self) -> float:
    """Return the used share of the cap of which most is used; 0 without a cap."""
    shares = [0.0]
    if self.call_limit:
      shares.append(self.large_calls / self.call_limit)
    if self.dollars.limit_usd:
      usable_usd = self.dollars.limit_usd - (self.aside_usd or 0.0)
      shares.append(self.dollars.settled_usd / usable_usd)
    return max(shares)


@dataclasses.dataclass(eq=False)
class Conversation:
  """One history of one agent, which becomes an episode.

  Attributes:
    id: the number of the conversation.
    name: the client's name for it within its session; "" without one.
    changed_s: when its last call began, in seconds since 1970; negative if it is over.
    score: in [0, 1]; None until it is scored.
    records: one for each reply, in the order of the attempts.
    deciding: the lock that admits one decision at a time.
  """

  id: int
  purse: Purse
  name: str
  state: State
  changed_s: float
  score: float | None = None
  records: list[Record] = dataclasses.field(default_factory=list)
  deciding: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)

  @property
  def steps(self) -> list[Step]:
    """Return the steps."""
    return [record.step for record in self.records]

  @property
  def atoms(self) -> set[str]:
    """Return the hashes of all replies."""
    return {atom for record in self.records for atom in record.atoms}

  @property
  def last_place(self) -> int:
    """Return the number of actions before the last known reply; -1 without one."""
    return max((it.place for it in self.records if it.atoms), default=-1)

  @property
  def caches(self) -> dict[int, Cache]:
    """Return what each model's prompt cache may hold, by model index."""
    return {record.step.model: record.cache for record in self.records if record.cache}

  def has_replies(self, atoms: Sequence[str], records: Sequence[Record]) -> bool:
    """Tell whether a call has the replies of some records, in their order.

    The last tool call of a reply stands for it, since some clients leave out the texts
    beside tool calls; and the text of a reply without tool calls.

    Args:
      atoms: the hashes of the replies in the call's history.
    """
    rest = iter(atoms)
    # Each search goes on after the reply that the one before it has found.
    return all(record.atoms[-1] in rest for record in records if record.atoms)


@dataclasses.dataclass(eq=False)
class Attempt:
  """An attempt at a model call that has not ended.

  Attributes:
    conversation: None for a side call.
    step: the step that the reply will belong to.
    worst_case_usd: the reserved US dollars.
    aside_usd: what was set aside for the last turn before the attempt.
    number: the row of the attempt in the tables `calls` and `attempts`.
    reservations: the reservation in each budget.
  """

  purse: Purse
  conversation: Conversation | None
  step: Step
  worst_case_usd: float
  aside_usd: float | None
  number: int
  reservations: list[tuple[DollarBudget, object]]
