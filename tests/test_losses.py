"""Check losses, their gradients and advantages against sums worked out by hand."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from baar_jax.config import BoPOConfig
from baar_jax.learn.batches import NO_TOKEN, Batch, next_token_loss
from baar_jax.paper import losses
from baar_jax.paper.bopo import compute_advantages
from baar_jax.paper.references import Profile, mean_large_usd
from baar_jax.rivals import vanilla

GARBAGE = (np.nan, np.inf, -np.inf, 1e38)


def run(loss, *arrays, **options):
  """Compile a loss with its options, and return its value and gradient."""
  gradient = jax.value_and_grad(partial(loss, **options))
  return jax.jit(gradient)(*map(jnp.asarray, arrays))


def f32(values):
  return np.array(values, np.float32)


# Probabilities of (SMALL, LARGE) at each decision; the last of episode 1 is padding.
P = f32([[[0.8, 0.2], [0.6, 0.4]], [[0.25, 0.75], [0.5, 0.5]]])
ACTION = np.array([[0, 1], [1, 0]], np.int32)
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
  # softmax(7, 7 + ln 2, 7 + ln 5) = (1, 2, 5) / 8; the reference chose the second: ln 4
  logits = 7 + np.log(f32([[[1.0, 2.0, 5.0]]]))
  loss, _ = run(losses.sft_loss, logits, np.array([[1]]), np.array([[True]]))
  np.testing.assert_allclose(loss, np.log(4), rtol=1e-6)
  assert run(losses.sft_loss, np.log(P), ACTION, np.zeros_like(MASK))[0] == 0


def batch_of(mask_BxS, **fields):
  zeros = np.zeros(np.shape(mask_BxS), np.int32)
  floats = zeros.astype(np.float32)
  defaults = dict(action_BxS=zeros, logp_BxS=floats, adv_B=floats[:, 0])
  mask_BxS = np.array(mask_BxS, bool)
  return Batch(zeros, zeros, zeros, mask_BxS=mask_BxS, **defaults | fields)


def test_dapo_weighs_decisions_equally_and_divides_by_episodes():
  """The gradient step has 5 episodes. This batch has 4 rows; two of them are padding."""
  low = np.log(0.5 / 1.5)
  mask_BxS = [[1, 1, 0], [1, 1, 0], [0, 0, 0], [0, 0, 0]]
  logp_BxS = f32([[low, 0.0, np.inf], [low, -0.5, 0], [0] * 3, [9] * 3])
  batch = batch_of(
    mask_BxS, logp_BxS=logp_BxS, adv_B=f32([2, -1, 0, 0]), episode_share=4 / 5
  )

  def step(logits):
    term = vanilla.dapo_loss(BoPOConfig(), logits, batch)["loss"]
    return term.weight * term.share * term.values.mean

  loss, gradient = run(step, jnp.zeros((4, 3, 2)))  # each decision has probability .5
  # Ratios 1.5 and .5 of a good episode, 1.5 and .5 e^.5 = .8244 of a bad one, are clipped to
  # [.8, 1.28]. Gains min(3, 2.56), min(1, 1.6), min(-1.5, -1.28), min(-.8244, -.8244).
  np.testing.assert_allclose(loss, -(2.56 + 1.0 - 1.5 - 0.8244) / 5, rtol=1e-4)
  # The gradient is 0 if clipped and on padding. Else d gain / d logit = gain * (1 - .5).
  gains = f32([[0.0, 1.0, 0.0], [-1.5, -0.8244, 0.0], [0.0] * 3, [0.0] * 3])
  np.testing.assert_allclose(gradient[:, :, 0], gains * -0.5 / 5, rtol=1e-4)


def test_bopo_clips_the_ratios_as_configured():
  """Decisions have probability .5; when they were sampled, it was .25 and .8."""
  logits = jnp.zeros((1, 2, 2))
  logp_BxS = np.log(f32([[0.25, 0.8]]))
  batch = batch_of([[1, 1]], logp_BxS=logp_BxS, adv_B=f32([1]), ref_logits_BxSxA=logits)
  config = BoPOConfig(ratio_level="decision", clip=(0.2, 0.28))
  # min(2, 1.28) and min(.625, .8)
  loss = losses.bopo_loss(config, logits, batch)["loss"].values.mean
  np.testing.assert_allclose(loss, -(1.28 + 0.625) / 2, rtol=1e-6)


def test_next_token_loss_averages_tokens_then_decisions():
  logits_BxSxV = np.log(f32([[[1, 1, 2], [1, 2, 5], [9, 9, 9]]]))
  token_BxSxM = np.array([[[2, 0], [2, NO_TOKEN], [NO_TOKEN, NO_TOKEN]]], np.int32)
  batch = batch_of([[1, 1, 1]], token_BxSxM=token_BxSxM, decision_share=0.5)
  term = next_token_loss(jnp.asarray(logits_BxSxV), batch)["loss"]
  # (ln 2 + ln 4) / 2 = 1.0397 and ln(8/5) = 0.4700; the third has no tokens.
  # The batch has half of the decisions of the step.
  expected = 0.5 * (1.0397208 + 0.4700036) / 2
  np.testing.assert_allclose(term.share * term.values.mean, expected, rtol=1e-5)


TRAJECTORY = {"ratio_level": "trajectory"}
DECISION = {"ratio_level": "decision"}
CLIPS = {"clip_low": 0.2, "clip_high": 0.28}
# Ratios pi / pi_old of two episodes with 2 and 3 decisions; 0 is padding.
RATIO = [[2.0, 0.5, 0], [1.5, 1.0, 0.5]]
ALONE = [[0, 0, 0], [0, 1.0, 0]]


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
    (DECISION | CLIPS, RATIO, (1, -2), (0.89, -2.2), [[0, 0.25, 0], [-1, -2 / 3, 0]]),
    # Each ratio is within 1.28, their product 1.25 * 1.2 = 1.5 is not; 0.5 is clipped for adv < 0.
    (TRAJECTORY | CLIPS, [[1.25, 1.2], [0.5, 1]], (1, -1), (1.28, -0.8), [[0] * 2] * 2),
    # The first episode has no decisions. The second has ratio 1; its gain is divided by 2.
    *(
      (level, ALONE, (1, -2), (0, -2), [[0] * 3, [0, -2, 0]])
      for level in (TRAJECTORY, DECISION)
    ),
    *(
      (level, [[0], [0]], (1, -2), (0, 0), [[0], [0]])
      for level in (TRAJECTORY, DECISION)
    ),
    # One clip: the other end is free. The case of two clips has the other signs.
    *(
      (level | clip, [[2.0], [0.5]], adv, gain, slope)
      for level in (TRAJECTORY, DECISION)
      for clip, adv, gain, slope in (
        ({"clip_low": 0.2}, (1, -1), (2.0, -0.8), [[2.0], [0]]),
        ({"clip_high": 0.28}, (1, -1), (1.28, -0.5), [[0], [-0.5]]),
      )
    ),
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


HARD = Profile("hard", 2.0, 10.0, [], [])
INVERTED = Profile("easy", 2.0, 1.0, [], [])  # SMALL costs more: C_min is LARGE's
PROFILES = {"h": HARD, "e": INVERTED}
LAM = 0.5


def rollout(task_id, seed, score, usd, models="SL"):
  return tiny.episode(task_id, "bopo", seed, models, score, cost_usd=usd)


# Rewards of the hard task: 0 - 0, 1.5 - 0.125, 1.5 - 0.25, 0 - 0.5: mean 0.53125, and the squared
# distances 0.28223, 0.71191, 0.51660, 1.06348 have the mean 0.64355, so std 0.80222.
COSTS = ((0, 2.0, "SL"), (1, 4.0, "SL"), (1, 6.0, "LLLL"), (0, 10.0, "SL"))
GROUP = [
  rollout("h", 8 + g, score, usd, models)
  for g, (score, usd, models) in enumerate(COSTS)
]
# Both episodes fail at cost C_min: rewards 0 and 0, std 0.
FAILED = [rollout("e", 8, 0, 1.0, "SSS"), rollout("e", 9, 0, 1.0, "SSS")]
# The rewards of the references are 1.375, above the mean, and 1.
REFERENCES = {"h": rollout("h", 0, 1, 4.0), "e": rollout("e", 0, 1, 1.0)}
# (0 - 1.375) / (0.80222 + 0.1), (1.25 - 1.375) / 0.90222, (-0.5 - 1.375) / 0.90222; and
# (0 - 1) / 0.1 = -10, clipped
GUIDED = {"h": [-1.52402, 0.0, -0.13855, -2.07821], "e": [-5.0, -5.0]}
# (0 - 0.53125) / 0.90222, ...
OF_THE_MEAN = {"h": [-0.58882, 0.93519, 0.79664, -1.14300], "e": [0.0, 0.0]}


@pytest.mark.parametrize(
  "guided, expected, clipped", [(True, GUIDED, 1), (False, OF_THE_MEAN, 0)]
)
def test_bopo_advantages_of_two_groups_by_hand(guided, expected, clipped):
  config = BoPOConfig(reference_guided=guided)
  rated, metrics = compute_advantages(
    config, [GROUP, FAILED], PROFILES, REFERENCES, LAM
  )
  kept, adv_B = zip(*rated)
  assert kept == (*GROUP, *FAILED)
  assert adv_B == pytest.approx([*expected["h"], *expected["e"]], abs=1e-4)
  assert metrics == {
    "clipped_groups": clipped,
    "reward": pytest.approx(2.125 / 6),
    "success": pytest.approx(2 / 6),
    "cost_usd": pytest.approx((2 + 4 + 6 + 10 + 1 + 1) / 6),
    # LARGE calls: 1, 1, 4, 1 and none; steps: 2, 2, 4, 2 and 3, 3
    "large_share": pytest.approx(7 / 16),
  }


# One normalised dollar is the mean of always-LARGE: (10 + 6) / 2 = 8 dollars.
VANILLA = {
  "a": Profile("hard", 2.0, 10.0, [], []),
  "b": Profile("easy", 1.0, 6.0, [], []),
}


def test_dapo_keeps_groups_with_successes_and_failures():
  # Rewards of a: 1 - .5 * 4/8 = .75 and 0 - .5 * 8/8 = -.5: mean .125, std .625. Those of b:
  # -.5 * 1/8 = -.0625 and -.5 * 9/8 = -.5625.
  group = [rollout("a", 0, 1.0, 4.0), rollout("a", 1, 0.9, 8.0)]
  bad = [rollout("b", seed, 0.5, usd) for seed, usd in enumerate((1.0, 9.0))]
  rated, metrics = vanilla.rate([group, bad], mean_large_usd(VANILLA.values()), LAM)
  kept, adv_B = zip(*rated)
  assert kept == (*group,)
  np.testing.assert_allclose(adv_B, [1.0, -1.0], rtol=1e-5)
  # Dropped groups count too.
  assert metrics["reward"] == pytest.approx((0.25 - 0.625) / 4)
  assert metrics["success"] == 0.25
  assert metrics["kept_share"] == 0.5
  good = [rollout("a", seed, 1.0, usd) for seed, usd in enumerate((1.0, 9.0))]
  rated, metrics = vanilla.rate([good], 8.0, LAM)
  assert rated == []
  assert metrics["kept_share"] == 0.0
