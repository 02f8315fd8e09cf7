"""Test how messages become episodes, and the tokens that `Router` reads of them."""

import dataclasses
import functools

import pytest
import tiny

from baar_jax import Router
from baar_jax.episode import CacheRule
from baar_jax.llms.history import extend, open_conversation, write_reply
from baar_jax.llms.prices import Billing, Price
from baar_jax.rollout.rules import Policy
from baar_jax.rollout.specs import Decision, PolicySpec
from baar_serve.request import read_history

SYSTEM = {"role": "system", "content": "You are an agent."}
LOOK = {
  "id": "1",
  "type": "function",
  "function": {"name": "look", "arguments": '{"at": "door"}'},
}
WAIT = {
  "id": "2",
  "type": "function",
  "function": {"name": "wait", "arguments": "not json"},
}
PARTS = [
  {"type": "text", "text": "What is"},
  {"type": "image_url"},
  {"type": "input_audio"},
]


def say(role, content=None, **fields):
  return {"role": role, "content": content} | fields


user, assistant, tool = (
  functools.partial(say, role) for role in ("user", "assistant", "tool")
)
CALLING = [
  user("Fix"),
  assistant("A look.", tool_calls=[LOOK, WAIT]),
  tool("a"),
  tool("b"),
  user("c"),
]
IN_A_ROW = [
  user("Fix"),
  assistant("1"),
  assistant("2"),
  SYSTEM,
  user("on"),
  assistant("3"),
]


@pytest.mark.parametrize(
  "messages, task, observations, actions",
  [
    ([SYSTEM], "You are an agent.", [""], []),
    (
      [SYSTEM, user("Task: boil\n\nA room.\n\nA pot.")],
      "boil",
      ["A room.\n\nA pot."],
      [],
    ),
    ([user("Note\n\nmore"), user("and this")], "Note\n\nmore", ["and this"], []),
    (CALLING, "Fix", ["", "a\nb\nc"], ['look {"at": "door"}\nwait not json\nA look.']),
    ([user("a"), assistant(write_reply("So.", "x\ny", True))], "a", ["", ""], ["x\ny"]),
    (IN_A_ROW, "Fix", ["", "", "You are an agent.\non", ""], ["1", "2", "3"]),
    ([user(PARTS)], "What is\n[image_url]\n[input_audio]", [""], []),
  ],
)
def test_messages_are_an_episode(messages, task, observations, actions):
  read = read_history({"messages": messages})
  assert (read.task, read.observations, read.actions) == (task, observations, actions)


def test_a_reply_is_known_again_without_ids_and_layout():
  """Its text and its tool calls may also come back as two messages."""
  function = {"name": "look", "arguments": '{"at":"door"}'}
  parts = [assistant(" A\nlook."), assistant(tool_calls=[{"function": function}])]
  read = read_history({"messages": [user("b"), *parts]})
  first = read_history({"messages": CALLING})
  assert read.atoms == first.atoms[:2] and len({*first.atoms}) == 3
  assert (
    read.opening != first.opening == read_history({"messages": CALLING[:1]}).opening
  )


class Spy(Policy):
  """Repeats the decisions of an episode, and keeps the tokens that a router reads."""

  def choose(self, ready):
    self.tokens = self.view.live_window(ready[0]).tokens
    self.history = ready[0].history
    return [Decision(self.episode.steps[len(ready[0].steps)].model, p_A=(0.25, 0.75))]


def test_router_in_python_knows_which_caches_are_warm(view, make_task, monkeypatch):
  """SMALL, LARGE and SMALL are chosen within the lifetime, and LARGE long after it.
  The prompt of 40,000 characters has about 10,000 tokens."""
  spy, rule = Spy(PolicySpec("spy")), CacheRule(1024, 128, 300.0)
  spy.view, spy.episode = view, tiny.episode(models="SLSL")
  router = Router(spy, ("small", "large"), make_task().max_steps, sessions=1)
  billing = Billing((Price(1, 0.5, 2), Price(5, 2, 10)), (rule, rule))
  messages, warm = [user("x" * 40_000)], []
  for now_s in (1000, 1010, 1020, 1400):
    monkeypatch.setattr("baar_jax.decide.time.monotonic", lambda now_s=now_s: now_s)
    router.decide(messages)
    outlooks = billing.forecast_calls(spy.history, 100, 10)
    warm.append([outlook.warm_tokens > 9_000 for outlook in outlooks])
    messages += [{"role": "assistant", "content": "go"}, user("A door.")]
  assert warm == [[False, False], [True, False], [True, True], [False, False]]


def test_router_reads_the_same_tokens_as_training(view, make_task):
  """The session has a cap in dollars and one on large calls."""
  task, episode = make_task(), tiny.episode(models="SLLS")  # $1, $5, $5, $1
  episode.call_budget, episode.usd_budget = 3, 15.0
  spy = Spy(PolicySpec("spy"))
  spy.view, spy.episode = view, episode
  router = Router(spy, ("small", "large"), task.max_steps, sessions=1)
  messages = open_conversation("", task, episode.steps[0].observation)
  for n, left in enumerate([(15.0, 3), (14.0, 3), (9.0, 2), (4.0, 1)]):
    caps = dict(zip(("left_usd", "left_large_calls"), left))
    so_far = dataclasses.replace(episode, steps=episode.steps[: n + 1])
    choice = router.decide(messages, **caps)
    assert spy.tokens == view.episode_windows(task, so_far)[-1].tokens
    assert choice == (
      ["small", "large"][episode.steps[n].model],
      {"small": 0.25, "large": 0.75},
    )
    after = episode.steps[min(n + 1, 3)].observation
    extend(messages, write_reply("So.", episode.steps[n].action, False), after)
  choice = router.decide(messages, left_usd=1.0, left_large_calls=0)
  assert choice == ("small", {"small": 1.0, "large": 0.0})
