"""Decision heads: what they read, their targets by hand, and that they solve a small problem."""

import contextlib
import dataclasses
import itertools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from baar_jax.config import ValueConfig
from baar_jax.episode import (
  LARGE,
  SMALL,
  Call,
  Episode,
  Step,
  Task,
  Usage,
)
from baar_jax.llms.prices import Outlook
from baar_jax.rollout.specs import Cap, Job, PolicySpec
from baar_jax.router import head
from baar_jax.router import policy as policies
from baar_jax.router.head import (
  Heads,
  Scale,
  count_calls_left,
  describe,
  draw_heads,
  estimate,
)
from baar_jax.router.policy import ConditionedPolicy
from baar_jax.run import Run
from baar_jax.stages import train
from baar_jax.train import values
from baar_jax.train.values import (
  Regime,
  States,
  Transitions,
  compute_returns,
  compute_target,
  fit_heads,
  make_transitions,
)

TASK = Task("t", "train", "Do it.", 4)


def step(model, usd, score=None):
  return Step("seen", model, "act", [Call(model, Usage(1, 0, 1), usd)], score=score)


def episode(score, *steps):
  return Episode("t", "p", 0, [*steps], score, "done")


def transitions_of(episodes, hidden_N) -> Transitions:
  """Transitions of a task of three steps, with hidden states of size 1."""
  progress = [row for e in episodes for row in head.count_progress(3, e.steps)]
  states = States(np.array(hidden_N, np.float32)[:, None], np.array(progress))
  return make_transitions(states, episodes, unit_usd=1.0)


def make_heads(width, hidden_size) -> Heads:
  mean_D, spread_D = np.zeros(hidden_size, np.float32), np.ones(hidden_size, np.float32)
  scale = Scale(mean_D, spread_D, *np.float32([1, 100, 10]))
  return draw_heads(jax.random.key(0), 2, (width, width), 2, scale)


def test_transitions_of_an_episode_by_hand():
  """Gains add up to the final score, even if the environment does not score steps."""
  scored = episode(0.5, step(0, 1.0, 0.25), step(1, 2.0, 0.25), step(0, 1.0, 0.9))
  states = States(np.zeros((5, 1)), np.zeros((5, 6)))
  unscored = episode(0.5, step(0, 1.0), step(1, 2.0))
  data = make_transitions(states, [scored, unscored], unit_usd=2.0)
  assert data.model_N.tolist() == [0, 1, 0, 0, 1]
  assert data.cost_N.tolist() == [0.5, 1.0, 0.5, 0.5, 1.0]
  assert data.gain_N.tolist() == [0.25, 0.0, 0.25, 0.0, 0.5]
  assert data.last_N.tolist() == [False, False, True, False, True]
  progress = ((0, 0, 4, 0, 0, 0), (1, 0, 4, 1, 0, 1), (2, 1, 4, 2, 1, 2))
  assert tuple(head.count_progress(TASK.max_steps, scored.steps)) == progress


def test_progress_by_hand():
  """A repeated observation is no progress. A new one sets the counts of stale steps to 0."""
  steps = [
    dataclasses.replace(step(int(m), 1.0), observation=o)
    for m, o in zip("10100", "ababc")
  ]
  first, second, _, fourth, fifth = head.count_progress(9, steps)
  assert first == (0, 0, 9, 0, 0, 0) and second == (1, 1, 9, 0, 0, 0)
  assert fourth == (3, 2, 9, 2, 1, 2) and fifth == (4, 2, 9, 0, 0, 2)


def test_optimism_takes_large_unless_the_heads_agree():
  """LARGE's advantage over SMALL is -0.3 and 0.1 in two heads: mean -0.1, deviation 0.2."""
  heads = make_heads(1, 1)
  bias_ExA = np.array([[0.0, -0.3], [0.0, 0.1]]) / head.ADVANTAGE_UNIT
  *layers, (weight, _) = heads.advantage
  heads = heads._replace(advantage=[*layers, (weight, bias_ExA)])
  state = np.zeros((1, 1)), np.zeros((1, head.FACTS))
  gaps = [
    np.diff(estimate(heads, *state, optimism)[1]).item() for optimism in (0.0, 1.0)
  ]
  assert gaps == pytest.approx([-0.1, 0.1], abs=1e-6)


def test_target_under_caps_and_cost_weights_by_hand():
  """LARGE counts only if a call is left. Gain and cost are .2 and .4."""
  columns = [  # (1 / (1 + cost weight), calls left after the step, is last, target)
    (1.0, 1.0, False, 0.2 + 0.6),
    (1.0, 0.0, False, 0.2 + 0.4),
    (0.5, np.inf, False, 0.1 - 0.2 + 0.6),
    (0.5, np.inf, True, 0.1 - 0.2),
  ]
  for weight, calls, last, target in columns:
    value, advantage = jnp.array(0.5), jnp.array([-0.1, 0.1])
    reward = Regime(calls, weight).weigh(0.2, 0.4)
    got = compute_target(reward, last, value, advantage, calls)
    assert got == pytest.approx(target, abs=1e-6)


