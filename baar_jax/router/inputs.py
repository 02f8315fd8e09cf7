"""Compute facts, offers and words of a step from text alone (our choice).

Facts count what was seen and done. An offer is a piece of the newest observation that
begins with a verb of earlier actions, such as "take the lamp" in a list of actions.
Words are hashed, and projected on the principal components of stored steps.

No environment's code or vocabulary is used: rarities, verbs and directions are learned
from training tasks and their episodes. Live decisions, the endpoint and training follow
episodes with the same code, step by step.

Axes: V verbs, H hash buckets, C directions.
"""

import functools
import math
import re
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.episode import SMALL, Episode, Step, Task
from baar_jax.llms.prices import measure_tokens
from baar_jax.rollout.specs import Live

WORD = re.compile(r"[a-z]{3,}")
PIECE = re.compile(r"[,\n]")
BUCKETS = 512  # H, number of hash buckets of (field, word)
DIRECTIONS = 48  # C, number of directions of the hashed words
OBSERVATION_CHARS = 400  # only these first characters of an observation are hashed
MARKED_EPISODES = 2000  # the directions are learned from about this many episodes
VERBS = 12  # V, the largest number of known verbs
KEPT = 1 << 14  # the size of each cache of what is found in a text
LEAST_SPREAD = 1e-3  # A feature of a lower standard deviation is not scaled.
# A step has a kind if the best offer's overlap, times the rarity of its verb, is above
# this number.
LEAST_STRENGTH = 0.1
# Before the first LARGE call, this number is added to the steps since a LARGE call.
NO_LARGE = 40
NO_STEP = Step("", SMALL, "")  # stands for the steps before the first one
# This number of remaining LARGE calls, or a larger one, counts as no cap.
MAX_CALLS = 20
TERMS = 9  # number of terms of a decision that `describe` computes


class Vocabulary(NamedTuple):
  """The statistics of training tasks and episodes that the inputs need.

  Attributes:
    directions_HxC: float32, the directions of the hashed words.
    idf: the logarithm of (number of tasks / number of tasks with the word), by word.
    new_idf: the same for words that no training task has.
    rarities: numbers in [0, 1], near 1 if few observations offer the verb, by known
      verb. Verbs are first words of actions that observations offer, the most frequent
      first, and at most `VERBS`.
    opening_tokens: the mean tokens of an episode's first prompt.
    reply_tokens: the mean tokens of a reply.
    mean_D: float32, the mean of each feature over the steps of the read episodes.
    spread_D: float32, its standard deviation; 1 for a feature that hardly varies.
  """

  directions_HxC: np.ndarray
  idf: dict[str, float]
  new_idf: float
  rarities: dict[str, float]
  opening_tokens: float = 0.0
  reply_tokens: float = 0.0
  mean_D: np.ndarray | float = 0.0
  spread_D: np.ndarray | float = 1.0


class States(NamedTuple):
  """Describe decisions, without their caps and cost weights.

  Attributes:
    features_NxD: float32, the result of `Tracker.read`.
    progress_NxP: int, the counts of `Tracker.progress`.
  """

  features_NxD: np.ndarray
  progress_NxP: np.ndarray


@functools.lru_cache(KEPT)
def find_words(text: str) -> frozenset[str]:
  """Return the words of a text: three or more letters, in lower case."""
  return frozenset(WORD.findall(text.lower()))


def find_pieces(text: str) -> tuple[str, ...]:
  """Split a text at commas and line ends; drop each piece's label before a colon."""
  pieces = [piece.strip().split(": ")[-1] for piece in PIECE.split(text.lower())]
  return tuple(filter(None, pieces))


@functools.lru_cache(KEPT)
def find_offers(text: str) -> tuple[tuple[str, frozenset[str]], ...]:
  """Return the verb and the words of each piece of a text."""
  return tuple((find_verb(piece), find_words(piece)) for piece in find_pieces(text))


def find_verb(text: str) -> str:
  """Return the first word of an action or of a piece."""
  return text.split(" ", 1)[0].lower()


@functools.lru_cache(KEPT)
def find_buckets(field: str, text: str) -> tuple[int, ...]:
  """Return the hash buckets of a text's words.

  Args:
    field: the part of the step that the text belongs to.
    text: the text.
  """
  names = [f"{field}|{word}" for word in find_words(text)]
  return tuple({zlib.crc32(name.encode()) % BUCKETS for name in names})


