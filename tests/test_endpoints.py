"""Test the keys of endpoints, and what is read from answers."""

import pytest

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms.chat import read_reply
from baar_jax.llms.provider import clean, endpoints
from baar_jax.llms.usage import Meter

KEY = "sk-Secret0123456789"
WITHHELD = "its message repeats a part of the key"
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
  values = {"OPENAI_API_KEY": " secret\r\n", "MINE": "mine", "ACCENT": "secrét"}
  for name, value in (values | {"TWO_LINES": "sec\nret"}).items():
    monkeypatch.setenv(name, value)
  variables = () if variable is None else (variable, "")
  config = ModelsConfig(base_urls=(url, "http://other/v1"), key_variables=variables)
  first, second = endpoints(config)
  assert (first.model, second.model, second.host) == (
    "gpt-4.1-mini",
    "gpt-4.1",
    "other",
  )
  assert second.key() == "none"
  if key:
    assert first.key() == key
    return
  with pytest.raises(
    ValueError, match="needs a key.*--config.models.key_variables"
  ) as error:
    first.key()
  assert not any(word in str(error.value) for word in ("NOT_SET", "sec", "mine", "\n"))


@pytest.mark.parametrize(
  "message, shown",
  [
    ("\x1b[2Ja\u202eb\u200d\n\u2066c", "[2Jab c"),  # control characters
    ("x" * 500 + KEY, "x" * 200),
    ("Secre", "Secre"),  # five consecutive characters are allowed
    (f"key {KEY[4:10]}...", WITHHELD),
    (" ".join(KEY), WITHHELD),
    ("S.e.c-r_e,t", WITHHELD),
    (KEY.upper(), WITHHELD),
  ],
)
def test_an_endpoint_s_message_is_one_line_without_the_key(message, shown):
  assert clean(message, KEY) == shown


# A lone surrogate becomes a question mark. A content that is no text is none.
@pytest.mark.parametrize(
  "content, kind, text",
  [("a \ud83d b \U0001f600", "reply", "a ? b \U0001f600"), ([], "retry", "")],
)
def test_an_answer_becomes_an_outcome(content, kind, text):
  answer = {"choices": [{"message": {"content": content}}]}
  outcome = read_reply(answer, Usage(8, 0, 10))
  assert (outcome.kind, outcome.text, outcome.fatal) == (kind, text, False)


def test_text_that_is_nested_too_deeply_is_no_answer():
  assert Meter().read("[" * 100_000) is None
