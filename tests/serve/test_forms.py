"""Test the wire forms with fixtures that were written from the published specifications."""

import asyncio
import contextlib
import io
import json
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest

from baar_jax.llms.history import ToolCall, Turn
from baar_jax.llms.prices import Price
from baar_jax.llms.provider import ImpossibleUsage, Meter, read_error
from baar_serve.client import Stream
from baar_serve.forms import FORMS
from baar_serve.meter import AnswerMeter
from baar_serve.request import hash_turn, read_history

GOLDEN = Path(__file__).parent / "golden" / "forms"
NAMES = {path: path.replace("/", "_") for path in FORMS}


def load(path, name):
  text = (GOLDEN / NAMES[path] / name).read_text()
  return json.loads(text) if name.endswith(".json") else text


def list_events(text):
  """Read a stream that comes in blocks of seven bytes."""
  data = io.BytesIO(text.encode())

  async def read_block():
    return data.read(7)

  async def read():
    response = SimpleNamespace(content=SimpleNamespace(readany=read_block))
    until_s = asyncio.get_running_loop().time() + 9
    events = []
    # The stream ends, and this reader does not know its end mark.
    with contextlib.suppress(aiohttp.ClientPayloadError):
      async for event in Stream(response, AnswerMeter()).events(until_s):
        events.append(event)
    return events

  return asyncio.run(read())


def list_counts(usage):
  return dict(
    prompt_tokens=usage.prompt_tokens,
    cached_tokens=usage.cached_tokens,
    cache_write_tokens=usage.cache_write_tokens,
    cache_write_1h_tokens=usage.hour_write_tokens,
    completion_tokens=usage.completion_tokens,
  )


def check_reply(turn, expected):
  calls = [[call.name, json.loads(call.arguments)] for call in turn.calls]
  assert (turn.text, calls) == (expected["reply_text"], expected["reply_tool_calls"])


@pytest.mark.parametrize("path", FORMS)
def test_a_request_is_read_as_an_episode(path):
  expected = load(path, "expected.json")
  read = read_history(load(path, "request.json"), FORMS[path])
  assert read.task == expected["task"]
  assert read.actions == expected["actions"]
  assert read.observations == expected["observations"]


@pytest.mark.parametrize("path", FORMS)
def test_answers_and_streams_say_the_same(path):
  """The events reach the client byte for byte. Both have one reply and one usage."""
  form = FORMS[path]
  expected = load(path, "expected.json")
  whole = AnswerMeter(counts_beside=form.counts_beside)
  fields = whole.read(json.dumps(load(path, "answer.json")))
  streamed = AnswerMeter(counts_beside=form.counts_beside)
  text = load(path, "stream.txt")
  events = list_events(text)
  assert b"".join(block for block, _ in events) == text.encode()
  answer = {}
  kinds = []
  for _, data in events:
    event = streamed.read(data) or {}
    kinds.append(event.get("type") or data.decode())
    form.collect(answer, event)
  assert kinds[-1] in form.endings and not {*kinds[:-1]} & {*form.endings}
  for meter in (whole, streamed):
    assert list_counts(meter.usage()) == expected["usage"]
  replies = [form.read_reply(fields), form.read_reply(answer)]
  for turn in replies:
    check_reply(turn, expected)
  assert hash_turn(replies[0]) == hash_turn(replies[1])


def test_only_line_feeds_end_the_lines_of_a_stream():
  block = "data: a\u2028b\x0cc\n\n".encode()
  assert list_events(block.decode()) == [(block, block[6:-2])]


@pytest.mark.parametrize("path", FORMS)
def test_errors_are_read_and_written_in_the_form(path):
  expected = load(path, "expected.json")["error"]
  error = load(path, "error.json")
  read = read_error(json.dumps(error))
  expected["param"] = error["error"].get("param")
  assert read._asdict() == {name: value or "" for name, value in expected.items()}
  written = FORMS[path].write_error(dict(message="m", type="t", code="c"))
  assert written["error"].keys() >= error["error"].keys() - {"param"}
  assert written.get("type") == error.get("type")
  last = list_events(load(path, "error_stream.txt"))[-1][1]
  failure = FORMS[path].write_failure(dict(message="m", type="t", code="c"))
  assert failure.get("type") == json.loads(last).get("type")
  assert failure["error"]["message"] == "m"


CASES = [(path, *case) for path in FORMS for case in load(path, "possible.json")]
CASES += [
  (path, *case, None) for path in FORMS for case in load(path, "impossible.json")
]


@pytest.mark.parametrize("path, name, usage, expected", CASES)
def test_only_possible_usage_is_billed(path, name, usage, expected):
  meter = AnswerMeter(counts_beside=FORMS[path].counts_beside)
  meter.note({"usage": usage})
  if expected is None:
    with pytest.raises(ImpossibleUsage, match="^The usage is impossible: [^\n]*$"):
      meter.usage()
  else:
    assert list_counts(meter.usage()) == expected


BILLS = [(path, *case) for path in FORMS for case in load(path, "bills.json")]


