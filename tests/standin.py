"""Serve a model in three wire forms on loopback, with faults, and count the bill."""

import contextlib
import functools
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from standin_forms import FORMS, Reply, prompt_of, text_of

from baar_jax.episode import SPLITS
from examples.sandbox import Sandbox

OK = b"HTTP/1.1 200 OK\r\n\r\n"


class StandIn(ThreadingHTTPServer):
  """A stand-in for an endpoint of models.

  Attributes:
    answer: the text of the reply, or a `Reply`.
    fault: None for no fault, a key of FAULTS, or an HTTP status with an optional error
      code ("400 too_long").
    latency_s: the seconds before the answer. These three may also be a list, for the
      next requests, or a function: of the request, of its number and the request, and
      of its number.
    retry_after: the header of 429 and 503.
    stall_s: seconds of a fault that stalls.
    chunk_s: seconds between the chunks of a streamed answer.
    seen: all requests, in order.
    headers: the headers of all requests, in order.
    paths: the paths of all requests with their queries, in order.
    billed: request and usage of each billed call, also if its answer was lost; the
      usage has the same names in each form, and prompt_tokens include cached.
  """

  daemon_threads = True
  request_queue_size = 4096
  retry_after = "0.01"
  stall_s = 5.0
  chunk_s = 0.0

  fault = None
  latency_s = 0.0

  def __init__(self, answer="Thought: now.\n\nAction: go", **settings):
    super().__init__(("127.0.0.1", 0), Handler)
    self.answer = answer
    vars(self).update(settings)
    self.seen, self.headers, self.billed = [], [], []
    self.paths: list[str] = []
    # The conversations in each model's prompt cache.
    self._prompts: dict[str, list] = {}
    self.lock = threading.Lock()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}/v1"

  def usd(self, prices: dict[str, tuple], user: str | None = None) -> Fraction:
    """Compute the bill in dollars.

    Args:
      prices: dollars per million tokens of input, cached input and output, by model.
      user: only this user's requests count; None means all.
    """
    total = Fraction(0)
    for request, usage in self.billed:
      if user is None or request.get("user") == user:
        input_usd, cached_usd, output_usd = map(Fraction, prices[request["model"]][:3])
        total += (usage["prompt_tokens"] - usage["cached"]) * input_usd
        total += usage["cached"] * cached_usd + usage["completion_tokens"] * output_usd
    return total / 10**6

  @contextlib.contextmanager
  def running(self) -> Iterator["StandIn"]:
    """Serve in a thread while the context is open."""
    thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
      yield self
    finally:
      self.shutdown()
      self.server_close()
      thread.join()

  def bill(self, request: dict, reply: Reply, **usage) -> dict:
    """Bill a call; return its usage.

    A token has 4 characters, and a message has 3 tokens more. The longest earlier prompt
    with which the prompt begins is cached.

    Args:
      usage: replaced counts of tokens.
    """
    texts = list(map(text_of, prompt_of(request)))
    count = lambda texts: sum(-(-len(text) // 4) + 3 for text in texts)  # noqa: E731
    with self.lock:
      prompts = self._prompts.setdefault(request["model"], [])
      known = [prompt for prompt in prompts if texts[: len(prompt)] == prompt]
      cached = max(map(count, known), default=0)
      said = text_of([reply.text, *map(json.dumps, reply.calls)])
      billed = {
        "prompt_tokens": count(texts),
        "cached": cached,
        "completion_tokens": min(count([said]), most_tokens(request)),
      } | usage
      prompts.append(texts)
      self.billed.append((request, billed))
    return billed

  def handle_error(self, request, client_address):
    """Ignore errors of connections that a client has closed."""


def choose(value, *arguments):
  """Return the value for a request: it may be a function, or a list for the next ones."""
  if isinstance(value, list):
    return value.pop(0) if value else None
  return value(*arguments) if callable(value) else value


def most_tokens(request: dict) -> int:
  """Return the limit on the tokens of the reply; a high number without one."""
  limits = "max_completion_tokens", "max_output_tokens", "max_tokens"
  return next((request[name] for name in limits if request.get(name)), 10**6)


class Handler(BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  # With Nagle's algorithm a body would be sent 40 ms after its headers.
  disable_nagle_algorithm = True
  server: StandIn

  def log_message(self, *args):
    pass

  def do_POST(self):
    request = json.loads(self.rfile.read(int(self.headers["content-length"])))
    with self.server.lock:
      number = len(self.server.seen)
      self.server.seen.append(request)
      self.server.paths.append(self.path)
      self.server.headers.append(
        {name.lower(): value for name, value in self.headers.items()}
      )
      fault = choose(self.server.fault, number, request)
    self.form = FORMS[self.path.partition("?")[0].removeprefix("/v1/")]
    time.sleep(choose(self.server.latency_s, number))
    reply = choose(self.server.answer, request)
    self.act(fault, request, reply if isinstance(reply, Reply) else Reply(reply))

  def act(self, fault, request, reply):
    if fault in FAULTS:
      FAULTS[fault](self, request, reply)
    elif fault:
      self.refuse(fault)
    else:
      self.deliver(request, reply)

  def deliver(self, request, reply, **replaced):
    """Send a billed answer, streamed if asked for."""
    if request.get("stream"):
      self.stream(request, reply, **replaced)
    else:
      self.send(200, self.answer(request, reply, **replaced))

  def body(self, request, reply, usage=(), choice=(), billed=(), **fields) -> dict:
    """Write a billed answer, with some fields replaced.

    Args:
      usage: replaced counts of tokens; None removes the usage.
      choice: replaced fields of the choice.
      billed: replaced counts of tokens, in the bill too.
      fields: replaced fields of the answer.
    """
    counts = self.server.bill(request, reply, **dict(billed))
    body = self.form.body(request["model"], reply, len(self.server.billed))
    if choice:
      body["choices"][0].update(choice)
    if usage is not None:
      usage = self.form.usage(counts) | dict(usage)
    return body | {"usage": usage} | fields

  def answer(self, request, reply, **replaced) -> bytes:
    return json.dumps(self.body(request, reply, **replaced)).encode()

  def stream(self, request, reply, most=10**9, **replaced):
    """Stream a billed answer; break off after `most` events."""
    self.send_response(200)
    self.send_header("content-type", "text/event-stream")
    self.send_header("connection", "close")
    self.end_headers()
    lines = []
    for name, data in self.form.events(self.body(request, reply, **replaced)):
      event = f"event: {name}\n" if name else ""
      lines.append(f"{event}data: {json.dumps(data)}\n\n")
    for line in [*lines, self.form.last][:most]:
      self.wfile.write(line.encode())
      self.wfile.flush()
      time.sleep(self.server.chunk_s)
    self.close_connection = True

  def refuse(self, fault, message=""):
    status, _, code = fault.partition(" ")
    error = self.form.error(status, code, message or f"asked to answer {fault}")
    headers = (
      {"retry-after": self.server.retry_after} if status in ("429", "503") else {}
    )
    self.send(int(status), json.dumps(error).encode(), headers)

  def send(self, status, body, headers=()):
    self.send_response(status)
    usual = {"content-type": "application/json", "set-cookie": "call=1"}
    for name, value in (usual | dict(headers)).items():
      self.send_header(name, value)
    self.send_header("content-length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)


def slow(first, repeated, last=b""):
  """Make a fault that sends bytes again and again for `stall_s`, then an answer.

  Args:
    first: bytes at the start.
    repeated: bytes that are sent again and again.
    last: bytes before the answer.
  """

  def fault(h, request, reply):
    h.wfile.write(first)
    answer, end = h.answer(request, reply), time.monotonic() + h.server.stall_s
    while time.monotonic() < end:
      h.wfile.write(repeated)
      time.sleep(0.02)
    h.wfile.write(last + answer)
    h.close_connection = True

  return fault


def drop(h, request, reply):
  """Bill the call, and reset the connection."""
  h.server.bill(request, reply)
  h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  h.connection.close()
  h.close_connection = True


def echo(h, request, reply, status="400"):
  """Send an error with the key, and with control characters."""
  key = h.headers["authorization"].removeprefix("Bearer ")
  h.refuse(f"{status} {key}", f"no \x1b[2J\u202eroom for {key}")


def dear(h, request, reply):
  """Bill 20 times the limit of tokens, and report them."""
  billed = {"completion_tokens": 20 * most_tokens(request)}
  h.send(200, h.answer(request, reply, billed=billed))


def fault(**fields):
  """Make a fault that sends a billed answer with some fields replaced."""
  return lambda h, request, reply: h.send(200, h.answer(request, reply, **fields))


def message_fault(content, reason="stop", **message):
  """Make a fault that sends a billed answer with another message."""
  return fault(
    choice={"finish_reason": reason, "message": {"content": content} | message}
  )


CALL = {"id": "1", "type": "function", "function": {"name": "go", "arguments": "{}"}}
# Each fault has the name of its effect at the client. `Handler.refuse` answers with
# statuses such as "429", which are not in this table.
FAULTS: dict[str, Callable[[Handler, dict, str], None]] = {
  "stall": slow(b"", b"", OK),
  "trickle": slow(OK, b" "),
  "slow_headers": slow(b"HTTP/1.1 200 OK\r\nx-slow: ", b"x", b"\r\n\r\n"),
  "drop": drop,
  "malformed": lambda h, *asked: h.send(200, h.answer(*asked)[:60]),
  "empty": fault(choices=[]),
  "silent": message_fault(None),
  "tool_calls": message_fault(None, "tool_calls", role="assistant", tool_calls=[CALL]),
  "filtered": message_fault("", "content_filter"),
  "refusal": message_fault(None, refusal="I'm sorry."),
  "cut": message_fault(None, "length"),  # all tokens went into reasoning
  "unpriced": lambda h, *asked: h.deliver(*asked, usage=None),
  "no_completion": fault(usage={"completion_tokens": 0, "total_tokens": None}),
  "dear": dear,
  "priority": fault(service_tier="priority"),
  "redirect": lambda h, *_: h.send(
    307, b"{}", {"location": h.server.url + "/chat/completions"}
  ),
  "echo": echo,
  "quote": functools.partial(echo, status="401"),
  "cut_stream": lambda h, request, reply: h.stream(request, reply, most=2),
}


class Lockpick:
  """Play the sandbox as a model does, with errors.

  The model "large" rarely errs. Other models mostly err at locks that are not plain.
  """

  def __init__(self, train_tasks: int, dev_tasks: int, test_tasks: int, max_steps: int):
    self._env = Sandbox(train_tasks, dev_tasks, test_tasks, max_steps)
    self._lock = threading.Lock()
    # The ids of the tasks by the texts that open their conversations.
    self._ids = {}
    for split in SPLITS:
      for task in self._env.tasks(split):
        opening = f"Task: {task.description}\n\n{self._env.reset(task.id)}"
        self._ids[opening] = task.id

  def __call__(self, request: dict) -> str:
    """Reply to a request, after a replay of its conversation in the sandbox."""
    start, *texts = (message["content"] for message in request["messages"][1:])
    if start not in self._ids:
      return "Thought: I have never been here."
    with self._lock:
      self._env.reset(self._ids[start])
      for reply in texts[::2]:
        if action := re.search(r"Action: (.*)", reply):
          self._env.step(action[1])
      oracle = self._env.oracle()
      mistake = self._env.mistake("wasted", "")
    hard = oracle.critical and request["model"] != "large"
    basis = (request["model"], request["seed"], start, texts)
    draw = hashlib.sha256(repr(basis).encode()).digest()[0]
    errs = draw < (180 if hard else 13)
    action = mistake if errs else oracle.action
    return f"Thought: I know this one.\n\nAction: {action}"
