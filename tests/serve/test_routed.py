"""Test caps, the limits and failures of models, and safe switches between them."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import standin
from endpoint import ASK, REPLY, TOKENS, Client, assistant, user
from standin_forms import Reply

from baar_serve.config import UpstreamsConfig
from baar_serve.forms import FORMS
from baar_serve.request import drop_nulls
from baar_serve.settings import fit_ids
from baar_serve.upstream import find_limits

WORDS = "I look around and go on, as before. " * 12


# Pays for 20 calls of 5,000 to 8,000 tokens.
CAP_USD = 0.14


def call(client, path, history, **fields):
  form = FORMS[path]
  body = {"model": "baar", form.history: history, form.limits[0]: 9000} | fields
  return client.post(f"/v1/{path}", body, {"x-session-id": "s"})


@pytest.mark.parametrize("path", FORMS)
def test_a_cap_is_used_to_nine_tenths_and_never_passed(open_client, upstream, path):
  """The models' caches give no discount, so no call costs less than its worst case."""
  upstream.answer = WORDS
  models = {"prices": ((1.0, 1.0, 2.0), (5.0, 5.0, 10.0))}
  client = open_client(models=models, max_usd=CAP_USD)
  *_, reply = play(client, path)
  limits = [request[FORMS[path].limits[0]] for request in upstream.seen]
  spent_usd = client.session()["spent_usd"]
  billed_usd = float(upstream.usd({"small": models["prices"][0]}))
  assert len(limits) >= 20 and 0.9 * CAP_USD < spent_usd <= CAP_USD
  assert spent_usd == pytest.approx(billed_usd)
  # The limit shrinks from the client's to the least one.
  assert limits[0] == 9000 and 256 <= limits[-1] < 9000
  assert limits == sorted(limits, reverse=True)
  error = reply.json()["error"]
  assert (error["session"], error["cap_usd"]) == ("s", CAP_USD)
  assert error["spent_usd"] + error["needed_usd"] > CAP_USD
  assert reply.status_code == 402


def test_a_client_cannot_raise_its_cap(open_client, upstream):
  """A retry must fit the cap, too. OpenAI's client must not repeat a refused call."""
  client = open_client(max_usd=0.0006)
  replies = [client.chat(headers={"x-baar-max-usd": "9"}) for _ in range(20)]
  statuses = [reply.status_code for reply in replies]
  assert statuses == sorted(statuses) and {*statuses} == {200, 402}
  assert replies[-1].headers["x-should-retry"] == "false"
  assert client.session()["spent_usd"] <= 0.0006
  upstream.seen.clear()
  upstream.fault = "drop"
  assert client.chat("other").json()["error"]["code"] == "upstream_error"
  assert len(upstream.seen) == 1 and client.session("other")["spent_usd"] > 0.0004


def test_a_broken_stream_counts_at_its_worst_case(client, upstream):
  """The worst case: 200 tokens of a reply at $2, and one for each byte of the request."""
  upstream.fault = "cut_stream"
  cut = client.chat(stream=True).text
  assert json.loads(cut.split("data: ")[-1])["error"]["code"] == "upstream_error"
  spent_usd = client.session()["spent_usd"]
  assert spent_usd >= 1e-6 * (200 * 2 + 23) and client.session()["in_flight"] == 0
  upstream.fault = None
  assert client.chat(stream=True).text.endswith("data: [DONE]\n\n")
  usd = 1e-6 * (9 * 0.5 + 10 * 2)  # The prompt is cached.
  assert client.session()["spent_usd"] - spent_usd == pytest.approx(usd)


@pytest.mark.parametrize(
  "fields, content, tokens",
  [
    ({"documents": ["a" * 10_000]}, "Hello", 10_000),
    ({}, [{"type": "video_url", "video_url": {"url": "http://127.0.0.1/a"}}], 50_000),
    (
      {},
      [dict(type="image_url", image_url={"url": "data:"}, text="a" * 10_000)],
      60_000,
    ),
  ],
)
def test_the_worst_case_covers_every_part_of_a_request(client, fields, content, tokens):
  assert client.chat().status_code == 200
  messages = [*ASK, user(content)]
  for name in ("s", "new"):
    call = client.receive(name, messages=messages, **fields)
    small = client.exchange.upstreams[0].prepare(call, client.config)
    assert small.prompt_usd >= 1e-6 * tokens