def hash_words(task: Task, observation: str, actions: Sequence[str]) -> np.ndarray:
  """Mark the hashed (field, word) pairs of a step.

  Args:
    task: the task.
    observation: the newest observation.
    actions: the actions so far; the last two are read.

  Returns:
    float32 [H], 1 for the buckets of the pairs, else 0.
  """
  mark_H = np.zeros(BUCKETS, np.float32)
  opening = observation[:OBSERVATION_CHARS]
  fields = [("task", task.description), ("observation", opening)]
  fields += zip(("last", "before"), actions[:-3:-1])
  for field, text in fields:
    mark_H[list(find_buckets(field, text))] = 1.0
  return mark_H


def learn_vocabulary(
  tasks: Mapping[str, Task], episodes: Sequence[Episode]
) -> Vocabulary:
  """Learn the vocabulary of training tasks and of their episodes.

  At most about `MARKED_EPISODES` episodes are read for the directions, which are the
  principal components of the hashed words, and for the statistics of the features.

  Args:
    tasks: the training tasks by id.
    episodes: episodes of these tasks.
  """
  counts = Counter()
  for task in tasks.values():
    counts.update(find_words(task.description))
  used = Counter()
  offered = Counter()
  marks = []
  stride = math.ceil(len(episodes) / MARKED_EPISODES)
  for number, episode in enumerate(episodes):
    actions = []
    for step in episode.steps:
      offered.update({verb for verb, _ in find_offers(step.observation)})
      used[find_verb(step.action)] += 1
      if number % stride == 0:
        marks.append(hash_words(tasks[episode.task_id], step.observation, actions))
      actions.append(step.action)
  _, vectors_HxH = np.linalg.eigh(np.cov(np.array(marks), rowvar=False, ddof=0))
  directions_HxC = vectors_HxH[:, : -DIRECTIONS - 1 : -1].astype(np.float32)
  idf = {word: math.log(len(tasks) / count) for word, count in counts.items()}
  verbs = [verb for verb, _ in used.most_common() if verb and offered[verb]]
  rarities = {}
  for verb in verbs[:VERBS]:
    log_share = math.log((offered[verb] + 1) / (used.total() + 1))
    rarities[verb] = min(1.0, -log_share / 2)
  vocabulary = Vocabulary(
    directions_HxC, idf, math.log(len(tasks)), rarities, *measure_tokens(episodes)
  )
  trackers = follow_episodes(vocabulary, tasks, episodes[::stride])
  features_NxD = read_states(trackers).features_NxD
  spread_D = features_NxD.std(axis=0)
  spread_D = np.where(spread_D > LEAST_SPREAD, spread_D, 1.0).astype(np.float32)
  return vocabulary._replace(mean_D=features_NxD.mean(axis=0), spread_D=spread_D)


def track(tracker: "Tracker", steps: Sequence[Step]) -> Iterator[Step]:
  """Let a tracker follow a stored episode.

  Yields:
    The step of each decision, when the tracker has seen its observation.
  """
  for step in steps:
    tracker.see(step.observation)
    yield step
    tracker.act(step)


def follow_episodes(
  vocabulary: Vocabulary, tasks: Mapping[str, Task], episodes: Iterable[Episode]
) -> Iterator["Tracker"]:
  """Yield a tracker at each decision of episodes; it changes with the next one.

  Args:
    vocabulary: the statistics that facts, offers and words need.
    tasks: the tasks by id.
    episodes: the episodes.
  """
  for episode in episodes:
    tracker = Tracker(vocabulary, tasks[episode.task_id])
    for _ in track(tracker, episode.steps):
      yield tracker


def read_states(trackers: Iterable["Tracker"]) -> States:
  """Compute the states of the decisions for which trackers wait."""
  features = []
  progress = []
  for tracker in trackers:
    features.append(tracker.read())
    progress.append(tracker.progress)
  return States(np.array(features), np.array(progress))


def weigh_words(vocabulary: Vocabulary, text: str) -> dict[str, float]:
  """Return each word of a task's description with its weight; they add up to 1."""
  idf = {
    word: vocabulary.idf.get(word, vocabulary.new_idf) for word in find_words(text)
  }
  total = sum(idf.values()) or 1.0
  return {word: value / total for word, value in idf.items()}


