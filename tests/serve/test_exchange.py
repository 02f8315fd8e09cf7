"""Test retries, scores and the ends of tasks."""

import asyncio
import concurrent.futures
import functools
import sqlite3
import threading
import time
from unittest import mock

import pytest
from endpoint import ASK, REPLY, Client, assistant, user

from baar_jax.decide import Decider
from baar_jax.episode import FAILED, Step, Task
from baar_jax.rollout.policy import RulePolicy
from baar_jax.rollout.specs import Job, Live, PolicySpec
from baar_serve.call import ClientCall
from baar_serve.exchange import Delivery
from baar_serve.forms.chat_completions import FORM
from baar_serve.request import ClientKey


def test_a_named_call_gets_the_answer_that_is_being_made(client, upstream):
  upstream.latency_s = 0.3
  post = functools.partial(client.chat, "")
  with concurrent.futures.ThreadPoolExecutor() as pool:
    named = [pool.submit(client.chat, stream=n < 0) for n in range(2)]
    unnamed = [pool.submit(post), pool.submit(post)]
    assert len({*(reply.result().text for reply in named)}) == 1
    ids = {reply.result().headers["x-baar-session-id"] for reply in unnamed}
  assert len(upstream.seen) == 3 and len(ids) == 2
  # A client has each of these answers.
  again = post({"x-stainless-retry-count": "1"})
  assert again.headers["x-baar-session-id"] not in ids


def test_a_call_waits_for_what_another_session_reserves(open_client, upstream):
  """The cap of all sessions pays for one worst case at a time, $0.0004."""
  upstream.latency_s = 0.3
  client = open_client(max_total_usd=0.0006)
  with concurrent.futures.ThreadPoolExecutor() as pool:
    replies = [*pool.map(client.chat, "ab")]
  assert [reply.status_code for reply in replies] == [200, 200]


def test_a_client_that_leaves_at_the_end_of_a_reply_has_it():
  async def leave(events):
    delivery = Delivery(None)
    for event in (*events, b"data: [DONE]"):
      delivery.add(event)
    reading = delivery.follow()
    for _ in events:
      await anext(reading)
    await reading.aclose()
    return delivery.is_dropped

  assert asyncio.run(leave([b'data: {"finish_reason": null}']))
  assert not asyncio.run(leave([b'data: {"finish_reason": "stop"}']))


def test_a_session_with_a_call_in_flight_has_no_score(client):
  """A call of another conversation of the session is no obstacle."""
  client.chat()
  sessions = client.exchange.sessions
  purse = sessions.find_purse("", "s")
  (conversation,) = sessions.list_conversations("purse = ?", purse.id)
  aside = sessions.begin(purse, None, Step("", 0, ""), 0.25)
  attempt = sessions.begin(purse, conversation, Step("", 0, ""), 0.25)
  assert client.score(1) == 409
  sessions.end(attempt, FAILED)
  assert client.score(1) == 200 and client.session()["score"] == 1
  sessions.end(aside, FAILED)


def test_a_server_that_ends_closes_its_connections(tmp_path, upstream):
  """The call in flight is cancelled, and counts at its worst case."""
  upstream.latency_s = 2.0
  with Client(tmp_path, upstream) as client:
    body = {"model": "baar", "messages": ASK}
    call = ClientCall(ClientKey(), FORM, {"x-session-id": "s"}, body)
    receive = client.http.app.desk.receive
    client.http.portal.call(client.exchange.deliver, call, receive)
    while not upstream.seen:
      time.sleep(0.01)
  assert client.exchange.upstreams[0].http.closed
  with pytest.raises(sqlite3.ProgrammingError):
    client.exchange.sessions.read("SELECT 1")
  with Client(tmp_path, upstream) as client:
    assert client.session()["spent_usd"] > 0.0004