def test_an_attempt_with_a_bug_counts_at_its_worst_case(client):
  client.http.app.exchange.upstreams[0].attempt = lambda call: 1 / 0
  assert client.chat().status_code == 500
  session = client.session()
  assert session["in_flight"] == 0 and session["spent_usd"] > 0.0004


NO_ANSWERS = {name: standin.fault(x=float(name)) for name in ("nan", "inf")}


NO_ANSWERS["no choice"] = standin.fault(choices=[1])


CREATED = {"created": lambda h, *request: h.send(201, h.answer(*request))}


@pytest.mark.parametrize(
  "fault, status, calls",
  [
    ("400 bad", 400, 1),
    ("500", 500, 2),
    ("redirect", 502, 1),
    ("drop", 502, 2),
    ("401", 401, 1),
  ]
  + [(fault, 502, 2) for fault in NO_ANSWERS],
)
def test_a_session_goes_on_after_a_models_error(
  client, upstream, monkeypatch, fault, status, calls
):
  monkeypatch.setattr(standin, "FAULTS", standin.FAULTS | NO_ANSWERS | CREATED)
  upstream.fault = fault
  reply = client.chat(stream=fault == "no choice")
  assert reply.status_code == status and len(upstream.seen) == calls
  # Two attempts that may be billed count at their worst case.
  assert (client.session()["spent_usd"] > 2 * 0.0004) == (calls == 2 and fault != "500")
  message = reply.json()["error"]["message"]
  assert (message == f"asked to answer {fault}") == (fault in ("400 bad", "500"))
  upstream.fault, upstream.answer = (
    lambda *_: "created",
    lambda request: "half a pair: \ud83d",
  )
  assert client.chat().status_code == 200 and client.session()["in_flight"] == 0
  assert len(client.conversations()) == 1


@pytest.mark.parametrize(
  "max_usd, fault, limits, status",
  [
    # A model with a window of 8,192 tokens refuses a limit that exceeds it.
    (None, None, [None], 200),
    (1.0, None, [128_000], 200),
    (1.0, "400 max_tokens is too large: 128000", [128_000, None], 200),
    (0.002, "400 max_tokens must be >= 1024", [945], 400),
    (1.0, "400 unsupported parameter: max_tokens at 2025-01-01", [128_000], 400),
    (None, "400 longer than the context length", [None], 400),
  ],
)
def test_a_limit_that_no_cap_needs_is_not_sent(
  open_client, upstream, max_usd, fault, limits, status
):
  upstream.fault = [fault]
  reply = open_client(max_usd=max_usd, max_reply_tokens=None).chat()
  sent = [request.get("max_completion_tokens") for request in upstream.seen]
  assert (sent, reply.status_code) == (limits, status)


@pytest.mark.parametrize(
  "name, tokens",
  [
    ("deepseek-chat", 64_000),  # Its window, which is the only limit that is known.
    ("claude-sonnet-4.5", 64_000),
    ("gpt-5.1-chat-latest", 16_384),
    ("a-model-of-nobody", 128_000),
  ],
)
def test_the_longest_reply_of_a_model(name, tokens):
  config = UpstreamsConfig(names=("a", name))
  assert find_limits(config, 1).reply_tokens == tokens


def test_a_bill_above_the_reservation_is_booked(client, upstream, capsys):
  """The reply has 20 times the tokens of its limit."""
  upstream.fault = "dear"
  assert client.chat().status_code == 200
  assert client.session()["spent_usd"] == pytest.approx(1e-6 * (9 + 20 * 200 * 2))
  assert "error: small counts as $0.008009. Its worst" in capsys.readouterr().err


def test_a_models_window_decides(open_client):
  client = open_client(models={"context_tokens": (1000, 100_000)})
  reply = call(client, "chat/completions", [user("a" * 8000)])
  assert reply.headers["x-baar-selected-model"] == "large"


SIGNED = {
  "chat/completions": {"reasoning_details": [{"data": "SECRET"}]},
  "responses": dict(type="reasoning", id="rs_1", encrypted_content="SECRET"),
  "messages": dict(type="thinking", thinking="", signature="SECRET"),
}


