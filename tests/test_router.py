"""The trained router: its cache changes nothing, its rules are kept, its shapes are few."""

import dataclasses
import json
import random

import hf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from baar_jax.episode import Step, Task
from baar_jax.rollout.live import Job, Live
from baar_jax.router import build
from baar_jax.router import policy as router
from baar_jax.router.build import build_model
from baar_jax.router.policy import RouterPolicy, Sample, Threshold
from baar_jax.router.tokenizer import adopt_tokenizer
from baar_jax.router.view import View
from baar_jax.router.weights import save_qwen2


def start(number: int, seed: int = 0, steps: int = 0) -> Live:
  """A live episode, perhaps with steps behind it."""
  task = Task(f"plant-{number}", "train", f"find plant {number}", 40)
  live = Live(Job(task, seed), env=None, call_budget=None, budget=None)
  live.observation = f"hall {number}"
  for _ in range(steps):
    act(live, model=len(live.steps) % 2)
  return live


def act(live: Live, model: int, logp=None) -> None:
  s = len(live.steps)
  action = f"go {live.task.id} {s}"
  live.steps.append(Step(live.observation, model, action, logp=logp))
  live.observation = f"room {s}" + " lamp" * (s % 3)


@pytest.mark.parametrize("tied", [True, False])
def test_decisions_start_alike(router_config, filled, tied):
  config = dataclasses.replace(router_config, tie_word_embeddings=tied)
  model = filled(lambda: build_model(config, 0))
  tables = [model.embedding_VxD] if tied else [model.embedding_VxD, model.head_VxD]
  befores = [np.array(table[...]) for table in tables]
  ids = [3, 5]
  build.start_alike(model, ids)
  for before, table in zip(befores, tables):
    after = np.array(table[...])
    others = [v for v in range(len(before)) if v not in ids]
    np.testing.assert_array_equal(after[others], before[others])
    np.testing.assert_allclose(after[ids], [(before[3] + before[5]) / 2] * 2, rtol=1e-6)
  hidden_D = np.random.default_rng(0).normal(size=config.hidden_size)
  small, large = np.asarray(model.logits(hidden_D, np.array(ids)))
  assert small == large != 0


@pytest.fixture(scope="module")
def uncached(tiny_model):
  """p_A of the last token, by one forward of all tokens."""
  forward = jax.jit(lambda tokens_BxT: tiny_model.logits(tiny_model(tokens_BxT)))

  def probabilities(view, live):
    tokens = view.windows(live.task, live.steps, live.observation, None)[-1].tokens
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
      windows = [view.windows(live.task, live.steps, None, None) for live in done]
      assert all(len(parts) > 1 for parts in windows)  # every history was cut
    assert {step.model for live in done for step in live.steps} == {0, 1}

  def test_long_texts_are_fed_in_parts(self, tiny_model, router_config, view, uncached):
    """Beside a short one, in one call: the long one is longer than the largest bucket."""
    policy = make_policy(tiny_model, view, router_config)
    ready = [start(0, steps=10), start(1)]
    lengths = [
      len(view.windows(live.task, live.steps, live.observation, None)[-1].tokens) for live in ready
    ]
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
      (window,) = view.windows(live.task, live.steps, live.observation, None)
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
    lengths.append(len(view.windows(live.task, live.steps, live.observation, None)[-1].tokens))
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


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
class TestPretrained:
  """A Hugging Face directory as the router that training starts from."""

  WORDS = (["Ġ", "S", "M", "A", "LL"], ["Ġ", "B", "I", "G"])  # " SMALL" and " BIG" in tokens

  def leaves(self, model):
    return jax.tree.leaves(nnx.split(model)[1])

  @pytest.fixture
  def adopt(self, router_config, tmp_path):
    """adopt(directory): what a run makes of a checkpoint: its configuration and its view."""

    def make(directory):
      adopt_tokenizer(directory, tmp_path / "tokenizer")
      config = dataclasses.replace(router_config, weights=str(directory))
      return config, View(config, tmp_path / "tokenizer")

    return make

  @pytest.mark.parametrize(
    "vocab_size, tokens, rows",
    [
      (307, 300, 307),  # seven spare rows
      (302, 300, 302),  # as many as there are decisions
      (301, 300, 384),  # one too few: 3 * 128
      (300, 300, 384),
      (383, 383, 512),  # the second decision is row 384, the first of the next block
    ],
  )
  def test_decisions_start_as_their_words(self, tied, vocab_size, tokens, rows, adopt, tmp_path):
    shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    config, view = adopt(hf.write(tmp_path / "base", shape, tokens=tokens))
    small, big = view.decision_ids
    assert (small, big) == (tokens, tokens + 1)  # behind all of its own
    model = build.load_pretrained(config, view)

    written = dict(hf.tensors(shape))
    tables = {"model.embed_tokens.weight": model.embedding_VxD}
    if not tied:
      tables["lm_head.weight"] = model.head_VxD
    number_of = json.loads((tmp_path / "base" / "tokenizer.json").read_text())["model"]["vocab"]
    for name, table in tables.items():
      before, after = written[name], np.asarray(table[...])
      assert after.shape == (rows, 48)
      for row, word in zip((small, big), self.WORDS):
        want = sum(before[number_of[token]] for token in word) / len(word)
        np.testing.assert_allclose(after[row], want, atol=1e-6)
      others = [row for row in range(vocab_size) if row not in (small, big)]
      np.testing.assert_array_equal(after[others], before[others])
      assert np.isfinite(after).all()
    np.testing.assert_array_equal(model.final_norm[...], written["model.norm.weight"])

    # Checkpoints are restored into this shape.
    assert model.config == build.shape_of(config, view.decision_ids)
    assert model.config.vocab_size == rows
    abstract = build.abstract_model(config, view.decision_ids)
    sizes = [[(x.shape, x.dtype) for x in self.leaves(m)] for m in (model, abstract)]
    assert sizes[0] == sizes[1]
    hidden_D = jnp.ones(48)
    want = np.asarray(list(tables.values())[-1][...])[[small, big]].sum(axis=1)
    np.testing.assert_allclose(model.logits(hidden_D, np.array([small, big])), want, atol=1e-5)

  @pytest.mark.parametrize("vocab_size", [307, 300], ids=["spare", "grown"])
  def test_a_saved_router_keeps_its_decisions(self, tied, vocab_size, adopt, tmp_path):
    shape = hf.SHAPES["grouped"] | {"vocab_size": vocab_size, "tie_word_embeddings": tied}
    config, view = adopt(hf.write(tmp_path / "base", shape, tokens=300))
    model = build.load_pretrained(config, view)
    ids = np.array(view.decision_ids)
    model.embedding_VxD[...] = model.embedding_VxD[...].at[ids].set(7.0)  # trained
    if not tied:
      model.head_VxD[...] = model.head_VxD[...].at[ids].set(8.0)
    tokenizer = tmp_path / "tokenizer" / "tokenizer.json"
    save_qwen2(model, tmp_path / "saved", tokenizer, jnp.float32)
    config, view = adopt(tmp_path / "saved")
    assert view.decision_ids == ids.tolist()
    again = build.load_pretrained(config, view)
    assert again.config == model.config
    for after, before in zip(self.leaves(again), self.leaves(model), strict=True):
      np.testing.assert_array_equal(after, before)
    assert (again.embedding_VxD[...][ids] == 7.0).all()
    assert tied or (again.head_VxD[...][ids] == 8.0).all()
