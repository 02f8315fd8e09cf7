"""Check losses and their gradients against sums worked out by hand."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from baar_jax.config import BoPOConfig
from baar_jax.learn.batches import Batch
from baar_jax.paper import losses

GARBAGE = (np.nan, np.inf, -np.inf, 1e38)


def run(loss, *arrays, **options):
  """Compile a loss with its options, and return its value and gradient."""
  gradient = jax.value_and_grad(partial(loss, **options))
  return jax.jit(gradient)(*map(jnp.asarray, arrays))


def f32(values):
  return np.array(values, np.float32)


# Probabilities of (SMALL, LARGE) at each decision; the last of episode 1 is padding.
P = f32([[[0.8, 0.2], [0.6, 0.4]], [[0.25, 0.75], [0.5, 0.5]]])
ACTION = np.array([[0, 1], [1, 0]])
MASK = np.array([[True, True], [True, False]])


def test_sft_loss_is_the_mean_cross_entropy():
  # -ln 0.8 = 0.2231436, -ln 0.4 = 0.9162907, -ln 0.75 = 0.2876821; the fourth is padding
  # The gradient is (p - onehot) / 3 decisions.
  expected = f32([[[-0.2, 0.2], [0.6, -0.6]], [[0.25, -0.25], [0.0, 0.0]]]) / 3
  for padding in (0.5, *GARBAGE):
    logits = np.log(P)
    logits[1, 1] = padding
    loss, gradient = run(losses.sft_loss, logits, ACTION, MASK)
    np.testing.assert_allclose(loss, (0.2231436 + 0.9162907 + 0.2876821) / 3, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)
  assert run(losses.sft_loss, np.log(P), ACTION, np.zeros_like(MASK))[0] == 0


TRAJECTORY = {"ratio_level": "trajectory"}
DECISION = {"ratio_level": "decision"}
LOW = {"clip_low": 0.2}
HIGH = {"clip_high": 0.28}
# Ratios pi / pi_old of two episodes with 2 and 3 decisions; 0 is padding.
RATIO = [[2.0, 0.5, 0], [1.5, 1.0, 0.5]]
ALONE = [[0, 0], [0, 1.0]]
PAIR = [[2.0], [0.5]]


@pytest.mark.parametrize(
  "options, ratio, adv, gain, slope",
  [
    # ratios of episodes: 2 * 0.5 = 1 and 1.5 * 1 * 0.5 = 0.75; gains 1 * 1 and 0.75 * -2
    (TRAJECTORY, RATIO, (1, -2), (1.0, -1.5), [[1, 1, 0], [-1.5, -1.5, -1.5]]),
    # means of ratios: 2.5 / 2 = 1.25 and 3 / 3 = 1; gains 1.25 * 1 and 1 * -2
    # slopes: ratio * adv / decisions, so 2 / 2 and 0.5 / 2, -3 / 3, -2 / 3 and -1 / 3
    (DECISION, RATIO, (1, -2), (1.25, -2.0), [[1, 0.25, 0], [-1, -2 / 3, -1 / 3]]),
    # adv 1: min(2, 1.28) = 1.28 and min(0.5, 0.8) = 0.5, mean 0.89
    # adv -2: min(-3, -2.56) = -3, min(-2, -2) = -2, min(-1, -1.6) = -1.6, mean -2.2
    (
      DECISION | LOW | HIGH,
      RATIO,
      (1, -2),
      (0.89, -2.2),
      [[0, 0.25, 0], [-1, -2 / 3, 0]],
    ),
    # Each ratio is within 1.28, their product 1.25 * 1.2 = 1.5 is not; 0.5 is clipped for adv < 0.
    (
      TRAJECTORY | LOW | HIGH,
      [[1.25, 1.2], [0.5, 1]],
      (1, -1),
      (1.28, -0.8),
      [[0] * 2] * 2,
    ),
    # The first episode has no decisions. The second has ratio 1; its gain is divided by 2.
    (TRAJECTORY, ALONE, (1, -2), (0, -2), [[0, 0], [0, -2]]),
    (DECISION, ALONE, (1, -2), (0, -2), [[0, 0], [0, -2]]),
    # One clip: the other end is free. The case of two clips has the other signs.
    (TRAJECTORY | LOW, PAIR, (1, -1), (2.0, -0.8), [[2.0], [0]]),
    (DECISION | HIGH, PAIR, (1, -1), (1.28, -0.5), [[0], [-0.5]]),
  ],
)
def test_policy_loss_by_hand(options, ratio, adv, gain, slope):
  """The slopes are derivatives of the gains by the log-probability of each decision."""
  mask = f32(ratio) > 0
  old = -0.1 * np.arange(1, mask.size + 1, dtype=np.float32).reshape(mask.shape)
  now = old + np.log(np.where(mask, f32(ratio), 1.0))
  # Each column of padding has one pair of garbage values.
  pairs = f32(list(itertools.product(GARBAGE, GARBAGE))).T[:, None].repeat(2, axis=1)
  now, old = np.concatenate([[now, old], pairs], axis=2)
  padded_mask = np.concatenate([mask, np.zeros_like(pairs[0], bool)], axis=1)
  loss, gradient = run(losses.policy_loss, now, old, f32(adv), padded_mask, **options)
  np.testing.assert_allclose(loss, -sum(gain) / 2, rtol=1e-5)
  np.testing.assert_allclose(gradient[:, : mask.shape[1]], -f32(slope) / 2, rtol=1e-5)
  np.testing.assert_array_equal(gradient[:, mask.shape[1] :], 0)
  by_advantage = jax.grad(losses.policy_loss, argnums=2)
  arrays = map(jnp.array, (now, old, f32(adv), padded_mask))
  np.testing.assert_array_equal(by_advantage(*arrays, **options), 0)


@pytest.mark.parametrize("padding", GARBAGE)
def test_kl_is_exact_and_ignores_padding(padding):
  logits = np.log(f32([[[0.5, 0.5], [0.3, 0.7], [1, 1]]]))
  reference = np.log(f32([[[0.9, 0.1], [0.3, 0.7], [1, 1]]]))
  logits[0, 2] = padding
  reference[0, 2] = -padding
  mask = np.array([[True, True, False]])
  # 0.5 ln(0.5 / 0.9) + 0.5 ln(0.5 / 0.1) = 0.5 * (-0.5877867 + 1.6094379) = 0.5108256; equal
  # distributions have 0. The slope is p (ln(p / q) - KL): 0.5 * (-0.5877867 - 0.5108256) = -0.5493.
  kl, gradient = run(losses.exact_kl, logits, reference, mask)
  np.testing.assert_allclose(kl, 0.5108256 / 2, rtol=1e-5)
  slope = f32([[[-0.5493061, 0.5493061], [0, 0], [0, 0]]])
  np.testing.assert_allclose(gradient, slope / 2, rtol=1e-5, atol=1e-7)
  assert run(losses.exact_kl, logits, reference, np.zeros_like(mask))[0] == 0


@pytest.mark.parametrize("padding", GARBAGE)
def test_bopo_clips_as_configured_and_learns_no_entropy(padding):
  logits = np.log(P)
  logits[1, 1] = padding
  # The ratios are 2 and .625 in the first episode, and 1 in the second.
  old = np.log(f32([[0.4, 0.64], [0.75, 1]]))
  batch = Batch(*[ACTION] * 2, old, MASK, f32([1, 2]), logits, decision_share=0.25)
  config = BoPOConfig(ratio_level="decision", clip=(0.2, 0.28))

  def step(logits):
    terms = losses.bopo_loss(config, logits, batch)
    term = terms["entropy"]
    figures = terms["loss"].values.mean, term.values.mean, term.share
    return term.weight * term.values.mean, figures

  gradient, figures = jax.grad(step, has_aux=True)(logits)
  # min(2, 1.28) and min(.625, .8); 1 * 2
  loss = -((1.28 + 0.625) / 2 + 2) / 2
  # .8 * .2231436 + .2 * 1.6094379 = .5004024, .6 * .5108256 + .4 * .9162907 = .6730117 and
  # .25 * 1.3862944 + .75 * .2876821 = .5623351; the fourth is padding.
  entropy = (0.5004024 + 0.6730117 + 0.5623351) / 3
  np.testing.assert_allclose(figures, (loss, entropy, 0.25), rtol=1e-6)
  np.testing.assert_array_equal(gradient, 0)
