"""Sandbox: rows of locks with noisy warnings, whose best router can be computed.

Of a lock's three levers one opens it, one jams it and one rings the alarm, which ends
the episode. Locks are plain, tricky (a weak model errs) or broken (no lever opens
them). A task's id determines everything; the kind of building, each lock's look and one
early sign warn of it. All variants of a text have the same number of characters, so
that a call's price depends on step and model alone.
"""

import dataclasses
import random
from pathlib import Path
from typing import NamedTuple

from baar_jax.envs.base import Env, Oracle
from baar_jax.envs.sandbox.errors import SandboxErrors
from baar_jax.episode import Task

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
  """All constants of the sandbox but the models' error rates, see errors.py."""

  locks: int = 9  # per task, at most 9
  attempts: int = 3  # jams of one lock that end the episode
  sign_at: int = 1  # the first lock at which the sign is green or amber
  # The broken lock of a doomed task is uniform from this one to the last.
  broken_from: int = 5
  # The probability of an amber sign: not doomed, doomed.
  amber: tuple[float, float] = (0.1, 0.9)
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
  """Draw the building of a task from its id."""
  draw = random.Random(f"sandbox|{task_id}")
  kind = draw.choices(rules.kinds, [kind.share for kind in rules.kinds])[0]
  doomed = draw.random() < kind.doomed
  broken = rules.broken_from + int(draw.random() * (rules.locks - rules.broken_from))
  sign = AMBER if draw.random() < rules.amber[doomed] else GREEN
  hardness = [PLAIN] * rules.locks
  for lock in range(rules.locks):
    if draw.random() < kind.tricky:
      hardness[lock] = TRICKY
  if doomed:
    hardness[broken] = BROKEN
  looks = [draw.choices(LOOKS, rules.looks[level])[0] for level in hardness]
  levers = ["".join(draw.sample(LEVERS, 3)) for _ in range(rules.locks)]
  return Building(kind.word, sign, tuple(hardness), tuple(looks), tuple(levers))


class Sandbox(Env):
  """Env over buildings of locks (protocol: envs/base.py)."""

  Errors = SandboxErrors
  needs_process = False
  has_optimum = True
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  rules = RULES

  def tasks(self, split: str) -> list[Task]:
    """List the tasks, whose ids are the split's name and a number."""
    tasks = []
    for number in range(self.sizes[split]):
      task_id = f"{split}-{number}"
      building = build(task_id, self.rules)
      task = Task(task_id, split, f"Open the {building.kind}.", self.max_steps)
      tasks.append(task)
    return tasks

  def reset(self, task_id: str) -> str:
    self._building = build(task_id, self.rules)
    self._lock = self._jams = 0
    return self._observe("You enter.")

  def step(self, action: str) -> tuple[str, bool]:
    levers = self._building.levers[self._lock]
    right, jamming, ringing = (f"pull {lever}" for lever in levers)
    if action == ringing:
      return "It rang an alarm. The task has failed.", True
    if action == right and self._building.hardness[self._lock] != BROKEN:
      event = "It opened."
      self._lock += 1
      self._jams = 0
    else:
      event = "It jammed." if action in (right, jamming) else "No effect."
      self._jams += 1
    if self._jams == self.rules.attempts:
      return f"{event} The task has failed.", True
    if self._lock == self.rules.locks:
      return f"{event} The task has been done.", True
    return self._observe(event), False

  def score(self) -> float:
    return float(self._lock == self.rules.locks)

  def oracle(self) -> Oracle:
    critical = self._building.hardness[self._lock] != PLAIN
    return Oracle(self._pull(0), self._lock, critical, recovering=False)

  def mistake(self, kind: str, key: str) -> str:
    return self._pull(2 if kind == "wrong" else 1)

  def _pull(self, lever: int) -> str:
    """Name the action on a lever of this lock: 0 opens, 1 jams, 2 rings."""
    return f"pull {self._building.levers[self._lock][lever]}"

  def _observe(self, event: str) -> str:
    sign = self._building.sign if self._lock >= self.rules.sign_at else BLANK
    look = self._building.looks[self._lock]
    return f"{event} Lock {self._lock + 1} looks {look}. The sign is {SIGNS[sign]}."
