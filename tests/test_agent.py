"""The conversation that a model is shown, and the action in its reply."""

import pytest

from baar_jax.llms import agent


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


@pytest.mark.parametrize(
  "reply, action",
  [
    ("Thought: x.\n\nAction:\n```python\na = 1\nprint(a)\n```", "a = 1\nprint(a)"),
    ("Action:\n```\nprint('Action: no')\n```\nand so on", "print('Action: no')"),
    ("Action: ```py\nx\n```\nObservation: 1\nAction:\n```python\ny\n```", "x"),  # y is made up
    ("Thought: no fence.\nAction: print(1)\nprint(2)", "print(1)\nprint(2)"),
    ("```python\nprint(1)\n```", None),
    ("Action:\n```python\n\n```", None),
    ("Action:", None),
  ],
)
def test_parse_code(reply, action):
  assert agent.parse_action(reply, code=True) == action


def test_written_replies_are_read_again():
  assert agent.write_reply("So.", "go", code=False) == "Thought: So.\n\nAction: go"
  code = "for i in range(2):\n  print(i)"
  assert agent.parse_action(agent.write_reply("So.", code, code=True), code=True) == code
