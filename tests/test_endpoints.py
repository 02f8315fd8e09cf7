"""Where models are served, with which keys, and what their answers come to."""

import base64
import datetime
import email.utils
import json

import pytest

from baar_jax.config import ModelsConfig
from baar_jax.episode import Usage
from baar_jax.llms import endpoints
from baar_jax.llms.endpoints import clean, read_answer, read_usage, read_wait_s

KEY = "sk-Secret0123456789"
WITHHELD = "its message repeats a part of the key"
UNNAMED = "name the environment variable of its key in --config.models.key_variables, or ''"
UNSET = "set the environment variable that --config.models.key_variables names for it"


# A key or what is said instead. What is not set is not named: it may be a key itself.
@pytest.mark.parametrize(
  "url, variable, key",
  [
    ("", None, "secret"),  # OpenAI's own address, and its key
    ("https://eu.api.openai.com/v1", None, "secret"),
    ("https://notapi.openai.com.example.org/v1", None, UNNAMED),
    ("https://api.together.xyz/v1", None, UNNAMED),
    ("https://api.together.xyz/v1", "MINE", "mine"),
    ("https://api.together.xyz/v1", "", "none"),
    ("https://api.together.xyz/v1", "NOT_SET", UNSET),
    ("https://api.together.xyz/v1", "TWO_LINES", "variable TWO_LINES holds characters of no key"),
    ("https://api.together.xyz/v1", "ACCENT", "variable ACCENT holds characters of no key"),
    # Private addresses need none.
    ("http://127.0.0.1:8000/v1", None, "none"),
    ("http://localhost/v1/", None, "none"),
    ("http://[::1]:8000/v1", None, "none"),
    ("http://10.1.2.3/v1", "NOT_SET", "none"),
    ("http://gpu-server:8000/v1", "MINE", "mine"),
    ("http://8.8.8.8/v1", None, UNNAMED),
  ],
)
def test_which_key_is_sent_where(monkeypatch, url, variable, key):
  values = {"OPENAI_API_KEY": " secret\r\n", "MINE": "mine", "ACCENT": "secrét"}
  for name, value in (values | {"TWO_LINES": "sec\nret"}).items():
    monkeypatch.setenv(name, value)
  urls, variables = (url,) if url else (), () if variable is None else (variable,)
  config = ModelsConfig(names=("a", "b"), base_urls=urls, key_variables=variables)
  first, second = endpoints.endpoints(config)
  assert (first.model, second.model) == ("a", "b")
  assert first.base_url == second.base_url == (url or "https://api.openai.com/v1").rstrip("/")
  assert ("NOT_SET" not in first.source) and ("None" not in first.source)
  if " " not in key:
    assert first.key() == second.key() == key
    return
  with pytest.raises(ValueError, match=key) as error:
    first.key()
  assert str(error.value).isprintable()
  assert not any(word in str(error.value) for word in ("NOT_SET", "sec", "mine"))


def test_two_models_at_two_addresses(monkeypatch):
  monkeypatch.setenv("OTHER", "other")
  urls = "http://localhost:8000/v1/", "https://api.together.xyz/v1"
  config = ModelsConfig(names=("a", "b"), base_urls=urls, key_variables=("", "OTHER"))
  rows = [(e.model, e.host, e.key()) for e in endpoints.endpoints(config)]
  assert rows == [("a", "localhost", "none"), ("b", "api.together.xyz", "other")]


@pytest.mark.parametrize(
  "said, shown",
  [
    ("no\troom\n", "no room"),
    ("\x1b[2Ja\u202eb\u200d\u2066c", "[2Jabc"),  # codes of a terminal, joiners
    ("x" * 500, "x" * 200),
    ("x" * 500 + KEY, "x" * 200),
    ("Secre", "Secre"),  # five characters in a row
    (KEY[:6], WITHHELD),
    (f"key {KEY[4:10]}...", WITHHELD),
    (" ".join(KEY), WITHHELD),
    ("\u200b".join(KEY), WITHHELD),
    ("S.e.c-r_e,t", WITHHELD),
    (KEY.upper(), WITHHELD),
    (KEY[::-1], WITHHELD),
    (KEY.encode().hex(), WITHHELD),
    *[(base64.b64encode(b"Bearer "[i:] + KEY.encode()).decode(), WITHHELD) for i in range(3)],
  ],
)
def test_what_an_endpoint_says_is_one_short_line_without_its_key(said, shown):
  assert clean(said, KEY) == shown


def test_how_long_an_endpoint_asks_to_wait():
  now = datetime.datetime.now(datetime.UTC)
  later = email.utils.format_datetime(now + datetime.timedelta(seconds=90), usegmt=True)
  assert 80 < read_wait_s(later) <= 90
  past = email.utils.format_datetime(now - datetime.timedelta(seconds=90), usegmt=True)
  assert read_wait_s(past) == read_wait_s("-3") == read_wait_s("") == read_wait_s("nan") == 0.0


COUNTS = {"prompt_tokens": 8, "completion_tokens": 10}
PARTS = [{"type": "reasoning"}, {"type": "text", "text": "Go "}, {"type": "text", "text": "on."}]


def answer(content="Go.", **counts):
  return json.dumps({"choices": [{"message": {"content": content}}], "usage": COUNTS | counts})


@pytest.mark.parametrize(
  "body, kind, text, fatal",
  [
    (answer(), "reply", "Go.", False),
    (answer(PARTS), "reply", "Go on.", False),
    (answer("a \ud83d b \U0001f600"), "reply", "a ? b \U0001f600", False),  # half a pair
    (answer([]), "retry", "", False),
    ("[" * 100_000, "presumed", "", False),  # deeper than can be read
    (b"\xff", "presumed", "", False),
    ('{"error": "try again"}', "presumed", "", False),
    (answer().replace("usage", "used"), "presumed", "", True),
    (answer().replace('"completion', '"completion_tokens": 0, "completion'), "presumed", "", True),
    (answer(prompt_tokens=10**400), "presumed", "", True),
    (answer(prompt_tokens=float("inf")), "presumed", "", True),
    (answer(completion_tokens=0.5), "presumed", "", True),
    (answer(prompt_tokens_details=[1]), "presumed", "", True),
    (answer(cached_tokens=False), "presumed", "", True),
    (answer().replace('"usage"', '"service_tier": ["default"], "usage"'), "presumed", "", True),
  ],
)
def test_what_an_answer_tells(body, kind, text, fatal):
  outcome = read_answer(body)
  assert (outcome.kind, outcome.text, outcome.fatal) == (kind, text, fatal)


# What a total counts beyond its parts is completion. (prompt, cached, completion, cache write)
@pytest.mark.parametrize(
  "fields, details, usage",
  [
    ({"total_tokens": 60}, None, (8, 0, 52)),
    ({"total_tokens": 18}, None, (8, 0, 10)),
    ({"total_tokens": 60}, {"total_tokens": 18}, (8, 0, 52)),
    ({"total_tokens": None}, {"cached_tokens": None, "cache_write_tokens": 5}, (8, 0, 10, 5)),
    ({}, {"cached_tokens": 3, "cache_creation_tokens": 5}, (8, 3, 10, 5)),  # LiteLLM
    ({"prompt_cache_hit_tokens": 6, "prompt_cache_miss_tokens": 2}, None, (8, 6, 10)),  # DeepSeek
    ({"prompt_cache_hit_tokens": 6}, {}, (8, 6, 10)),
  ],
)
def test_usage_as_several_endpoints_report_it(fields, details, usage):
  assert read_usage(COUNTS | fields | {"prompt_tokens_details": details}) == Usage(*usage)
