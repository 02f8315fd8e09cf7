"""Check facts, words and their vocabulary by hand, and that live episodes agree."""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import call

from baar_jax.episode import Episode, Step, Task
from baar_jax.families.cascade import describe_proposal
from baar_jax.rollout.specs import Job, Live
from baar_jax.router.inputs import (
  Tracker,
  Trackers,
  hash_words,
  learn_vocabulary,
  read_states,
  weigh_words,
)

TEXTS = "Find the red lamp", "Find the blue lamp", "Find the red box", "Find a door"
TASKS = {text: Task(text, "train", text, 9) for text in TEXTS}
TASK = Task("held-out", "test", "Red lamp or tea", 9)


def play(task_id: str, *pairs: tuple[str, str]) -> Episode:
  """Make an episode of observations and the actions after them."""
  steps = [Step(observation, 0, action) for observation, action in pairs]
  return Episode(task_id, "p", "profile", 0, steps, 1.0, "done")


# Of 15 observations 7 offer the verb "go", and one offers "take".
EPISODES = [
  play(
    TEXTS[0],
    ("Exits: Go north, go up\nHere: take lamp", "take lamp"),
    ("Taken.", "Go north"),
    *[("A hall", "look")] * 6,
  ),
  play(TEXTS[1], *[("Exits: go south", "look")] * 6, ("Taken.", "go north")),
]
VOCABULARY = learn_vocabulary(TASKS, EPISODES)


def follow(steps: Sequence[Step], task: Task = TASK) -> Iterator[Tracker]:
  """Yield the tracker of an episode before each of its decisions."""
  tracker = Tracker(VOCABULARY, task)
  for step in steps:
    tracker.see(step.observation)
    yield tracker
    tracker.act(step)


def read_live(trackers: Trackers, steps: Sequence[Step], observation: str):
  """Return the state of a live episode; all of these episodes have one key."""
  live = Live(Job(TASK, "test", 0), steps=[*steps], observation=observation)
  return read_states([trackers.follow(live)])


def test_the_vocabulary_by_hand():
  weights = weigh_words(VOCABULARY, "The red lamp, or TEA! find")
  # Of 4 tasks all have "find", 3 "the", 2 "red", 2 "lamp", and none has "tea". The
  # logarithms of 4/4, 4/3, 4/2, 4/2 and 4 add up to log(64/3) = 3.0603.
  expected = {"the": 0.0940, "red": 0.2265, "lamp": 0.2265, "tea": 0.4530, "find": 0}
  assert weights == pytest.approx(expected, abs=1e-4)
  # "look" acts most often, but is never offered. "go" acts twice, and "take" once.
  # -log(8 / 16) / 2 = 0.3466, and -log(2 / 16) / 2 = 1.04, which is above 1.
  assert [*VOCABULARY.rarities] == ["go", "take"]
  assert VOCABULARY.rarities == pytest.approx({"go": 0.3466, "take": 1}, abs=1e-4)


def test_words_mark_a_bucket_for_each_field_and_word():
  """Older actions, short words and the end of a long observation have no bucket."""
  task = Task("t", "test", "A lamp: LAMP", 9)
  observation = "Lamp, my lamp." + " " * 400 + "door"
  mark_H = hash_words(task, observation, ["take box", "lamp", "go lamp"])
  # The CRC-32 modulo 512 of "before|lamp", "observation|lamp", "task|lamp", "last|lamp".
  assert np.flatnonzero(mark_H).tolist() == [71, 263, 457, 494]
  assert mark_H.sum() == 4


HALL = "A hall, take red"
OFFERS = "Exits: go red tea\ntake tea, take a lamp"
EPISODE = [
  Step(HALL, 0, "go tea", score=0.25),
  Step(OFFERS, 1, "take a lamp", score=0.25),
  Step(HALL, 0, "take tea", [call(1, kind="proposal")]),
  Step("go red tea", 2, "take tea", score=1.0),
  Step("Taken.", 0, ""),
]


def test_the_facts_of_an_episode_by_hand():
  """Each row is a decision. Of the task's words, tea weighs 1/2, red and lamp 1/4."""
  first, *others = [tracker.facts for tracker in follow(EPISODE)]
  # At the start only the task's words, the observation and the wait for LARGE count.
  assert np.flatnonzero(first).tolist() == [0, 1, 8, 9, 23]
  facts_SxF = np.array(others)
  # The task's words in the newest observation, in the first one, new in the newest one,
  # in all but the first one, in the last action, and in the action before.
  expected = [
    [1, 0.25, 0.75, 1, 0.5, 0],
    [0.25, 0.25, 0, 1, 0.25, 0.5],
    [0.75, 0.25, 0, 1, 0.5, 0.25],
    [0, 0.25, 0, 1, 0.5, 0.5],
  ]
  np.testing.assert_allclose(facts_SxF[:, :6], expected)
  # The observation equals the last one; how often it came after this action, and at
  # all.
  expected = [[0, 1, 1], [0, 1, 2], [0, 1, 1], [0, 1, 1]]
  np.testing.assert_allclose(facts_SxF[:, 6:9], expected)
  # The logarithm of the observation's characters.
  expected = np.log([40, 17, 11, 7]) / 5
  np.testing.assert_allclose(facts_SxF[:, 9], expected, rtol=1e-6)
  # The last verb was new; the last model was costlier, and its result was new; score;
  # gain.
  expected = [
    [1, 0, 0, 0.25, 0.25],
    [1, 1, 0, 0.25, 0],
    [0, 0, 0, 0.25, 0],
    [0, 1, 1, 1, 0.75],
  ]
  np.testing.assert_allclose(facts_SxF[:, 10:15], expected)
  # The most repeated action; distinct actions; repeated results of SMALL and of LARGE;
  # new ones; steps of SMALL and of LARGE since the score rose.
  counts = [
    [1, 1, 0, 0, 1, 0, 0, 0],
    [1, 2, 0, 1, 1, 0, 0, 1],
    [1, 3, 0, 1, 2, 0, 1, 1],
    [2, 3, 0, 1, 2, 1, 0, 0],
  ]
  np.testing.assert_allclose(facts_SxF[:, 15:23], np.log1p(counts), rtol=1e-6)
  # Steps since LARGE, 40 more if it has not acted; SMALL's steps in a row; steps since
  # the score rose.
  counts = [[41, 1, 0], [0, 0, 1], [1, 1, 2], [0, 0, 0]]
  np.testing.assert_allclose(facts_SxF[:, 23:26], np.log1p(counts) / 3, rtol=1e-6)


