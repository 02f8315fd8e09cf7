"""The endpoint, in process, with a loopback upstream."""

import contextlib
import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import standin
from standin import StandIn
from starlette.testclient import TestClient

from baar_jax.config import Config, EnvConfig, ModelsConfig, ServeConfig
from baar_jax.episode import Step
from baar_jax.rollout.live import Policy
from baar_jax.run import Run
from baar_jax.serve.sessions import Turn
from baar_jax.stages.serve import build

# Dollars per million tokens: input, cached input, output.
PRICES = (1.0, 0.5, 2.0), (5.0, 2.0, 10.0)
ASK = [{"role": "user", "content": "Task: go out\n\nA door."}]
SAID = "Thought: now.\n\nAction: go"  # 27 characters: 7 tokens, and 3 for the message
USD = 1e-6 * (9 * 1 + 10 * 2)  # of the first call: 23 characters are 6 tokens, and 3
TOKENS = 200  # of a reply, at most


class Client:
  """A client of a server on a run's directory."""

  def __init__(self, directory, upstream, name="served", timeout_s=2, concurrency=16, **serve):
    models = {
      "concurrency": concurrency,
      "timeout_s": timeout_s,
      "retries": 1,
      "prices": PRICES,
      "base_urls": (upstream.url,),
      "max_completion_tokens": TOKENS,
    }
    config = Config(name=name, runs=str(directory))
    config.models = ModelsConfig("chat", ("small", "large"), **models)
    config.env, config.bopo.lam = EnvConfig("served", max_steps=9), (0.1,)
    config.serve = ServeConfig(**{"policy": "small"} | serve)
    self.run = Run(config)
    self.http = TestClient(build(self.run), "http://127.0.0.1")

  def __enter__(self):
    self.http.__enter__()
    return self

  def __exit__(self, *error):
    self.http.__exit__(*error)
    self.run.close()

  def chat(self, session="s", headers=(), **fields):
    body = {"model": "baar", "messages": ASK, **fields}
    return self.post("/v1/chat/completions", body, {"x-session-id": session, **dict(headers)})

  def post(self, path, body, headers=None):
    return self.http.post(path, json=body, headers=headers)

  def session(self, name="s"):
    return self.http.get(f"/v1/sessions/{name}").json()


@pytest.fixture
def upstream():
  with StandIn(lambda request: SAID).running() as server:
    yield server


@pytest.fixture
def client(tmp_path, upstream):
  with Client(tmp_path, upstream) as client:
    yield client


def test_a_call_is_forwarded_and_its_dollars_are_told(client, upstream):
  response = client.chat(temperature=0.5, unheard="of", stop=["x"])
  body, said = response.json(), response.headers
  assert body["model"] == said["x-baar-selected-model"] == "small"
  assert body["choices"][0]["message"]["content"] == SAID
  assert body["usage"]["cost"] == float(said["x-baar-cost-usd"]) == pytest.approx(USD)
  assert float(said["x-baar-session-usd"]) == pytest.approx(USD)
  assert said["x-baar-session-id"] == "s" and float(said["x-baar-p-large"]) == 0
  sent = {"temperature": 0.5, "unheard": "of", "stop": ["x"], "messages": ASK, "model": "small"}
  assert upstream.seen == [sent | {"max_completion_tokens": TOKENS}]


