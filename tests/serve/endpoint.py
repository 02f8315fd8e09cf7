"""Drive the endpoint in this process, with a stand-in for the models."""

import hashlib

from starlette.testclient import TestClient

from baar_jax.rollout.specs import Decision
from baar_serve.__main__ import build
from baar_serve.call import ClientCall
from baar_serve.config import ServeConfig, UpstreamsConfig, open_run
from baar_serve.forms.chat_completions import FORM
from baar_serve.request import ClientKey

# Dollars per million tokens: input, cached input, output.
PRICES = (1.0, 0.5, 2.0), (5.0, 2.0, 10.0)
ASK = [{"role": "user", "content": "Task: go out\n\nA door."}]
# The stand-in counts a token for each 4 characters, and 3 for each message. The reply of
# 27 characters has 7 + 3 tokens, and the prompt of 23 characters 6 + 3.
REPLY = "Thought: now.\n\nAction: go"
# The dollars of the first call.
USD = 1e-6 * (9 * 1 + 10 * 2)
# The limit of a reply's tokens.
TOKENS = 200


def user(content):
  """Write a message of the user."""
  return {"role": "user", "content": content}


def assistant(content):
  """Write a reply of the model."""
  return {"role": "assistant", "content": content}


class Client:
  """A client of an endpoint that records a run."""

  def __init__(self, directory, upstream, name="served", models=(), **settings):
    usual = dict(names=("small", "large"), prices=PRICES, base_urls=(upstream.url,))
    usual |= {"timeout_s": 20, "retries": 1}
    self.config = ServeConfig(
      name=name,
      runs=str(directory),
      models=UpstreamsConfig(**usual | dict(models)),
      **{"policy": "small", "max_reply_tokens": TOKENS} | settings,
    )
    self.run = open_run(self.config)
    app = build(self.config, self.run)
    self.http = TestClient(app, "http://127.0.0.1")

  def __enter__(self):
    self.http.__enter__()
    return self

  def __exit__(self, *error):
    self.http.__exit__(*error)
    self.run.close()

  @property
  def exchange(self):
    """Return what routes the calls."""
    return self.http.app.exchange

  def chat(self, session="s", headers=(), **fields):
    """Make a chat completion in a session; "" names none."""
    body = {"model": "baar", "messages": ASK, **fields}
    named = {"x-session-id": session} if session else {}
    return self.post("/v1/chat/completions", body, named | dict(headers))

  def score(self, score, name="s"):
    """Score a session; return the status."""
    return self.post(f"/v1/sessions/{name}/score", {"score": score}).status_code

  def receive(self, session="s", **fields):
    """Find the purse and the conversation of a chat completion that is not made."""
    body = {"model": "baar", "messages": ASK} | fields
    named = {"x-session-id": session} if session else {}
    call = ClientCall(ClientKey(), FORM, named, body)
    self.http.app.desk.receive(call)
    return call

  def post(self, path, body, headers=None):
    """Send a body as JSON."""
    return self.http.post(path, json=body, headers=headers)

  def session(self, name="s"):
    """Return a session, with the fields of its newest conversation."""
    session = self.http.get(f"/v1/sessions/{name}").json()
    return session | {**session["conversations"][0], "id": session["id"]}

  def conversations(self, name="s"):
    """List the number and the steps of each conversation, the newest first."""
    session = self.http.get(f"/v1/sessions/{name}").json()
    return [(found["id"], len(found["steps"])) for found in session["conversations"]]

  def decide(self, *models):
    """Let the policy "random" choose these models, one after the other."""
    choices = iter(models)
    policy = self.exchange.deciders["random"].policy
    policy.choose = lambda lives: [Decision(next(choices)) for _ in lives]


def write_keys(directory, **settings):
  """Write a file of clients' keys; return its path. A client's key is its name.

  Args:
    settings: by the client's name, further lines of its table.
  """
  tables = []
  for name, lines in settings.items():
    digest = hashlib.sha256(name.encode()).hexdigest()
    tables.append(f'[{name}]\nsha256 = "{digest}"\n{lines}\n')
  path = directory / "keys.toml"
  path.write_text("".join(tables))
  return str(path)
