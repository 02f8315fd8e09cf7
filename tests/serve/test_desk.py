"""Test which purse and which conversation a client's call belongs to."""

import contextlib
import itertools

import pytest
from endpoint import ASK, REPLY, USD, Client, assistant, user, write_keys
from standin_forms import Reply

from baar_jax import Router
from baar_jax.conditioned.policy import ConditionedSpec
from baar_jax.rollout.policy import RulePolicy
from baar_jax.rollout.specs import Decision, PolicySpec


def test_histories_keep_tasks_apart_without_names(client, upstream):
  """Three runs of one task, in step with each other; their first replies are equal.
  A prompt cache key that is no id names no session."""
  reply = itertools.count()
  upstream.answer = lambda request: (
    REPLY if len(request["messages"]) == 2 else f"Action: go {next(reply)}"
  )
  examples = [user("hi"), assistant("ho")]
  histories = [[*examples, *ASK] for _ in range(3)]
  ids = [[], [], []]
  for place in range(3):
    for number, messages in enumerate(histories):
      answer = client.chat("", messages=messages, prompt_cache_key="app")
      ids[number].append(answer.headers["x-baar-conversation"])
      (choice,) = answer.json()["choices"]
      text = choice["message"]["content"]
      # The client strips its history, and changes a text before it.
      messages[0] = user(f"file {place}")
      messages += [assistant(f" {text}\n"), *ASK]
  assert [len({*names}) for names in ids] == [1, 1, 1]
  assert len({names[0] for names in ids}) == 3
  # Two tasks begin with an example that is equal to their first reply.
  example = [*examples, user("hi")]
  example[1] = assistant(REPLY)
  names = []
  upstream.answer = REPLY
  for task in ("a", "b"):
    messages = [*examples, *example, user(task)]
    answer = client.chat("", messages=messages)
    names.append(answer.headers["x-baar-conversation"])
  assert names[0] != names[1]
  # Calls of two equal tasks arrive before either is made.
  for _ in range(2):
    client.chat("")
  messages = [*ASK, assistant(REPLY)]
  twins = [client.receive("", messages=messages) for _ in "ab"]
  assert len({call.conversation.id for call in twins}) == 2


def play_equal_tasks(client, order, **changed):
  """Play tasks without names that begin equally; return their sessions and steps."""
  histories = {task: [*ASK] for task in order}
  ids = {task: set() for task in order}
  for task in order:
    answer = client.chat("", messages=histories[task])
    if answer.status_code == 200:
      ids[task].add(answer.headers["x-baar-session-id"])
      reply = answer.json()["choices"][0]["message"] | changed
      result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"]}
      histories[task] += [reply, result | {"content": "done " * 60}]
  sessions = client.http.get("/v1/sessions").json()["data"]
  return ids, [len(session["conversations"][0]["steps"]) for session in sessions]


def test_tasks_without_our_texts_stay_apart(client, upstream):
  """Two clients keep the tool calls of each reply, but not its text."""
  upstream.answer = [Reply("Now.", [("go", {"to": number})]) for number in "001234"]
  ids, counts = play_equal_tasks(client, "ababba", content=None)
  assert counts == [3, 3] and not ids["a"] & ids["b"]


@pytest.mark.parametrize(
  "order, fault, settings, steps",
  [
    # The second call of a fails, then b takes its session.
    ("aabba", [None, "503"], {"models": {"retries": 0}}, 2),
    # One alone makes 8 under this cap. Only a prompt with its own ids has a close bound.
    ("abba" * 4, [], {"max_usd": 0.003}, 8),
  ],
)
def test_equal_tasks_keep_their_sessions(
  open_client, upstream, order, fault, settings, steps
):
  upstream.answer = Reply("Now.", [("go", {})])
  upstream.fault = fault
  _, counts = play_equal_tasks(open_client(**settings), order)
  assert counts == [steps, steps]