def read_stream(response):
  events = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
  return events[-1], [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize("asked", [False, True])
def test_a_stream_is_passed_on_and_ends_with_its_dollars(client, upstream, asked):
  options = {"stream_options": {"include_usage": True}} if asked else {}
  response = client.chat(stream=True, **options)
  mark, chunks = read_stream(response)
  usages = [chunk.pop("usage") for chunk in chunks if "usage" in chunk]
  assert [usage["cost"] for usage in usages] == [pytest.approx(USD)] * asked
  deltas = [choice["delta"].get("content", "") for c in chunks for choice in c["choices"]]
  assert "".join(deltas) == SAID and mark == "[DONE]"
  assert {chunk["model"] for chunk in chunks} == {"small"}
  assert upstream.seen[0]["stream_options"] == {"include_usage": True}
  assert client.session()["spent_usd"] == pytest.approx(USD)


def test_a_stream_that_breaks_is_an_error_and_counts_at_its_most(client, upstream):
  upstream.fault = lambda number, request: "cut_stream"
  text = client.chat(stream=True).text
  assert json.loads(text.split("data: ")[-1])["error"]["code"] == "upstream_error"
  # Of the reply 200 tokens at $2, and a token for each byte of the request at least.
  assert client.session()["spent_usd"] >= 1e-6 * (200 * 2 + 23)
  upstream.fault = lambda number, request: None
  assert client.chat().status_code == 200 and client.session()["in_flight"] == 0


def test_usage_that_is_told_while_a_model_writes_is_not_the_bill(client, upstream, monkeypatch):
  def count_on(handler, request, text):
    for n in (1, 2):
      choices = [{"index": 0, "delta": {"content": "x"}, "finish_reason": None}]
      usage = {"prompt_tokens": 9, "completion_tokens": n}
      line = json.dumps({"choices": choices, "usage": usage})
      start = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" if n == 1 else b""
      handler.wfile.write(start + f"data: {line}\n\n".encode())
    handler.wfile.write(b"data: [DONE]\n\n" if request["user"] == "whole" else b"")
    handler.close_connection = True

  monkeypatch.setitem(standin.FAULTS, "count_on", count_on)
  upstream.fault = lambda number, request: "count_on"
  for session in ("cut", "whole"):
    client.chat(session, stream=True, user=session)
  assert client.session("cut")["spent_usd"] >= 1e-6 * (200 * 2 + 23)
  assert client.session("whole")["spent_usd"] == pytest.approx(1e-6 * (9 + 2 * 2))


@pytest.mark.parametrize(
  "fields, content, tokens",
  [
    ({"documents": ["a" * 10_000]}, "Hello", 10_000),
    ({}, [{"type": "video_url", "video_url": {"url": "http://127.0.0.1/a"}}], 50_000),
    ({}, [{"type": "image_url", "image_url": {"url": "data:"}, "text": "a" * 10_000}], 60_000),
  ],
)
def test_the_worst_case_counts_all_that_a_model_may_read(client, fields, content, tokens):
  assert client.chat().status_code == 200
  exchange = client.http.app.state.exchange
  cache, upstream = exchange.sessions.find("s").caches[0], exchange.upstreams[0]
  messages = [*ASK, {"role": "user", "content": content}]
  for known in (cache, None):
    assert upstream.bound_usd({"messages": messages} | fields, known) >= 1e-6 * tokens


def test_a_cap_holds_for_later_calls_that_name_none(client):
  assert client.chat(headers={"x-baar-max-usd": "0.05"}).status_code == 200
  assert client.chat().headers["x-baar-left-usd"] < "0.05"
  for cap in ("0.06", "0.04"):
    assert client.chat(headers={"x-baar-max-usd": cap}).status_code == 409


def test_a_session_that_was_killed_before_its_end_is_one_episode(client):
  client.chat()
  sessions = client.http.app.state.exchange.sessions
  sessions.finish(sessions.find("s"), 1.0)
  sessions.find("s").score = None  # as it is on disk until the episode is stored
  assert client.post("/v1/sessions/s/score", {"score": 1.0}).status_code == 200
  assert len(client.run.store.episodes("always-small")) == 1


def test_a_cap_that_only_large_calls_would_pass_leaves_a_trial_of_small(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=0.001) as client:
    client.chat()
    assert client.session()["policy"] == "always-small"


def test_a_cap_is_never_passed_and_says_what_is_needed(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=0.0006) as client:
    replies = [client.chat(headers={"x-baar-max-usd": "9"}) for _ in range(20)]
    statuses = [reply.status_code for reply in replies]
    assert statuses == sorted(statuses) and {*statuses} == {200, 429}
    error, spent = replies[-1].json()["error"], client.session()["spent_usd"]
    assert error["spent_usd"] == spent < error["cap_usd"] == 0.0006 < spent + error["needed_usd"]
    assert upstream.usd({"small": PRICES[0], "large": PRICES[1]}) == pytest.approx(spent)
    partial = client.chat(headers={"x-baar-on-exhausted": "partial"}).json()
    assert partial["choices"][0]["finish_reason"] == "length" and partial["usage"]["cost"] == 0


def test_one_last_call_is_paid_from_the_reserve(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=0.0017, reserve_usd=0.001) as client:
    replies = [client.chat() for _ in range(16)]
    left = [float(r.headers["x-baar-left-usd"]) for r in replies if r.status_code == 200]
    # A call takes $0.0000245, the first one more, and may cost 0.000409: 12 fit beside the reserve.
    assert left[-3] > 0.001409 > left[-2] > left[-1] and len(left) == 13


def test_large_calls_are_capped_by_header_and_name(client, upstream):
  for name, headers in (("a", {"x-baar-max-large-calls": "1"}), ("b", {})):
    model = "baar:large" if headers else "baar:large:K=1"
    left = [client.chat(name, headers, model=model) for _ in range(3)]
    assert [reply.json()["model"] for reply in left] == ["large", "small", "small"]
    assert [reply.headers["x-baar-left-large-calls"] for reply in left] == ["0", "0", "0"]
    assert client.session(name)["policy"] == "first-large(K=1)"


class Values(Policy):
  """Stands for the router that knows its budget: LARGE where a dollar counts for little."""

  prices = (0.5, 0.1)

  def __init__(self):
    super().__init__("conditioned(update=3)", lambda live: int(live.price < 0.3))


@pytest.fixture
def routed(tmp_path, upstream, monkeypatch):
  """routed(**serve): a client of a server with a router."""
  monkeypatch.setattr("baar_jax.serve.decide.open_router", lambda *args: Values())
  (tmp_path / "served" / "tokenizer").mkdir(parents=True)
  with contextlib.ExitStack() as stack:
    yield lambda **serve: stack.enter_context(Client(tmp_path, upstream, policy="router", **serve))


def test_a_client_says_how_much_a_dollar_counts(routed):
  client, price = routed(), ["baar:price=0.5", "baar:price=0.1", "baar", "baar:K=5:price=0.5"]
  models = [client.chat(f"s{n}", model=name).json()["model"] for n, name in enumerate(price)]
  assert models == ["small", "large", "large", "small"]
  settings = ["price=0.5", "price=0.1", "price=0.1", "price=0.5,K=5"]
  policies = [client.session(f"s{n}")["policy"] for n in range(4)]
  assert policies == [f"conditioned(update=3,{text})" for text in settings]
  assert {*price[:3]} < {model["id"] for model in client.http.get("/v1/models").json()["data"]}
  for name in ("baar:price=0.3", "baar:small:price=0.5", "baar:price=x"):
    assert client.chat("other", model=name).status_code == 404
  assert client.chat("s0").status_code == 200  # a later call that names no price
  assert client.chat("s0", model="baar:price=0.1").status_code == 409


def test_what_was_in_flight_at_a_kill_counts_at_its_worst_case(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=1.0) as client:
    client.chat()
    sessions = client.http.app.state.exchange.sessions
    step = Step("", 1, "")
    sessions.begin(Turn(sessions.find("s"), {}, 1, step, 1.0, 0.25, ()))  # and no end of it
  with Client(tmp_path, upstream, max_usd=1.0) as client:
    session = client.session()
    assert session["spent_usd"] == pytest.approx(USD + 0.25) and session["in_flight"] == 0
    assert session["large_calls"] == 1 and len(session["steps"]) == 1
    assert client.chat().status_code == 200


def test_a_session_with_an_attempt_in_flight_stays_in_memory(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=1.0, max_sessions=1) as client:
    client.chat("a")
    sessions = client.http.app.state.exchange.sessions
    session = sessions.find("a")
    client.chat("b")  # takes its place
    turn = Turn(session, {}, 1, Step("", 1, ""), 1.0, 0.25, ())
    sessions.begin(turn)
    session.reported[turn.number] = turn
    del session, turn
    gc.collect()
    assert client.session("a")["left_usd"] == pytest.approx(1.0 - USD - 0.25)


def test_a_scored_session_is_an_episode(tmp_path, upstream):
  with Client(tmp_path, upstream, record_text=True) as client:
    client.chat(headers={"x-baar-task": "t"})
    messages = [*ASK, {"role": "assistant", "content": SAID}, {"role": "user", "content": "Out."}]
    client.chat(headers={"x-baar-task": "t", "x-baar-score": "0.2"}, messages=messages)
    score = client.post("/v1/sessions/s/score", {"score": 0.5})
    assert score.json()["score"] == 0.5
    (episode,) = client.run.store.episodes("always-small")
    assert [step.observation for step in episode.steps] == ["A door.", "Out."]
    assert [step.action for step in episode.steps] == ["go", ""]  # of the last one nothing came
    assert (episode.task_id, episode.score, episode.stop) == ("t", 0.5, "done")
    assert [step.score for step in episode.steps] == [0.2, None]
    assert episode.spent_usd == pytest.approx(client.session()["spent_usd"])
    assert client.run.store.tasks("train")[0].description == "go out"
    assert client.chat().status_code == 409


def test_a_decision_is_booked_when_its_usage_is_reported(client):
  decision = client.post(
    "/v1/decision", {"model": "baar:large", "messages": ASK, "session_id": "d"}
  )
  number = decision.json()["decision_id"]
  assert decision.json()["model"] == "large" and client.session("d")["in_flight"] == 1
  report = {"session_id": "d", "decision_id": number}
  report["usage"] = {"prompt_tokens": 100, "completion_tokens": 10}
  assert client.post("/v1/decision", report).json()["spent_usd"] == pytest.approx(6e-4)
  assert client.post("/v1/decision", report).status_code == 404


MESSAGES = {"messages": ASK}
BAD = [  # fields of a call or its headers, the status, and a word of the error
  ({"model": "gpt-4.1"}, {}, 404, "baar:large"),
  ({"model": None}, {}, 404, "model"),
  ({"messages": []}, {}, 400, "messages"),
  ({"messages": None}, {}, 400, "messages"),
  ({"messages": [{"content": "x"}]}, {}, 400, "role"),
  ({"n": 0}, {}, 400, "n must"),
  ({"max_tokens": -1}, {}, 400, "max_tokens"),
  ({"stream": "yes"}, {}, 400, "stream"),
  ({"session_id": ""}, {}, 400, "session id"),
  ({}, {"x-session-id": "a" * 257}, 400, "session id"),
  ({}, {"x-baar-max-usd": "-1"}, 400, "x-baar-max-usd"),
  ({}, {"x-baar-max-usd": "nan"}, 400, "x-baar-max-usd"),
  ({}, {"x-baar-score": "1.1"}, 400, "x-baar-score"),
  ({}, {"x-baar-max-large-calls": "1.5"}, 400, "x-baar-max-large-calls"),
  ({"text": "a" * 2**20}, {}, 413, "max_body_mb"),
]


@pytest.mark.parametrize("fields, headers, status, word", BAD)
def test_bad_input_is_refused_in_one_line(tmp_path, upstream, fields, headers, status, word):
  with Client(tmp_path, upstream, max_body_mb=0.5) as client:
    client.chat()
    reply = client.chat(headers=headers, **fields)
    error = reply.json()["error"]
    assert reply.status_code == status and word in error["message"], error
    assert "\n" not in error["message"] and {*error} >= {"message", "type", "param", "code"}
    assert len(client.session()["steps"]) == len(upstream.seen) == 1


@pytest.mark.parametrize("text", ["{", "[]", '{"n": NaN}', '"x"'])
def test_a_body_that_is_no_object_is_refused(client, text):
  headers = {"content-type": "application/json"}
  reply = client.http.post("/v1/chat/completions", content=text, headers=headers)
  assert reply.status_code == 400 and "JSON object" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
  "fault, status, calls",
  [("400 bad", 400, 1), ("500", 500, 2), ("redirect", 502, 1), ("drop", 502, 2), ("401", 401, 1)],
)
def test_an_upstream_error_comes_back_and_leaves_the_session(
  client, upstream, monkeypatch, fault, status, calls
):
  monkeypatch.setattr("baar_jax.serve.exchange.BACKOFF_S", 0.01)
  upstream.fault = lambda number, request: fault
  assert client.chat().status_code == status and len(upstream.seen) == calls
  upstream.fault = lambda number, request: None
  assert client.chat().status_code == 200 and client.session()["in_flight"] == 0


