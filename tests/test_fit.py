"""Decision heads: what they read, their targets by hand, and that they solve a small problem."""

import contextlib
import dataclasses
import io
import itertools
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from baar_jax import open
from baar_jax.conditioned import fit as values
from baar_jax.conditioned import heads as head
from baar_jax.conditioned import policy as policies
from baar_jax.conditioned.fit import (
  Regime,
  Transitions,
  compute_target,
  fit_heads,
  make_transitions,
)
from baar_jax.conditioned.heads import (
  Heads,
  Scale,
  count_calls_left,
  describe,
  draw_heads,
  estimate,
)
from baar_jax.config import ValueConfig
from baar_jax.episode import LARGE, SMALL, Call, Episode, Step, Task, Usage
from baar_jax.llms.prices import Outlook
from baar_jax.open import Loader, load_heads
from baar_jax.rollout.jobs import Planned
from baar_jax.rollout.specs import Cap, Job, Live, PolicySpec
from baar_jax.router.inputs import learn_vocabulary
from baar_jax.run import Run
from baar_jax.stages import collect, train

TASK = Task("t", "train", "Do it.", 3)


def step(model, usd, score=None):
  return Step("seen", model, "act", [Call(model, Usage(1, 0, 1), usd)], score=score)


def episode(score, *steps):
  return Episode("t", "p", 0, [*steps], score, "done")


def transitions_of(episodes, feature_N, unit_usd=1.0) -> Transitions:
  """Transitions of a task of three steps, whose states have one given feature."""
  vocabulary = learn_vocabulary({"t": TASK}, episodes)
  states = values.read_states(vocabulary, {"t": TASK}, episodes)
  states = states._replace(features_NxD=np.array(feature_N, np.float32)[:, None])
  return make_transitions(states, episodes, unit_usd)


def make_heads(width) -> Heads:
  """Draw two heads for states of one feature."""
  scale = Scale(*np.float32([[0], [1]]), *np.float32([1, 100, 10]), np.zeros(0))
  return draw_heads(jax.random.key(0), 2, (width, width), 2, scale)


def test_transitions_of_an_episode_by_hand():
  """Gains add up to the final score, even if the environment does not score steps."""
  scored = episode(0.5, step(0, 1.0, 0.25), step(1, 2.0, 0.25), step(0, 1.0, 0.9))
  unscored = episode(0.5, step(0, 1.0), step(1, 2.0))
  data = transitions_of([scored, unscored], [0] * 5, unit_usd=2.0)
  assert data.model_N.tolist() == [0, 1, 0, 0, 1]
  assert data.cost_N.tolist() == [0.5, 1.0, 0.5, 0.5, 1.0]
  assert data.gain_N.tolist() == [0.25, 0.0, 0.25, 0.0, 0.5]
  assert data.last_N.tolist() == [False, False, True, False, True]
  assert data.states.progress_NxP[2].tolist() == [2, 1, 3]