class Tracker:
  """Follow one episode and compute the facts of its next decision.

  Call `see` with each observation before its decision, and `act` with the step after
  it.

  Attributes:
    task: the task of the episode.
    steps: the steps so far.
    observation: the observation that waits for a decision; None after `act`.
    vocabulary: the statistics that facts, offers and words need.
    actions: how often each action was taken.
  """

  def __init__(
    self, vocabulary: Vocabulary, task: Task, sees_models: bool = True
  ) -> None:
    """Start before the first observation of a task.

    Args:
      vocabulary: the statistics that facts, offers and words need.
      task: the task.
      sees_models: whether the facts tell which model acted; if not, every step counts
        as one of SMALL.
    """
    self.task = task
    self.steps: list[Step] = []
    self.observation: str | None = None
    self.vocabulary = vocabulary
    self._sees_models = sees_models
    self._weight_of = weigh_words(vocabulary, task.description)
    self._index_of = {verb: n for n, verb in enumerate(vocabulary.rarities)}
    self._rarity_V = np.zeros(VERBS)
    self._rarity_V[: len(vocabulary.rarities)] = [*vocabulary.rarities.values()]
    self._seen = Counter()  # observations
    self._results = Counter()  # (action, observation that it brought)
    self.actions = Counter()
    self._verbs = Counter()
    self._large_calls = 0
    self._small_run = 0  # steps of SMALL since the last LARGE step
    self._score = self._gain = 0.0
    self._since_rise = [0, 0]  # steps since the score rose, by model
    # Words of the task in the newest observation, in the first one, new in the newest
    # one, and in all but the first.
    self._words = self._first = self._new_words = self._covered = frozenset()
    # Results that were repeated or new, by model.
    self._outcomes = np.zeros((2, 2))
    # Steps with a kind: whether the action took the best offer to a new result, by
    # model and kind.
    self._trials = np.zeros((2, 2, VERBS))
    self._kind: int | None = None

  def follows(self, live: Live) -> bool:
    """Tell whether an episode begins with what this tracker has seen."""
    count = len(self.steps)
    if self.task != live.task or self.steps != live.steps[:count]:
      return False
    return self.observation in (None, live.history[count].observation)

  def see(self, observation: str) -> None:
    """Take in the observation before a decision; a second call changes nothing."""
    if self.observation is not None:
      return
    self.observation = observation
    is_new = observation not in self._seen
    self._seen[observation] += 1
    self._words = find_words(observation) & self._weight_of.keys()
    self._new_words = frozenset()
    if self.steps:
      step = self.steps[-1]
      is_large = self._is_large(step)
      self._results[step.action, observation] += 1
      self._outcomes[int(is_new), is_large] += 1
      if self._kind is not None:
        is_hit = is_new and self._index_of.get(find_verb(step.action)) == self._kind
        self._trials[int(is_hit), is_large, self._kind] += 1
      self._new_words = self._words - self._covered - self._first
      self._covered |= self._words
    else:
      self._first = self._words
    self._find_offers(observation)

  def act(self, step: Step) -> None:
    """Take in a step, with its action and the score after it."""
    self.see(step.observation)
    self.steps.append(step)
    self.observation = None
    self.actions[step.action] += 1
    self._verbs[find_verb(step.action)] += 1
    is_large = self._is_large(step)
    self._small_run = 0 if is_large else self._small_run + 1
    if self._sees_models:
      self._large_calls += step.large_calls
    self._gain = 0.0
    self._since_rise[is_large] += 1
    if step.score is not None:
      self._gain = step.score - self._score
      self._score = step.score
    if self._gain > 0:
      self._since_rise = [0, 0]

  @property
  def progress(self) -> tuple[int, ...]:
    """Return the earlier steps, the earlier LARGE calls and the task's `max_steps`."""
    return len(self.steps), self._large_calls, self.task.max_steps

  def read(self) -> np.ndarray:
    """Compute the standardised facts, offers and words of the next decision."""
    actions = [step.action for step in self.steps[-2:]]
    mark_H = hash_words(self.task, self.observation, actions)
    words_C = mark_H @ self.vocabulary.directions_HxC
    features_D = np.concatenate([self.facts, self.offers, words_C])
    return (features_D - self.vocabulary.mean_D) / self.vocabulary.spread_D

  @property
  def facts(self) -> np.ndarray:
    """Compute the facts of the next decision, float32."""
    before, last = [NO_STEP, NO_STEP, *self.steps][-2:]
    seen = self._seen[self.observation]
    is_large = self._is_large(last)
    words = [self._words, self._first, self._new_words, self._covered]
    words += [find_words(last.action), find_words(before.action)]
    values = [
      *map(self.overlap, words),
      bool(self.steps) and self.observation == last.observation,
      min(self._results[last.action, self.observation], 4),
      min(seen, 5),
      math.log1p(len(self.observation)) / 5,
      self._verbs[find_verb(last.action)] == 1,
      is_large,
      is_large and seen == 1,
      self._score,
      self._gain,
    ]
    counts = [
      max(self.actions.values(), default=0),
      len(self.actions),
      *self._outcomes.flat,
      *self._since_rise,
    ]
    waits = [
      self._small_run + NO_LARGE * (not self._large_calls),
      self._small_run,
      sum(self._since_rise),
    ]
    columns = [values, np.log1p(counts), np.log1p(waits) / 3]
    return np.concatenate(columns).astype(np.float32)

  def _is_large(self, step: Step) -> int:
    """Tell whether a step counts as one of LARGE, as 0 or 1."""
    return int(self._sees_models and step.model != SMALL)

  def overlap(self, words: Iterable[str]) -> float:
    """Add up the weights of the task's words among some words."""
    return math.fsum(map(self._weight_of.get, self._weight_of.keys() & words))

  def _find_offers(self, observation: str) -> None:
    """Find the best offer of each known verb, and the kind of the step.

    An offer is a piece of the observation that begins with a known verb.
    """
    self._offer_V = np.zeros(VERBS)
    for verb, words in find_offers(observation):
      if verb in self._index_of:
        index = self._index_of[verb]
        self._offer_V[index] = max(self._offer_V[index], self.overlap(words))
    strength_V = self._offer_V * self._rarity_V
    self._strength = strength_V.max()
    self._kind = int(strength_V.argmax()) if self._strength > LEAST_STRENGTH else None

  @property
  def offers(self) -> np.ndarray:
    """Compute the facts about offers and actions with known verbs, float32."""
    kind_V = np.zeros(VERBS)
    if self._kind is not None:
      kind_V[self._kind] = 1
    acted_V = np.zeros(VERBS)
    for verb, index in self._index_of.items():
      acted_V[index] = self._verbs[verb]
    counts = [
      *(self._trials @ kind_V).flat,
      *self._trials.sum(axis=-1).flat,
      *self._trials[0].max(axis=-1),
      *acted_V,
    ]
    values = [self._strength, self._kind is not None, *self._offer_V, *kind_V]
    return np.concatenate([values, np.log1p(counts)]).astype(np.float32)


