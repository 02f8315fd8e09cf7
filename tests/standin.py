"""Serve chat completions on loopback, with faults, and count the bill."""

import contextlib
import functools
import gzip
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

from baar_jax.envs.sandbox.adapter import Sandbox
from baar_jax.episode import SPLITS

OK, BLANKS = b"HTTP/1.1 200 OK\r\n\r\n", b" " * 20_000_000


class StandIn(ThreadingHTTPServer):
  """A stand-in for an endpoint of models.

  Attributes:
    answer: function of a request; returns the text of the reply.
    fault: function of a request's number and the request; returns None for no fault, a
      key of FAULTS, or an HTTP status with an optional error code ("400 too_long").
    latency_s: function of a request's number; returns the seconds before the answer.
    retry_after: the header of 429 and 503.
    stall_s: seconds of a fault that stalls.
    chunk_s: seconds between the chunks of a streamed answer.
    seen: all requests, in order.
    headers: the headers of all requests, in order.
    billed: request and usage of each billed call, also if its answer was lost.
  """

  daemon_threads = True
  request_queue_size = 128
  retry_after = "0.01"
  stall_s = 5.0
  chunk_s = 0.0

  def __init__(
    self,
    answer: Callable[[dict], str] = lambda request: "Thought: now.\n\nAction: go",
    fault: Callable[[int, dict], str | None] = lambda number, request: None,
    latency_s: Callable[[int], float] = lambda number: 0.0,
    **settings,
  ):
    super().__init__(("127.0.0.1", 0), Handler)
    self.answer, self.fault, self.latency_s = answer, fault, latency_s
    vars(self).update(settings)
    self.seen, self.headers, self.billed = [], [], []
    # The conversations in each model's prompt cache.
    self._prompts: dict[str, list] = {}
    self.lock = threading.Lock()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}/v1"

  def usd(
    self, prices: dict[str, tuple[str, str, str]], user: str | None = None
  ) -> Fraction:
    """Compute the bill in dollars.

    Args:
      prices: dollars per million tokens of input, cached input and output, by model.
      user: only this user's requests count; None means all.
    """
    total = Fraction(0)
    for request, usage in self.billed:
      if user is None or request.get("user") == user:
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        counts = usage["prompt_tokens"] - cached, cached, usage["completion_tokens"]
        price_of = map(Fraction, prices[request["model"]])
        total += sum(count * price for count, price in zip(counts, price_of))
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

  def bill(self, request: dict, text: str) -> dict:
    """Bill a call; return its usage.

    A token has 4 characters, and a message has 3 tokens more. The longest earlier prompt
    with which the prompt begins is cached.
    """
    contents = [message.get("content") or "" for message in request["messages"]]
    count = lambda texts: sum(-(-len(text) // 4) + 3 for text in texts)  # noqa: E731
    with self.lock:
      prompts = self._prompts.setdefault(request["model"], [])
      cached = [prompt for prompt in prompts if contents[: len(prompt)] == prompt]
      usage = {
        "prompt_tokens": count(contents),
        "completion_tokens": min(count([text]), most_tokens(request)),
        "prompt_tokens_details": {"cached_tokens": max(map(count, cached), default=0)},
      }
      usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
      prompts.append(contents)
      self.billed.append((request, usage))
    return usage

  def handle_error(self, request, client_address):
    """Ignore errors of connections that a client has closed."""


def most_tokens(request: dict) -> int:
  """Return the limit on the tokens of the reply."""
  return request.get("max_completion_tokens") or request["max_tokens"]


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
      self.server.headers.append(
        {name.lower(): value for name, value in self.headers.items()}
      )
      fault = self.server.fault(number, request)
    time.sleep(self.server.latency_s(number))
    text = self.server.answer(request)
    if fault in FAULTS:
      FAULTS[fault](self, request, text)
    elif fault:
      self.refuse(fault)
    elif request.get("stream"):
      self.stream(request, text)
    else:
      self.send(200, self.answer(request, text))

  def answer(self, request, text, usage=(), choice=(), **fields) -> bytes:
    """Write a billed answer, with some fields replaced.

    Args:
      usage: replaced counts of tokens; None removes the usage.
      choice: replaced fields of the choice.
      fields: replaced fields of the answer.
    """
    billed = self.server.bill(request, text)
    body = {
      "id": "c1",
      "object": "chat.completion",
      "created": 1,
      "model": request["model"],
    }
    message = {"role": "assistant", "content": text}
    body["choices"] = [
      {"index": 0, "finish_reason": "stop", "message": message, **dict(choice)}
    ]
    body["usage"] = None if usage is None else {**billed, **dict(usage)}
    return json.dumps(body | fields).encode()

  def stream(self, request, text, most=10**9):
    """Stream a billed answer, one word per chunk; break off after `most` chunks."""
    self.send_response(200)
    self.send_header("content-type", "text/event-stream")
    self.send_header("connection", "close")
    self.end_headers()
    chunk = {
      "id": "c1",
      "object": "chat.completion.chunk",
      "created": 1,
      "model": "other",
    }
    deltas = [{"content": word} for word in ("", *re.findall(r"\s*\S+", text))]
    chunks = [
      {"choices": [{"index": 0, "delta": d, "finish_reason": None}]} for d in deltas
    ]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    chunks.append({"choices": [], "usage": self.server.bill(request, text)})
    for line in [*(json.dumps(chunk | fields) for fields in chunks), "[DONE]"][:most]:
      self.wfile.write(f"data: {line}\n\n".encode())
      self.wfile.flush()
      time.sleep(self.server.chunk_s)
    self.close_connection = True

  def refuse(self, fault, message=""):
    status, _, code = fault.partition(" ")
    error = {
      "message": message or f"asked to answer {fault}",
      "type": "x",
      "code": code or None,
    }
    headers = (
      {"retry-after": self.server.retry_after} if status in ("429", "503") else {}
    )
    self.send(int(status), json.dumps({"error": error}).encode(), headers)

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

  def fault(h, request, text):
    h.wfile.write(first)
    answer, end = h.answer(request, text), time.monotonic() + h.server.stall_s
    while time.monotonic() < end:
      h.wfile.write(repeated)
      time.sleep(0.02)
    h.wfile.write(last + answer)
    h.close_connection = True

  return fault


def drop(h, request, text):
  """Bill the call, and reset the connection."""
  h.server.bill(request, text)
  h.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
  h.connection.close()
  h.close_connection = True


def long_body(h, request, text, pack=bytes, **headers):
  """Send 20 MB of blanks before an answer; packed they have less than 1 MB."""
  h.send(200, pack(BLANKS + h.answer(request, text)), headers)


def echo(h, request, text):
  """Send an error with the key in several forms, and with control characters."""
  key = h.headers["authorization"].removeprefix("Bearer ")
  h.refuse(f"400 {key}", f"no \x1b[2J\u202eroom for {key[3:]} and {' '.join(key)}")


def dear(h, request, text):
  """Bill 20 times the limit of tokens, and report them."""
  tokens = {"completion_tokens": 20 * most_tokens(request)}
  h.send(200, h.answer(request, text, usage=tokens | {"total_tokens": None}))
  h.server.billed[-1][1].update(tokens)


def fault(**fields):
  """Make a fault that sends a billed answer with some fields replaced."""
  return lambda h, request, text: h.send(200, h.answer(request, text, **fields))


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
  "error_trickle": slow(b"HTTP/1.1 500 Error\r\n\r\n", b" "),
  "slow_headers": slow(b"HTTP/1.1 200 OK\r\nx-slow: ", b"x", b"\r\n\r\n"),
  "endless_continue": slow(b"", b"HTTP/1.1 100 Continue\r\n\r\n", OK),
  "drop": drop,
  "malformed": lambda h, *asked: h.send(200, h.answer(*asked)[:60]),
  "long_body": long_body,
  "bomb": functools.partial(
    long_body, pack=gzip.compress, **{"content-encoding": "gzip"}
  ),
  "empty": fault(choices=[]),
  "silent": message_fault(None),
  "tool_calls": message_fault(None, "tool_calls", role="assistant", tool_calls=[CALL]),
  "filtered": message_fault("", "content_filter"),
  "refusal": message_fault(None, refusal="I'm sorry."),
  "cut": message_fault(None, "length"),  # all tokens went into reasoning
  "unpriced": fault(usage=None),
  "no_prompt": fault(usage={"prompt_tokens": 0, "prompt_tokens_details": None}),
  "no_completion": fault(usage={"completion_tokens": 0, "total_tokens": None}),
  "negative": fault(usage={"completion_tokens": -7}),
  "boolean": fault(usage={"prompt_tokens": True, "total_tokens": None}),
  "absurd": fault(usage={"completion_tokens": 10**18, "total_tokens": None}),
  "small_total": fault(usage={"total_tokens": 1}),
  "large_cache": fault(usage={"prompt_tokens_details": {"cached_tokens": 10**6}}),
  "dear": dear,
  "priority": fault(service_tier="priority"),
  "redirect": lambda h, *_: h.send(
    307, b"{}", {"location": h.server.url + "/chat/completions"}
  ),
  "echo": echo,
  "cut_stream": lambda h, request, text: h.stream(request, text, most=3),
}


class Lockpick:
  """Play the sandbox as a model does, with errors.

  The model "large" rarely errs. Other models mostly err at locks that are not plain.
  """

  def __init__(self, train_tasks: int, dev_tasks: int, test_tasks: int, max_steps: int):
    self._env = Sandbox(train_tasks, dev_tasks, test_tasks, max_steps)
    self._tasks = [task for split in SPLITS for task in self._env.tasks(split)]

  def __call__(self, request: dict) -> str:
    """Reply to a request, after a replay of its conversation in the sandbox."""
    start, *texts = (message["content"] for message in request["messages"][1:])
    draw = hashlib.sha256(
      repr((request["model"], request["seed"], start, texts)).encode()
    )
    for task in self._tasks:
      replayed = [f"Task: {task.description}\n\n{self._env.reset(task.id)}"]
      for reply, observation in (
        zip(texts[::2], texts[1::2]) if start == replayed[0] else ()
      ):
        action = re.search(r"Action: (.*)", reply)
        replayed.append(self._env.step(action[1])[0] if action else observation)
      if replayed == [start, *texts[1::2]]:
        oracle = self._env.oracle()
        hard = oracle.critical and request["model"] != "large"
        errs = draw.digest()[0] < (180 if hard else 13)
        action = self._env.mistake("lost", "") if errs else oracle.action
        return f"Thought: I know this one.\n\nAction: {action}"
    return "Thought: I have never been here."
