"""Test the endpoint over a socket: OpenAI's client, the example, kills."""

import contextlib
import functools

import httpx2
import openai
import pytest
from endpoint import ASK, REPLY, TOKENS, USD, Client
from schedules import run_schedules

from baar_jax.episode import Task
from baar_serve.desk import SelectedPolicy
from baar_serve.learn import serving
from examples import agent, corridor

TOOLS = [
  {"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}
]


@pytest.fixture
def url(tmp_path, upstream):
  """Return the URL of an endpoint that listens on a socket."""
  client = Client(tmp_path, upstream, record_text=True)
  with contextlib.closing(client.run), serving(client.http.app) as url:
    yield f"{url}/v1"


@pytest.fixture
def ask(url):
  """ask(**fields): a call by OpenAI's client."""
  with openai.OpenAI(base_url=url, api_key="-") as client:
    create = client.chat.completions.with_raw_response.create
    headers = {"x-session-id": "s"}
    yield functools.partial(create, model="baar", messages=ASK, extra_headers=headers)


def show(url):
  """Return the session."""
  return httpx2.get(f"{url}/sessions/s").json()


def test_a_plain_call_is_answered_with_its_dollars(ask, url, upstream):
  reply = ask(temperature=0.5, stop=["x"], extra_body={"unheard": "of"})
  completion = reply.parse()
  assert completion.choices[0].message.content == REPLY
  assert completion.model == reply.headers["x-baar-selected-model"] == "small"
  assert completion.usage.cost == show(url)["spent_usd"] == pytest.approx(USD)
  assert float(reply.headers["x-baar-session-usd"]) == pytest.approx(USD)
  sent = dict(temperature=0.5, unheard="of", stop=["x"], messages=ASK)
  assert upstream.seen == [sent | dict(model="small", max_completion_tokens=TOKENS)]


def test_a_stream_passes_on_unchanged(ask, url, upstream):
  """The client sees the provider's usage only if it asks for it."""
  chunks = list(ask(stream=True).parse())
  deltas = [choice.delta.content for chunk in chunks for choice in chunk.choices]
  assert "".join(filter(None, deltas)) == REPLY
  assert [chunk.usage for chunk in chunks] == [None] * len(chunks)
  options = {"include_usage": True}
  assert upstream.seen[-1]["stream_options"] == options
  assert show(url)["spent_usd"] == pytest.approx(USD)
  (*_, last) = ask(stream=True, stream_options=options).parse()
  assert last.usage.prompt_tokens == 9 and not hasattr(last.usage, "cost")


def test_tool_calls_pass_through_and_become_actions(open_client, upstream):
  """The reply itself tells the last action."""
  client = open_client(record_text=True)
  upstream.fault = ["tool_calls"]
  headers = {"x-baar-task": "tools"}
  answer = client.chat(headers=headers, tools=TOOLS).json()
  message = answer["choices"][0]["message"]
  (call,) = message["tool_calls"]
  result = dict(role="tool", tool_call_id=call["id"], content="Outside.")
  client.chat(headers={"x-baar-score": "0.2"}, messages=[*ASK, message, result])
  client.score(0.5)
  (episode,) = client.run.store.episodes("always-small")
  steps = [(step.observation, step.action, step.score) for step in episode.steps]
  assert steps == [("A door.", "go {}", 0.2), ("Outside.", "go", None)]
  assert (episode.task_id, episode.score) == ("tools", 0.5)
  assert episode.spent_usd == pytest.approx(client.session()["spent_usd"])
  assert client.run.store.tasks("train")[0].description == "go out"


def test_the_examples_agent_plays_through_the_endpoint(tmp_path, monkeypatch):
  """The agent plays the corridor, which needs no engine."""
  env = corridor.Corridor(1, 1, 1, 12)
  games = agent.Games([env], [Task("t", "train", "Go.", 12)])
  client = Client(tmp_path, games, models={"names": agent.PAIR.names}, record_text=True)
  client.http.app.desk.assigned["s"] = SelectedPolicy("large", None)
  with contextlib.closing(client.run) as run, serving(client.http.app) as url:
    variables = dict(BAAR_TASK="t", BAAR_TRIAL="0", BAAR_SESSION="s")
    variables |= dict(BAAR_SCORE=str(tmp_path / "score"), GAMES=f"{games.url}/game")
    variables |= dict(OPENAI_BASE_URL=f"{url}/s/s/v1", OPENAI_API_KEY="-")
    for name, value in variables.items():
      monkeypatch.setenv(name, value)
    agent.play()
    httpx2.post(f"{url}/v1/sessions/s/score", json={"score": 1.0})
    (episode,) = run.store.episodes("always-large")
  games.shutdown()
  assert (tmp_path / "score").read_text() == "1.0"
  assert games.free.qsize() == 1
  assert (
    episode.steps[0].observation.endswith("door.") and episode.steps[0].score == 0.0
  )
  actions = [step.action for step in episode.steps]
  assert actions and all(action.startswith("open ") for action in actions)


def test_random_schedules_never_count_less_than_the_bill(tmp_path):
  report = run_schedules(12, seed=0, runs=str(tmp_path))
  assert report["sessions"] == 12 and 0 < report["billed_usd"] <= report["counted_usd"]
