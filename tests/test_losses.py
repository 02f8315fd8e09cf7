"""Check losses and their gradients: sums worked out by hand, Eq. 8 in NumPy, torch's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import make_bopo
from scipy import special

from baar_jax.config import BoPOConfig
from baar_jax.learn.batches import Batch
from baar_jax.paper import losses

GARBAGE = (np.nan, np.inf, -np.inf, 1e38)


def run(loss, *arrays):
  """Compile a loss, and return its value and gradient."""
  return jax.jit(jax.value_and_grad(loss))(*map(jnp.asarray, arrays))


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


@pytest.mark.parametrize("padding", GARBAGE)
def test_policy_loss_by_hand(padding):
  """The third episode has no decisions, so it counts as 0 in the mean."""
  # Ratios 2 * 0.5 = 1 and 1.5 * 1 * 0.5 = 0.75; gains 1 * 1 and 0.75 * -2. The slopes are those
  # of the gains by the log-probability of each decision.
  ratio = f32([[2.0, 0.5, 0], [1.5, 1.0, 0.5], [0, 0, 0]])
  slope = f32([[1, 1, 0], [-1.5] * 3, [0] * 3])
  mask = ratio > 0
  old = np.where(mask, -0.1 * np.arange(1, 10).reshape(3, 3), -padding)
  now = np.where(mask, old + np.log(np.maximum(ratio, 0.1)), padding)
  arrays = f32(now), f32(old), f32([1, -2, 7]), mask
  loss, gradient = run(losses.policy_loss, *arrays)
  np.testing.assert_allclose(loss, -(1 - 1.5) / 3, rtol=1e-5)
  np.testing.assert_allclose(gradient, -slope / 3, rtol=1e-5)
  by_advantage = jax.grad(losses.policy_loss, argnums=2)
  np.testing.assert_array_equal(by_advantage(*map(jnp.array, arrays)), 0)


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


GOLDEN = np.load(make_bopo.FILE)
GRADIENT = GOLDEN["gradient_BxSxA"]


def bopo_loss(logits, batch):
  config = BoPOConfig(kl_beta=make_bopo.KL_BETA)
  return losses.bopo_loss(config, logits, batch)["loss"]


def differentiate(decisions, size):
  """Differentiate BoPO's loss by the golden logits, in micro-batches of rows of episodes."""
  names = "logits_BxSxA", "ref_logits_BxSxA", "action_BxS", "mask_BxS"
  logits, reference, action, mask = (
    GOLDEN[name].reshape(-1, decisions, *GOLDEN[name].shape[2:]) for name in names
  )
  adv = GOLDEN["adv_B"].repeat(6 // decisions)
  gradients = []
  for start in range(0, len(adv), size):
    b = slice(start, start + size)
    labels = action[b], action[b], mask[b], adv[b]
    batch = Batch(None, *labels, 5, mask.sum(), reference[b])
    gradients.append(jax.grad(bopo_loss)(f32(logits[b]), batch))
  return np.concatenate(gradients).reshape(5, 6, 3)


@pytest.mark.parametrize("decisions, size", [(6, 5), (2, 4), (1, 30)])
def test_bopo_has_the_gradient_of_torch_on_rows_too(decisions, size):
  """golden/make_bopo.py computed it from whole episodes, which are rows of 6 decisions."""
  gradient = differentiate(decisions, size)
  np.testing.assert_allclose(gradient, GRADIENT, rtol=1e-5, atol=1e-7)


def test_bopo_has_the_slope_of_eq_8_in_float64():
  """The ratio of the objective is one to the router before the step."""
  start, mask = GOLDEN["logits_BxSxA"], GOLDEN["mask_BxS"]
  chosen = np.eye(3)[GOLDEN["action_BxS"]] * mask[:, :, None]
  reference = special.softmax(GOLDEN["ref_logits_BxSxA"], axis=2)
  direction = np.random.default_rng(1).normal(size=start.shape)

  def objective(size):
    policy = special.softmax(start + size * direction, axis=2)
    ratio = policy / special.softmax(start, axis=2)
    ratio = np.exp((chosen * np.log(ratio)).sum(axis=(1, 2)))
    kl = special.rel_entr(policy, reference).sum(axis=2)[mask].mean()
    return (ratio * GOLDEN["adv_B"]).mean() - make_bopo.KL_BETA * kl

  slope = (objective(1e-5) - objective(-1e-5)) / 2e-5
  assert -(differentiate(6, 5) * direction).sum() == pytest.approx(slope, rel=1e-5)
