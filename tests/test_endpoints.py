"""Test the keys of endpoints, and what is read from answers."""

import base64
import json

import pytest

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms.chat import read_reply
from baar_jax.llms.chat_completions import read_answer, read_counts
from baar_jax.llms.wire import clean, endpoints

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
    *[
      (base64.b64encode(b"Bearer "[i:] + KEY.encode()).decode(), WITHHELD)
      for i in range(3)
    ],
  ],
)
def test_an_endpoint_s_message_is_one_line_without_the_key(message, shown):
  assert clean(message, KEY) == shown


COUNTS = {"prompt_tokens": 8, "completion_tokens": 10}


def answer(content="Go.", **counts):
  return json.dumps(
    {"choices": [{"message": {"content": content}}], "usage": COUNTS | counts}
  )


# The counts that the stand-in sends are in test_chat.py.
@pytest.mark.parametrize(
  "body, kind, text, fatal",
  [
    (
      answer("a \ud83d b \U0001f600"),
      "reply",
      "a ? b \U0001f600",
      False,
    ),  # a lone surrogate
    (answer([]), "retry", "", False),
    ("[" * 100_000, "presumed", "", False),  # nested too deeply
    ('{"error": "try again"}', "presumed", "", False),
    (
      answer().replace('"completion', '"completion_tokens": 0, "completion'),
      "presumed",
      "",
      True,
    ),
    (answer(prompt_tokens=float("inf")), "presumed", "", True),
    (answer(completion_tokens=0.5), "presumed", "", True),
    (answer(cached_tokens=False), "presumed", "", True),
    (
      answer(prompt_cache_hit_tokens=6, prompt_cache_miss_tokens=8),
      "presumed",
      "",
      True,
    ),
    (
      answer(prompt_tokens_details={"a": 0, "b": 5}).replace('"b"', '"a"'),
      "presumed",
      "",
      True,
    ),
    (
      answer().replace('"usage"', '"service_tier": ["default"], "usage"'),
      "presumed",
      "",
      True,
    ),
  ],
)
def test_an_answer_becomes_an_outcome(body, kind, text, fatal):
  outcome = read_reply(read_answer(body.encode()))
  assert (outcome.kind, outcome.text, outcome.fatal) == (kind, text, fatal)


# Tokens that only the total has count as completion. A usage is (prompt, cached,
# completion, cache write).
@pytest.mark.parametrize(
  "fields, details, usage",
  [
    ({"total_tokens": 60}, None, (8, 0, 52)),
    (
      {"total_tokens": None},
      {"cached_tokens": None, "cache_write_tokens": 5},
      (8, 0, 10, 5),
    ),
    ({"cache_write_tokens": 5}, {"cache_write_tokens": None}, (8, 0, 10, 5)),
    ({}, {"cached_tokens": 3, "cache_creation_tokens": 5}, (8, 3, 10, 5)),  # LiteLLM
    (
      {"prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 2},
      None,
      (8, 6, 10),
    ),  # DeepSeek
  ],
)
def test_the_usage_of_several_endpoints_is_read(fields, details, usage):
  assert read_counts(COUNTS | fields | {"prompt_tokens_details": details}) == Usage(
    *usage
  )
