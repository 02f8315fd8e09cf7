"""Test the endpoint in this process, with a stand-in for the models."""

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import socket
import sqlite3
import threading
import time

import pytest
import standin
import uvicorn
from endpoint import ASK, PRICES, REPLY, USD, Client, wait_until
from starlette.responses import JSONResponse

from baar_jax import Router
from baar_jax.episode import Step, Task
from baar_jax.llms.history import ToolCall, Turn
from baar_jax.rollout.loop import Decider
from baar_jax.rollout.rules import RulePolicy
from baar_jax.rollout.specs import Decision, Job, Live, PolicySpec
from baar_serve.__main__ import Connection
from baar_serve.exchange import Delivery
from baar_serve.forms.chat_completions import FORM
from baar_serve.request import ClientKey, hash_turn


def test_a_broken_stream_counts_at_its_worst_case(client, upstream, monkeypatch):
  def count_on(handler, request, text):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
    for n in (1, 2):
      usage = {"prompt_tokens": 9, "completion_tokens": n}
      fields = {
        "choices": [{"index": 0, "delta": {"content": "x\u2028y"}}],
        "usage": usage,
      }
      line = json.dumps(fields, ensure_ascii=False)  # U+2028 ends no line.
      handler.wfile.write(f"data: {line}\n\n".encode())
    handler.wfile.write(b"data: [DONE]\n\n" if request["user"] == "whole" else b"")
    handler.close_connection = True

  monkeypatch.setitem(standin.FAULTS, "count_on", count_on)
  upstream.fault = lambda number, request: "count_on"
  whole, cut = [
    client.chat(name, stream=True, user=name).text for name in ("whole", "cut")
  ]
  assert whole.endswith("data: [DONE]\n\n")
  assert json.loads(cut.split("data: ")[-1])["error"]["code"] == "upstream_error"
  assert client.session("whole")["spent_usd"] == pytest.approx(1e-6 * (9 + 2 * 2))
  # The worst case: 200 tokens of a reply at $2, and one for each byte of the request.
  assert client.session("cut")["spent_usd"] >= 1e-6 * (200 * 2 + 23)
  upstream.fault = lambda number, request: None
  assert (
    client.chat("cut").status_code == 200 and client.session("cut")["in_flight"] == 0
  )


@pytest.mark.parametrize(
  "fields, content, tokens",
  [
    ({"documents": ["a" * 10_000]}, "Hello", 10_000),
    ({}, [{"type": "video_url", "video_url": {"url": "http://127.0.0.1/a"}}], 50_000),
    (
      {},
      [{"type": "image_url", "image_url": {"url": "data:"}, "text": "a" * 10_000}],
      60_000,
    ),
  ],
)
def test_the_worst_case_covers_every_part_of_a_request(client, fields, content, tokens):
  assert client.chat().status_code == 200
  app = client.http.app
  messages = [*ASK, {"role": "user", "content": content}]
  body = {"messages": messages, "model": "baar"} | fields
  for name in ("s", "new"):
    call = app.desk.receive(ClientKey(), FORM, {"x-session-id": name}, body)
    assert (
      app.exchange.upstreams[0].prepare(call, app.exchange.config).prompt_usd
      >= 1e-6 * tokens
    )


# Rows: headers, fields of the body, the path before /v1, and the session's name.
UUID = "0199c0de-0000-4000-8000-00000000000a"
CODEX = {
  "x-codex-turn-metadata": json.dumps({"thread_id": "t", "session_id": "abcdefgh"})
}
NAMES = [
  ({"x-baar-session-id": "a", "x-session-id": "b"}, {}, "", "a"),
  ({"x-session-id": "b"}, {"session_id": "c"}, "/s/u", "b"),
  ({"x-claude-code-session-id": "d"}, {"session_id": "c"}, "/s/u", "u"),
  ({"x-claude-code-session-id": "d", "session-id": "e"}, {}, "", "d"),
  (CODEX, {"prompt_cache_key": UUID}, "", "abcdefgh"),
  ({"x-litellm-session-id": "f"}, {"metadata": {"session_id": "g"}}, "", "f"),
  ({}, {"session_id": None, "metadata": {"session_id": "g"}}, "", "g"),
  ({}, {"metadata": {"user_id": f"user_1_account__session_{UUID}"}}, "", UUID),
  ({}, {"metadata": {"user_id": json.dumps({"session_id": UUID})}}, "", UUID),
  ({}, {"prompt_cache_key": UUID}, "", UUID),
  ({"x-session-id": "child", "x-parent-session-id": "b"}, {}, "", "b"),
]


