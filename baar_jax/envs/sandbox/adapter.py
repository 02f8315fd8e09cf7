"""Simulate buildings with locks, an environment whose best policy can be computed.

A building has a row of locks. A lock has three levers: one opens the lock, one jams it,
and one rings the alarm, which ends the episode. Locks are plain, tricky (a weak model
often errs) or broken (no lever opens them). The kind of building, the look of each lock
and one early sign are noisy warnings of tricky and broken locks. A task's id determines
the building. All observations and actions have texts of the same length, so without
prompt caches the cost of a call depends only on its step and its model.
"""

import dataclasses
import random
from pathlib import Path
from typing import NamedTuple

from baar_jax.envs.base import Env, Errors, Lapse, Oracle
from baar_jax.episode import Task


class SandboxErrors(Errors):
  """Error rates of scripted models in the sandbox.

  Each attribute has a pair for SMALL and a pair for LARGE. A pair consists of the error
  rate and of the share of errors that ring the alarm. All other errors jam the lock.

  Attributes:
    PLAIN: at a plain lock.
    CRITICAL: at a tricky or broken lock.
  """

  PLAIN = (0.10, 0.05), (0.02, 0.05)
  CRITICAL = (0.80, 0.5), (0.10, 0.3)

  def lapse(
    self, model: int, task_id: str, oracle: Oracle, failed: bool = False
  ) -> Lapse:
    """Compute the chances that a model errs at a lock.

    They depend only on the model and on whether the lock is plain, so that the best
    policy can be computed.

    Args:
      model: the model's index by price.
      task_id: not used.
      oracle: the expert's step; its `critical` is false only at a plain lock.
      failed: not used.
    """
    rates = self.CRITICAL if oracle.critical else self.PLAIN
    return Lapse(*(self.between(ends, model) for ends in zip(*rates)))


PLAIN, TRICKY, BROKEN = range(3)  # the possible values of a lock's hardness
LOOKS = ("smooth", "marked", "rusted")
SIGNS = ("blank", "green", "amber")  # The sign is blank before lock Rules.sign_at.
BLANK, GREEN, AMBER = range(3)  # indices into SIGNS
LEVERS = "ABC"


class Kind(NamedTuple):
  """A kind of building.

  Attributes:
    word: the kind's name in the description of a task.
    share: share of this kind among the tasks.
    tricky: probability that a lock is tricky.
    doomed: probability that one lock of the building is broken.
  """

  word: str
  share: float
  tricky: float
  doomed: float


@dataclasses.dataclass(frozen=True)
class Rules:
  """All constants of the sandbox, except the models' error rates (SandboxErrors).

  Locks are counted from 0. A task with a broken lock is doomed.

  Attributes:
    locks: number of locks of a task, at most 9.
    attempts: number of jams of one lock that end the episode.
    sign_at: the first lock at which the sign is green or amber.
    broken_from: the broken lock of a doomed task is drawn uniformly from this lock to
      the last.
    amber: probability of an amber sign in a task that is not doomed, and in a doomed
      task.
    looks: for each hardness of a lock, the probability of each of LOOKS.
    kinds: the kinds of buildings.
  """

  locks: int = 9
  attempts: int = 3
  sign_at: int = 1
  broken_from: int = 5
  amber: tuple[float, float] = (0.1, 0.9)
  looks: tuple[tuple[float, float, float], ...] = (
    (0.80, 0.17, 0.03),  # P(smooth), P(marked) and P(rusted) of a plain lock
    (0.16, 0.80, 0.04),  # P(smooth), P(marked) and P(rusted) of a tricky lock
    (0.05, 0.07, 0.88),  # P(smooth), P(marked) and P(rusted) of a broken lock
  )
  kinds: tuple[Kind, ...] = (
    Kind("cabin", share=0.42, tricky=0.03, doomed=0.08),
    Kind("tower", share=0.33, tricky=0.25, doomed=0.20),
    Kind("vault", share=0.25, tricky=0.30, doomed=0.60),
  )


RULES = Rules()
MAX_STEPS = 18


class Building(NamedTuple):
  """The building of a task.

  Attributes:
    kind: the word for the kind of building.
    sign: GREEN or AMBER; amber warns of a broken lock.
    hardness: PLAIN, TRICKY or BROKEN, for each lock.
    looks: one of LOOKS, for each lock.
    levers: a text of three letters for each lock: the lever that opens, the one that
      jams, and the one that rings the alarm. No lever opens a broken lock: the first
      jams it, too.
  """

  kind: str
  sign: int
  hardness: tuple[int, ...]
  looks: tuple[str, ...]
  levers: tuple[str, ...]


def build(task_id: str, rules: Rules = RULES) -> Building:
  """Generate the building of a task, with the task's id as the random seed."""
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
  """The Env of the sandbox; it needs no child process."""

  Errors = SandboxErrors
  needs_process = False
  # The prompts are too short for the rules of real providers. The cache outlives an
  # episode, so the cost of a call depends on the steps of the calls before it only.
  system_prompt = Path(__file__).with_name("prompt.txt").read_text()
  rules = RULES

  def tasks(self, split: str) -> list[Task]:
    """Return a split's tasks; an id is the split's name and a number."""
    tasks = []
    for number in range(self.sizes[split]):
      task_id = f"{split}-{number}"
      building = build(task_id, self.rules)
      task = Task(task_id, split, f"Open the {building.kind}.", self.max_steps)
      tasks.append(task)
    return tasks

  def reset(self, task_id: str) -> str:
    """Start a task at its first lock, and return the first observation."""
    self._building = build(task_id, self.rules)
    self._lock = self._jams = 0
    return self._observe("You enter.")

  def step(self, action: str) -> tuple[str, bool]:
    """Pull a lever of the next lock; any other action counts as a jam."""
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
    """Return 1 if all locks are open, else 0."""
    return float(self._lock == self.rules.locks)

  def oracle(self) -> Oracle:
    """Return the expert's next step: it pulls the lever that opens the lock."""
    critical = self._building.hardness[self._lock] != PLAIN
    return Oracle(self._pull(0), self._lock, critical, recovering=False)

  def mistake(self, kind: str, key: str) -> str:
    """Return the action that rings the alarm ("wrong") or jams the lock.

    Args:
      kind: "wrong", or another kind of mistake; see Env.mistake.
      key: not used.
    """
    return self._pull(2 if kind == "wrong" else 1)

  def _pull(self, lever: int) -> str:
    """Write the action that pulls a lever of the next lock.

    Args:
      lever: 0 opens, 1 jams, 2 rings the alarm.
    """
    return f"pull {self._building.levers[self._lock][lever]}"

  def _observe(self, event: str) -> str:
    """Write an observation: the event, the next lock's look and the sign."""
    sign = self._building.sign if self._lock >= self.rules.sign_at else BLANK
    look = self._building.looks[self._lock]
    return f"{event} Lock {self._lock + 1} looks {look}. The sign is {SIGNS[sign]}."
