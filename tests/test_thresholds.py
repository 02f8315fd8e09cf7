"""Thresholds from training episodes, by hand."""

import dataclasses

import numpy as np
import pytest

from baar_jax.budget import CallBudget
from baar_jax.rollout import Job, Live
from baar_jax.thresholds import Paced, Scale, probabilities

SCALE = Scale(np.linspace(0.0, 1.0, 11), np.array([2, 4, 6]))


@pytest.mark.parametrize("share, threshold", [(0.2, 0.8), (0.5, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_threshold_is_a_quantile(share, threshold):
  assert SCALE.threshold(share) == pytest.approx(threshold)


@pytest.mark.parametrize("step, left", [(0, 4.0), (1, 3.0), (2, 3.0), (4, 2.0), (5, 1.0), (9, 1.0)])
def test_remaining_counts_episodes_that_get_there(step, left):
  # Of lengths 2, 4, 6: at step 1 the mean of 1, 3, 5; at step 2 of 2, 4; at step 4 of 2.
  assert SCALE.remaining(step) == pytest.approx(left)


def at(make_task, make_episode, models, K):
  live = Live(Job(make_task(), 0), None, K, CallBudget(K))
  live.steps = make_episode(models).steps
  for step in live.steps:
    live.budget.reserve(step.model)
  return live


def test_pace_follows_what_is_left(make_task, make_episode):
  decide = Paced(SCALE)
  pick = lambda p, live: decide.pick(np.array([1 - p, p]), live)  # noqa: E731
  fresh = at(make_task, make_episode, "", 1)  # 1 call for 4 decisions: the upper quarter, p >= .75
  assert [pick(p, fresh) for p in (0.74, 0.76)] == [0, 1]
  rich = at(make_task, make_episode, "", 5)  # more calls than decisions: always
  assert pick(0.0, rich) == 1
  later = at(make_task, make_episode, "LS", 2)  # 1 left for 3 decisions: p >= 2/3
  assert [pick(p, later) for p in (0.66, 0.67)] == [0, 1]


def test_probabilities_of_large():
  logits = np.array([[[0.0, np.log(3.0)], [1000.0, 0.0]]])
  np.testing.assert_allclose(probabilities(logits), [[0.75, 0.0]])


def test_scale_is_of_the_decisions_asked_for(make_task):
  assert dataclasses.replace(SCALE, p_D=np.array([0.5])).threshold(0.3) == 0.5