@pytest.mark.parametrize("headers, fields, prefix, name", NAMES)
def test_sessions_have_the_names_that_agents_give(
  client, headers, fields, prefix, name
):
  body = {"model": "gpt-9", "messages": ASK} | fields
  reply = client.post(f"{prefix}/v1/chat/completions", body, headers)
  assert reply.headers["x-baar-session-id"] == name


def test_histories_keep_tasks_apart_without_names(client, upstream):
  """Three runs of one task, in step with each other; their first replies are equal.
  A prompt cache key that is no id names no session."""
  reply = itertools.count()
  upstream.answer = lambda request: (
    REPLY if len(request["messages"]) == 2 else f"Action: go {next(reply)}"
  )
  examples = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
  histories = [[*examples, *ASK] for _ in range(3)]
  ids = [[], [], []]
  for place in range(3):
    for number, messages in enumerate(histories):
      body = {"model": "baar", "messages": messages, "prompt_cache_key": "app"}
      answer = client.post("/v1/chat/completions", body)
      ids[number].append(answer.headers["x-baar-conversation"])
      (choice,) = answer.json()["choices"]
      text = choice["message"]["content"]
      # The client strips its history, and changes a text before it.
      messages[0] = {"role": "user", "content": f"file {place}"}
      messages += [{"role": "assistant", "content": f" {text}\n"}, *ASK]
  assert [len({*names}) for names in ids] == [1, 1, 1]
  assert len({names[0] for names in ids}) == 3
  # Two tasks begin with an example that is equal to their first reply.
  example = [*examples, {"role": "user", "content": "hi"}]
  example[1] = {"role": "assistant", "content": REPLY}
  names = []
  upstream.answer = lambda request: REPLY
  for task in ("a", "b"):
    messages = [*examples, *example, {"role": "user", "content": task}]
    answer = client.post(
      "/v1/chat/completions", {"model": "baar", "messages": messages}
    )
    names.append(answer.headers["x-baar-conversation"])
  assert names[0] != names[1]
  # Calls of two equal tasks arrive before either is made.
  upstream.answer = lambda request: REPLY
  for _ in range(2):
    client.post("/v1/chat/completions", {"model": "baar", "messages": ASK})
  body = {"model": "baar", "messages": [*ASK, {"role": "assistant", "content": REPLY}]}
  receive = client.http.app.desk.receive
  twins = [receive(ClientKey(), FORM, {}, body | {"user": name}) for name in "ab"]
  assert len({call.conversation.id for call in twins}) == 2


def test_replies_are_recognised_without_their_reasoning():
  given = Turn("assistant", "<think>a\nb</think> go", (ToolCall("look", ""),))
  sent_back = Turn("assistant", "go", (ToolCall("look", "{}"),))
  assert hash_turn(given) == hash_turn(sent_back)