@pytest.mark.parametrize("path", FORMS)
def test_reasoning_stays_with_the_model_that_wrote_it(open_client, upstream, path):
  """SMALL has written the reply and its reasoning. SMALL gets both, LARGE the reply."""
  upstream.answer = Reply("", [("look", {"at": "SECRET input"})])
  history = [user("Go.")]
  client = open_client(policy="random")
  client.decide(0, 0, 1)
  answer = call(client, path, history).json()
  if path == "chat/completions":
    turn = [answer["choices"][0]["message"] | SIGNED[path]]
    result = dict(role="tool", tool_call_id="c", content="ok")
  elif path == "responses":
    turn = [SIGNED[path], *answer["output"]]
    result = dict(type="function_call_output", call_id="c", output="ok")
  else:
    turn = [{"role": "assistant", "content": [SIGNED[path], *answer["content"]]}]
    result = {"role": "user", "content": [{"type": "tool_result", "content": "ok"}]}
  history += [*turn, result]
  for _ in range(2):
    assert call(client, path, history).status_code == 200
  small, large = (json.dumps(request) for request in upstream.seen[1:])
  assert small.count("SECRET") == 2 and large.count("SECRET") == 1
  assert "SECRET input" in large and "fc_" not in large


GOLDEN = Path(__file__).parent / "golden" / "refusals.json"
# The words of real refusals, whose status is 400 or 422, with the fields of the call, and
# what the second request has in their place; null is no second request.
REFUSALS = [(*case.values(),) for case in json.loads(GOLDEN.read_text())]


@pytest.mark.parametrize("path, words, fields, changed", REFUSALS)
def test_a_call_goes_on_without_what_a_model_refuses(
  open_client, upstream, path, words, fields, changed
):
  upstream.fault = [words]
  client = open_client(max_usd=2.0)
  reply = call(client, path, [user("Go.")], **fields)
  sent = [
    {name: request[name] for name in request if name in {**fields, **(changed or {})}}
    for request in upstream.seen
  ]
  expected = [drop_nulls(asked) for asked in (fields, changed) if asked]
  assert [*map(drop_nulls, sent)] == expected
  assert reply.status_code == (200 if changed else int(words[:3]))
  assert client.exchange.sessions.room_usd(client.receive().purse) > 1.9


def test_what_a_model_never_takes_is_left_out_from_then_on(open_client, upstream):
  """Three fields are refused, one after the other. A passing problem is forgotten."""
  words = "400 {} is not supported".format
  upstream.fault = [
    *map(words, ("logprobs", "seed", "effort")),
    None,
    "400 top_p must be below 1",
  ]
  client = open_client()
  fields = dict(logprobs=True, seed=1, reasoning={"effort": "low"}, top_p=1)
  for _ in range(3):
    assert client.chat("", **fields).status_code == 200
  sent = [[name for name in fields if name in request] for request in upstream.seen]
  whole = [*fields]
  assert sent[:4] == [whole, whole[1:], whole[2:], ["top_p"]]
  assert sent[4:] == [["top_p"], [], ["top_p"]]
  # A later request may have another type of value there.
  assert client.chat("", reasoning="low").status_code == 200
  assert upstream.seen[-1]["reasoning"] == "low"
  page = client.http.get("/").text
  assert page.count("logprobs") == 1 and "top_p" not in page


def test_ids_of_tool_calls_fit_the_model(open_client, upstream):
  """A call and its result keep one id, in each form, and nothing else changes."""
  id_ = "functions.ls:0"
  function = {"name": "ls", "arguments": json.dumps({"id": id_})}
  history = [
    user("Go."),
    {"role": "assistant", "tool_calls": [{"id": id_, "function": function}]},
    {"role": "tool", "tool_call_id": id_, "content": "ok"},
  ]
  blocks = [
    {"type": "tool_use", "id": id_, "input": {"id": id_}},
    {"type": "tool_result", "tool_use_id": id_},
    {"type": "function_call", "call_id": id_, "id": "fc_1"},
  ]
  fitted = json.dumps(fit_ids([*history, *blocks], "[A-Za-z0-9]{9}"))
  (new,) = set(re.findall('"[0-9a-f]{9}"', fitted))
  assert fitted.count(new) == 5
  assert fitted.replace(new, json.dumps(id_)) == json.dumps([*history, *blocks])
  call(open_client(models={"names": ("mistral-9", "z")}), "chat/completions", history)
  sent = json.dumps(upstream.seen[0]["messages"])
  assert sent == json.dumps(fit_ids(history, "[A-Za-z0-9]{9}"))
  assert fit_ids(history, "[a-z.:0]+") == history