def test_the_offers_of_an_episode_by_hand():
  """The first three steps are of the kind "take". SMALL takes none, and then the third.
  LARGE takes the second, but has seen its result before. The fourth is of the kind "go".

  At the second step "go red tea" has 3/4 of the task's words, times 0.3466: 0.26. "take
  tea" has a half, times 1.
  """
  first, *others = [tracker.offers for tracker in follow(EPISODE)]
  assert np.flatnonzero(first).tolist() == [0, 1, 3, 15]
  offers_SxF = np.array(others)
  kinds = [[0.5, 1], [0.25, 1], [0.2599, 1], [0, 0]]
  np.testing.assert_allclose(offers_SxF[:, :2], kinds, atol=1e-4)
  # Offers of this kind that SMALL and LARGE did not take, and took; the same of all
  # kinds; the most that were not taken of one kind.
  counts = [
    [1, 0, 0, 0, 1, 0, 0, 0, 1, 0],
    [1, 1, 0, 0, 1, 1, 0, 0, 1, 1],
    [0, 0, 0, 0, 1, 1, 1, 0, 1, 1],
    [0, 0, 0, 0, 1, 2, 1, 0, 1, 1],
  ]
  np.testing.assert_allclose(offers_SxF[:, 26:36], np.log1p(counts), rtol=1e-6)
  # For "go" and "take": the best offer; the kind; how often these verbs have acted.
  best_SxV, kind_SxV = np.split(offers_SxF[:, 2:26], 2, axis=1)
  expected = [[0.75, 0.5], [0, 0.25], [0.75, 0], [0, 0]]
  np.testing.assert_allclose(best_SxV[:, :2], expected)
  assert kind_SxV[:, :2].tolist() == [[0, 1], [0, 1], [1, 0], [0, 0]]
  counts = [[1, 0], [1, 1], [1, 2], [1, 3]]
  np.testing.assert_allclose(offers_SxF[:, 36:38], np.log1p(counts), rtol=1e-6)


def test_the_inputs_of_a_proposal_by_hand():
  """Tea has half of the weight of the task's words. At most four trials count."""
  steps = [Step("A hall", 0, "take tea")] * 5 + [Step("Tea: take tea, go", 0, "")]
  proposed = Step("", 1, "", proposal="take tea")
  inputs = [describe_proposal(tracker, proposed) for tracker in follow(steps)]
  buckets = [zlib.crc32(word) % 512 for word in (b"last|take", b"last|tea")]
  words = VOCABULARY.directions_HxC[buckets].sum(axis=0)
  assert np.abs(words).max() > 0.1
  for number, (tried, offered) in ((0, (0, 0)), (3, (3, 0)), (5, (4, 1))):
    expected = [1, 0.5, tried, offered, *words]
    np.testing.assert_allclose(inputs[number], expected, atol=1e-6)
  assert not any(
    describe_proposal(tracker, steps[0]).any() for tracker in follow(steps)
  )


STEP = st.builds(
  Step,
  st.sampled_from((HALL, OFFERS, "take tea", "Taken.", "")),
  st.integers(0, 2),
  st.sampled_from(("go tea", "take tea", "look", "")),
  score=st.sampled_from((None, 0.0, 0.5, 1.0)),
)
HISTORY = st.lists(STEP, min_size=1, max_size=8)


@given(st.lists(HISTORY, min_size=1, max_size=3))
def test_states_step_by_step_equal_those_of_whole_histories(histories):
  """A client may change earlier steps, or ask twice."""
  trackers = Trackers(VOCABULARY)
  for steps in histories:
    for count, step in enumerate(steps):
      whole = Tracker(VOCABULARY, TASK)
      for earlier in steps[:count]:
        whole.act(earlier)
      whole.see(step.observation)
      for _ in range(2):
        states = read_live(trackers, steps[:count], step.observation)
        np.testing.assert_array_equal(states.features_NxD[0], whole.read())
        assert states.progress_NxP.tolist() == [[*whole.progress]]