def test_target_under_caps_and_cost_weights_by_hand():
  """LARGE counts only if a call is left. Gain and cost are .2 and .4."""
  columns = [  # (1 / (1 + cost weight), calls left after the step, is last, target)
    (1.0, 1.0, False, 0.2 + 0.6),
    (1.0, 0.0, False, 0.2 + 0.4),
    (0.5, np.inf, False, 0.1 - 0.2 + 0.6),
    (0.5, np.inf, True, 0.1 - 0.2),
  ]
  for weight, calls, last, target in columns:
    value = jnp.array(0.5)
    advantage = jnp.array([-0.1, 0.1])
    reward = Regime(calls, weight).weigh(0.2, 0.4)
    got = compute_target(reward, last, value, advantage, calls)
    assert got == pytest.approx(target, abs=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_a_target_under_a_cap_is_at_most_the_one_without(sign):
  """The value rises or falls with the calls that are left. A step of SMALL earns nothing.

  So each target without the bound equals the value, and only falling values change.
  """
  heads = make_heads(1)
  zero = np.zeros((2, 1), np.float32)
  one = np.ones((2, 1, 1), np.float32)
  calls = np.zeros((2, 1 + head.TERMS, 1), np.float32)
  calls[:, 1] = 1
  nets = heads.nets._replace(value=[(calls, zero), (one, zero), (sign * one, zero)])
  steps = [step(SMALL, 0.0, 0.0)] * 2
  data = transitions_of([episode(0.0, *steps)], [0, 0])
  data = data._replace(last_N=np.array([False, False]))
  config = ValueConfig(updates=1, heads=2, noise=0)
  ((_, _, loss),) = fit_heads(heads._replace(nets=nets), data, config, seed=0)
  # The value of no cap is SiLU(SiLU(1)) = 0.4936, and that of no call left is 0.
  assert 0.01 < loss < 0.4936**2 if sign < 0 else loss == pytest.approx(0, abs=1e-9)


def test_calls_left_by_hand():
  """A call costs $0.5 now and $0.2 when it is repeated; nothing cached, it costs $0.6."""
  outlook = Outlook(0, usd=0.5, repeat_usd=0.2, cold_usd=0.6)
  steps = [step(LARGE, 0.5), step(SMALL, 0.25)]
  for cap, left in [
    (Cap().after(steps), np.inf),
    (Cap(3).after(steps), 2),
    (Cap(usd=0.59), 0),
    # $0.1 or $0.4 remain after the first call, too little for another cold prompt.
    (Cap(usd=0.6), 1),
    (Cap(usd=0.9), pytest.approx(1)),
    # Half way between one call and two. $0.6 remain, enough for one more; $1, for three.
    (Cap(usd=1.0), pytest.approx(1.5)),
    (Cap(usd=1.1), pytest.approx(2)),
    (Cap(usd=1.5), pytest.approx(4)),
    (Cap(2, 1.5), 2),
  ]:
    assert count_calls_left(cap, outlook) == left


def test_terms_by_hand():
  progress = np.array([[1, 1, 4]] * 2)
  free, capped = describe(np.array([np.inf, 2]), 0.5, progress)
  assert free[:4].tolist() == [1, pytest.approx(np.log(21) / 3), 1, 1]
  assert capped[:4].tolist() == pytest.approx([0.1, np.log(3) / 3, 2 / 3, 0])
  expected = [0.5, 0.5**0.5, 0.25, 0.5, 0.05]
  assert capped[4:].tolist() == pytest.approx(expected)


def test_heads_learn_the_best_plan_of_each_cap_and_cost_weight(monkeypatch):
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
  monkeypatch.setattr(values, "BATCH_DECISIONS", 128)
  monkeypatch.setattr(values, "LEARNING_RATE", 1e-2)
  config = ValueConfig(
    updates=2000,
    heads=2,
    noise=0,
    weight_decay=0,
  )
  *_, (done, heads, loss) = fit_heads(make_heads(16), data, config, seed=0)
  assert done == 2000 and loss < 0.01
  progress = np.array([[0, 0, 3], [1, 0, 3], [2, 0, 3]])
  for left, cost_weight, *gains in [  # of LARGE over SMALL, by step
    (3.0, 0.0, 0.3, 0.5, 0.4),
    # At the first step, LARGE takes a call from the third.
    (2.0, 0.0, 0.3 - 0.4, 0.5, 0.4),
    (1.0, 0.0, 0.3 - 0.5, 0.5 - 0.4, 0.4),
    (np.inf, 1 / 19, 0.95 * 0.3 - 0.05, 0.95 * 0.5 - 0.05, 0.95 * 0.4 - 0.05),
    (np.inf, 1 / 3, 0.75 * 0.3 - 0.25, 0.75 * 0.5 - 0.25, 0.75 * 0.4 - 0.25),
    (np.inf, 1.0, 0.5 * 0.3 - 0.5, 0.5 * 0.5 - 0.5, 0.5 * 0.4 - 0.5),
  ]:
    state = describe(np.full(3, left), 1 / (1 + cost_weight), progress)
    value_S, advantage_SxA = estimate(heads, np.array([[-1.0], [0.0], [1.0]]), state)
    np.testing.assert_allclose(np.diff(advantage_SxA)[:, 0], gains, atol=0.1)
    # SMALL earns nothing, so the best plan's value is the sum of positive gains to come.
    best_S = np.cumsum(np.maximum(gains, 0)[::-1])[::-1]
    np.testing.assert_allclose(value_S + advantage_SxA.max(axis=1), best_S, atol=0.08)


@pytest.fixture
def run(tmp_path):
  config = tiny.config(tmp_path)
  config.value = ValueConfig(updates=3, cost_weights=(0.5, 1.0), heads=2)
  with contextlib.closing(Run(config)) as run:
    collect.profile(run)
    collect.references(run)
    train.value(run)
    yield run


def test_policy_and_fit_see_equal_states_and_terms(run, monkeypatch):
  """A policy decides on the states and terms that the heads learn from. A cap-blind policy
  has the terms of no cap. Without a cost weight, the least one counts."""
  training = run.files()
  _, vocabulary = load_heads(training)
  loader = Loader(training, 1, run.source.pair, run.store)
  jobs = [Job(task, "dev", 0) for task in run.store.tasks("train")]
  for is_conditioned, weight in ((True, None), (False, 1.0), (True, 0.7)):
    estimate = Mock(wraps=head.estimate)
    monkeypatch.setattr(policies, "estimate", estimate)
    spec = PolicySpec("conditioned", cost_weight=weight, cap=Cap(3))
    spec = dataclasses.replace(spec, cap_conditioned=is_conditioned)
    played = run.source.episodes("capped", Planned(spec, jobs), loader.build)
    stored = {episode.task_id: episode for episode in played}
    episodes = [stored[job.task.id] for job in jobs]
    assert len({len(e.steps) for e in episodes}) > 1
    states = values.read_states(
      vocabulary, {job.task.id: job.task for job in jobs}, episodes
    )
    decisions = iter(estimate.call_args_list)
    left_N = 3 - states.progress_NxP[:, 1]
    for n in np.flatnonzero(left_N):  # without a call left, there is no choice
      # One episode lives at a time.
      _, (features,), (terms,) = next(decisions).args
      np.testing.assert_allclose(features, states.features_NxD[n], atol=1e-5)
      calls_left = left_N[n] if is_conditioned else np.inf
      expected = describe(calls_left, 1 / (1 + (weight or 0.5)), states.progress_NxP[n])
      np.testing.assert_allclose(terms, expected, rtol=1e-6)
    assert next(decisions, None) is None
  (decision,) = loader.build(spec).choose([Live(jobs[0], observation="A door.")])
  assert type(decision.known) is float  # JSON has no numbers of NumPy


DAMAGED = r"value_heads.npz is missing or damaged \(.+\): delete"


def test_heads_are_saved_once_and_damage_is_noticed(run, monkeypatch):
  """A second fit does nothing. A damaged file is an error of one line."""
  training = run.files()
  path = training.checkpoints("value") / "value_heads.npz"
  stored = path.read_bytes()
  heads, vocabulary = load_heads(training)
  tasks = {task.id: task for task in run.store.tasks("train")}
  episodes = open.load_value_episodes(run.store, run.config)
  # Nothing of the vocabulary is lost in the file.
  learnt = learn_vocabulary(tasks, episodes)
  jax.tree.map(np.testing.assert_array_equal, vocabulary, learnt)
  # 26 facts, 48 of offers and 48 directions of words.
  assert heads.scale.mean_D.shape == (26 + 48 + 48,)
  assert heads.nets.value[0][0].shape == (2, 122 + head.TERMS, 64)
  assert heads.nets.advantage[2][0].shape == (2, 32, 2)
  train.value(run)
  assert path.read_bytes() == stored
  arrays = dict(np.load(path))
  first = arrays["arr_0"]
  for changes in (
    {"arr_0": np.array(np.nan)},
    {"arr_0": np.array([{}])},  # a pickled object
    {"arr_0": first[:, 1:]},  # weights for other inputs
    {"arr_0": np.array(1.0)},
    {"arr_0": first[..., :0]},
    {"arr_0": first.astype(str)},
    {"arr_0": first.astype([("a", "f4")])},
    {"arr_12": arrays["arr_12"][1:]},
    {"arr_18": arrays["arr_18"].T},
    {"arr_19": np.array('[[], 1.0, {"a": "b"}]')},
    {"foreign": first},
  ):
    np.savez(path, **arrays | changes)
    with pytest.raises(ValueError, match=DAMAGED):
      load_heads(training)
  array = io.BytesIO()
  np.save(array, first)
  for content in (stored[:-100], b"", array.getvalue()):
    path.write_bytes(content)
    with pytest.raises(ValueError, match=DAMAGED):
      load_heads(training)
  path.unlink()
  monkeypatch.setattr(values, "fit_heads", lambda heads, *_: [(2, heads, np.nan)])
  problem = "^value stopped: update 2 has loss nan; last good"
  with pytest.raises(ValueError, match=problem):
    train.value(run)
  assert not path.exists()