def test_agents_of_one_session_draw_on_one_purse(client):
  """A title is no step. A subagent, another policy and the next task are conversations."""
  tools = [{"type": "function", "function": {"name": "go"}}]
  long = [{"role": "user", "content": "x" * 400}]
  client.chat(messages=long, tools=tools)
  title = client.chat(messages=[{"role": "user", "content": "Write a title."}])
  assert "x-baar-conversation" not in title.headers
  sub = {"x-claude-code-agent-id": "sub"}
  replies = [client.chat(headers=sub, tools=tools) for _ in range(2)]
  replies.append(client.chat(model="baar:large", messages=long, tools=tools))
  assert client.post("/v1/sessions/s/score", {"score": 1}).status_code == 200
  replies.append(client.chat(messages=long, tools=tools))
  numbers = [reply.headers["x-baar-conversation"] for reply in replies]
  assert numbers[0] == numbers[1] and len({*numbers}) == 3
  session = client.http.get("/v1/sessions/s").json()
  counts = [len(found["steps"]) for found in session["conversations"]]
  assert counts == [1, 1, 2, 1]  # the newest first
  assert [found["score"] for found in session["conversations"]] == [None, 1, None, None]
  spent = sum(
    step["cost_usd"] for found in session["conversations"] for step in found["steps"]
  )
  assert session["spent_usd"] > spent + USD / 2  # with the title
  assert client.post("/v1/sessions/s/score", {"score": 0}).status_code == 200
  assert client.post("/v1/sessions/s/score", {"score": 0}).status_code == 409


def test_a_retry_gets_the_answer_that_is_being_made(client, upstream):
  upstream.latency_s = lambda number: 0.3
  again = {"x-stainless-retry-count": "1"}
  body = {"model": "baar", "messages": ASK}
  post = functools.partial(client.post, "/v1/chat/completions")
  with concurrent.futures.ThreadPoolExecutor() as pool:
    named = [pool.submit(client.chat, stream=n < 0) for n in range(2)]
    unnamed = [pool.submit(post, body), pool.submit(post, body)]
    assert len({*(reply.result().text for reply in named)}) == 1
    ids = {reply.result().headers["x-baar-session-id"] for reply in unnamed}
  assert len(upstream.seen) == 3 and len(ids) == 2
  assert post(body, again).headers["x-baar-session-id"] in ids
  assert len(upstream.seen) == 3
  assert post(body).headers["x-baar-session-id"] not in ids


def test_a_client_that_leaves_at_the_end_of_a_reply_has_it():
  async def leave(events):
    delivery = Delivery(None)
    for event in (*events, b"data: [DONE]"):
      await delivery.add(event, 0)
    reading = delivery.follow()
    for _ in events:
      await anext(reading)
    await reading.aclose()
    return delivery.is_dropped

  assert asyncio.run(leave([b'data: {"finish_reason": null}']))
  assert not asyncio.run(leave([b'data: {"finish_reason": "stop"}']))


def test_a_client_lowers_its_cap_and_an_operator_raises_it(client):
  caps = ["0.05", None, "0.06", "0.04"]
  replies = []
  for cap in caps:
    replies.append(client.chat(headers={"x-baar-max-usd": cap} if cap else {}))
  assert [reply.status_code for reply in replies] == [200] * 4
  lefts = [float(reply.headers["x-baar-left-usd"]) for reply in replies]
  assert lefts[2] > 0.04 > lefts[3]
  path = "/v1/sessions/s"
  assert client.http.patch(path, json={"max_usd": 1}).json()["usd_limit"] == 1
  assert client.http.patch(path, json={"max_usd": None}).json()["left_usd"] is None
  for wrong in ({"max_usd": -1}, {"usd_limit": 1}):
    assert client.http.patch(path, json=wrong).status_code == 400
  client.chat("new")
  client.http.patch("/v1/sessions/new", json={"max_usd": 1})
  turn = [{"role": "assistant", "content": REPLY}, *ASK]
  later = [client.chat("new", messages=[*ASK, *turn * n]) for n in (1, 2)]
  # The changed cap begins one conversation.
  assert len({reply.headers["x-baar-conversation"] for reply in later}) == 1