def test_a_call_that_waits_for_a_connection_is_in_time(tmp_path, upstream):
  with Client(tmp_path, upstream, timeout_s=1, concurrency=1) as client:
    upstream.latency_s = lambda number: 0.6
    with ThreadPoolExecutor(3) as threads:
      replies = list(threads.map(client.chat, "abc"))
    upstream.latency_s = lambda number: 0.0
  assert [reply.status_code for reply in replies] == [200] * 3 and len(upstream.seen) == 3


def test_other_addresses_need_a_key(tmp_path, upstream, monkeypatch):
  with pytest.raises(ValueError, match="key_variable"):
    Client(tmp_path, upstream, "open", host="0.0.0.0")
  monkeypatch.setenv("CLIENTS", "secret-1")
  with Client(tmp_path, upstream, "locked", host="0.0.0.0", key_variable="CLIENTS") as client:
    assert client.chat().status_code == 401
    assert client.chat(headers={"authorization": "Bearer secret-1"}).status_code == 200
    assert client.http.get("/health").status_code == 200
  monkeypatch.setenv("CLIENTS", " ")
  with pytest.raises(ValueError, match="without a key"):
    Client(tmp_path, upstream, "empty", key_variable="CLIENTS")


def test_what_is_no_route_or_no_name_of_this_machine_is_refused(client, upstream):
  assert client.chat(headers={"host": "other.example"}).status_code == 403 and not upstream.seen
  for path, status in (("/v1/completions", 404), ("/v1/models", 405)):
    reply = client.post(path, {})
    assert reply.status_code == status and path in reply.json()["error"]["message"]


def test_the_page_shows_steps_and_escapes_names(client):
  client.chat("<script>")
  page = client.http.get("/").text
  assert "&lt;script&gt;" in page and "<script>" not in page and f"${USD:.6f}" in page
  assert 'baar_calls_total{model="small"} 1.0' in client.http.get("/metrics").text
