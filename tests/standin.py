"""A loopback server that speaks chat completions, keeps its own books, and fails as it is told."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("429", "500", "stall", "drop", "malformed", "empty", "silent")
BILLED_FAULTS = ("empty", "silent")  # the model was at work, and nothing came of it


class StandIn(ThreadingHTTPServer):
  """Answers `answer(request)`; `fault(number, request)` names what goes wrong with a request.

  A fault is one of FAULTS, "unpriced", "dear" (more tokens than were asked for), "cut" (nothing but
  reasoning), "trickle", or a status with a code behind it, if any: "400 too_long".

  Attributes:
    seen: every request's body, in order.
    headers: of the same.
    billed: (model, usage, whether its answer was usable) of every call that is billed.
  """

  daemon_threads = True
  request_queue_size = 128

  def __init__(
    self,
    answer: Callable[[dict], str] = lambda request: "Thought: now.\n\nAction: go",
    fault: Callable[[int, dict], str | None] = lambda number, request: None,
    retry_after: str = "0.01",
    latency_s: Callable[[int], float] = lambda number: 0.0,
    stall_s: float = 5.0,
    bills_what_it_loses: bool = False,
  ):
    super().__init__(("127.0.0.1", 0), Handler)
    self.answer, self.fault, self.retry_after = answer, fault, retry_after
    self.latency_s, self.stall_s, self.bills_what_it_loses = latency_s, stall_s, bills_what_it_loses
    self.seen, self.headers, self.billed = [], [], []
    self.most_at_once = self._now = 0
    self._prompts: dict[str, list] = {}  # model -> conversations that its cache holds
    self._lock = threading.Lock()

  @property
  def url(self) -> str:
    return f"http://127.0.0.1:{self.server_address[1]}/v1"

  def usd(self, prices: dict[str, tuple[str, str, str]], billed: list | None = None) -> Fraction:
    """Dollars of some calls, or of all; prices are (input, cached, output) per million tokens."""
    total = Fraction(0)
    for model, usage, _ in self.billed if billed is None else billed:
      fresh, cached, out = map(Fraction, prices[model])
      cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
      total += (usage["prompt_tokens"] - cached_tokens) * fresh + cached_tokens * cached
      total += usage["completion_tokens"] * out
    return total / 10**6

  @contextlib.contextmanager
  def running(self) -> Iterator["StandIn"]:
    thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
      yield self
    finally:
      self.shutdown()
      self.server_close()
      thread.join()

  def take(self, request: dict, headers) -> tuple[int, str | None]:
    with self._lock:
      self.seen.append(request)
      self.headers.append({name.lower(): value for name, value in headers.items()})
      self._now += 1
      self.most_at_once = max(self.most_at_once, self._now)
      number = len(self.seen) - 1
      return number, self.fault(number, request)

  def give(self) -> None:
    with self._lock:
      self._now -= 1

  def bill(self, request: dict, text: str, usable: bool) -> dict:
    """Counts the call's tokens: 4 characters each, and those of the longest prompt it begins with
    are cached."""
    contents = [message["content"] for message in request["messages"]]
    count = lambda texts: sum(-(-len(text) // 4) + 3 for text in texts)  # noqa: E731
    with self._lock:
      held = self._prompts.setdefault(request["model"], [])
      known = [prompt for prompt in held if contents[: len(prompt)] == prompt]
      usage = {
        "prompt_tokens": count(contents),
        "completion_tokens": min(count([text]), most_tokens(request)),
        "prompt_tokens_details": {"cached_tokens": max(map(count, known), default=0)},
      }
      usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
      held.append(contents)
      self.billed.append((request["model"], usage, usable))
    return usage

  def handle_error(self, request, client_address):
    """A client that is gone is no error here."""


def most_tokens(request: dict) -> int:
  return request.get("max_completion_tokens") or request["max_tokens"]


class Handler(BaseHTTPRequestHandler):
  protocol_version = "HTTP/1.1"
  server: StandIn

  def log_message(self, *args):
    pass

  def do_POST(self):
    request = json.loads(self.rfile.read(int(self.headers["content-length"])))
    number, fault = self.server.take(request, self.headers)
    try:
      self._respond(number, request, fault)
    finally:
      self.server.give()

  def _respond(self, number, request, fault):
    time.sleep(self.server.latency_s(number))
    text = self.server.answer(request)
    if fault in ("stall", "drop", "malformed") and self.server.bills_what_it_loses:
      self.server.bill(request, text, False)
    if fault == "stall":
      time.sleep(self.server.stall_s)
      self.close_connection = True
    elif fault == "drop":
      self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
      self.connection.close()  # at once, with a reset
      self.close_connection = True
    elif fault == "malformed":
      self._send(200, b'{"id": "c1", "choices": [{"mess')
    elif fault == "trickle":
      self.send_response(200)
      self.end_headers()
      end = time.monotonic() + self.server.stall_s
      while time.monotonic() < end:
        self.wfile.write(b" ")
        time.sleep(0.02)
      usage = self.server.bill(request, text, True)
      self.wfile.write(json.dumps({"choices": [], "usage": usage}).encode())
      self.close_connection = True
    elif fault and fault[0].isdigit():
      status, _, code = fault.partition(" ")
      error = {"error": {"message": f"told to answer {fault}", "type": "x", "code": code or None}}
      headers = {"retry-after": self.server.retry_after} if status in ("429", "503") else {}
      self._send(int(status), json.dumps(error).encode(), headers)
    else:
      usage = self.server.bill(request, text, fault not in BILLED_FAULTS)
      if fault == "dear":
        usage["completion_tokens"] = 20 * most_tokens(request)
      content = None if fault in ("silent", "cut") else text
      message = {"index": 0, "finish_reason": "length" if fault == "cut" else "stop"}
      message["message"] = {"role": "assistant", "content": content}
      body = {"id": "c1", "object": "chat.completion", "created": 1, "model": request["model"]}
      body |= {"choices": [] if fault == "empty" else [message], "usage": usage}
      if fault == "unpriced":
        del body["usage"]
      self._send(200, json.dumps(body).encode())

  def _send(self, status, body, headers=()):
    self.send_response(status)
    for name, value in {"content-type": "application/json", **dict(headers)}.items():
      self.send_header(name, value)
    self.send_header("content-length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)
