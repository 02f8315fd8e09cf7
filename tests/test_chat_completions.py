"""Test how the action in a reply is read."""

import pytest

from baar_jax.llms.history import parse_action


@pytest.mark.parametrize(
  "reply, action, code",
  [
    ("Thought: it is dark.\n\nAction: turn on lamp", "turn on lamp", False),
    (
      "Action:\n\n  open door\nObservation: it is open",
      "open door",
      False,
    ),  # the model invents an observation
    ("Action: go north\nThought: no.\nAction: go south", "go south", False),
    ("Action: go north\nAction:  \n ", None, False),
    ("action: go", None, False),  # the prompt spells it "Action:"
    (
      "Thought: x.\n\nAction:\n```python\na = 1\nprint(a)\n```",
      "a = 1\nprint(a)",
      True,
    ),
    ("Action:\n```\nprint('Action: no')\n```\nand so on", "print('Action: no')", True),
    ("Action: ```py\nx\n```\nObservation: 1\nAction:\n```python\ny\n```", "x", True),
    ("Action:\n```python\n\n```", None, True),
  ],
)
def test_the_action_of_a_reply_is_read(reply, action, code):
  assert parse_action(reply, code=code) == action