def test_a_cancelled_call_keeps_others_out_until_its_thread_ends():
  begun, goes_on, other = [threading.Event() for _ in range(3)]
  running = []

  def rule(live, spec):
    running.append(live.task.id)
    (other if begun.is_set() else begun).set()
    goes_on.wait(20)
    running.append("end")
    return 1

  decider = Decider(RulePolicy(PolicySpec("p"), rule), rows=2)
  lives = [Live(Job(Task(name, "test", "go", 9), "test", 0)) for name in "ab"]

  async def decide():
    first = asyncio.create_task(decider.decide(lives[0]))
    await asyncio.to_thread(begun.wait, 20)
    first.cancel()
    second = asyncio.create_task(decider.decide(lives[1]))
    await asyncio.to_thread(other.wait, 0.2)
    goes_on.set()
    return await asyncio.gather(first, second, return_exceptions=True)

  first, second = asyncio.run(decide())
  assert isinstance(first, asyncio.CancelledError) and second.model == 1
  assert running == ["a", "end", "b", "end"]


def test_a_full_disk_forgets_no_answer_that_is_being_made(client, monkeypatch):
  exchange = client.exchange
  monkeypatch.setattr(exchange, "_make", mock.AsyncMock())
  call = ClientCall(ClientKey(), FORM, {}, {"model": "baar", "messages": ASK})
  refuse = mock.Mock(side_effect=sqlite3.OperationalError)

  async def deliver():
    first = exchange.deliver(call, client.http.app.desk.receive)
    with pytest.raises(sqlite3.OperationalError):
      exchange.deliver(call, refuse)
    first.is_dropped = True  # Its client leaves, and calls again.
    return first, exchange.deliver(call, refuse)

  first, again = asyncio.run(deliver())
  assert again is first


def test_responses_refer_to_earlier_ones(client, upstream, monkeypatch):
  body = {"model": "gpt-9", "input": "Go out."}
  first = client.post("/v1/responses", body).json()
  (item,) = first["output"]
  more = user("On.")
  bodies = [
    body | {"previous_response_id": first["id"], "input": [more]},
    body | {"input": [{"type": "item_reference", "id": item["id"]}, more]},
  ]
  for number, body in enumerate(bodies):
    assert client.post("/v1/responses", body).status_code == 200
    sent = upstream.seen[-1]["input"]
    assert sent == [user("Go out."), item, more][number:]
  monkeypatch.setattr("baar_serve.forms.responses.MOST_CHARS", 400)
  client.post("/v1/responses", body | {"input": "Go in."})
  body["input"] = [{"type": "item_reference", "id": item["id"]}]
  error = client.post("/v1/responses", body).json()["error"]["message"]
  assert "Set store: false" in error


def test_a_hang_is_reported_as_a_hang(open_client, upstream):
  upstream.latency_s = 0.5
  client = open_client(call_timeout_s=0.2, max_usd=0.1)
  reply = client.chat()
  assert reply.status_code == 504 and "hangs" in reply.json()["error"]["message"]
  session = client.session()
  assert session["in_flight"] == 0 and session["spent_usd"] > 0
  # The retry of a call without a name stays under its cap.
  names = {client.chat("").headers["x-baar-session-id"] for _ in range(2)}
  assert len(names) == 1


def test_a_refused_session_refuses_no_later_task(client):
  """Each run of the task needs $0.0006 for its third call."""
  for cap, last in (("0.00063", 402), ("0.00063", 402), ("1", 200)):
    for turns, status in enumerate((200, 200, last)):
      messages = [*ASK, *[assistant(REPLY), *ASK] * turns]
      answer = client.chat("", {"x-baar-max-usd": cap}, messages=messages)
      assert answer.status_code == status
  sessions = client.http.get("/v1/sessions").json()["data"]
  assert [session["refusals"] for session in sessions] == [0, 1, 1]


@pytest.mark.parametrize("name", ["", "s"])
def test_a_refused_first_call_leaves_nothing_behind(client, name):
  cap = {"x-baar-max-usd": "1e-6"}
  refused = [client.chat(name, cap).status_code for _ in range(3)]
  assert refused == [402] * 3
  assert client.http.get("/v1/sessions").json()["data"] == []
  whole = client.chat(name, {"x-baar-max-usd": "1"})
  assert whole.headers["x-baar-left-usd"] > "0.99"


def test_sound_is_refused_and_texts_about_it_are_not(client):
  statuses = []
  for content in ('src = "data:audio/wav;base64,A"', [{"type": "audio_url"}]):
    statuses.append(client.chat(messages=[user(content)]).status_code)
  assert statuses == [200, 400]
