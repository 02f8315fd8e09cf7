"""Test the scripted models: their error rates, and that replies repeat."""

import math
from unittest import mock

import numpy as np
import pytest

from baar_jax.config import ModelsConfig
from baar_jax.envs import base
from baar_jax.envs.base import Env, Errors, Lapse, Oracle
from baar_jax.episode import LARGE, SMALL, Task, Usage
from baar_jax.llms.history import open_conversation, parse_action
from baar_jax.llms.offline import ScriptedPair
from baar_jax.rollout.budget import unlimited

TASK = Task("t", "test", "Do it.", 40)


def critical(position):
  """Make the expert's view of a critical step."""
  return Oracle("focus on pot", position, critical=True, recovering=False)


# Numbers for sums by hand.
HAND = Errors((0.5, 2.5), (0.2, 0.1), wrong=0.4, growth=(4.0, 3.0))


# The difficulty is 1 + (0.8 + 0.6) / sqrt(2) - 0.5 = 1.49, plus the model's own luck. "on" is too
# short for a word.
EFFECTS = {
  "find-plant": 1.0,
  "focus": 0.8,
  "pot": 0.6,
  "find-plant/3|2": -0.5,
  "find-plant/3|2|0": 0.3,
  "find-plant/3|2|1": -0.2,
}


@pytest.mark.parametrize(
  "model, failed, odds",
  [
    (SMALL, False, math.exp(1.49 + 0.3 - 0.5)),
    (SMALL, True, math.exp(1.49 + 0.3 - 0.5) * 4),
    (LARGE, True, math.exp(1.49 - 0.2 - 2.5) * 3),
  ],
)
def test_error_odds_grow_with_difficulty_and_a_failed_try(
  monkeypatch, model, failed, odds
):
  monkeypatch.setattr(base, "draw_effect", EFFECTS.__getitem__)
  lapse = HAND.lapse(model, "find-plant/3", critical(2), failed)
  assert lapse.rate == pytest.approx(odds / (1 + odds), abs=1e-3)
  assert lapse.wrong == 0.4


@pytest.mark.parametrize("model, rate", [(SMALL, 0.2), (LARGE, 0.1)])
def test_routine_steps_and_recoveries_have_no_difficulty(model, rate):
  routine = Oracle("look around", 3, False, False)
  recovery = Oracle("undo", 3, True, True)
  for oracle in (routine, recovery):
    lapse = HAND.lapse(model, "t", oracle, failed=True)
    assert lapse == Lapse(pytest.approx(rate), 0.0)


class Room(Env):
  """An environment whose state never changes."""

  system_prompt = "s" * 40
  code_actions = False
  oracle = staticmethod(lambda: critical(5))
  mistake = staticmethod(lambda kind, key: f"{kind} {key}")


def rule(lapse):
  """Make error rates that a function tells."""
  return type("Rule", (Errors,), {"lapse": staticmethod(lapse)})()


def always(rate=1.0, wrong=0.0):
  """Make error rates that are a tenth higher after a failed try at the same step."""
  return rule(lambda model, task, oracle, failed: Lapse(rate + failed / 10, wrong))


def agents(errors, seed=0):
  """Start the scripted agents of an episode."""
  with mock.patch.object(Room, "errors", errors):
    pair = ScriptedPair(ModelsConfig(), Room)
  return pair.start(Room(), TASK, seed, unlimited)


def test_replies_repeat_and_tokens_follow_from_the_text():
  messages = open_conversation(Room.system_prompt, TASK, "You see.")
  pairs = [agents(Errors(), seed) for seed in (0, 0, 1)]
  first, again, other = (
    [a.reply(messages, i) for a in pair for i in range(30)] for pair in pairs
  )
  assert first == again != other
  # The system prompt of 40 characters has 10 tokens. "Task: Do it.\n\nYou see." has 22
  # characters, so it has 6 tokens.
  reply = first[0]
  assert reply.call.usage == Usage(16, 0, -(-len(reply.text) // 4))
  assert reply.text.startswith("Thought: ")


def actions_of(agent, steps):
  """List an agent's actions at the steps of an episode."""
  return [parse_action(agent.reply([], step).text) for step in steps]


def test_each_model_draws_its_own_errors():
  errors = rule(lambda *args: Lapse(0.5, 0.5))
  small, large = (actions_of(agent, range(400)) for agent in agents(errors))
  assert actions_of(agents(errors)[SMALL], range(400)) == small
  is_right = [[action == "focus on pot" for action in row] for row in (small, large)]
  # Four standard errors of 400 draws: 0.1, and 0.087 for a share of a quarter.
  assert np.mean(is_right) == pytest.approx(0.5, abs=0.1)
  both = np.logical_and(*is_right)
  assert both.mean() == pytest.approx(0.25, abs=0.087)
  assert small[is_right[0].index(False)].split()[0] in ("wrong", "wasted")


def rate_of(agent, step, position=5):
  return agent._find_lapse(critical(position), step).rate


def test_a_failed_try_of_either_model_raises_the_next_rate_at_the_same_step():
  small, large = agents(always(wrong=1.0))
  assert rate_of(small, 0) == 1.0
  assert actions_of(small, [0]) == ["wrong t|0|0|0"]
  # The error at step 0 counts from step 1 on.
  assert rate_of(large, 0) == 1.0
  assert rate_of(large, 1) == 1.1
  assert rate_of(large, 1, position=6) == 1.0
  small.reply([], 1)
  # LARGE acts in place of SMALL, without an error: SMALL's proposal does not count.
  large._errors = always(rate=-1.0)
  assert actions_of(large, [1]) == ["focus on pot"]
  assert rate_of(small, 2) == 1.1
