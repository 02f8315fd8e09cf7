"""Test the keys of endpoints, and that no message shows one."""

import re

import pytest

from baar_jax.config import ModelsConfig
from baar_jax.llms.provider import clean, endpoints, read_refusal

KEY = "sk-Secret0123456789"
WITHHELD = "its message repeats the key"
PUBLIC = "https://api.together.xyz/v1"


# The key is None if the configuration is refused. The message does not show the variable's
# name, because it may be the key itself.
@pytest.mark.parametrize(
  "url, variable, key",
  [
    ("https://eu.api.openai.com/v1", None, "secret"),
    ("https://notapi.openai.com.example.org/v1", None, None),
    (PUBLIC, None, None),
    (PUBLIC, "MINE", "mine"),
    (PUBLIC, "", "none"),
    (PUBLIC, "NOT_SET", None),
    (PUBLIC, "TWO_LINES", None),
    (PUBLIC, "ACCENT", None),
    # Private addresses need no key.
    ("http://[::1]:8000/v1", None, "none"),
    ("http://10.1.2.3/v1", "NOT_SET", "none"),
    ("http://gpu-server:8000/v1", "MINE", "mine"),
  ],
)
def test_which_key_is_sent_where(monkeypatch, url, variable, key):
  values = dict(
    OPENAI_API_KEY=" secret\r\n", MINE="mine", ACCENT="secrét", TWO_LINES="sec\nret"
  )
  for name, value in values.items():
    monkeypatch.setenv(name, value)
  variables = () if variable is None else (variable, "")
  config = ModelsConfig(base_urls=(url, "http://other/v1"), key_variables=variables)
  first, second = endpoints(config)
  # The second address has no key.
  assert (second.host, second.key()) == ("other", "none")
  if key:
    assert first.key() == key
    return
  with pytest.raises(ValueError, match="needs a key.*key_variables") as error:
    first.key()
  assert not re.search("NOT_SET|sec|mine|\n", str(error.value))


@pytest.mark.parametrize(
  "message, shown",
  [
    ("\x1b[2Ja\u202eb\u200d\n\u2066c", "[2Jab c"),  # control characters
    ("x" * 500, "x" * 200),
    ("x" * 500 + KEY, WITHHELD),
    (f"key \x1b{KEY[:4]}\u202e{KEY[4:]}...", WITHHELD),
  ],
)
def test_an_endpoint_s_message_is_one_line_without_the_key(message, shown):
  assert clean(message, KEY) == shown


@pytest.mark.parametrize(
  "body",
  [
    # llama.cpp
    b'{"error":{"code":400,"message":"request (70 tokens) exceeds the available context'
    b' size (64 tokens)","type":"exceed_context_size_error","n_ctx":64}}',
    # Gemini
    b'[{"error":{"code":400,"message":"The input token count (70) exceeds the maximum '
    b'number of tokens allowed (64).","status":"INVALID_ARGUMENT"}}]',
  ],
)
def test_an_overflow_of_the_window_ends_only_its_call(body):
  outcome = read_refusal(400, body, {}, KEY)
  assert outcome.is_overflow and outcome.hopeless and not outcome.fatal
