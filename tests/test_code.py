"""Test tickets of functions: their walk, the tests of agents' code, and its wall."""

import itertools
import json
import socket
from collections import Counter

import pytest
import tickets

from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import (
  FUNCTIONS,
  NO_END,
  deal,
  find_place,
  read_functions,
  read_recording,
  run_tests,
)
from baar_jax.envs.engines import can_confine
from baar_jax.llms.history import open_conversation, parse_action

RIGHT = "def f(x): return x + 1"
WRONG = "def f(x): return -1"
RAISES = "def f(x): return x[0]"
# A code, the event, the end of what the agent sees next, the place, whether a try has
# failed there, and the score.
WALK = [
  (RIGHT, "It is solved.", "assert f(1) == 2", 1, False, 0.25),
  (WRONG, "The first try failed. It gave -1.", "f(1) == 2\nIt gave -1.", 1, True, 0.25),
  (RIGHT, "It is solved.", "assert f(1) == 2", 2, False, 0.5),
  (RAISES, "The first try failed. It raised TypeError:", "subscriptable", 2, True, 0.5),
  (WRONG, "It is not solved.", "assert f(1) == 2", 3, False, 0.5),
  ("", "The first try failed. It had no", "begins with ```python.", 3, True, 0.5),
]


def test_a_ticket_is_walked_from_function_to_function(tmp_path):
  env = make("code", tickets.configure(tmp_path).env.options, train_tasks=1)
  (task,) = env.tasks("train")
  dealt = deal(env.functions, task.id)
  observation = env.reset(task.id)
  assert observation.startswith(" Function 1 of 4.")
  assert find_place(observation) == (0, False)
  for code, event, end, place, failed, score in WALK:
    observation, done = env.step(code)
    assert observation.startswith(f"{event} Function {place + 1} of 4.\n\n")
    assert find_place(observation) == (place, failed)
    assert (env.score(), done) == (score, False)
    _, prompt = open_conversation(env.system_prompt, task, observation, env.opening)
    seen = prompt["content"]
    assert seen.startswith("Write this") and seen.endswith(end)
    assert dealt[place].text in seen and "return" not in seen
  assert env.step(RIGHT) == ("It is solved.", True)
  assert env.score() == 0.75


# The second test is no equation.
TESTS = ("assert f(1) == 2", "assert f(3) > 3")
INVALID = "It raised SyntaxError: invalid syntax (<solution>, line 1)"


@pytest.mark.parametrize(
  "code, results",
  [
    ("def f(x):\n  while x == 3: pass\n  return 2", ["", NO_END]),
    ("def f(x): return 2 if x == 1 else __import__('os')._exit(0)", ["", NO_END]),
    ("print('\"\"\\n\"\"')\ndef f(x): return 0", ["It gave 0.", "It is not true."]),
    ("f(x) = 1 +", [INVALID] * 2),
  ],
)
def test_whatever_code_does_each_test_has_a_result(code, results):
  assert run_tests(code, TESTS, walled=False) == results


def test_a_wall_keeps_code_from_files_and_the_network(tmp_path):
  """Without the wall, the same code reaches them."""
  if not can_confine(None):
    pytest.skip("bubblewrap cannot be had here")
  (tmp_path / "file").write_text("secret")
  with socket.create_server(("127.0.0.1", 0)) as server:
    address = server.getsockname()
    for attack in (
      f"open('{tmp_path}/file')",
      f"__import__('socket').create_connection({address})",
    ):
      code = f"{attack}\n{RIGHT}"
      assert run_tests(code, TESTS, walled=False) == ["", ""]
      assert run_tests(code, TESTS)[0].startswith("It raised")
  assert run_tests(RIGHT, TESTS) == ["", ""]


@pytest.mark.parametrize(
  "split, size, rounds", [("train", 120, 2), ("dev", 20, 1), ("test", 40, 1)]
)
def test_a_round_of_tickets_has_each_function_once(split, size, rounds):
  env = make("code", {"trusted": True}, **{f"{split}_tasks": size})
  dealt = []
  for task in env.tasks(split):
    functions = deal(env.functions, task.id)
    assert functions[3].text in task.description
    dealt += functions
  counts = Counter(function.id for function in dealt)
  assert set(counts.values()) == {rounds} and len(counts) == 4 * size / rounds
  # The next round has another order.
  assert dealt[:4] != dealt[len(counts) :][:4]


def test_a_problem_of_mbpp_is_read_by_its_number(tmp_path):
  lines = []
  for number in (10, 11, 510, 511, 600, 601):
    problem = {
      "task_id": number,
      "text": "Add.",
      "code": "def help(x):\r\n return x\r\ndef f(x, y = 1) :\r\n return help(x) + y",
      "test_setup_code": "one = 1",
      "test_list": ["assert f(one) == 2", "assert f(2) == 3", "assert f(3) == 4"],
    }
    lines.append(json.dumps(problem))
  path = tmp_path / "mbpp.jsonl"
  path.write_text("\n".join(lines))
  functions = read_functions(str(path))
  assert [function.id for function in functions["test"]] == ["mbpp-11", "mbpp-510"]
  assert [function.id for function in functions["dev"]] == ["mbpp-511", "mbpp-600"]
  (function,) = functions["train"]
  assert function.signature == "def f(x, y = 1) :"
  assert function.shown == ["one = 1\nassert f(one) == 2", "one = 1\nassert f(2) == 3"]
  assert function.tests == [*function.shown, "one = 1\nassert f(3) == 4"]


def test_recorded_outcomes_come_again():
  path = FUNCTIONS.with_name("qwen2.5-coder.jsonl.gz")
  if not path.exists() or not can_confine(None):
    pytest.skip("there is no recording, or bubblewrap cannot be had here")
  nodes = [*read_recording(str(path)).nodes.values()]
  functions = itertools.chain(*read_functions("").values())
  tests = {function.id: function.tests for function in functions}
  for node in nodes[:: len(nodes) // 40 + 1]:
    code = parse_action(node.reply, code=True) or ""
    results = run_tests(code, tests[node.function])
    assert [not text for text in results] == [not text for text in node.results]
