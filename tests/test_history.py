"""Test how a chat becomes a task, actions and observations."""

import functools

import pytest

from baar_jax.llms.history import parse_action, read_chat, write_reply

SYSTEM = {"role": "system", "content": "You are an agent."}
PARTS = [
  {"type": "text", "text": "What is"},
  {"type": "image_url"},
  {"type": "input_audio"},
]


def call(name, arguments):
  return {"function": {"name": name, "arguments": arguments}}


def say(role, content=None, **fields):
  return {"role": role, "content": content} | fields


user, assistant, tool = (
  functools.partial(say, role) for role in ("user", "assistant", "tool")
)
CALLS = [call("look", '{"at": "door"}'), call("wait", "not json")]
CALLING = [
  user("Fix"),
  assistant("A look.", tool_calls=CALLS),
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
  read = read_chat(messages)
  assert (read.task, read.observations, read.actions) == (task, observations, actions)


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
    ("Here it is:\n```python3\nx\n```\nIt adds.\n```\ny\n```", "x", True),
    ("x = 1", None, True),
    ("<think>\n```py\nx\n```\n</think>\n```py\ny\n```", "y", True),
    ("<think>Action: x</think>", None, False),
    ("<think>\n```py\nx\n```", None, True),  # the reply was cut
    ("No:\n```py\nx\n```\n</think>\n``` python\ny\n```", "y", True),
    ("```text\nx\n```\nSo:\n```python\nAction: y\n```", "Action: y", True),
  ],
)
def test_the_action_of_a_reply_is_read(reply, action, code):
  assert parse_action(reply, code=code) == action