@pytest.mark.parametrize("case", BILLS, ids=lambda case: case[1])
def test_what_is_billed_is_booked(case):
  """Input $3, cached $0.3, output $15 and writes $3.75; the worst case is $0.1."""
  path, _, usd, problem, usages, *hourly = case
  meter = AnswerMeter(
    counts_beside=FORMS[path].counts_beside, is_hourly=bool(hourly), model="m"
  )
  for usage in usages:
    meter.read(json.dumps({"usage": usage}))
  bill = meter.bill(Price(3, 0.3, 15, 3.75), 0.1)
  assert bill.usd == pytest.approx(usd)
  assert problem in bill.problem and bool(problem) == bool(bill.problem)


LOOK = {"name": "look", "arguments": '{"at": "door"}'}


@pytest.mark.parametrize(
  "message, text, calls",
  [
    (
      {
        "content": [
          {"type": "thinking", "thinking": []},
          {"type": "text", "text": "Go."},
        ]
      },
      "Go.",
      0,
    ),
    (
      {"tool_calls": [{"id": "1", "function": LOOK | {"arguments": {"at": "door"}}}]},
      "",
      1,
    ),
    ({"content": None, "function_call": LOOK}, "", 1),
    ({"content": None, "refusal": "I cannot."}, "I cannot.", 0),
  ],
)
def test_replies_in_other_shapes_are_read_whole_and_streamed(message, text, calls):
  form = FORMS["chat/completions"]
  turn = form.read_reply({"choices": [{"message": message}]})
  assert (turn.role, turn.text) == ("assistant", text)
  assert [(c.name, c.arguments) for c in turn.calls] == [(*LOOK.values(),)] * calls
  answer = {}
  form.collect(answer, {"choices": [{"delta": message}]})
  assert form.read_reply(answer) == turn


def test_a_reply_is_known_again_without_layout_and_reasoning():
  """Its text and its tool calls may also come back as two messages."""
  calls = (ToolCall("look", '{"at": "door"}'), ToolCall("wait", "not json"))
  first = hash_turn(Turn("assistant", "A look.", calls))
  text = Turn("assistant", "<think>a\nb</think> A\nlook.")
  call = Turn("assistant", "", (ToolCall("look", '{"at":"door"}'),))
  assert hash_turn(text) + hash_turn(call) == first[:2]
  assert len({*first}) == 3
  empty = [Turn("assistant", "", (ToolCall("look", x),)) for x in ("", "{}", "null")]
  assert len({*hash_turn(empty[0]), *hash_turn(empty[1]), *hash_turn(empty[2])}) == 1


# Parts of streamed tool calls, as some models send them: index, id, name, arguments.
CALLS = (ToolCall("look", "{}"), ToolCall("go", '{"x": 1}'))
PARTS = {
  "one-index": [(0, "a", "look", "{}"), (0, "b", "go", '{"x": 1}')],
  "no-index": [(None, "a", "look", ""), (None, "b", "go", '{"x": 1}')],
  "no-ids": [(0, "", "look", "{}"), (0, None, "go", '{"x"'), (0, None, "", ": 1}")],
  "no-arguments": [(0, None, "look", None), (0, None, "go", '{"x": 1}')],
  "from-one": [(1, "a", "look", ""), (2, "b", "go", '{"x": 1}')],
  "name-again": [(0, "a", "look", ""), (1, "b", "go", '{"x"'), (1, "b", "go", ": 1}")],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_each_streamed_tool_call_is_read_apart(parts):
  form = FORMS["chat/completions"]
  answer = {}
  for index, id_, name, arguments in parts:
    function = dict(name=name, arguments=arguments)
    part = dict(index=index, id=id_, function=function)
    form.collect(answer, {"choices": [{"delta": {"tool_calls": [part]}}]})
  assert hash_turn(form.read_reply(answer)) == hash_turn(Turn("assistant", "", CALLS))


BLOCKS = []
ITEMS = []
for call in CALLS:
  block = dict(type="tool_use", name=call.name, input={})
  BLOCKS.append(dict(type="content_block_start", content_block=block))
  item = {"type": "function_call"} | call._asdict()
  ITEMS.append({"type": "response.output_item.done", "item": item})
for index, call in enumerate(CALLS):
  delta = dict(type="input_json_delta", partial_json=call.arguments)
  BLOCKS[index]["index"] = index
  BLOCKS.append(dict(type="content_block_delta", index=index, delta=delta))
ITEMS.append({"type": "response.completed", "response": {"output": []}})
STREAMS = {"messages": BLOCKS, "responses": ITEMS}


@pytest.mark.parametrize("path, events", STREAMS.items(), ids=STREAMS)
def test_streams_with_odd_events_are_whole_replies(path, events):
  answer = {}
  for event in events:
    FORMS[path].collect(answer, event)
  reply = FORMS[path].read_reply(answer)
  assert hash_turn(reply) == hash_turn(Turn("assistant", "", CALLS))


def test_text_that_is_nested_too_deeply_is_no_answer():
  assert Meter().read("[" * 100_000) is None
