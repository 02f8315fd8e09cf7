"""Define an environment with error rates of its own: buildings with locks.

A building has a row of locks. A lock has three levers: one opens the lock, one jams it,
and one rings the alarm, which ends the episode. Locks are plain, tricky (a weak model
often errs) or broken (no lever opens them). The kind of building, the look of each lock
and one early sign are noisy warnings of tricky and broken locks. A task's id determines
the building. All observations and actions have texts of the same length, so without
prompt caches the cost of a call depends only on its step and its model. This command
trains a router in half an hour:

    python main.py --config=examples/sandbox.py
"""

import random
from typing import NamedTuple

from baar_jax import config
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

    They depend only on the model and on whether the lock is plain.

    Args:
      model: the model's index by price.
      task_id: not used.
      oracle: the expert's step; its `critical` is false only at a plain lock.
      failed: not used.
    """
    rates = self.CRITICAL if oracle.critical else self.PLAIN
    return Lapse(*(self.between(ends, model) for ends in zip(*rates)))


PLAIN, TRICKY, BROKEN = range(3)  # The possible values of a lock's hardness.
LOOKS = ("smooth", "marked", "rusted")
SIGNS = ("blank", "green", "amber")
BLANK, GREEN, AMBER = range(3)  # Indices into SIGNS.
LEVERS = "ABC"
LOCKS = 9  # The number of locks of a task. They are counted from 0.
ATTEMPTS = 3  # The number of jams of one lock that end the episode.
SIGN_AT = 1  # The first lock at which the sign is green or amber.
BROKEN_FROM = 5  # The broken lock of a doomed task is this one or a later one.
# The probability of an amber sign in a task that is not doomed, and in a doomed one.
AMBER_SHARE = (0.1, 0.9)
# For each hardness of a lock, the probability of each of LOOKS.
LOOK_SHARES = ((0.80, 0.17, 0.03), (0.16, 0.80, 0.04), (0.05, 0.07, 0.88))
PROMPT = (
  "Open every lock of the building in turn. One lever of A, B, C opens a lock, one "
  "jams it, one rings the alarm, which ends the task. Answer with a thought and an "
  "action.\n"
  "\nExample:\nThought: The first lock is next.\n\nAction: pull B"
)


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


KINDS = (
  Kind("cabin", share=0.42, tricky=0.03, doomed=0.08),
  Kind("tower", share=0.33, tricky=0.25, doomed=0.20),
  Kind("vault", share=0.25, tricky=0.30, doomed=0.60),
)


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


def build(task_id: str) -> Building:
  """Generate the building of a task, with the task's id as the random seed."""
  draw = random.Random(f"sandbox|{task_id}")
  kind = draw.choices(KINDS, [kind.share for kind in KINDS])[0]
  doomed = draw.random() < kind.doomed
  broken = BROKEN_FROM + int(draw.random() * (LOCKS - BROKEN_FROM))
  sign = AMBER if draw.random() < AMBER_SHARE[doomed] else GREEN
  hardness = [PLAIN] * LOCKS
  for lock in range(LOCKS):
    if draw.random() < kind.tricky:
      hardness[lock] = TRICKY
  if doomed:
    hardness[broken] = BROKEN
  looks = [draw.choices(LOOKS, LOOK_SHARES[level])[0] for level in hardness]
  levers = ["".join(draw.sample(LEVERS, 3)) for _ in range(LOCKS)]
  return Building(kind.word, sign, tuple(hardness), tuple(looks), tuple(levers))


class Sandbox(Env):
  """The Env of the sandbox; it needs no child process."""

  errors = SandboxErrors()
  needs_process = False
  # The prompts are too short for the rules of real providers. The cache outlives an
  # episode, so the cost of a call depends on the steps of the calls before it only.
  system_prompt = PROMPT

  def tasks(self, split: str) -> list[Task]:
    """Return a split's tasks; an id is the split's name and a number."""
    tasks = []
    for number in range(self.sizes[split]):
      task_id = f"{split}-{number}"
      building = build(task_id)
      task = Task(task_id, split, f"Open the {building.kind}.", self.max_steps)
      tasks.append(task)
    return tasks

  def reset(self, task_id: str) -> str:
    """Start a task at its first lock, and return the first observation."""
    self._building = build(task_id)
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
    if self._jams == ATTEMPTS:
      return f"{event} The task has failed.", True
    if self._lock == LOCKS:
      return f"{event} The task has been done.", True
    return self._observe(event), False

  def score(self) -> float:
    """Return 1 if all locks are open, else 0."""
    return float(self._lock == LOCKS)

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
    sign = self._building.sign if self._lock >= SIGN_AT else BLANK
    look = self._building.looks[self._lock]
    return f"{event} Lock {self._lock + 1} looks {look}. The sign is {SIGNS[sign]}."


def get_config() -> config.Config:
  """Return the configuration of the sandbox."""
  c = config.Config(name="sandbox")
  c.models.prompt_cache = False
  c.env = config.EnvConfig(
    f"{__file__}:Sandbox", 384, 128, 256, max_steps=18, live_per_process=16
  )
  c.references.plans = (
    config.SamplePlan("samples", c.references.samples, all_tasks=True),
  )
  c.value = config.ValueConfig(
    updates=5000,
    cost_weights=(0.0, 0.1, 0.2, 0.5, 1.0, 1.5, 2.0),
    heads=3,
    widths=(128, 128),
    # The sandbox has enough episodes for the value heads not to overfit without noise
    # and weight decay.
    noise=0.0,
    weight_decay=0.0,
  )
  c.sft = config.SFTConfig(micro_episodes=64, learning_rate=3e-3)
  c.bopo = config.BoPOConfig(
    lam=(0.3,),
    learning_rate=3e-3,
    last_rate=0.05,
    vanilla_learning_rate=3e-3,
  )
  c.evaluate = config.EvaluateConfig(
    call_budgets=(1, 2, 4, 8), random_p=(0.5,), thresholds=(0.1, 0.2, 0.35, 0.65, 0.8)
  )
  return c
