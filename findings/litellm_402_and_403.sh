#!/usr/bin/env bash
# litellm 1.110.2: a server with OpenAI's chat completions answers 402 or 403 once.
#
# One would guess that 403 becomes litellm's PermissionDeniedError, as it does in the
# openai SDK beneath, and that 402 is at least an APIStatusError. Both become a plain
# APIError, which is no APIStatusError. So an agent that lists the exceptions after which
# it gives up, as mini-swe-agent 2.4.6 does, repeats a call whose budget is spent ten
# times in about five minutes. Statuses 400, 401 and 404 have classes of their own.
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install --quiet litellm==1.110.2
cat >"$directory/ask.py" <<'PYTHON'
import http.server
import threading

import litellm
import openai


class Handler(http.server.BaseHTTPRequestHandler):
  def do_POST(self):
    self.rfile.read(int(self.headers["content-length"]))
    body = b'{"error": {"message": "no", "type": "t", "code": "c"}}'
    self.send_response(int(self.path.split("/")[1]))
    self.send_header("content-type", "application/json")
    self.send_header("content-length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, *_):
    pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
messages = [{"role": "user", "content": "Hello"}]
for status in 400, 401, 402, 403, 404:
  url = f"http://127.0.0.1:{server.server_port}/{status}/v1"
  names = []
  try:
    client = openai.OpenAI(base_url=url, api_key="unused", max_retries=0)
    client.chat.completions.create(model="m", messages=messages)
  except openai.APIStatusError as error:
    names.append(type(error).__name__)
  try:
    litellm.completion("openai/m", messages, api_base=url, api_key="unused")
  except Exception as error:
    names += [type(error).__name__, str(isinstance(error, openai.APIStatusError))]
  print(status, *names)
PYTHON
LITELLM_LOCAL_MODEL_COST_MAP=True "$directory/venv/bin/python" "$directory/ask.py" \
  2>/dev/null | grep -E '^40[0-9] ' | tee "$directory/seen"
# Status; what openai raises; what litellm raises; whether that is an APIStatusError.
diff "$directory/seen" - <<'SEEN'
400 BadRequestError BadRequestError True
401 AuthenticationError AuthenticationError True
402 APIStatusError APIError False
403 PermissionDeniedError APIError False
404 NotFoundError NotFoundError True
SEEN
