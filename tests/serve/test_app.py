"""Test the routes: wrong requests, keys, and the page."""

import functools
import json
import re

from endpoint import ASK, write_keys

from baar_serve import request

HOSTS = ("evil@127.0.0.1", "127.0.0.1@evil", "127.0.0.1, evil", "", "127.0.0.1:")


# Rows: a body or some of its fields, headers, the status, and a word of the error.
BAD = [
  ({"model": "llama"}, {}, 404, "baar:large"),
  ({"max_tokens": True}, {}, 400, "max_tokens"),
  ({}, {"x-session-id": "a" * 257}, 400, "session's name"),
  ({}, {"x-baar-max-usd": "nan"}, 400, "x-baar-max-usd"),
  ({}, {"host": "other.example"}, 403, "localhost"),
  *[({}, {"host": host}, 403, "localhost") for host in HOSTS],
  ({}, {"content-type": "text/plain"}, 415, "application/json"),
  ({"text": "a" * 2**20}, {}, 413, "too large"),
  ('{"n": NaN}', {}, 400, "JSON object"),
]


def test_bad_input_is_refused_in_one_line(open_client, upstream, monkeypatch):
  monkeypatch.setattr(request, "MOST_BYTES", 2**19)
  client = open_client()
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


def test_the_health_needs_no_key(open_client, tmp_path):
  client = open_client(host="0.0.0.0", keys=write_keys(tmp_path, ann=""))
  assert client.chat().status_code == 401
  assert client.http.get("/health").json() == {"status": "ok"}


def test_the_page_lists_what_is_asked_for(client, upstream):
  client.chat("<i>a", {"x-baar-task": "fix"})
  client.chat("<i>a", model="baar:large")
  client.chat("<i>a", {"x-baar-max-usd": "0"})
  client.score(0.5, "<i>a")
  upstream.fault = "500"
  client.chat("beta")
  first, second = (client.http.get(f"/?name={name}").text for name in ("i", "beta"))
  assert "&lt;i&gt;a" in first and "<i>" not in first and "beta" not in first
  for words in ("fix", "large 1, small 1", "0.5", 'refused">1<'):
    assert words in first, words
  assert 'failed">2<' in second and "&lt;i" not in second
  assert not re.search(r"<script|src=|url\(", first)


def test_the_page_adds_up_what_large_would_have_cost(client):
  """LARGE's tokens cost five times as much: 145 instead of 29 millionths."""
  client.chat()
  client.chat(model="baar:large")
  page = client.http.get("/").text
  for words in (
    'all</td><td title="calls">2</td><td title="usd">$0.000174</td>',
    'small</td><td title="calls">1</td><td title="usd">$0.000029</td>',
  ):
    assert words in page
  assert 'http-equiv="refresh"' in page
  # all, today, SMALL, LARGE; always-LARGE, always-SMALL
  saved = re.findall(r'"saved_usd">\$0.000(\d+)', page)
  assert saved == ["116", "116", "116", "000", "000", "116"]


def test_keys_part_the_clients(open_client, tmp_path):
  """Bob's sessions have a cap. The operator sees all, and may change caps."""
  tables = dict(ann="", bob="max_large_calls = 0", root="operator = true")
  client = open_client(keys=write_keys(tmp_path, **tables))
  keys = {name: {"x-api-key": name} for name in tables}
  for name in ("a", "b"):
    assert client.chat(name, keys["ann"]).status_code == 200
  reply = client.chat("a", keys["bob"], model="baar:large")
  assert reply.json()["model"] == "small"
  get = functools.partial(client.http.get, "/v1/sessions")
  counts = {}
  for name, key in keys.items():
    counts[name] = len(get(headers=key).json()["data"])
  assert counts == dict(ann=2, bob=1, root=3)
  patch = functools.partial(client.http.patch, "/v1/sessions/a", json={"max_usd": 1})
  statuses = [patch(headers=key).status_code for key in keys.values()]
  assert statuses == [403, 403, 200]
  bearer = {"authorization": "bearer bob"}
  assert client.http.get("/v1/sessions/b", headers=bearer).status_code == 404
  path = "/v1/sessions/a?client=bob"
  assert client.http.get(path, headers=keys["root"]).json()["call_limit"] == 0
  assert get().status_code == 401


def test_other_routes_of_the_forms(open_client, upstream):
  models = {"forms": ("chat/completions", "messages")}
  client = open_client(models=models)
  body = dict(model="claude-x", messages=ASK, max_tokens=9)
  version = {"anthropic-version": "2026-10-21", "anthropic-beta": "b"}
  count = client.post("/v1/messages/count_tokens?beta=true", body, version)
  # About four bytes to a token.
  assert 15 < count.json()["input_tokens"] < 60 and not upstream.seen
  assert client.post("/v1/messages?beta=true", body, version).status_code == 200
  assert upstream.headers[-1].items() >= version.items()
  assert upstream.paths[-1] == "/v1/messages?beta=true"
  refused = client.post("/v1/responses", {"model": "baar", "input": "a"})
  assert refused.status_code == 404 and "forms" in refused.text
  listed = client.http.get("/v1/models", headers=version).json()
  assert listed["data"][0]["id"] == "claude-baar"
  assert client.http.head("/").status_code == 200
  upstream.fault = "429"
  error = client.post("/v1/messages", body).json()
  assert error["type"] == "error" and error["error"]["code"] == "x"
