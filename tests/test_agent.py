"""The conversation that a model is shown, and the action in its reply."""

import pytest

from baar_jax import agent
from baar_jax.episode import Task


@pytest.mark.parametrize(
  "reply, action",
  [
    ("Thought: it is dark.\n\nAction: turn on lamp", "turn on lamp"),
    ("Action:   look around  ", "look around"),
    ("Action:\n\n  open door\nObservation: it is open", "open door"),  # what follows is made up
    ("Action: go north\nThought: no.\nAction: go south", "go south"),
    ("Thought: no colon here. Action go", None),
    ("Thought: I am done.", None),
    ("Action:", None),
    ("Action: go north\nAction:  \n ", None),
    ("", None),
    ("action: go", None),  # as the prompt spells it
    ("Action: say Action: go", "go"),
  ],
)
def test_parse_action(reply, action):
  assert agent.parse_action(reply) == action


def test_conversation():
  messages = agent.opening("Be brief.", Task("t", "train", "Find it.", 9), "A hall.")
  agent.extend(messages, "Action: go", "A room.")
  assert messages == [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Task: Find it.\n\nA hall."},
    {"role": "assistant", "content": "Action: go"},
    {"role": "user", "content": "A room."},
  ]
