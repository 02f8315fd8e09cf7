"""Test routers as policies: their KV cache, rules, batch shapes, and the judge."""

import math
import random
from functools import partial
from unittest.mock import Mock

import jax
import numpy as np
import pytest
import tiny
from tiny import call
from tiny_router import VIEW, draw_model, make_view

from baar_jax.conditioned.policy import ConditionedPolicy, ConditionedSpec
from baar_jax.episode import Call, Reply, Step, Task, Usage
from baar_jax.families.zero_shot import ZeroShotPolicy
from baar_jax.llms.prices import Billing, CacheRule, Price
from baar_jax.rollout.budget import CallBudget, DollarBudget, unlimited
from baar_jax.rollout.policy import StepContext
from baar_jax.rollout.specs import Cap, Job, Live, PolicySpec
from baar_jax.router import reader
from baar_jax.router.inputs import describe
from baar_jax.router.policy import (
  RouterPolicy,
  apply_threshold,
  sample,
  switch_thresholds,
)


def start(number: int, seed: int = 0) -> Live:
  """Start an episode of a task with a number."""
  task = Task(f"plant-{number}", "train", f"find plant {number}", 40)
  live = Live(Job(task, "profile", seed))
  live.observation = f"hall {number}"
  return live


def act(live: Live, model: int, logp=None) -> None:
  """Add a step of a model to an episode."""
  s = len(live.steps)
  live.steps.append(Step(live.observation, model, f"go {live.task.id} {s}", logp=logp))
  live.observation = f"room {s}" + " lamp" * (s % 3)


def play(policy, check):
  """Play 5 episodes, at most 3 at a time. Each batch has a random subset of these.

  The episodes have 12 to 14 steps.

  Args:
    policy: decides for the batches.
    check: gets each live episode with its decision.

  Returns:
    The episodes, in the order of their ends.
  """
  draw = random.Random(0)
  waiting = [start(number, seed=number % 3) for number in range(5)]
  running = []
  finished = []
  while waiting or running:
    while waiting and len(running) < 3:
      running.append(waiting.pop())
    ready = draw.sample(running, draw.randint(1, len(running)))
    for live, decision in zip(ready, policy.choose(ready)):
      check(live, decision)
      act(live, decision.model, decision.logp)
      if len(live.steps) == 12 + live.job.seed:
        policy.finish(live)
        running.remove(live)
        finished.append(live)
  return finished


def make_policy(view=VIEW) -> RouterPolicy:
  """Make a policy for three live episodes."""
  feed = reader.Reader(draw_model(), view, rows=3)
  return RouterPolicy(PolicySpec("router"), feed, partial(sample, "key"))


@pytest.mark.parametrize(
  "kind, lengths",
  [(kind, reader.NEW_TOKENS) for kind in ("transcript", "paper")]
  + [("transcript", (16,))],
)
def test_the_cached_router_equals_an_uncached_forward_pass(kind, lengths, monkeypatch):
  """Whole episodes join and leave the batch, and their texts are cut.

  The batches have few shapes. With calls of 16 tokens, the text of a step needs several
  calls.
  """
  monkeypatch.setattr(reader, "NEW_TOKENS", lengths)
  extend = Mock(side_effect=reader._extend)
  monkeypatch.setattr(reader, "_extend", extend)
  limit = {"transcript": 320, "paper": 400}[kind]
  view = make_view(view=kind, max_tokens=limit)
  model = draw_model()
  forward = jax.jit(lambda tokens_BxT: model.logits(model(tokens_BxT)))

  def check(live, decision):
    tokens = view.live_window(live).tokens
    padded = np.pad(np.array([tokens], np.int32), ((0, 0), (0, limit - len(tokens))))
    logits_BxTxV = np.asarray(forward(padded), np.float64)
    logits_A = logits_BxTxV[0, len(tokens) - 1, view.decision_ids]
    logp_A = logits_A - np.log(np.exp(logits_A).sum())
    assert decision.logp == pytest.approx(logp_A[decision.model], abs=1e-4)

  finished = play(make_policy(view), check)
  assert len(finished) == 5
  shapes = {call.args[3].tokens_RxT.shape for call in extend.call_args_list}
  assert shapes <= {(R, T) for R in (1, 4) for T in lengths}
  if kind == "transcript":
    # Every text was cut.
    texts = [view.tokenizer.decode(view.live_window(live).tokens) for live in finished]
    assert all(" omitted" in text for text in texts)
  assert {step.model for live in finished for step in live.steps} == {0, 1}


def test_only_new_tokens_are_paid_for(monkeypatch):
  """The whole text is paid for after finish(), or a repeated question."""
  monkeypatch.setattr(reader, "USD_PER_TOKEN", 1.0)
  policy = make_policy()
  live = start(0)
  paid = []
  lengths = [0]
  for _ in range(3):
    (decision,) = policy.choose([live])
    paid.append(decision.cost_usd)
    lengths.append(len(VIEW.live_window(live).tokens))
    act(live, decision.model)
  np.testing.assert_allclose(paid, np.diff(lengths))
  (new,) = policy.choose([live])
  (again,) = policy.choose([live])
  assert again.cost_usd == len(VIEW.live_window(live).tokens) > new.cost_usd
  np.testing.assert_allclose(again.logp, new.logp, atol=1e-5)
  policy.finish(live)
  act(live, 0)
  assert policy.choose([live])[0].cost_usd == len(VIEW.live_window(live).tokens)