def test_a_cap_is_never_passed_and_errors_name_the_dollars(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=0.0006) as client:
    replies = [client.chat(headers={"x-baar-max-usd": "9"}) for _ in range(20)]
    statuses = [reply.status_code for reply in replies]
    assert statuses == sorted(statuses) and {*statuses} == {200, 402, 404}
    refused = len(replies) - statuses.count(200)
    # OpenAI's client must not repeat the call.
    assert replies[-1].headers["x-should-retry"] == "false"
    error, spent = replies[-1].json()["error"], client.session()["spent_usd"]
    assert (
      error["spent_usd"]
      == spent
      < error["cap_usd"]
      == 0.0006
      < spent + error["needed_usd"]
    )
    assert upstream.usd({"small": PRICES[0], "large": PRICES[1]}) == pytest.approx(
      spent
    )
    upstream.fault = lambda number, request: "drop"  # A retry must fit the cap, too.
    assert client.chat("third").json()["error"]["code"] == "upstream_error"
    assert upstream.seen.pop() and len(upstream.seen) == len(replies) - refused
    assert client.session("third")["spent_usd"] > 0.0004


def test_an_attempt_with_a_bug_counts_at_its_worst_case(client):
  client.http.app.exchange.upstreams[0].attempt = lambda call: 1 / 0
  assert client.chat().status_code == 500
  session = client.session()
  assert session["in_flight"] == 0 and session["spent_usd"] > 0.0004


@pytest.mark.parametrize("full_at", range(4))
def test_a_full_disk_leaves_the_session_whole(client, upstream, monkeypatch, full_at):
  """The disk is full at one of the four writes of a call, and then has room again."""
  sessions = client.http.app.exchange.sessions
  client.chat("other")
  writes = itertools.count()
  execute = sessions._execute

  def fail(statements):
    if next(writes) == full_at:
      raise sqlite3.OperationalError("database or disk is full")
    return execute(statements)

  monkeypatch.setattr(sessions, "_execute", fail)
  reply = client.chat()
  assert reply.status_code == (200 if next(writes) > full_at + 1 else 503)
  if reply.status_code == 503:
    assert "Free disk space" in reply.json()["error"]["message"]
  assert client.chat(messages=[*ASK, *ASK]).status_code == 200
  session = client.session()
  assert session["in_flight"] == 0
  assert len(session["steps"]) == len(upstream.seen) - 1
  assert session["spent_usd"] == pytest.approx(
    float(upstream.usd({"small": PRICES[0]})) - USD
  )
  assert client.post("/v1/sessions/s/score", {"score": 1}).status_code == 200


def test_a_failed_batch_ends_only_the_call_that_ran_it():
  """The first call decides alone. The second decides for both others and fails.
  Then the third decides again."""
  picks = iter((0, 2))
  policy = RulePolicy(PolicySpec("p"), lambda live, spec: (0, 1)[next(picks, 1)])
  decider = Decider(policy, rows=3)
  tasks = [Task(name, "test", "go", 9) for name in "abc"]
  calls = [decider.decide(Live(Job(task, "test", 0))) for task in tasks]

  async def gather():
    return await asyncio.gather(*calls, return_exceptions=True)

  first, second, third = asyncio.run(gather())
  assert (first.model, third.model) == (0, 1) and isinstance(second, IndexError)


@pytest.mark.parametrize("model, cap", [("baar:large", "1"), ("baar:large:K=1", "9")])
def test_large_calls_are_capped_by_header_and_name(client, model, cap):
  replies = [
    client.chat("s", {"x-baar-max-large-calls": cap}, model=model) for _ in range(3)
  ]
  assert [reply.json()["model"] for reply in replies] == ["large", "small", "small"]
  assert [reply.headers["x-baar-left-large-calls"] for reply in replies] == [
    "0",
    "0",
    "0",
  ]
  assert client.session()["policy"] == "first-large(K=1)"


@pytest.fixture
def routed(tmp_path, upstream, monkeypatch):
  """routed(**serve): a client whose router picks LARGE at a cost weight below 0.3."""
  spec = PolicySpec("conditioned", update=3, cap_conditioned=True)
  router = RulePolicy(spec, lambda live, spec: int(live.cost_weight < 0.3))
  router.cost_weights = (0.5, 0.1)
  monkeypatch.setattr("baar_serve.__main__.open_router", lambda *args: router)
  (tmp_path / "served" / "tokenizer").mkdir(parents=True)
  with contextlib.ExitStack() as stack:
    yield lambda **serve: stack.enter_context(
      Client(tmp_path, upstream, policy="router", **serve)
    )


