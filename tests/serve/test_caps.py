"""Test the ends of caps, the limits of models and safe switches, with a stand-in."""

import json

import pytest
from endpoint import Client
from standin_forms import Reply

from baar_serve.forms.chat_completions import FORM
from baar_serve.request import ClientKey

WORDS = "I look around and go on, as before. " * 12
# Pays for 20 calls of 5,000 to 8,000 tokens.
CAP_USD = 0.14
# By path: the fields of the history and of the limit.
FORMS = {
  "chat/completions": ("messages", "max_completion_tokens"),
  "responses": ("input", "max_output_tokens"),
  "messages": ("messages", "max_tokens"),
}


@pytest.fixture(autouse=True)
def long_replies(upstream):
  """Let the models reply with WORDS."""
  upstream.answer = lambda request: WORDS


def call(client, path, history, **fields):
  field, limit = FORMS[path]
  body = {"model": "baar", field: history, limit: 9000} | fields
  return client.post(f"/v1/{path}", body, {"x-session-id": "s"})


@pytest.mark.parametrize("path", FORMS)
def test_a_cap_is_used_to_nine_tenths_and_never_passed(tmp_path, upstream, path):
  """The models' caches give no discount, so no call costs less than its worst case."""
  history = []
  limits = []
  models = {"prices": ((1.0, 1.0, 2.0), (5.0, 5.0, 10.0))}
  with Client(tmp_path, upstream, models=models, max_usd=CAP_USD) as client:
    for number in range(40):
      history.append(
        {"role": "user", "content": "Task: go. " * (2000 if not number else 10)}
      )
      reply = call(client, path, history)
      if reply.status_code != 200:
        break
      limits.append(upstream.seen[-1][FORMS[path][1]])
      history.append({"role": "assistant", "content": WORDS})
    spent_usd = client.session()["spent_usd"]
    repeated = call(client, path, history)
  billed_usd = float(upstream.usd({"small": models["prices"][0]}))
  assert number >= 20 and 0.9 * CAP_USD < spent_usd <= CAP_USD
  assert spent_usd == pytest.approx(billed_usd)
  # The limit shrinks from the client's to the least one.
  assert limits[0] == 9000 and 256 <= limits[-1] < 9000
  assert limits == sorted(limits, reverse=True)
  error = reply.json()["error"]
  assert (error["session"], error["cap_usd"]) == ("s", CAP_USD)
  assert error["spent_usd"] + error["needed_usd"] > CAP_USD
  # Clients that repeat 402 stop at another status.
  last = 404 if path == "chat/completions" else 400
  assert (reply.status_code, repeated.status_code) == (402, last)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FORMS)
def test_a_spent_cap_can_end_with_a_whole_answer(tmp_path, upstream, path, stream):
  asked = [{"role": "user", "content": "Go."}]
  with Client(tmp_path, upstream, max_usd=1e-6, exhausted="finish") as client:
    reply = call(client, path, asked, stream=stream)
  said = "Session s has cost $0.000000 of $1e-06; the next call needs $"
  assert reply.status_code == 200 and said in reply.text and not upstream.seen
  assert reply.headers["content-type"].startswith("text/event-stream") == stream


def test_a_client_is_warned_before_its_cap_is_spent(tmp_path, upstream):
  with Client(tmp_path, upstream, max_usd=0.00088) as client:
    replies = [client.chat(max_tokens=120) for _ in range(3)]
  warnings = [reply.headers.get("x-baar-warning") for reply in replies]
  # A call costs 9 tokens at $1 and 111 at $2 a million: $0.000231.
  assert warnings == [None, "50% of the cap is spent", "75% of the cap is spent"]


def test_thinking_tokens_are_kept_beside_the_least_reply(tmp_path, upstream):
  thinking = {"type": "enabled", "budget_tokens": 4000}
  asked = [{"role": "user", "content": "Go."}]
  with Client(tmp_path, upstream, max_usd=0.01) as client:
    assert call(client, "messages", asked, thinking=thinking).status_code == 200
    # $0.01 has room for about 4,900 tokens, and then for about 4,800.
    assert 4256 <= upstream.seen[-1]["max_tokens"] < 5000
    client.post("/v1/sessions/s", {})
    client.http.patch("/v1/sessions/s", json={"max_usd": 0.0083})
    assert call(client, "messages", asked, thinking=thinking).status_code == 402


@pytest.mark.parametrize(
  "families, least, most", [((), 40_000, 42_000), (("one", "one"), 10_003, 11_000)]
)
def test_models_of_one_tokenizer_share_counts(
  tmp_path, upstream, families, least, most
):
  """SMALL has read 40,000 characters as 10,003 tokens. LARGE costs $5 a million."""
  body = {"model": "baar", "messages": [{"role": "user", "content": "a" * 40_000}]}
  with Client(tmp_path, upstream, models={"tokenizer_families": families}) as client:
    client.post("/v1/chat/completions", body, {"x-session-id": "s"})
    body["messages"] += [{"role": "assistant", "content": WORDS}]
    body["messages"] += [{"role": "user", "content": "Go."}]
    headers = {"x-session-id": "s"}
    call = client.http.app.desk.receive(ClientKey(), FORM, headers, body)
    large = client.exchange.upstreams[1].prepare(call, client.config)
  # WORDS are 444 bytes more.
  assert 5e-6 * least < large.prompt_usd < 5e-6 * most


