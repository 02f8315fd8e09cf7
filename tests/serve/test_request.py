"""Test the names in a client's request, and what its replies are known by."""

import json

import pytest
from endpoint import ASK, assistant, user

from baar_serve.forms.chat_completions import FORM
from baar_serve.request import read_history

# Rows: headers, fields of the body, the path before /v1, and the session's name.
UUID = "0199c0de-0000-4000-8000-00000000000a"


NAMES = [
  ({"x-baar-session-id": "a", "x-session-id": "b"}, {}, "", "a"),
  ({"x-session-id": "b"}, {"session_id": "c"}, "/s/u", "u"),
  ({"x-claude-code-session-id": "d", "session-id": "e"}, {}, "", "d"),
  ({"x-litellm-session-id": "f"}, {"metadata": {"session_id": "g"}}, "", "f"),
  ({}, {"session_id": None, "metadata": {"session_id": "g"}}, "", "g"),
  ({}, {"metadata": {"user_id": f"user_1_account__session_{UUID}"}}, "", UUID),
  ({}, {"metadata": {"user_id": json.dumps({"session_id": UUID})}}, "", UUID),
  ({}, {"prompt_cache_key": UUID}, "", UUID),
  ({"x-session-id": "child", "x-parent-session-id": "b"}, {}, "", "b"),
]


@pytest.mark.parametrize("headers, fields, prefix, name", NAMES)
def test_sessions_have_the_names_that_agents_give(
  client, headers, fields, prefix, name
):
  body = {"model": "gpt-9", "messages": ASK} | fields
  reply = client.post(f"{prefix}/v1/chat/completions", body, headers)
  assert reply.headers["x-baar-session-id"] == name


# The messages that agents write before the task.
QWEN = """This is the Qwen Code. We are setting up the context for our chat.
Today's date is Friday.
/project/
└───a.py"""
PREAMBLES = {
  "codex": [user("<environment_context>\n<cwd>/a</cwd>\n</environment_context>")],
  "codex-agents": [
    user("# AGENTS.md instructions for /a\n\n<INSTRUCTIONS>\nBe kind.\n</INSTRUCTIONS>")
  ],
  "claude": [user("<system-reminder>\nIt is Friday.\n</system-reminder>")],
  "cline": [user("<environment_details>\n# Time\n9:00\n</environment_details>")],
  "gemini": [user("<session_context>\nThis is the Gemini CLI.\n</session_context>")],
  "qwen": [user(QWEN), assistant("Got it. Thanks for the context!")],
}


@pytest.mark.parametrize("preamble", PREAMBLES.values(), ids=PREAMBLES)
def test_an_agents_preamble_is_no_task(preamble):
  messages = [*preamble, user("Fix it."), assistant("a")]
  read = read_history({"messages": messages}, FORM)
  assert (read.task, read.actions, len(read.atoms)) == ("Fix it.", ["a"], 1)


def test_a_header_is_no_part_of_the_url(client, upstream):
  reply = client.chat("", {"url": "a", "query": "b=c"})
  assert reply.headers["x-baar-session-id"].startswith("auto-")
  assert upstream.paths == ["/v1/chat/completions"]