@pytest.mark.parametrize(
  "words, added",
  [
    ("400 Missing `reasoning_content` in message 2", {"reasoning_content": " "}),
    ("400 Function call is missing a thought_signature", {"thought_signature": "skip"}),
  ],
)
def test_what_a_model_demands_beside_anothers_calls_is_added(
  open_client, upstream, words, added
):
  upstream.fault = [words]
  function = {"name": "ls", "arguments": "{}"}
  called = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
  history = [
    user("Go."),
    called,
    {"role": "tool", "tool_call_id": "a", "content": "ok"},
  ]
  client = open_client()
  for _ in range(2):
    assert call(client, "chat/completions", history).status_code == 200
    history = [*history, assistant(REPLY), user("On.")]
  first, *later = [json.dumps(request["messages"][1]) for request in upstream.seen]
  ((name, value),) = added.items()
  assert name not in first and len(later) == 2
  assert all(f'"{name}": "{value}' in text for text in later)


@pytest.mark.parametrize("tokens, usd", [(TOKENS, None), (3 * TOKENS, 0.001209)])
def test_choices_that_a_usage_leaves_out_are_paid(
  client, upstream, monkeypatch, capsys, tokens, usd
):
  """All three replies are cut at their limit, and the usage counts one, or all."""
  choice = {"message": {"content": "Go."}, "finish_reason": "length"}
  choices = [choice | {"index": index} for index in range(3)]
  usage = dict(prompt_tokens=9, completion_tokens=tokens, total_tokens=9 + tokens)
  cut = standin.fault(usage=usage, choices=choices)
  monkeypatch.setitem(standin.FAULTS, "cut", cut)
  upstream.fault = "cut"
  client.chat(n=3)
  worst = client.exchange.upstreams[0].prepare(client.receive(n=3), client.config)
  expected = usd or worst.shrink(1.0).worst_case_usd
  assert client.session()["spent_usd"] == pytest.approx(expected)
  assert ("usage does not count them all" in capsys.readouterr().err) == (usd is None)


@pytest.mark.parametrize("path", FORMS)
@pytest.mark.parametrize("as_parts", [False, True])
def test_the_model_is_told_what_is_left(open_client, upstream, path, as_parts):
  """Of three LARGE calls the last one is told; the client's own texts stay as they are.

  The newest one may be a reminder of the client's, as Claude Code sends them.
  """
  kind = "input_text" if path == "responses" else "text"
  client = open_client(policy="large", max_large_calls=3, max_usd=1.0, warn_share=0.6)
  history = []
  for number in range(3):
    text = f"Go {number}."
    history.append(user([{"type": kind, "text": text}] if as_parts else text))
    if number == 2 and not as_parts:
      history.append({"role": "system", "content": "Remember: Go 2."})
    answer = call(client, path, history).json()
    if path == "chat/completions":
      history.append(answer["choices"][0]["message"])
    elif path == "responses":
      history += answer["output"]
    else:
      history.append(assistant(answer["content"]))
  sent = [json.dumps(request) for request in upstream.seen]
  assert ["Finish it soon" in text for text in sent] == [False, False, True]
  assert re.search(r"Left for this task: \$0\.99\d{4} and 1 calls", sent[2])
  newest = upstream.seen[2][FORMS[path].history][-1]["content"]
  assert as_parts == isinstance(newest, list) and "Go 2." in json.dumps(newest)
  assert len(client.conversations()) == 1 and len(client.session()["steps"]) == 3
  # What the next call begins with is the prompt without the message that was told.
  (conversation,) = client.exchange.sessions.list_conversations("purse = ?", 1)
  assert (
    conversation.caches[1].messages == len(upstream.seen[2][FORMS[path].history]) - 1
  )


def test_a_providers_words_about_retries_reach_the_client(open_client, upstream):
  upstream.fault = "429"
  upstream.retry_after = "7.5"
  client = open_client(models={"retries": 0})
  reply = client.chat()
  assert (reply.status_code, reply.headers["retry-after"]) == (429, "7.5")


TOOL = {"name": "go", "input_schema": {}, "parameters": {}, "function": {"name": "go"}}


def play(client, path, **fields):
  """Call until a call is refused; return the answers."""
  history = []
  answers = []
  while len(history) < 80 and (not answers or answers[-1].status_code == 200):
    history.append(user("Task: go. " * (10 if history else 1000)))
    answers.append(call(client, path, history, tools=[TOOL], **fields))
    history.append(assistant(WORDS))
  return answers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
