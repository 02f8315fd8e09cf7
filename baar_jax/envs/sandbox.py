"""Sandbox: rows of locks with noisy warnings, small enough for the best router to be computed.

Of a lock's three levers one opens it, one jams it and one rings the alarm, which ends the episode.
Locks are plain, tricky (a weak model errs) or broken (no lever opens them). A task's id determines
everything; the kind of building, each lock's look and one early sign warn of it. All variants of a
text have the same number of characters, so that a call's price depends on step and model alone.
"""

import dataclasses
import random
from typing import NamedTuple

from baar_jax.envs.base import Env, Oracle
from baar_jax.episode import SPLITS, Task

PLAIN, TRICKY, BROKEN = range(3)
LOOKS = ("smooth", "marked", "rusted")
SIGNS = ("blank", "green", "amber")  # blank until the sign is reached
BLANK, GREEN, AMBER = range(3)
LEVERS = "ABC"


class Kind(NamedTuple):
  word: str  # names the kind of building in the task's description
  share: float  # of the tasks
  tricky: float  # probability that a lock is tricky
  doomed: float  # probability that one lock is broken


@dataclasses.dataclass(frozen=True)
class Rules:
  """All constants of the sandbox but the models' error rates, which stand in llms/scripted.py."""

  locks: int = 9  # per task, at most 9
  attempts: int = 3  # jams of one lock that end the episode
  sign_at: int = 1  # the first lock at which the sign is green or amber
  broken_from: int = 5  # the broken lock of a doomed task is uniform from this one to the last
  amber: tuple[float, float] = (0.1, 0.9)  # probability of an amber sign: not doomed, doomed
  looks: tuple[tuple[float, float, float], ...] = (  # probability of each of LOOKS
    (0.80, 0.17, 0.03),  # for PLAIN
    (0.16, 0.80, 0.04),  # for TRICKY
    (0.05, 0.07, 0.88),  # for BROKEN
  )
  kinds: tuple[Kind, ...] = (
    Kind("cabin", share=0.42, tricky=0.03, doomed=0.08),
    Kind("tower", share=0.33, tricky=0.25, doomed=0.20),
    Kind("vault", share=0.25, tricky=0.30, doomed=0.60),
  )


RULES = Rules()
MAX_STEPS = 18


class Building(NamedTuple):  # with a hardness, a look and levers for each lock
  kind: str
  sign: int
  hardness: tuple[int, ...]
  looks: tuple[str, ...]
  levers: tuple[str, ...]  # the one that opens, the one that jams, the one that rings


def build(task_id: str, rules: Rules = RULES) -> Building:
  """The building of a task, drawn from its id."""
  draw = random.Random(f"sandbox|{task_id}")
  kind = draw.choices(rules.kinds, [kind.share for kind in rules.kinds])[0]
  doomed = draw.random() < kind.doomed
  broken = rules.broken_from + int(draw.random() * (rules.locks - rules.broken_from))
  sign = AMBER if draw.random() < rules.amber[doomed] else GREEN
  hardness = [TRICKY if draw.random() < kind.tricky else PLAIN for _ in range(rules.locks)]
  if doomed:
    hardness[broken] = BROKEN
  looks = [draw.choices(LOOKS, rules.looks[level])[0] for level in hardness]
  levers = ["".join(draw.sample(LEVERS, 3)) for _ in range(rules.locks)]
  return Building(kind.word, sign, tuple(hardness), tuple(looks), tuple(levers))


class Sandbox(Env):
  """Env over buildings of locks (protocol: envs/base.py)."""

  system_prompt = (
    "Open every lock of the building in turn. One lever of A, B, C opens a lock, one jams it, "
    "one rings the alarm, which ends the task. Answer with a thought and an action.\n\n"
    "Example:\nThought: The first lock is next.\n\nAction: pull B"
  )

  def __init__(self, train_tasks=96, dev_tasks=34, test_tasks=60, max_steps=MAX_STEPS, rules=RULES):
    self._sizes = dict(zip(SPLITS, (train_tasks, dev_tasks, test_tasks)))
    self._max_steps, self._rules = max_steps, rules

  def tasks(self, split: str) -> list[Task]:
    ids = [f"{split}-{number}" for number in range(self._sizes[split])]
    kinds = [build(id_, self._rules).kind for id_ in ids]
    return [Task(id_, split, f"Open the {kind}.", self._max_steps) for id_, kind in zip(ids, kinds)]

  def reset(self, task_id: str) -> str:
    self._building = build(task_id, self._rules)
    self._lock = self._jams = 0
    return self._observe("You enter.")

  def step(self, action: str) -> tuple[str, bool]:
    right, jamming, ringing = (f"pull {lever}" for lever in self._building.levers[self._lock])
    if action == ringing:
      return "It rang an alarm. The task has failed.", True
    if action == right and self._building.hardness[self._lock] != BROKEN:
      self._lock, self._jams, event = self._lock + 1, 0, "It opened."
    else:
      self._jams += 1
      event = "It jammed." if action in (right, jamming) else "No effect."
    if self._jams == self._rules.attempts:
      return f"{event} The task has failed.", True
    if self._lock == self._rules.locks:
      return f"{event} The task has been done.", True
    return self._observe(event), False

  def score(self) -> float:
    return float(self._lock == self._rules.locks)

  def oracle(self) -> Oracle:
    action = f"pull {self._building.levers[self._lock][0]}"
    return Oracle(action, self._lock, self._building.hardness[self._lock] != PLAIN, False)

  def mistake(self, kind: str, key: str) -> str:
    return f"pull {self._building.levers[self._lock][2 if kind == 'wrong' else 1]}"

  def _observe(self, event: str) -> str:
    sign = self._building.sign if self._lock >= self._rules.sign_at else BLANK
    look = self._building.looks[self._lock]
    return f"{event} Lock {self._lock + 1} looks {look}. The sign is {SIGNS[sign]}."