def test_a_client_selects_a_cost_weight_by_the_model_name(routed):
  client = routed()
  names = "baar:cost_weight=0.5", "baar:cost_weight=0.1", "baar"
  models = []
  for name in (*names, "baar:K=5:cost_weight=0.5"):
    models.append(client.chat(name, model=name).json()["model"])
  assert models == ["small", "large", "large", "small"]
  assert client.session(name)["policy"] == "conditioned(update=3,cost_weight=0.5,K=5)"
  listed = client.http.get("/v1/models").json()["data"]
  assert {*names} < {model["id"] for model in listed}
  assert client.chat("other", model="baar:cost_weight=0.3").status_code == 404


def test_decisions_read_the_scores_of_earlier_steps(routed, monkeypatch):
  client = routed()
  scores = []

  def choose(policy, ready):
    scores.append([step.score for step in ready[0].steps])
    return [Decision(0)]

  monkeypatch.setattr(RulePolicy, "choose", choose)
  messages = [*ASK]
  router = Router(RulePolicy(PolicySpec("r"), None), ("small", "large"), 9, sessions=1)
  for score in (None, 0.25, 0.5):
    headers = {} if score is None else {"x-baar-score": f"{score}"}
    assert client.chat(headers=headers, messages=messages).status_code == 200
    router.decide(messages, score=score)
    messages += [{"role": "assistant", "content": "go"}, *ASK]
  assert scores == [[], [], [0.25], [0.25], [0.25, 0.5], [0.25, 0.5]]


def test_attempts_in_flight_count_after_a_kill(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=1.0) as client:
    client.chat("s")
    sessions = client.http.app.exchange.sessions
    purse = sessions.find_purse("", "s")
    # This attempt never ends.
    client.attempt = sessions.begin(purse, None, Step("", 1, ""), 0.25)
    assert client.session()["left_usd"] == pytest.approx(1.0 - USD - 0.25)
  with Client(tmp_path, upstream, max_usd=1.0) as client:
    session = client.session()
    assert (
      session["spent_usd"] == pytest.approx(USD + 0.25) and session["in_flight"] == 0
    )
    assert session["large_calls"] == 1 and len(session["steps"]) == 1
    assert client.chat().status_code == 200


HOSTS = ("evil@127.0.0.1", "127.0.0.1@evil", "127.0.0.1, evil", "", "127.0.0.1:")
# Rows: a body or some of its fields, headers, the status, and a word of the error.
BAD = [
  ({"model": "llama"}, {}, 404, "baar:large"),
  ({"max_tokens": True}, {}, 400, "max_tokens"),
  ({}, {"x-session-id": "a" * 257}, 400, "session's name"),
  ({}, {"x-baar-max-usd": "nan"}, 400, "x-baar-max-usd"),
  ({}, {"host": "other.example"}, 403, "127.0.0.1"),
  *[({}, {"host": host}, 403, "127.0.0.1") for host in HOSTS],
  ({}, {"content-type": "text/plain"}, 415, "application/json"),
  ({"text": "a" * 2**20}, {}, 413, "max_body_mb"),
  ('{"n": NaN}', {}, 400, "JSON object"),
]


def test_bad_input_is_refused_in_one_line(tmp_path, upstream):
  with Client(tmp_path, upstream, max_body_mb=0.5) as client:
    client.chat()
    for fields, headers, status, word in BAD:
      body = {"model": "baar", "messages": ASK}
      text = fields if isinstance(fields, str) else json.dumps(body | fields)
      headers = {"content-type": "application/json", "x-session-id": "s"} | headers
      reply = client.http.post("/v1/chat/completions", content=text, headers=headers)
      error = reply.json()["error"]
      assert reply.status_code == status and word in error["message"], error
      assert "\n" not in error["message"]
    assert len(client.session()["steps"]) == len(upstream.seen) == 1


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
  upstream.fault = lambda number, request: fault
  final = {"x-baar-session-final": "true"}
  reply = client.chat(headers=final, stream=fault == "no choice")
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


