"""Define the stored records of clients' conversations; sessions.py keeps them."""

import dataclasses

from pydantic import TypeAdapter

from baar_jax.episode import Step

# The tables of clients' purses and conversations.
SESSIONS_SCHEMA = """
CREATE TABLE IF NOT EXISTS purses (
  id INTEGER PRIMARY KEY, client TEXT, name TEXT, call_limit INTEGER, usd_limit REAL,
  changed_s REAL, UNIQUE (client, name));
CREATE TABLE IF NOT EXISTS conversations (
  id INTEGER PRIMARY KEY, purse INTEGER, state TEXT, name TEXT, changed_s REAL,
  score REAL);
CREATE INDEX IF NOT EXISTS conversations_by_purse ON conversations (purse);
CREATE TABLE IF NOT EXISTS attempts (
  id INTEGER PRIMARY KEY, purse INTEGER, conversation INTEGER, at_s REAL, record TEXT);
CREATE INDEX IF NOT EXISTS attempts_by_purse ON attempts (purse);
CREATE INDEX IF NOT EXISTS attempts_by_conversation ON attempts (conversation);
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
    at_s: when the model read the prefix, in seconds since 1970.
  """

  messages: int
  digest: str
  tokens: int
  at_s: float


@dataclasses.dataclass
class Record:
  """A step of a conversation, as it is stored.

  Attributes:
    place: the number of replies in the call's history.
    cache: what the call left in its model's prompt cache; None if that is unknown.
    atoms: hashes of the reply; see `hash_turn`.
    bound_tokens: an upper bound on the prompt tokens of the call.
    has_tools: whether the call offered tools.
    number: the number of the attempt that completed the step.
    known: how usual the text was for the router; None if unknown.
  """

  step: Step
  place: int
  cache: Cache | None
  atoms: list[str]
  bound_tokens: int = 0
  has_tools: bool = False
  number: int = 0
  known: float | None = None


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
