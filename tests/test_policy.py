"""The trained router: its cache changes nothing, its rules are kept, its shapes are few."""

import dataclasses
import random

import jax
import numpy as np
import pytest

from baar_jax.episode import Step, Task
from baar_jax.rollout.live import Job, Live
from baar_jax.router import policy as router
from baar_jax.router.build import build_model
from baar_jax.router.policy import RouterPolicy, Sample, Threshold
from baar_jax.router.view import View


def start(number: int, seed: int = 0, steps: int = 0) -> Live:
  """A live episode, perhaps with steps behind it."""
  task = Task(f"plant-{number}", "train", f"find plant {number}", 40)
  live = Live(Job(task, seed), env=None)
  live.observation = f"hall {number}"
  for _ in range(steps):
    act(live, model=len(live.steps) % 2)
  return live


def act(live: Live, model: int, logp=None) -> None:
  s = len(live.steps)
  action = f"go {live.task.id} {s}"
  live.steps.append(Step(live.observation, model, action, logp=logp))
  live.observation = f"room {s}" + " lamp" * (s % 3)


@pytest.fixture(scope="module")
def uncached(tiny_model):
  """p_A of the last token, by one forward of all tokens."""
  forward = jax.jit(lambda tokens_BxT: tiny_model.logits(tiny_model(tokens_BxT)))

  def probabilities(view, live):
    tokens = view.live_window(live).tokens
    padded = np.zeros((1, 320), np.int32)
    padded[0, : len(tokens)] = tokens
    logits = np.asarray(forward(padded), np.float64)[0, len(tokens) - 1, view.decision_ids]
    return np.exp(logits) / np.exp(logits).sum()

  return probabilities


def play(policy, episodes: int, steps: int, check=lambda live, decision: None):
  """Runs episodes of about so many steps, 3 at a time, of which some are ready; returns them."""
  draw = random.Random(0)
  waiting = [start(number, seed=number % 3) for number in range(episodes)]
  live, done = [], []
  while waiting or live:
    while waiting and len(live) < 3:
      live.append(waiting.pop())
    ready = draw.sample(live, draw.randint(1, len(live)))
    for one, decision in zip(ready, policy.choose(ready)):
      check(one, decision)
      act(one, decision.model, decision.logp)
      if len(one.steps) == steps + one.job.seed:
        policy.finish(one)
        live.remove(one)
        done.append(one)
  return done


def make_policy(model, view, config, decide=None) -> RouterPolicy:
  return RouterPolicy("router", model, view, config, decide or Sample("key"), live_episodes=3)


class TestCache:
  @pytest.mark.parametrize("kind", ["transcript", "paper"])
  def test_equals_the_uncached_forward(
    self, tiny_model, router_config, tokenizer_dir, uncached, kind
  ):
    """Over whole episodes that join and leave the batch, behind cuts of the history too."""
    config = dataclasses.replace(router_config, view=kind)
    view = View(config, tokenizer_dir)
    seen = []

    def check(live, decision):
      p_A = uncached(view, live)
      seen.append(abs(decision.logp - np.log(p_A[decision.model])))
      assert seen[-1] < 1e-4

    done = play(make_policy(tiny_model, view, config), episodes=5, steps=12, check=check)
    assert len(done) == 5 and len(seen) == sum(len(live.steps) for live in done) >= 60
    if kind == "transcript":
      assert all(view.live_window(live).first > 0 for live in done)  # every history was cut
    assert {step.model for live in done for step in live.steps} == {0, 1}

  def test_long_texts_are_fed_in_parts(self, tiny_model, router_config, view, uncached):
    """Beside a short one, in one call: the long one is longer than the largest bucket."""
    policy = make_policy(tiny_model, view, router_config)
    ready = [start(0, steps=10), start(1)]
    lengths = [len(view.live_window(live).tokens) for live in ready]
    assert lengths[0] > router.NEW_TOKENS[-1] > lengths[1]
    for live, decision in zip(ready, policy.choose(ready)):
      p_A = uncached(view, live)
      np.testing.assert_allclose(decision.logp, np.log(p_A[decision.model]), atol=1e-4)

  def test_a_long_silence_is_fed_in_parts_behind_what_is_held(
    self, tiny_model, router_config, view, uncached, monkeypatch
  ):
    """Steps that a policy is not asked about come with the next question, in parts of 32."""
    monkeypatch.setattr(router, "NEW_TOKENS", (32,))
    policy = make_policy(tiny_model, view, router_config)
    live, held = start(0), 0
    for silent in (0, 4):
      for _ in range(silent):
        act(live, model=1)
      window = view.live_window(live)
      (decision,) = policy.choose([live])
      p_A = uncached(view, live)
      np.testing.assert_allclose(decision.logp, np.log(p_A[decision.model]), atol=1e-4)
      new, held = len(window.tokens) - held, len(window.tokens)
    assert new > 3 * 32

  def test_an_episode_that_starts_again(self, tiny_model, router_config, view, uncached):
    """finish() forgets; so does asking twice for the same text."""
    policy = make_policy(tiny_model, view, router_config)
    live = start(3, steps=2)
    first = policy.choose([live])[0]
    again = policy.choose([live])[0]
    policy.finish(live)
    policy.finish(live)
    np.testing.assert_allclose([again.logp, policy.choose([live])[0].logp], first.logp, atol=1e-5)
    p_A = uncached(view, live)
    np.testing.assert_allclose(first.logp, np.log(p_A[first.model]), atol=1e-4)

  def test_few_shapes_are_compiled(self, tiny_model, filled, router_config, view, monkeypatch):
    """Whatever number of episodes is ready, and however much each has to be fed."""
    extend, shapes = router._extend, set()

    def spy(graphdef, params, cache, tokens_RxT, *rest):
      shapes.add(tokens_RxT.shape)
      return extend(graphdef, params, cache, tokens_RxT, *rest)

    monkeypatch.setattr(router, "_extend", spy)
    play(make_policy(tiny_model, view, router_config), episodes=6, steps=8)
    assert shapes <= {(R, T) for R in (1, 4) for T in router.NEW_TOKENS}
    compiled = extend._cache_size()
    assert compiled > 0
    # Other episodes with another router compile nothing.
    other = filled(lambda: build_model(router_config, 0), seed=7)
    play(make_policy(other, view, router_config), episodes=6, steps=8)
    assert extend._cache_size() == compiled