def test_other_addresses_need_a_key(tmp_path, upstream, monkeypatch):
  monkeypatch.setenv("CLIENTS", "secret-1")
  with Client(
    tmp_path, upstream, "locked", host="0.0.0.0", key_variable="CLIENTS"
  ) as client:
    assert client.chat().status_code == 401
    assert client.chat(headers={"authorization": "Bearer secret-1"}).status_code == 200
    assert client.http.get("/health").status_code == 200
  monkeypatch.setenv("CLIENTS", " ")
  with pytest.raises(ValueError, match="key_variable"):
    Client(tmp_path, upstream, "empty", key_variable="CLIENTS")


def test_the_page_shows_steps_and_escapes_names(client):
  client.chat("<i>a")
  page = client.http.get("/").text
  assert "&lt;i&gt;a" in page and "<i>" not in page and f"${USD:.6f}" in page
  assert "1 steps<" in page and "LARGE calls: 0." in page
  assert (
    'baar_calls_total{model="small",outcome="reply"} 1.0'
    in client.http.get("/metrics").text
  )


@pytest.mark.parametrize("command, score", [("echo 0.5", 0.5), ("false", None)])
def test_a_command_scores_a_task_at_its_end(
  tmp_path, upstream, monkeypatch, command, score
):
  """The first task ends by a header, and the second one after some time."""
  monkeypatch.setattr("baar_serve.exchange.WATCH_S", 0.05)
  script = tmp_path / "score.sh"
  script.write_text(f"{command}\n")
  command = f"sh {script}"
  over = "SELECT count(*) FROM conversations WHERE id = ? AND changed_s <= 0"
  with Client(tmp_path, upstream, outcome=command, idle_s=1.0) as client:
    for name, headers in (("s", {"x-baar-session-final": "true"}), ("idle", {})):
      client.chat(name, headers)
      ((number, _),) = client.conversations(name)
      read = client.http.app.exchange.sessions.read
      wait_until(lambda number=number, read=read: read(over, number) == [(1,)])
      wait_until(lambda name=name: client.session(name)["score"] == score)
      client.chat(name)
      assert [steps for _, steps in client.conversations(name)] == [1, 1]


KEYS = """
[ann]
sha256 = "{}"
usd_per_day = 0.00065
[bob]
sha256 = "{}"
max_large_calls = 0
[root]
sha256 = "{}"
operator = true
"""


def test_keys_part_the_clients(tmp_path, upstream):
  """Ann has a cap per day, and Bob one per session. The operator sees both."""
  digests = [hashlib.sha256(name.encode()).hexdigest() for name in ("a", "b", "r")]
  (tmp_path / "keys.toml").write_text(KEYS.format(*digests))
  with Client(tmp_path, upstream, keys=str(tmp_path / "keys.toml")) as client:
    ann, bob, root = [{"x-api-key": name} for name in ("a", "b", "r")]
    replies = [client.chat(f"s{n}", ann) for n in range(10)]
    statuses = [reply.status_code for reply in replies]
    assert statuses == sorted(statuses) and {*statuses} == {200, 402}
    assert client.chat("s0", bob, model="baar:large").json()["model"] == "small"
    get = functools.partial(client.http.get, "/v1/sessions")
    names = []
    for key in (ann, bob, root):
      names.append([session["id"] for session in get(headers=key).json()["data"]])
    assert {*names[0]} == {f"s{n}" for n in range(10)} and names[1] == ["s0"]
    assert len(names[2]) == 11
    path = "/v1/sessions/s0"
    patch = functools.partial(client.http.patch, path, json={"max_large_calls": 1})
    assert [patch(headers=key).status_code for key in (bob, root)] == [403, 200]
    bearer = {"authorization": "bearer b"}
    assert client.http.get("/v1/sessions/s1", headers=bearer).status_code == 404
    ann_s = client.http.get(f"{path}?client=ann", headers=root).json()
    assert (ann_s["client"], ann_s["call_limit"]) == ("ann", None)
    assert get().status_code == 401