def describe(
  calls_left: jax.Array, score_weight: jax.Array, progress: jax.Array
) -> jax.Array:
  """Compute the terms that a network reads beside the features of a state.

  The terms describe the remaining cap, the cost weight and the episode's progress. The
  leading axes of the arguments broadcast. NumPy arrays give a NumPy array.

  Args:
    calls_left: LARGE calls that the cap still allows; `MAX_CALLS` or more is no cap.
    score_weight: 1 / (1 + w) for the cost weight w.
    progress: [..., P], the counts of `Tracker.progress`.

  Returns:
    float32 [..., T], T = TERMS, scaled to about [0, 1] (our choice).
  """
  xp = jnp if isinstance(calls_left, jax.Array) else np
  step, large_calls, max_steps = xp.moveaxis(progress, -1, 0)
  calls_left = xp.minimum(calls_left, MAX_CALLS)
  steps_left = xp.maximum(max_steps - step, 1)
  time = step / max_steps
  terms = xp.broadcast_arrays(
    calls_left / MAX_CALLS,
    # log(1 + MAX_CALLS) is about 3, so this term is at most about 1.
    xp.log1p(calls_left) / 3,
    xp.minimum(calls_left / steps_left, 1.0),
    (calls_left >= steps_left) | (calls_left >= MAX_CALLS),
    score_weight,
    score_weight**0.5,
    time,
    time**0.5,
    large_calls / MAX_CALLS,
  )
  return xp.stack(terms, axis=-1).astype(np.float32)


class Trackers:
  """Follow live episodes, for the value heads and policy networks.

  An episode's facts are updated by its new steps only. If its earlier steps have
  changed, all of its steps are read again.

  Attributes:
    vocabulary: the statistics of the training tasks and episodes.
  """

  def __init__(self, vocabulary: Vocabulary, sees_models: bool = True) -> None:
    """Start without episodes.

    Args:
      vocabulary: the statistics of the training tasks and episodes.
      sees_models: whether the facts tell which model acted; see `Tracker`.
    """
    self.vocabulary = vocabulary
    self._sees_models = sees_models
    self._trackers: dict[Hashable, Tracker] = {}

  def forget(self, live: Live) -> None:
    """Free what is kept of an episode that ended or starts again."""
    self._trackers.pop(live.key, None)

  def compile(self) -> None:
    """Do nothing, because NumPy compiles nothing."""

  def follow(self, live: Live) -> Tracker:
    """Return the tracker of an episode, after its newest observation."""
    tracker = self._trackers.get(live.key)
    if tracker is None or not tracker.follows(live):
      tracker = Tracker(self.vocabulary, live.task, self._sees_models)
      self._trackers[live.key] = tracker
    for step in live.steps[len(tracker.steps) :]:
      tracker.act(step)
    tracker.see(live.observation)
    return tracker
