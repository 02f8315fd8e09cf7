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
  def test_value(self, run):
    # -ln 0.8 = 0.2231436, -ln 0.4 = 0.9162907, -ln 0.75 = 0.2876821; ln 0.5 is padding
    loss = run(losses.sft_loss, np.log(P), ACTION, MASK)
    np.testing.assert_allclose(loss, (0.2231436 + 0.9162907 + 0.2876821) / 3, rtol=1e-6)

  def test_logits_need_not_be_normalised(self, run):
    loss = run(losses.sft_loss, np.log(P) + f32([[[3.0], [-7.0]], [[0.5], [40.0]]]), ACTION, MASK)
    np.testing.assert_allclose(loss, 1.4271164 / 3, rtol=1e-5)

  def test_three_models(self, run):
    # softmax(0, ln 2, ln 5) = (1, 2, 5) / 8; the reference chose the second: ln 4
    logits = np.log(f32([[[1.0, 2.0, 5.0]]]))
    loss = run(losses.sft_loss, logits, np.array([[1]]), np.array([[True]]))
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)

  def test_gradient(self, run):
    # (p - onehot) / 3 decisions, and nothing on padding
    gradient = run(jax.grad(losses.sft_loss), np.log(P), ACTION, MASK)
    want = [[[-0.2, 0.2], [0.6, -0.6]], [[0.25, -0.25], [0.0, 0.0]]]
    np.testing.assert_allclose(gradient, f32(want) / 3, rtol=1e-5)

  @pytest.mark.parametrize("garbage", GARBAGE)
  def test_garbage_in_the_padding(self, run, garbage):
    logits = np.log(P)
    logits[1, 1] = garbage
    loss = run(losses.sft_loss, logits, ACTION, MASK)
    np.testing.assert_allclose(loss, 1.4271164 / 3, rtol=1e-5)
    gradient = run(jax.grad(losses.sft_loss), logits, ACTION, MASK)
    np.testing.assert_allclose(gradient[0, 0], f32([-0.2, 0.2]) / 3, rtol=1e-5)
    np.testing.assert_array_equal(gradient[1, 1], 0)

  def test_empty_mask(self, run):
    assert run(losses.sft_loss, np.log(P), ACTION, np.zeros_like(MASK)) == 0


class TestDapo:
  def test_by_hand(self):
    # Ratios 1.5 and 0.5 of a good episode, 1.5 of a bad one; clipped to [0.8, 1.28]. Gains
    # min(1.5, 1.28) * 2, min(0.5, 0.8) * 2, min(-1.5, -1.28): 2.56 + 1.0 - 1.5 over 3 decisions.
    old = f32([[0.0, 0.0], [0.0, 0.0]])
    logp = f32(np.log([[1.5, 0.5], [1.5, 99.0]]))
    mask = jnp.array([[True, True], [True, False]])
    for run in (losses.dapo_loss, jax.jit(losses.dapo_loss, static_argnums=(4, 5))):
      np.testing.assert_allclose(
        run(logp, old, f32([2, -1]), mask, 0.2, 0.28), -2.06 / 3, rtol=1e-5
      )

  def test_gradient_is_zero_where_clipped_and_on_padding(self):
    logp = f32(np.log([[1.5, 1.1, 1.0]]))
    mask = jnp.array([[True, True, False]])
    gradient = jax.grad(losses.dapo_loss)(logp, f32([[0, 0, jnp.inf]]), f32([1]), mask, 0.2, 0.28)
    np.testing.assert_allclose(gradient, [[0, -1.1 / 2, 0]], rtol=1e-5)


