"""Replay the requests of real agents: each task is one conversation."""

import json
from pathlib import Path

import pytest
from endpoint import Client
from standin import StandIn
from standin_forms import Reply

RECORDED = sorted((Path(__file__).parent / "golden" / "clients").iterdir())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_a_task_of_a_real_client_is_one_conversation(tmp_path, path):
  recorded = json.loads(path.read_text())
  upstream = StandIn([Reply(*call["reply"]) for call in recorded["calls"]])
  with upstream.running(), Client(tmp_path, upstream) as client:
    for call in recorded["calls"]:
      answer = client.post(call["path"], call["body"], call["headers"])
      # The number of the conversation; a side call has none.
      assert answer.headers.get("x-baar-conversation") == call["conversation"]
      assert answer.headers["x-baar-session-id"].startswith(recorded["session"])
