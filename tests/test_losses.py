"""Losses against sums worked out by hand, and their gradients."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from baar_jax.train import losses
from baar_jax.train.batches import Batch

GARBAGE = (np.nan, np.inf, -np.inf, 1e38)


@pytest.fixture(params=["eager", "jitted"])
def run(request):
  """Calls a loss with its options, compiled or not."""

  def call(loss, *arrays, **options):
    loss = partial(loss, **options)
    arrays = [jnp.asarray(array) for array in arrays]
    return (jax.jit(loss) if request.param == "jitted" else loss)(*arrays)

  return call


def f32(values):
  return np.array(values, np.float32)


# Probabilities of (SMALL, LARGE) at each decision; the last of episode 1 is padding.
P = f32([[[0.8, 0.2], [0.6, 0.4]], [[0.25, 0.75], [0.5, 0.5]]])
ACTION = np.array([[0, 1], [1, 0]], np.int32)
MASK = np.array([[True, True], [True, False]])

# Ratios pi / pi_old of two episodes of 2 and 3 decisions; 9 is padding.
RATIO = f32([[2.0, 0.5, 9.0], [1.5, 1.0, 0.5]])
OLD = f32([[-1.0, -0.5, -0.1], [-2.0, -0.7, -0.3]])
NOW = OLD + np.log(RATIO)
REAL = np.array([[True, True, False], [True, True, True]])
ADV = f32([1.0, -2.0])


class TestSFT:
  def test_by_hand(self, run):
    # -ln 0.8 = 0.2231436, -ln 0.4 = 0.9162907, -ln 0.75 = 0.2876821; the fourth is padding
    # The gradient is (p - onehot) / 3 decisions.
    expected = f32([[[-0.2, 0.2], [0.6, -0.6]], [[0.25, -0.25], [0.0, 0.0]]]) / 3
    for padding in (0.5, *GARBAGE):
      logits = np.log(P)
      logits[1, 1] = padding
      loss, gradient = run(jax.value_and_grad(losses.sft_loss), logits, ACTION, MASK)
      np.testing.assert_allclose(loss, (0.2231436 + 0.9162907 + 0.2876821) / 3, rtol=1e-6)
      np.testing.assert_allclose(gradient, expected, rtol=1e-5)
    assert run(losses.sft_loss, np.log(P), ACTION, np.zeros_like(MASK)) == 0

  def test_three_models_with_logits_that_are_not_normalised(self, run):
    # softmax(7, 7 + ln 2, 7 + ln 5) = (1, 2, 5) / 8; the reference chose the second: ln 4
    logits = 7 + np.log(f32([[[1.0, 2.0, 5.0]]]))
    loss = run(losses.sft_loss, logits, np.array([[1]]), np.array([[True]]))
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)


def batch_of(mask_BxS, **fields):
  zeros = np.zeros(np.shape(mask_BxS), np.int32)
  fields = {"action_BxS": zeros, "logp_BxS": zeros.astype(np.float32)} | fields
  return Batch(zeros, zeros, zeros, mask_BxS=np.array(mask_BxS, bool), **fields)


def test_dapo_counts_each_decision_once_and_is_divided_by_episodes(run):
  """Of 5 episodes in the step this batch has 4 rows, two of them padding."""
  batch = batch_of(
    [[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]],
    logp_BxS=f32(
      [[np.log(0.5 / 1.5), 0.0, np.inf], [np.log(0.5 / 1.5), -0.5, 0], [0] * 3, [9] * 3]
    ),
    adv_B=f32([2, -1, 0, 0]),
    episode_share=4 / 5,
  )
  step = jax.value_and_grad(lambda logits: losses.dapo_loss(None, logits, batch)[0])
  loss, gradient = run(step, jnp.zeros((4, 3, 2)))  # each decision has probability .5
  # Ratios 1.5 and .5 of a good episode, 1.5 and .5 e^.5 = .8244 of a bad one, are clipped to
  # [.8, 1.28]. Gains min(3, 2.56), min(1, 1.6), min(-1.5, -1.28), min(-.8244, -.8244).
  np.testing.assert_allclose(loss, -(2.56 + 1.0 - 1.5 - 0.8244) / 5, rtol=1e-4)
  # Zero where clipped and on padding; d gain / d logit of the action is the gain times 1 - .5.
  expected = f32([[0.0, 1.0, 0.0], [-1.5, -0.8244, 0.0], [0.0] * 3, [0.0] * 3]) * -0.5 / 5
  np.testing.assert_allclose(gradient[:, :, 0], expected, rtol=1e-4)


def test_the_next_token_loss_is_a_mean_over_tokens_then_decisions():
  logits_BxSxV = np.log(f32([[[1, 1, 2], [1, 2, 5], [9, 9, 9]]]))
  none = losses.NO_TOKEN
  token_BxSxM = np.array([[[2, 0], [2, none], [none, none]]], np.int32)
  batch = batch_of([[1, 1, 1]], token_BxSxM=token_BxSxM, decision_share=0.5)
  loss, _ = losses.next_token_loss(jnp.asarray(logits_BxSxV), batch)
  # (ln 2 + ln 4) / 2 = 1.0397 and ln(8/5) = 0.4700; nothing follows the third. Half of the mean.
  np.testing.assert_allclose(loss, 0.5 * (1.0397208 + 0.4700036) / 2, rtol=1e-5)


class TestPolicy:
  def test_both_levels(self, run):
    # ratios of episodes: 2 * 0.5 = 1 and 1.5 * 1 * 0.5 = 0.75; gains 1 * 1 and 0.75 * -2
    loss = run(losses.policy_loss, NOW, OLD, ADV, REAL)
    np.testing.assert_allclose(loss, -(1.0 - 1.5) / 2, rtol=1e-5)
    # means of ratios: 2.5 / 2 = 1.25 and 3 / 3 = 1; gains 1.25 * 1 and 1 * -2
    loss = run(losses.policy_loss, NOW, OLD, ADV, REAL, ratio_level="decision")
    np.testing.assert_allclose(loss, -(1.25 - 2.0) / 2, rtol=1e-5)
    # One of two episodes without decisions: the other's gain is still divided by 2. Its ratio is 1.
    half = np.array([[False] * 3, [False, True, False]])
    for level in ("trajectory", "decision"):
      loss = run(losses.policy_loss, NOW, OLD, ADV, half, ratio_level=level)
      np.testing.assert_allclose(loss, -(0.0 + 1.0 * -2.0) / 2, rtol=1e-5)
      assert run(losses.policy_loss, NOW, OLD, ADV, half & False, ratio_level=level) == 0

  def test_decisions_are_clipped_one_by_one(self, run):
    # adv 1: min(2, 1.28) = 1.28 and min(0.5, 0.8) = 0.5, mean 0.89
    # adv -2: min(-3, -2.56) = -3, min(-2, -2) = -2, min(-1, -1.6) = -1.6, mean -2.2
    options = {"ratio_level": "decision", "clip_low": 0.2, "clip_high": 0.28}
    loss = run(losses.policy_loss, NOW, OLD, ADV, REAL, **options)
    np.testing.assert_allclose(loss, -(0.89 - 2.2) / 2, rtol=1e-5)
    # d/dlogp of what is not clipped is -ratio * adv / (decisions * 2 episodes)
    gradient = run(jax.grad(losses.policy_loss), NOW, OLD, ADV, REAL, **options)
    expected = f32([[0.0, -0.5 / 4, 0.0], [1.5 * 2 / 6, 2 / 6, 0.0]])
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)

  @pytest.mark.parametrize(
    "clip_low, clip_high, gain",
    [
      # ratios 2 (adv 1), 0.5 (adv -1), 2 (adv -1), 0.5 (adv 1)
      (None, None, (2.0, -0.5, -2.0, 0.5)),
      (0.2, None, (2.0, -0.8, -2.0, 0.5)),
      (None, 0.28, (1.28, -0.5, -2.0, 0.5)),
      (0.2, 0.28, (1.28, -0.8, -2.0, 0.5)),
    ],
  )
  def test_clipping_is_pessimistic_on_both_sides(self, run, clip_low, clip_high, gain):
    logp = np.log(f32([[2.0], [0.5], [2.0], [0.5]]))
    adv = f32([1.0, -1.0, -1.0, 1.0])
    arrays = (logp, np.zeros_like(logp), adv, np.ones((4, 1), bool))
    for level in ("trajectory", "decision"):
      options = {"ratio_level": level, "clip_low": clip_low, "clip_high": clip_high}
      loss = run(losses.policy_loss, *arrays, **options)
      np.testing.assert_allclose(loss, -sum(gain) / 4, rtol=1e-5)
      gradient = run(jax.grad(losses.policy_loss), *arrays, **options)
      # The gradient of a gain that the clip has changed is gone.
      is_clipped = np.array(gain) != [2.0, -0.5, -2.0, 0.5]
      np.testing.assert_array_equal(gradient[:, 0] == 0, is_clipped)

  def test_trajectory_is_clipped_as_a_whole(self, run):
    # Each ratio is within 1.28, their product 1.25 * 1.2 = 1.5 is not; 0.5 is clipped for adv < 0.
    logp = np.log(f32([[1.25, 1.2], [0.5, 1.0]]))
    arrays = (logp, np.zeros_like(logp), f32([1.0, -1.0]), np.ones((2, 2), bool))
    options = {"clip_low": 0.2, "clip_high": 0.28}
    loss = run(losses.policy_loss, *arrays, **options)
    np.testing.assert_allclose(loss, -(1.28 - 0.8) / 2, rtol=1e-5)
    gradient = run(jax.grad(losses.policy_loss), *arrays, **options)
    np.testing.assert_array_equal(gradient, 0)

  def test_on_policy_the_levels_differ_by_the_number_of_decisions(self, run):
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 1, 1]], bool)
    logp = f32([[-0.1, -9.0, -9.0], [-0.7, -1.1, -9.0], [-0.2, -2.0, -0.4]])
    arrays = (logp, logp, f32([1.0, -2.0, 0.5]), mask)
    # minus the advantage, over 3 episodes; over S more at decision level
    want = -f32([[1.0, 0.0, 0.0], [-2.0, -2.0, 0.0], [0.5, 0.5, 0.5]]) / 3
    for level, decisions_B in (("trajectory", 1.0), ("decision", f32([[1.0], [2.0], [3.0]]))):
      gradient = run(jax.grad(losses.policy_loss), *arrays, ratio_level=level)
      np.testing.assert_allclose(gradient, want / decisions_B, rtol=1e-6)

  @pytest.mark.parametrize("level, clip", [("trajectory", None), ("decision", 0.2)])
  def test_garbage_in_the_padding(self, run, level, clip):
    options = {"ratio_level": level, "clip_low": clip, "clip_high": clip}
    (value, gradient) = run(jax.value_and_grad(losses.policy_loss), NOW, OLD, ADV, REAL, **options)
    # Every pair of garbage stands in a column of padding.
    pairs = f32(list(itertools.product(GARBAGE, GARBAGE))).T[:, None].repeat(2, axis=1)
    now, old = np.concatenate([[NOW, OLD], pairs], axis=2)
    mask = np.concatenate([REAL, np.zeros_like(pairs[0], bool)], axis=1)
    dirty = run(jax.value_and_grad(losses.policy_loss), now, old, ADV, mask, **options)
    np.testing.assert_allclose(dirty[0], value, rtol=1e-6)
    np.testing.assert_allclose(dirty[1][:, :3], gradient, rtol=1e-6)
    np.testing.assert_array_equal(dirty[1][:, 3:], 0)

  def test_the_advantage_is_a_constant_and_the_level_is_checked(self):
    gradient = jax.grad(losses.policy_loss, argnums=2)(NOW, OLD, jnp.asarray(ADV), REAL)
    np.testing.assert_array_equal(gradient, 0)
    with pytest.raises(ValueError, match="'token'; use 'trajectory' or 'decision'"):
      losses.policy_loss(NOW, OLD, ADV, REAL, ratio_level="token")


class TestKL:
  def test_by_hand(self, run):
    # 0.5 ln(0.5 / 0.9) + 0.5 ln(0.5 / 0.1) = 0.5 * (-0.5877867 + 1.6094379) = 0.5108256;
    # equal distributions have 0; the third decision is padding
    p = f32([[[0.5, 0.5], [0.3, 0.7], [0.1, 0.9]]])
    q = f32([[[0.9, 0.1], [0.3, 0.7], [0.9, 0.1]]])
    kl = run(losses.exact_kl, np.log(p), np.log(q), np.array([[True, True, False]]))
    np.testing.assert_allclose(kl, 0.5108256 / 2, rtol=1e-5)
    gradient = run(jax.grad(losses.exact_kl), np.log(P), np.log(P), MASK)  # at the reference
    np.testing.assert_allclose(gradient, np.zeros_like(P), atol=1e-7)

  def test_against_scipy(self, run):
    draw = np.random.default_rng(0)
    logits, ref = draw.normal(size=(2, 3, 4, 5)).astype(np.float32) * 3
    mask = draw.random((3, 4)) < 0.6
    p, q = scipy.special.softmax(logits, axis=-1), scipy.special.softmax(ref, axis=-1)
    want = scipy.stats.entropy(p, q, axis=-1)[mask].mean()
    np.testing.assert_allclose(run(losses.exact_kl, logits, ref, mask), want, rtol=1e-5)
    want = scipy.stats.entropy(p, axis=-1)[mask].mean()
    np.testing.assert_allclose(run(losses.entropy, logits, mask), want, rtol=1e-5)

  def test_garbage_in_the_padding(self, run):
    kl, entropy = jax.value_and_grad(losses.exact_kl), jax.value_and_grad(losses.entropy)
    logits, ref = np.log(P), np.log(P[:, ::-1])
    clean = run(kl, logits, ref, MASK), run(entropy, logits, MASK)
    assert clean[0][0] > 0.01
    for garbage in GARBAGE:
      logits[1, 1], ref[1, 1] = garbage, -garbage
      dirty = run(kl, logits, ref, MASK), run(entropy, logits, MASK)
      jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    none = np.zeros_like(MASK)
    assert run(losses.exact_kl, logits, ref, none) == run(losses.entropy, logits, none) == 0