def test_only_new_tokens_are_paid_for(tiny_model, router_config, view):
  config = dataclasses.replace(router_config, usd_per_million_tokens=1e6)  # a dollar each
  policy = make_policy(tiny_model, view, config)
  live, paid, lengths = start(0), [], []
  for _ in range(3):
    (decision,) = policy.choose([live])
    paid.append(round(decision.cost_usd, 6))
    lengths.append(len(view.live_window(live).tokens))
    act(live, decision.model)
  assert paid == [lengths[0], lengths[1] - lengths[0], lengths[2] - lengths[1]]


class TestSample:
  def draws(self, decide, p_A, count=1000):
    return [decide.pick(np.array(p_A), start(n // 10, seed=n % 10)) for n in range(count)]

  def test_repeats_and_depends_on_key_task_seed_and_step(self):
    even = np.full(64, 1 / 64)  # many choices, so that chance equality is rare
    pick = lambda key, *args: Sample(key).pick(even, start(*args))  # noqa: E731
    assert pick("a", 1, 0, 0) == pick("a", 1, 0, 0)
    for other in (("b", 1, 0, 0), ("a", 2, 0, 0), ("a", 1, 1, 0), ("a", 1, 0, 1)):
      assert pick(*other) != pick("a", 1, 0, 0)

  def test_frequencies(self):
    # three standard deviations of 1,000 draws are at most 0.047
    share = np.bincount(self.draws(Sample("a"), [0.2, 0.5, 0.3]), minlength=3) / 1000
    np.testing.assert_allclose(share, [0.2, 0.5, 0.3], atol=0.047)

  def test_certainty(self):
    assert set(self.draws(Sample("a"), [0.0, 1.0], 100)) == {1}
    assert set(self.draws(Sample("a"), [1.0, 0.0], 100)) == {0}

  def test_rounding_cannot_pick_a_model_that_is_not_there(self):
    assert set(self.draws(Sample("a"), [0.0, 0.0], 20)) == {1}


@pytest.mark.parametrize(
  "value, p_A, model",
  [
    (0.5, [0.4, 0.6], 1),
    (0.5, [0.6, 0.4], 0),
    (0.5, [0.5, 0.5], 1),  # "reaches"
    (0.7, [0.4, 0.6], 0),
    (0.3, [0.6, 0.4], 1),
    (0.0, [1.0, 0.0], 1),
    (0.3, [0.2, 0.5, 0.3], 2),
    (0.5, [0.2, 0.5, 0.3], 1),  # the likeliest of the others
    (0.5, [0.5, 0.2, 0.3], 0),
  ],
)
def test_threshold(value, p_A, model):
  assert Threshold(value).pick(np.array(p_A), start(0)) == model