def test_the_last_turn_hands_back_what_there_is(open_client, upstream, path, stream):
  """The caches give no discount. Of five LARGE calls, the second is warned of."""
  upstream.answer = WORDS
  prices = (1.0, 1.0, 2.0), (5.0, 5.0, 10.0)
  settings = dict(last_turn=True, warn_share=0.5, max_large_calls=2, policy="large")
  client = open_client(models={"prices": prices}, max_usd=CAP_USD, **settings)
  answers = play(client, path, stream=stream)
  *texts, last = [json.dumps(request) for request in upstream.seen]
  assert [answer.status_code for answer in answers] == [200] * len(upstream.seen) + [
    402
  ]
  assert len(texts) > 5 and "Finish it soon" in texts[-1]
  assert "Finish it soon" not in last and "hand back what there is" in last
  assert ["hand back" in text or "tool_choice" in text for text in texts] == [
    False
  ] * len(texts)
  none = {"type": "none"} if path == "messages" else "none"
  assert upstream.seen[-1]["tool_choice"] == none and upstream.seen[-1]["tools"]
  session = client.session()
  usd = float(upstream.usd(dict(zip(("small", "large"), prices))))
  assert 0.5 * CAP_USD < session["spent_usd"] <= CAP_USD
  assert session["spent_usd"] == pytest.approx(usd)
  assert session["large_calls"] == 2 and len(client.conversations()) == 1
  # No other call is answered either, until the cap is raised.
  assert client.chat(headers={"x-baar-conversation": "b"}).status_code == 402
  client.http.patch("/v1/sessions/s", json={"max_usd": 1})
  assert client.chat().status_code == 200


def test_a_cap_without_room_for_a_last_turn_is_refused(open_client, upstream):
  client = open_client(last_turn=True, max_usd=0.015)
  answer = client.chat()
  assert answer.status_code == 402 and not upstream.seen
  assert (
    "With a last turn, the next call needs $0.0" in answer.json()["error"]["message"]
  )
  assert client.chat(headers={"x-baar-max-usd": "0.01"}).status_code == 402
  assert client.http.get("/v1/sessions/s").status_code == 404
  assert open_client(max_usd=0.015, name="other").chat().status_code == 200


def test_a_subagent_leaves_the_dollars_of_the_last_turn(tmp_path, upstream):
  """They are kept while the server restarts, and a failed last turn can be repeated."""
  settings = dict(last_turn=True, max_usd=0.0176, name="kept")
  with Client(tmp_path, upstream, **settings) as client:
    assert client.chat().status_code == 200
    sub = {"x-baar-conversation": "sub"}
    statuses = {client.chat(headers=sub).status_code for _ in range(30)}
    assert statuses == {200, 402}
    aside_usd = client.session()["last_turn_usd"]
    assert client.session()["left_usd"] < 0.001 < 0.016 < aside_usd
  with Client(tmp_path, upstream, **settings) as client:
    assert client.session()["last_turn_usd"] == aside_usd
    assert client.chat(headers=sub).status_code == 402
    upstream.fault = ["400 no", "400 tool_choice: none is not supported"]
    history = [*ASK, assistant(REPLY), user("on")]
    statuses = []
    for _ in range(3):
      statuses.append(client.chat(messages=history, tools=[TOOL]).status_code)
    assert statuses == [400, 200, 402]
    assert [request.get("tool_choice") for request in upstream.seen[-3:]] == [
      *("none", "none"),
      None,
    ]
    assert "tools" not in upstream.seen[-1]
  with Client(tmp_path, upstream, **settings) as client:
    assert client.chat().status_code == 402 and client.session()["spent_usd"] <= 0.0176


def test_one_of_many_calls_at_once_is_the_last_turn(open_client, upstream):
  upstream.latency_s = 0.05
  client = open_client(last_turn=True, max_usd=0.0176)
  with ThreadPoolExecutor(8) as threads:
    answers = [*threads.map(lambda n: client.chat(user=str(n)), range(40))]
  texts = [json.dumps(request) for request in upstream.seen]
  assert sum("hand back" in text for text in texts) == 1
  assert {answer.status_code for answer in answers} == {200, 402}
  assert 0.0002 < client.session()["spent_usd"] <= 0.0176