def test_a_sample_repeats_and_depends_on_key_task_seed_and_step():
  # With 64 equally probable choices, two draws are rarely equal by chance.
  even = np.full(64, 1 / 64)
  lives = [start(0), start(0), start(1), start(0, seed=1), start(0)]
  act(lives[-1], 0)
  draw = lambda: [sample(key, even, x) for key, x in zip("abaaa", lives)]  # noqa: E731
  first = draw()
  assert first == draw() and first[0] not in first[1:]
  # If rounded probabilities add up to less than 1, the last model is picked.
  assert sample("a", np.zeros(2), start(0)) == 1
  p_A = np.array([0.2, 0.5, 0.3])
  draws = [sample("a", p_A, start(n // 10, seed=n % 10)) for n in range(1000)]
  # Three standard deviations of a share of 1,000 draws are at most 0.047.
  np.testing.assert_allclose(np.bincount(draws) / 1000, p_A, atol=0.047)


def test_a_threshold_weighs_the_ranks_of_three_models():
  # The ranks u are 0, .5 and 1. M2 replaces M3 from the logit -log(.5 / .2) / .5 on, and
  # M1 replaces M2 from log(.5 / .3) / .5 on.
  p_A = np.array([0.3, 0.5, 0.2])
  # Of two models, LARGE is picked from the threshold on.
  assert [apply_threshold(np.full(2, 0.5), None, x) for x in (0.5, 0.51)] == [1, 0]
  for model, logit in ((2, -1.9), (1, -1.8), (1, 0.0), (1, 1.0), (0, 1.1)):
    threshold = 1 / (1 + math.exp(-logit))
    assert apply_threshold(p_A, None, threshold) == model
  last = switch_thresholds(p_A[None])[0]
  assert math.log(last / (1 - last)) == pytest.approx(math.log(5 / 3) / 0.5, rel=1e-3)


@pytest.mark.parametrize(
  "weight, cap_conditioned, left, unit",
  # A cap-blind policy sees no cap. At cost weight 1 a dollar weighs 1/2 / 0.005, at 0.25
  # it weighs 1/5 / 0.005.
  [(1.0, False, np.inf, 100), (0.25, True, 2, 40)],
)
def test_heads_read_the_cap_and_the_cost_weight(
  monkeypatch, weight, cap_conditioned, left, unit
):
  """The picked model has probability 1. At the end its tracker is freed."""
  prices = tuple(Price(usd, usd / 4, 0.0) for usd in (1.0, 2.0, 10.0))
  billing = Mock(wraps=Billing(prices, (CacheRule(1, 1, 1000.0),) * 3))
  trackers = Mock()
  trackers.follow.return_value.read.return_value = np.zeros(48)
  trackers.follow.return_value.progress = (1, 0, 40)
  trackers.vocabulary = Mock(opening_tokens=100, reply_tokens=7)
  estimate = Mock(return_value=(None, np.array([[[0.1, 0.1, 0.2]]])))
  monkeypatch.setattr("baar_jax.conditioned.policy.estimate_each", estimate)
  spec = ConditionedSpec(
    "conditioned", 2, None, weight, cap_conditioned=cap_conditioned
  )
  policy = ConditionedPolicy(spec, trackers, None, billing, [0.5, 0.25])
  live = start(0)
  live.cap = Cap(2)
  live.steps.append(Step("x", 0, "", [Call(0, Usage(100, 0, 0), 0.0)]))
  live.observation = "x" * 400
  (decision,) = policy.choose([live])
  assert billing.forecast_calls.call_args.args[1:] == (100, 7)
  assert (decision.model, decision.logp, *decision.p_A) == (2, 0.0, 0, 0, 1)
  policy.finish(live)
  trackers.forget.assert_called_once_with(live)
  _, _, (terms_T,) = estimate.call_args.args
  expected = describe(left, 1 - unit * 0.005, np.array([1, 0, 40]))
  np.testing.assert_allclose(terms_T, expected, rtol=1e-6)


@pytest.mark.parametrize(
  "text, model",
  [("Decision: SMALL.", 0), ("The step is hard, so **BIG**\nBIG", 1)]
  + [(text, 0) for text in ("SMALL or BIG?", "big", "BIGGER", "")],
)
def test_a_judge_is_shown_the_prompt_and_billed(text, model):
  """The judge reads the paper's prompt with the budget, and its lost attempts are billed.

  Only an answer that names exactly one model in capitals counts.
  """
  live = Live(Job(tiny.TASK, "profile", 0), Cap(3))
  live.observation = "see lamp 9"
  live.steps = tiny.episode(models="LS").steps
  lost = call(2, 0.5, kind="retry"), call(2, 0.25, kind="presumed")
  judge = Mock(**{"reply.return_value": Reply(text, call(2, 2.0), lost)})
  spec = PolicySpec("zero-shot")
  policy = ZeroShotPolicy(spec, lambda *_: judge)
  agents = [Mock(**{"reply.return_value": number}) for number in range(2)]
  context = StepContext(live, agents, [], CallBudget(2), DollarBudget(None), unlimited)
  playing = policy.play(context)
  next(playing)
  with pytest.raises(StopIteration) as end:
    playing.send(*policy.choose([live]))
  move = end.value.value
  assert move.reply == move.decision.model == model
  ((((message,), place), _),) = judge.reply.call_args_list
  prompt = message["content"]
  assert place == 2 and prompt.endswith("Decision:")
  assert "Task: find the plant" in prompt
  assert "at most 3 BIG calls, 1 used, 2 left. Step 3 of 40." in prompt
  step = move.decision.make_step("")
  assert [step.usd(kind) for kind in ("judge", "retry", "presumed")] == [2.0, 0.5, 0.25]