def test_calls_left_by_hand():
  """A call costs $0.5 now and $0.2 when it is repeated; nothing cached, it costs $0.6."""
  outlook = Outlook(0, usd=0.5, repeat_usd=0.2, cold_usd=0.6)
  steps = [step(LARGE, 0.5), step(SMALL, 0.25)]
  assert count_calls_left(Cap().after(steps), outlook) == float("inf")
  assert count_calls_left(Cap(3).after(steps), outlook) == 2
  assert count_calls_left(Cap(usd=0.59), outlook) == 0
  # $0.1 or $0.4 remain after the first call, too little for another cold prompt.
  assert count_calls_left(Cap(usd=0.6), outlook) == 1
  assert count_calls_left(Cap(usd=0.9), outlook) == pytest.approx(1)
  # Half way between one call and two. $0.6 remain, enough for one more; $1, for three.
  assert count_calls_left(Cap(usd=1.0), outlook) == pytest.approx(1.5)
  assert count_calls_left(Cap(usd=1.1), outlook) == pytest.approx(2)
  assert count_calls_left(Cap(usd=1.5), outlook) == pytest.approx(4)
  assert count_calls_left(Cap(2, 1.5), outlook) == 2


def test_facts_by_hand():
  progress = np.array([[1, 1, 4, 2, 1, 2]] * 2)
  free, capped = describe(np.array([np.inf, 2]), 1.0, progress)
  assert free[:4].tolist() == [1, pytest.approx(np.log(21) / 3), 1, 1]
  assert capped[:4].tolist() == pytest.approx([0.1, np.log(3) / 3, 2 / 3, 0])
  expected = [0.5, 0.5**0.5, 0.25, 0.5, 0.05, np.log(3) / 3, np.log(2) / 2, 0.5]
  assert capped[4:].tolist() == pytest.approx(expected)


def test_returns_end_with_their_episode():
  episodes = episode(1.0, step(0, 1.0), step(1, 1.0)), episode(0.5, step(0, 1.0))
  data = transitions_of(episodes, [0, 0, 0])
  gain_N, cost_N = compute_returns(data)
  assert gain_N.tolist() == [1.0, 1.0, 0.5] and cost_N.tolist() == [2.0, 1.0, 1.0]


def test_heads_learn_the_best_plan_of_each_cap_and_cost_weight():
  """In three steps LARGE, at one dollar, earns 0.3, 0.5 and 0.4. SMALL earns nothing.

  All eight plans are stored. One call is best used at the second step, two at the second and third.
  At cost weight 1/19 scores count .95 and dollars .05, so LARGE is better at each step. At cost
  weight 1/3 it is not better at the first step, and at 1 at no step.
  """
  episodes = []
  for plan in itertools.product((SMALL, LARGE), repeat=3):
    scores = np.cumsum(np.multiply(plan, (0.3, 0.5, 0.4)))
    episodes.append(episode(scores[-1], *map(step, plan, plan, scores)))
  data = transitions_of(episodes * 8, [-1, 0, 1] * 8 * 8)
  exact = {"learning_rate": 1e-2, "noise": 0, "weight_decay": 0}
  config = ValueConfig(updates=2000, heads=2, batch_decisions=128, **exact)
  *_, (done, heads, loss) = fit_heads(make_heads(16, 1), data, config, seed=0)
  assert done == 2000 and loss < 0.01
  progress = np.array([[0, 0, 3, 0, 0, 0], [1, 0, 3, 1, 0, 1], [2, 0, 3, 2, 0, 2]])
  for left, cost_weight, *gains in [  # of LARGE over SMALL, by step
    (3.0, 0.0, 0.3, 0.5, 0.4),
    (
      2.0,
      0.0,
      0.3 - 0.4,
      0.5,
      0.4,
    ),  # at the first step, LARGE takes a call from the third
    (1.0, 0.0, 0.3 - 0.5, 0.5 - 0.4, 0.4),
    (np.inf, 1 / 19, 0.95 * 0.3 - 0.05, 0.95 * 0.5 - 0.05, 0.95 * 0.4 - 0.05),
    (np.inf, 1 / 3, 0.75 * 0.3 - 0.25, 0.75 * 0.5 - 0.25, 0.75 * 0.4 - 0.25),
    (np.inf, 1.0, 0.5 * 0.3 - 0.5, 0.5 * 0.5 - 0.5, 0.5 * 0.4 - 0.5),
  ]:
    state = describe(np.full(3, left), cost_weight, progress)
    value_S, advantage_SxA = estimate(heads, np.array([[-1.0], [0.0], [1.0]]), state)
    np.testing.assert_allclose(np.diff(advantage_SxA)[:, 0], gains, atol=0.1)
    # SMALL earns nothing, so the best plan's value is the sum of positive gains to come.
    best_S = np.cumsum(np.maximum(gains, 0)[::-1])[::-1]
    np.testing.assert_allclose(value_S + advantage_SxA.max(axis=1), best_S, atol=0.08)