class TestPolicy:
  def test_trajectory(self, run):
    # ratios of episodes: 2 * 0.5 = 1 and 1.5 * 1 * 0.5 = 0.75; gains 1 * 1 and 0.75 * -2
    loss = run(losses.policy_loss, NOW, OLD, ADV, REAL)
    np.testing.assert_allclose(loss, -(1.0 - 1.5) / 2, rtol=1e-5)

  def test_decision(self, run):
    # means of ratios: 2.5 / 2 = 1.25 and 3 / 3 = 1; gains 1.25 * 1 and 1 * -2
    loss = run(losses.policy_loss, NOW, OLD, ADV, REAL, ratio_level="decision")
    np.testing.assert_allclose(loss, -(1.25 - 2.0) / 2, rtol=1e-5)

  def test_decision_clipped(self, run):
    # adv 1: min(2, 1.28) = 1.28 and min(0.5, 0.8) = 0.5, mean 0.89
    # adv -2: min(-3, -2.56) = -3, min(-2, -2) = -2, min(-1, -1.6) = -1.6, mean -2.2
    options = {"ratio_level": "decision", "clip_low": 0.2, "clip_high": 0.28}
    loss = run(losses.policy_loss, NOW, OLD, ADV, REAL, **options)
    np.testing.assert_allclose(loss, -(0.89 - 2.2) / 2, rtol=1e-5)
    # d/dlogp of what is not clipped is -ratio * adv / (decisions * 2 episodes)
    gradient = run(jax.grad(losses.policy_loss), NOW, OLD, ADV, REAL, **options)
    np.testing.assert_allclose(gradient[0], f32([0.0, -0.5 / 4, 0.0]), rtol=1e-5)
    np.testing.assert_allclose(gradient[1, 0], 1.5 * 2 / 6, rtol=1e-5)
    assert gradient[1, 2] == 0

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
    by_level = [
      run(jax.grad(losses.policy_loss), *arrays, ratio_level=level)
      for level in ("trajectory", "decision")
    ]
    # minus the advantage, over 3 episodes; over S more at decision level
    want = -f32([[1.0, 0.0, 0.0], [-2.0, -2.0, 0.0], [0.5, 0.5, 0.5]]) / 3
    np.testing.assert_allclose(by_level[0], want, rtol=1e-6)
    np.testing.assert_allclose(by_level[0], by_level[1] * f32([[1.0], [2.0], [3.0]]), rtol=1e-6)

  @pytest.mark.parametrize("level", ["trajectory", "decision"])
  @pytest.mark.parametrize("clip", [None, 0.2])
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

  @pytest.mark.parametrize("level", ["trajectory", "decision"])
  def test_empty_episodes_count_zero(self, run, level):
    none = np.zeros_like(REAL)
    assert run(losses.policy_loss, NOW, OLD, ADV, none, ratio_level=level) == 0
    # One of two episodes empty: the other's gain is still divided by 2. Its ratio is 1.
    half = np.array([[False] * 3, [False, True, False]])
    loss = run(losses.policy_loss, NOW, OLD, ADV, half, ratio_level=level)
    np.testing.assert_allclose(loss, -(0.0 + 1.0 * -2.0) / 2, rtol=1e-5)

  def test_the_advantage_is_a_constant(self):
    gradient = jax.grad(losses.policy_loss, argnums=2)(NOW, OLD, jnp.asarray(ADV), REAL)
    np.testing.assert_array_equal(gradient, 0)

  def test_unknown_level(self):
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

  def test_against_scipy(self, run):
    draw = np.random.default_rng(0)
    logits, ref = draw.normal(size=(2, 3, 4, 5)).astype(np.float32) * 3
    mask = draw.random((3, 4)) < 0.6
    p, q = scipy.special.softmax(logits, axis=-1), scipy.special.softmax(ref, axis=-1)
    want = scipy.stats.entropy(p, q, axis=-1)[mask].mean()
    np.testing.assert_allclose(run(losses.exact_kl, logits, ref, mask), want, rtol=1e-5)
    want = scipy.stats.entropy(p, axis=-1)[mask].mean()
    np.testing.assert_allclose(run(losses.entropy, logits, mask), want, rtol=1e-5)

  def test_no_gradient_at_the_reference(self, run):
    gradient = run(jax.grad(losses.exact_kl), np.log(P), np.log(P), MASK)
    np.testing.assert_allclose(gradient, np.zeros_like(P), atol=1e-7)

  @pytest.mark.parametrize("garbage", GARBAGE)
  def test_garbage_in_the_padding(self, run, garbage):
    logits, ref = np.log(P), np.log(P[:, ::-1])
    clean = run(jax.value_and_grad(losses.exact_kl), logits, ref, MASK)
    clean_entropy = run(jax.value_and_grad(losses.entropy), logits, MASK)
    assert clean[0] > 0.01
    logits[1, 1], ref[1, 1] = garbage, -garbage
    dirty = run(jax.value_and_grad(losses.exact_kl), logits, ref, MASK)
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    dirty_entropy = run(jax.value_and_grad(losses.entropy), logits, MASK)
    jax.tree.map(np.testing.assert_array_equal, dirty_entropy, clean_entropy)

  def test_empty_mask(self, run):
    none = np.zeros_like(MASK)
    assert run(losses.exact_kl, np.log(P), np.log(P[:, ::-1]), none) == 0
    assert run(losses.entropy, np.log(P), none) == 0
