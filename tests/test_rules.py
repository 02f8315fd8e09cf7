"""Test the choices of policies without training against answers worked out by hand."""

import math

import numpy as np
import pytest
from hand import live, models

from baar_jax.config import SamplePlan


def test_random_chooses_large_with_probability_p():
  """The draw depends only on task, seed and step."""
  ready = [
    live(f"t{t}", seed, step)
    for t in range(10)
    for seed in range(10)
    for step in range(20)
  ]
  none, few, many, all_ = (models("random", ready, p=p) for p in (0.0, 0.25, 0.5, 1.0))
  for p, draws in ((0.25, few), (0.5, many)):
    # The mean of 2000 draws is within five standard deviations.
    assert abs(sum(draws) - 2000 * p) < 5 * math.sqrt(2000 * p * (1 - p))
  # A larger p chooses LARGE at all steps at which a smaller p does.
  assert all(a <= b for a, b in zip(few, many))
  assert none == models("always-small", ready) == [0] * 2000
  assert (
    all_ == models("always-large", ready) == models("first-large", ready) == [1] * 2000
  )
  assert many[::-1] == models("random", ready[::-1], p=0.5)


def test_costlier_models_are_drawn_evenly():
  """The draws of two models keep their values."""

  def draw(seed, p, count=2, steps=20):
    return models("random", [live("t1", seed, s, count) for s in range(steps)], p=p)

  drawn = ["".join(map(str, draw(1000 + k, k / 4))) for k in (1, 2, 3)]
  assert drawn == [
    "00000100000000000010",
    "10000101011001110000",
    "11111111101101110111",
  ]
  counts = np.bincount(draw(0, 0.5, 3, 4000), minlength=3)
  # Costlier models act at the same steps.
  assert counts[1:].sum() == sum(draw(0, 0.5, steps=4000))
  # The tolerance is three standard deviations.
  assert counts[1] / counts[1:].sum() == pytest.approx(0.5, abs=0.034)


def test_sample_k_of_n_takes_large_with_probability_k_over_n():
  plans = (SamplePlan("samples", 3),)
  for k in (1, 2, 3):
    lives = [live("t", k, step, purpose="reference") for step in range(1000)]
    large = sum(models("stratified", lives, plans=plans))
    # 1000 draws: four standard deviations are below 0.064; k = N is always LARGE.
    assert large / 1000 == pytest.approx(k / 3, abs=0.064 if k < 3 else 0)


def test_exploration_takes_large_at_consecutive_steps():
  # 10 k / (2 * 5) = k of 10 steps: the first 1 and 3 are LARGE, and all but the first 2 and 4. Then
  # the same at 5/3, 10/3 and 5 of 0, 0, 1, 1, 2, 3, 4, 5, 6, 7 observations that were not new.
  steps = "LSSSSSSSSS", "SSLLLLLLLL", "LLLSSSSSSS", "SSSSLLLLLL", "LLLLLSSSSS"
  repeats = "LLLLSSSSSS", "SSSSSSLLLL", "LLLLLLLSSS"
  together = SamplePlan("steps", 5), SamplePlan("repeats", 3)
  stratified = SamplePlan("samples", 4)
  for k, letters in enumerate(steps + repeats, 1):
    # Other tasks have these samples after 4 stratified ones.
    for sample, plans in ((k, together), (4 + k, (stratified, *together))):
      lives = [live("t", sample, step, purpose="exploration") for step in range(10)]
      taken = models("exploration", lives, plans=plans)
      assert "".join("SL"[model] for model in taken) == letters
  # The stratified samples of the exploration have draws of their own.
  draws = []
  for purpose in ("reference", "exploration"):
    lives = [live("t", 2, step, purpose=purpose) for step in range(30)]
    draws.append(models("stratified", lives, plans=(stratified,)))
  assert draws[0] != draws[1]
