"""The conversation that a model is shown, and the action in its reply."""

import pytest

from baar_jax.llms import agent


@pytest.mark.parametrize(
  "reply, action, code",
  [
    ("Thought: it is dark.\n\nAction: turn on lamp", "turn on lamp", False),
    (
      "Action:\n\n  open door\nObservation: it is open",
      "open door",
      False,
    ),  # the rest is made up
    ("Action: go north\nThought: no.\nAction: go south", "go south", False),
    ("Action: go north\nAction:  \n ", None, False),
    ("action: go", None, False),  # as the prompt spells it
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
def test_parse_action(reply, action, code):
  assert agent.parse_action(reply, code=code) == action
