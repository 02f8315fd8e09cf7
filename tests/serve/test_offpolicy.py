"""Compare estimates of a policy that did not act with sums over all sequences."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from baar_jax.episode import Episode, Step, Task
from baar_jax.rollout.jobs import ALWAYS_LARGE
from baar_jax.router.inputs import States, Vocabulary
from baar_serve import offpolicy
from baar_serve.offpolicy import Sample, estimate_means
from configs import quickstart

# All sequences of three models are equally probable. The target plays LARGE, SMALL,
# LARGE. Only this sequence scores. SMALL costs $1 and LARGE costs $5.
WANTED = (1, 0, 1)
SEQUENCES = [*itertools.product((0, 1), repeat=3)]


def enumerate_sessions(tasks):
  """Play each sequence once on each task; the inputs are the number of the decision."""
  models_N = np.array(SEQUENCES * tasks).ravel()
  place_N = np.tile([0, 1, 2], 8 * tasks)
  score_N = [(0, 0, models == WANTED) for models in SEQUENCES * tasks]
  reward_NxV = np.stack([np.ravel(score_N), 1 + 4 * models_N], axis=1)
  sample = Sample(
    np.repeat(np.arange(tasks), 24),
    place_N,
    0.5 ** (place_N + 1),
    np.eye(2)[models_N],
    reward_NxV.astype(float),
    np.eye(3)[place_N],
  )
  return sample, np.eye(2)[np.array(WANTED)[place_N]]


def test_corrected_estimates_are_exact_on_all_sequences():
  sample, target_NxA = enumerate_sessions(tasks=10)
  # The values do not know what was played before, so the ratios must correct them.
  means = estimate_means(sample, target_NxA)
  # Half of the 80 sessions agree after each decision.
  np.testing.assert_allclose(means.size_S, [40, 20, 10])
  # Every task has the same sessions, so the resamples do not differ.
  np.testing.assert_allclose(means.mean_RxV, [[1, 5 + 1 + 5]] * 201, atol=1e-4)


def test_the_values_alone_know_what_each_decision_costs(monkeypatch):
  monkeypatch.setattr(offpolicy, "RIDGE", 1e-9)
  sample, target_NxA = enumerate_sessions(tasks=2)
  means = estimate_means(sample, target_NxA)
  np.testing.assert_allclose(means.size_S, [8, 4, 2])
  np.testing.assert_allclose(means.mean_RxV[:, 1], 11, atol=1e-4)


@pytest.fixture
def read(monkeypatch):
  """read(episodes): the sample of sessions, with heads that always prefer LARGE."""
  task = Task("t", "test", "", 9)
  store = SimpleNamespace(tasks=lambda split: [task] * (split == "test"))
  learned = SimpleNamespace(tasks=lambda split: [])

  def read_states(vocabulary, tasks, episodes):
    counts = [[n, 0, 9] for e in episodes for n in range(len(e.steps))]
    return States(np.zeros((len(counts), 1)), np.array(counts))

  def prefer(heads, features_NxD, terms_NxT):
    return terms_NxT[:, 0], np.tile([0.0, 1.0], (len(terms_NxT), 1))

  changes = dict(
    Store=lambda path: learned,
    load_heads=lambda files: None,
    load_vocabulary=lambda files: Vocabulary(None, {}, 0.0, {}),
    read_states=read_states,
    estimate=prefer,
  )
  for name, change in changes.items():
    monkeypatch.setattr(offpolicy, name, change)

  def read(*episodes):
    store.episodes = lambda key: [e for e in episodes if e.policy == key]
    files = SimpleNamespace(directory=Path(), config=quickstart.get_config())
    return offpolicy.read_sample(files, store, {"half": [0.5], "strata": [0.5, 1.0]})

  return read


def test_a_drawn_mix_keeps_its_probability_for_the_session(read):
  steps = [
    Step("", model, "", score=0.25 * model, started_s=0.0) for model in (1, 1, 0)
  ]
  sample, targets = read(Episode("t", "strata", 0, steps, 1.0, "done"))
  # Half of the sessions play LARGE always, the others at each step with 1/2:
  # (1/2 + 1) / 2, (1/4 + 1) / 2, (1/8 + 0) / 2
  np.testing.assert_allclose(sample.chance_N, [0.75, 0.625, 0.0625])
  np.testing.assert_allclose(sample.reward_NxV[:, 0], [0.25, 0.0, 0.75])
  assert all((target.argmax(1) == 1).all() for target in targets.values())


def test_imported_sessions_do_not_count(read):
  """Their steps have no time. Nobody knows how their models were drawn."""
  with pytest.raises(ValueError, match="^No session of a random policy .*stratified.$"):
    read(Episode("t", "strata", 0, [Step("", 1, "")], 1.0, "done"))


def test_too_few_effective_sessions_are_a_row_that_says_so():
  rows = []
  for tasks in (10, 2):
    sample, target_NxA = enumerate_sessions(tasks)
    read = mock.Mock(return_value=(sample, {ALWAYS_LARGE: target_NxA}))
    changes = dict(Store=str, read_run=str, list_mixes=str, read_sample=read)
    with mock.patch.multiple(offpolicy, **changes):
      rows += offpolicy.list_estimates(None, Path(), 0.0)
  assert (rows[0]["sessions"], rows[0]["effective"]) == (80, 40)
  assert "count as 8.0 effective ones, fewer than 10" in rows[1]["estimate"]
