"""Test what `Router` reads of messages, without a run and without training."""

import dataclasses

import tiny
from tiny_router import VIEW

from baar_jax import Router
from baar_jax.decide import Decider
from baar_jax.llms.history import extend, open_conversation, write_reply
from baar_jax.llms.prices import Billing, CacheRule, Price
from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import Decision, Job, Live, PolicySpec


class Spy(Policy):
  """Repeats the decisions of an episode, and keeps the tokens that a router reads."""

  view = VIEW

  def choose(self, ready):
    self.tokens = self.view.live_window(ready[0]).tokens
    self.history = ready[0].history
    return [Decision(self.episode.steps[len(ready[0].steps)].model, p_A=(0.25, 0.75))]


def test_the_episode_with_the_oldest_decision_is_forgotten():
  """After a, b and a there is no row for c, so b is forgotten."""
  forgotten = []
  spy = Spy(PolicySpec("spy"))
  spy.finish = lambda live: forgotten.append(live.task.id)
  decider = Decider(spy, rows=2)
  for name in "abac":
    decider.remember(Live(Job(dataclasses.replace(tiny.TASK, id=name), "test", 0)))
  assert forgotten == ["b"]
  assert [task_id for task_id, *_ in decider.lives] == ["a", "c"]


def test_router_in_python_knows_which_caches_are_warm(monkeypatch):
  """SMALL, LARGE and SMALL are chosen within the lifetime, and LARGE long after it.
  The prompt of 40,000 characters has about 10,000 tokens."""
  spy, rule = Spy(PolicySpec("spy")), CacheRule(1024, 128, 300.0)
  spy.episode = tiny.episode(models="SLSL")
  router = Router(spy, ("small", "large"), tiny.TASK.max_steps, sessions=1)
  billing = Billing((Price(1, 0.5, 2), Price(5, 2, 10)), (rule, rule))
  messages, warm = [{"role": "user", "content": "x" * 40_000}], []
  for now_s in (1000, 1010, 1020, 1400):
    monkeypatch.setattr("baar_jax.decide.time.monotonic", lambda now_s=now_s: now_s)
    router.decide(messages)
    outlooks = billing.forecast_calls(spy.history, 100, 10)
    warm.append([outlook.usd < outlook.cold_usd for outlook in outlooks])
    extend(messages, "go", "A door.")
  assert warm == [[False, False], [True, False], [True, True], [False, False]]


def test_router_reads_the_same_tokens_as_training():
  """The session has a cap in dollars and one on large calls."""
  task = tiny.TASK
  episode = tiny.episode(models="SLLS")  # $1, $5, $5, $1
  episode.call_budget, episode.usd_budget = 3, 15.0
  spy = Spy(PolicySpec("spy"))
  spy.episode = episode
  router = Router(spy, ("small", "large"), task.max_steps, sessions=1)
  messages = open_conversation("", task, "see lamp 0")
  for n, (usd, calls) in enumerate([(15.0, 3), (14.0, 3), (9.0, 2), (4.0, 1)], 1):
    router.decide(messages, left_usd=usd, left_large_calls=calls)
    so_far = dataclasses.replace(episode, steps=episode.steps[:n])
    assert spy.tokens == VIEW.encode(task, so_far)[-1].tokens
    reply = write_reply("So.", so_far.steps[-1].action, False)
    extend(messages, reply, f"see lamp {n}")
  choice = router.decide(messages, left_large_calls=0)
  assert choice == ("small", {"small": 1.0, "large": 0.0})