@pytest.fixture
def run(tmp_path):
  config = tiny.config(tmp_path)
  config.router.tie_word_embeddings = False
  config.value.updates, config.value.heads = 3, 2
  with contextlib.closing(Run(config)) as run:
    yield run


@pytest.mark.parametrize(
  "optimism, weight", [(None, None), (0, 1.0), (2, None), (None, 0.7)]
)
def test_policy_and_fit_see_equal_states_and_facts(run, monkeypatch, optimism, weight):
  """A policy decides on the hidden states and facts that the heads learn from. A cap-blind policy
  has the facts of no cap. Without a cost weight, the least one counts."""
  train.profile(run)
  view = run.training().open_trunk_view()
  trunk = values.checkpoint.load_initial(run.training(), view)
  heads = make_heads(8, 16)
  estimate = Mock(wraps=policies.estimate)
  is_conditioned = optimism is None
  spec = PolicySpec("c", optimism=optimism, cap_conditioned=is_conditioned, cap=Cap(3))
  spec = dataclasses.replace(spec, cost_weight=weight)
  bundle = policies.Values(heads, [0.5, 1.0], run.training().billing)
  policy = ConditionedPolicy(spec, trunk, view, bundle, 1)
  with pytest.raises(
    ValueError,
    match=" NaN in hidden states of the budget-conditioned router, expected finite",
  ):
    policy._predict(np.full((1, 16), np.nan), ())
  monkeypatch.setattr(policies, "estimate", estimate)
  jobs = [Job(task, "dev", 0) for task in run.store.tasks("train")]
  stored = {
    e.task_id: e for e in run.collect("capped", spec, jobs, lambda spec: policy)
  }
  episodes = [stored[job.task.id] for job in jobs]
  assert len({len(e.steps) for e in episodes}) > 1
  data = values.read_states(run.training(), episodes)
  decisions = iter(estimate.call_args_list)
  left_N = 3 - data.progress_NxP[:, 1]
  for n in np.flatnonzero(left_N):  # without a call left, there is no choice
    _, (hidden,), (facts,), added = next(decisions).args  # one episode lives at a time
    np.testing.assert_allclose(hidden, data.hidden_NxD[n], atol=1e-5)
    expected = describe(
      left_N[n] if is_conditioned else np.inf,
      weight or 0.5,
      data.progress_NxP[n],
    )
    np.testing.assert_allclose(facts, expected, rtol=1e-6)
    assert added == (optimism or 0)
  assert next(decisions, None) is None


def test_heads_are_saved_once_and_damage_is_noticed(run, tmp_path, monkeypatch):
  """A second fit does nothing. A damaged file is an error of one line."""
  train.profile(run)
  values.fit_values(run.training())
  path = tmp_path / "tiny" / "checkpoints" / "value" / "value_heads.npz"
  stored, heads = path.read_bytes(), values.load_heads(run.training())
  assert [len(heads.value), len(heads.advantage), heads.scale.mean_D.shape] == [
    3,
    3,
    (16,),
  ]
  assert heads.advantage[2][0].shape == (2, 32, 2) and heads.value[0][0].shape == (
    2,
    16 + head.FACTS,
    64,
  )
  values.fit_values(run.training())
  assert path.read_bytes() == stored
  arrays = dict(np.load(path))
  # The arrays have nan, a pickled object, weights for other inputs, and a wrong shape.
  for array in (
    np.array(np.nan),
    np.array([{}]),
    arrays["arr_0"][:, 1:],
    np.array(1.0),
  ):
    np.savez(path, **arrays | {"arr_0": array})
    with pytest.raises(
      ValueError, match=r"value_heads.npz is missing or damaged \(.+\): delete"
    ):
      values.load_heads(run.training())
  path.write_bytes(stored[:-100])
  with pytest.raises(
    ValueError, match="value_heads.npz is missing or damaged .*not a zip"
  ):
    values.load_heads(run.training())
  path.unlink()
  monkeypatch.setattr(values, "fit_heads", lambda heads, *_: [(2, heads, np.nan)])
  with pytest.raises(
    ValueError, match="^value stopped: update 2 has loss nan; last good"
  ):
    values.fit_values(run.training())
  assert not path.exists()