def test_a_model_that_fails_all_the_time_is_asked_once_in_a_while(
  tmp_path, upstream, monkeypatch
):
  upstream.fault = lambda number, request: "500"
  models = {"max_failures": 3, "retries": 0}
  with Client(tmp_path, upstream, models=models) as client:
    statuses = [client.chat(f"s{n}").status_code for n in range(6)]
    assert statuses == [500] * 4 + [503] * 2 and len(upstream.seen) == 4
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 31)
    upstream.fault = lambda number, request: None
    assert [client.chat("t").status_code for _ in range(2)] == [200, 200]


def test_responses_refer_to_earlier_ones(client, upstream, monkeypatch):
  body = {"model": "gpt-9", "input": "Go out."}
  first = client.post("/v1/responses", body).json()
  (item,) = first["output"]
  more = {"role": "user", "content": "On."}
  bodies = [
    body | {"previous_response_id": first["id"], "input": [more]},
    body | {"input": [{"type": "item_reference", "id": item["id"]}, more]},
  ]
  for number, body in enumerate(bodies):
    assert client.post("/v1/responses", body).status_code == 200
    sent = upstream.seen[-1]["input"]
    assert sent == [{"role": "user", "content": "Go out."}, item, more][number:]
  monkeypatch.setattr("baar_serve.forms.responses.MOST_CHARS", 400)
  client.post("/v1/responses", body | {"input": "Go in."})
  body["input"] = [{"type": "item_reference", "id": item["id"]}]
  error = client.post("/v1/responses", body).json()["error"]["message"]
  assert "Set store: false" in error


def test_other_routes_of_the_forms(tmp_path, upstream):
  models = {"forms": ("chat/completions", "messages")}
  with Client(tmp_path, upstream, models=models) as client:
    body = {"model": "claude-x", "messages": ASK, "max_tokens": 9}
    version = {"anthropic-version": "2026-10-21", "anthropic-beta": "b"}
    count = client.post("/v1/messages/count_tokens?beta=true", body, version)
    assert count.json() == {"input_tokens": 5} and "max_tokens" in upstream.seen[-1]
    assert upstream.seen[-1]["model"] == "large"
    assert client.post("/v1/messages?beta=true", body, version).status_code == 200
    assert upstream.headers[-1].items() >= version.items()
    assert upstream.paths[-1] == "/v1/messages?beta=true"
    refused = client.post("/v1/responses", {"model": "baar", "input": "a"})
    assert refused.status_code == 404 and "forms" in refused.text
    listed = client.http.get("/v1/models", headers=version).json()
    assert listed["data"][0]["id"] == listed["first_id"] == "claude-baar"
    assert client.http.head("/").status_code == 200
    upstream.fault = lambda number, request: "429"
    error = client.post("/v1/messages", body).json()
    assert error["type"] == "error" and error["error"]["type"] == "rate_limit_error"


def test_a_request_with_two_lengths_or_hosts_ends_its_connection():
  config = uvicorn.Config(JSONResponse({}), http=Connection, log_level="critical")
  server = uvicorn.Server(config)
  lines = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n"
  smuggled = "0\r\n\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n"
  with socket.create_server(("127.0.0.1", 0)) as listener:
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    for line in ("transfer-encoding: chunked", "content-length: 6", "host: b"):
      with socket.create_connection(listener.getsockname()) as client:
        client.sendall(f"{lines}{line}\r\n\r\n{smuggled}".encode())
        answer = client.makefile("rb").read()  # up to the end of the connection
      assert answer.startswith(b"HTTP/1.1 400") and answer.count(b"HTTP/1.1") == 1
    server.should_exit = True
    thread.join()
