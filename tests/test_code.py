"""Test tickets of functions: their walk, the tests of agents' code, and its wall."""

import socket
from collections import Counter

import pytest
import tickets

from baar_jax.envs.base import make
from baar_jax.envs.code.adapter import (
  FUNCTIONS,
  NO_BLOCK,
  NO_END,
  deal,
  find_place,
  read_functions,
  read_recording,
  run_tests,
)
from baar_jax.envs.engines import can_confine
from baar_jax.llms.history import parse_action

RIGHT = "def f(x): return x + 1"
WRONG = "def f(x): return -1"
RAISES = "def f(x): return x[0]"
SHOWN = "It must pass: assert f(1) == 2"
# The event, the last two lines, the place and whether a try has failed there, the score.
WALK = [
  f"It is solved. Function 2 of 4. {SHOWN} (1, False) 0.25",
  "The first try failed. It gave -1. Function 2 of 4. assert f(1) == 2 It gave -1. "
  "(1, True) 0.25",
  f"It is solved. Function 3 of 4. {SHOWN} (2, False) 0.5",
  "The first try failed. It raised TypeError. Function 3 of 4. assert f(1) == 2 "
  "It raised TypeError: 'int' object is not subscriptable (2, True) 0.5",
  f"It is not solved. Function 4 of 4. {SHOWN} (3, False) 0.5",
  "The first try failed. It had no code. Function 4 of 4.  "
  f"An earlier try was wrong. {NO_BLOCK} (3, True) 0.5",
]


def test_a_ticket_is_walked_from_function_to_function(tmp_path):
  env = make("code", tickets.configure(tmp_path).env.options)
  dealt = deal(env.functions, "train-0")
  env.reset("train-0")
  tape = []
  for code in (RIGHT, WRONG, RIGHT, RAISES, WRONG, ""):
    observation, done = env.step(code)
    head, _, seen = observation.partition("\n\n")
    place = find_place(observation)
    lines = " ".join(seen.splitlines()[-2:])
    tape.append(f"{head} {lines} {place} {env.score()}")
    assert seen.startswith(env.opening) and dealt[place[0]].text in seen
    assert not done and "return" not in seen
  assert tape == WALK
  assert env.step(RIGHT) == ("It is solved.", True) and env.waits
  assert env.score() == 0.75


TESTS = ("assert f(1) == 2", "assert f(3) > 3")
INVALID = "It raised SyntaxError: '(' was never closed (<solution>, line 1)"


@pytest.mark.parametrize(
  "code, results",
  [
    ("def f(x):\n  while x == 3: pass\n  return 2", ["", NO_END]),
    ("def f(x): return 2 if x == 1 else __import__('os')._exit(0)", ["", NO_END]),
    ('print(\'""\\n""\')\ndef f(x): return 0', ["It gave 0.", "It is not true."]),
    ("f(x", [INVALID, INVALID]),
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
    connect = f"__import__('socket').create_connection({server.getsockname()})"
    for attack in ("", f"open('{tmp_path}/file')", connect):
      code = f"{attack}\n{RIGHT}"
      assert run_tests(code, TESTS, walled=False) == ["", ""]
      assert any(run_tests(code, TESTS)) == bool(attack)


@pytest.mark.parametrize("split, size, rounds", [("train", 120, 2), ("dev", 20, 1)])
def test_a_round_of_tickets_has_each_function_once(split, size, rounds):
  env = make("code", **{f"{split}_tasks": size})
  dealt = []
  for task in env.tasks(split):
    dealt += [function.id for function in deal(env.functions, task.id)]
  counts = Counter(dealt)
  assert {*counts.values()} == {rounds}
  # The next round has another order.
  assert dealt[:4] != dealt[len(counts) :][:4]


MBPP = (
  '{"task_id": %d, "text": "Add.", "code": "def help(x):\\r\\n return x\\r\\n'
  'def f(x, y = 1) :\\r\\n return help(x) + y", "test_setup_code": "one = 1", '
  '"test_list": ["assert f(one) == 2", "assert f(2) == 3"]}\n'
)


def test_a_problem_of_mbpp_is_read_by_its_number(tmp_path):
  path = tmp_path / "mbpp"
  path.write_text("".join(MBPP % number for number in (10, 11, 510, 511, 601)))
  function, *others = read_functions(str(path))
  assert [other.split for other in others] == ["dev", "test", "test"]
  assert (function.id, function.signature) == ("mbpp-601", "def f(x, y = 1) :")
  assert function.shown == ["one = 1\nassert f(one) == 2"]
  assert function.tests == [*function.shown, "one = 1\nassert f(2) == 3"]


def test_recorded_outcomes_come_again():
  path = FUNCTIONS.with_name("qwen2.5-coder.jsonl.gz")
  if not path.exists() or not can_confine(None):
    pytest.skip("there is no recording, or bubblewrap cannot be had here")
  nodes = [*read_recording(str(path)).nodes.values()]
  tests = {function.id: function.tests for function in read_functions("")}
  for node in nodes[:: len(nodes) // 40 + 1]:
    code = parse_action(node.reply, code=True) or ""
    results = run_tests(code, tests[node.function])
    assert [*map(bool, results)] == [*map(bool, node.results)], node.key