def test_a_models_window_decides_and_overflows_move_on(tmp_path, upstream):
  models = {"context_tokens": (1000, 100_000)}
  with Client(tmp_path, upstream, models=models) as client:
    long = [{"role": "user", "content": "a" * 8000}]
    reply = call(client, "chat/completions", long)
    assert reply.headers["x-baar-selected-model"] == "large"
    # An overflow that SMALL reports is not billed, and LARGE answers.
    upstream.fault = lambda number, request: (
      "400 context_length_exceeded" if request["model"] == "small" else None
    )
    reply = call(client, "chat/completions", [{"role": "user", "content": "Go."}])
    assert reply.headers["x-baar-selected-model"] == "large"
    assert [request["model"] for request in upstream.seen] == [
      "large",
      "small",
      "large",
    ]


SIGNED = {
  "chat/completions": {"reasoning_details": [{"data": "SECRET"}]},
  "responses": {"type": "reasoning", "id": "rs_1", "encrypted_content": "SECRET"},
  "messages": {"type": "thinking", "thinking": "", "signature": "SECRET"},
}


@pytest.mark.parametrize("path", FORMS)
def test_reasoning_stays_with_the_model_that_wrote_it(tmp_path, upstream, path):
  """SMALL has written the reply and its reasoning. SMALL gets both, LARGE the reply."""
  upstream.answer = lambda request: Reply("", [("look", {"at": "SECRET input"})])
  history = [{"role": "user", "content": "Go."}]
  with Client(tmp_path, upstream, policy="random") as client:
    client.decide(0, 0, 1)
    answer = call(client, path, history).json()
    if path == "chat/completions":
      turn = [answer["choices"][0]["message"] | SIGNED[path]]
      result = {"role": "tool", "tool_call_id": "c", "content": "ok"}
    elif path == "responses":
      turn = [SIGNED[path], *answer["output"]]
      result = {"type": "function_call_output", "call_id": "c", "output": "ok"}
    else:
      turn = [{"role": "assistant", "content": [SIGNED[path], *answer["content"]]}]
      result = {"role": "user", "content": [{"type": "tool_result", "content": "ok"}]}
    history += [*turn, result]
    for _ in range(2):
      assert call(client, path, history).status_code == 200
  small, large = (json.dumps(request) for request in upstream.seen[1:])
  assert small.count("SECRET") == 2 and large.count("SECRET") == 1
  assert "SECRET input" in large and "fc_" not in large


def test_a_refusal_of_reasoning_is_tried_without_it(tmp_path, upstream):
  refusals = iter(["400 invalid_signature_in_thinking"])
  upstream.fault = lambda number, request: next(refusals, None)
  with Client(tmp_path, upstream) as client:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    asked = [{"role": "user", "content": "Go."}]
    assert call(client, "messages", asked, thinking=thinking).status_code == 200
  first, second = upstream.seen
  assert "thinking" in first and "thinking" not in second


def test_a_providers_words_about_retries_reach_the_client(tmp_path, upstream):
  upstream.fault = lambda number, request: "429"
  upstream.retry_after = "7.5"
  with Client(tmp_path, upstream, models={"retries": 0}) as client:
    reply = client.chat()
  assert (reply.status_code, reply.headers["retry-after"]) == (429, "7.5")


def test_a_hang_is_reported_as_a_hang(tmp_path, upstream):
  upstream.latency_s = lambda number: 0.5
  with Client(tmp_path, upstream, call_timeout_s=0.2, max_usd=0.1) as client:
    reply = client.chat()
    assert reply.status_code == 504 and "hangs" in reply.json()["error"]["message"]
    session = client.session()
    assert session["in_flight"] == 0 and session["spent_usd"] > 0


def test_a_call_repeated_after_an_error_stays_in_its_session(tmp_path, upstream):
  asked = {"model": "baar", "messages": [{"role": "user", "content": "Go."}]}
  with Client(tmp_path, upstream, max_usd=1e-6) as client:
    replies = [client.post("/v1/chat/completions", asked) for _ in range(3)]
    sessions = client.http.get("/v1/sessions").json()["data"]
  assert [reply.status_code for reply in replies] == [402, 404, 404]
  assert len(sessions) == 1


def test_the_page_filters_sessions_and_shows_failures(tmp_path, upstream):
  serve = dict(record_text=True, max_usd=0.001, models={"retries": 1})
  with Client(tmp_path, upstream, **serve) as client:
    for _ in range(3):
      client.chat("alpha")
    upstream.fault = lambda number, request: "500"
    client.chat("beta")
    alpha, beta = (client.http.get(f"/?name={name}").text for name in ("alpha", "beta"))
    metrics = client.http.get("/metrics").text
  assert "go out" in alpha and "% spent" in alpha and "<td>failed</td>" not in alpha
  assert "alpha" not in beta and beta.count("<td>failed</td>") == 2
  assert "baar_added_seconds_count 4.0" in metrics