def test_equal_replies_of_another_client_are_not_continued(open_client, tmp_path):
  """Ann and Bob play the same task, without names. Bob sends Ann's reply back."""
  messages = [*ASK, assistant(REPLY), *ASK]
  client = open_client(keys=write_keys(tmp_path, ann="", bob=""))
  names = []
  for key, history in (("ann", ASK), ("bob", messages), ("ann", messages)):
    reply = client.chat("", {"x-api-key": key}, messages=history)
    names.append(reply.headers["x-baar-conversation"])
  ann, bob, continued = names
  assert continued == ann != bob


def test_a_reply_in_common_joins_no_sessions(client, upstream):
  """A and B begin with one reply. B goes on after its score; C comes from elsewhere."""
  upstream.answer = ["ls", "ls", "cat", "make", "", ""]
  histories = {task: [user(task)] for task in "AB"}
  histories["C"] = [user("C"), assistant("ls"), assistant("make")]
  ids = []
  for task in "ABABBC":
    if len(ids) == 4:
      client.score(1, ids[-1])
    answer = client.chat("", messages=histories[task])
    ids.append(answer.headers["x-baar-session-id"])
    histories[task].append(answer.json()["choices"][0]["message"])
  assert [ids.index(name) for name in ids] == [0, 1, 0, 1, 4, 5]


def test_a_task_that_ended_long_ago_does_not_go_on(client):
  """Two equal tasks wait."""
  for _ in range(2):
    client.chat("")
  sessions = client.exchange.sessions
  (ended,) = sessions.list_conversations("id = 1")
  ended.changed_s = 1.0
  client.chat("", messages=[*ASK, assistant(REPLY), *ASK])
  found = sessions.list_conversations("id > 0")
  assert [len(conversation.records) for conversation in found] == [2, 1]


def test_small_models_of_agents_stand_for_small(open_client):
  client = open_client(policy="large")
  assert client.chat(model="gpt-9-nano").json()["model"] == "small"


def test_agents_of_one_session_draw_on_one_purse(client):
  """A title is no step. A subagent, another policy and the next task are conversations."""
  tools = [{"type": "function", "function": {"name": "go"}}]
  long = [user("x" * 400)]
  client.chat(messages=long, tools=tools)
  title = client.chat(messages=[user("Write a title.")])
  assert "x-baar-conversation" not in title.headers
  sub = {"x-claude-code-agent-id": "sub"}
  replies = [client.chat(headers=sub, tools=tools) for _ in range(2)]
  replies.append(client.chat(model="baar:large", messages=long, tools=tools))
  assert client.score(1) == 200
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
  assert client.score(0) == 200
  assert client.score(0) == 409


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
  """routed(**settings): a client whose router picks LARGE at a cost weight below 0.3."""
  spec = ConditionedSpec("conditioned", 3, None, 0.5, cap_conditioned=True)
  router = RulePolicy(spec, lambda live, spec: int(live.cost_weight < 0.3))
  router.cost_weight = 0.5
  router.cost_weights = (0.1, 0.5)
  monkeypatch.setattr("baar_serve.__main__.open_router", lambda *args: router)
  (tmp_path / "served").mkdir()
  (tmp_path / "served" / "vocabulary.npz").touch()
  with contextlib.ExitStack() as stack:
    yield lambda **settings: stack.enter_context(
      Client(tmp_path, upstream, **{"policy": "router"} | settings)
    )


def test_a_client_selects_a_cost_weight_by_the_model_name(routed):
  client = routed()
  names = "baar:cost_weight=0.5", "baar:cost_weight=0.1", "baar"
  models = []
  for name in (*names, "baar:K=5:cost_weight=0.5"):
    models.append(client.chat(name, model=name).json()["model"])
  assert models == ["small", "large", "small", "small"]
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
    messages += [assistant("go"), *ASK]
  assert scores == [[], [], [0.25], [0.25], [0.25, 0.5], [0.25, 0.5]]
