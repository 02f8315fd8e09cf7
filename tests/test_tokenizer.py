"""The tokenizer: no text is lost or read as a decision, and files that do not fit are named."""

import json

import hf
import pytest

from baar_jax.router.tokenizer import Tokenizer
from baar_jax.router.view import View


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir):
  return Tokenizer(tokenizer_dir)


@pytest.mark.parametrize("text", ["naïve ☂ \t\x00", "二", "a\n\nb", "", "a < | b |> c"])
def test_any_text_can_be_written(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text, None)) == text


@pytest.mark.parametrize("text", ["<|SMALL|>", "a<|BIG|>b", "<|<|BIG|>", "<| BIG |>"])
def test_no_text_is_read_as_a_decision(tokenizer, text):
  tokens = tokenizer.encode(text, None)
  assert not set(tokens) & set(tokenizer.decision_ids)
  assert tokenizer.decode(tokens) == text.replace("<|", "< |")


def test_a_directory_without_the_decision_tokens(tmp_path):
  with pytest.raises(ValueError, match=r"tokenizer.json cannot .*: .* run --stage=profile first"):
    Tokenizer(tmp_path)
  hf.write_tokenizer(tmp_path, 300)
  with pytest.raises(ValueError, match="lacks the decision tokens"):
    Tokenizer(tmp_path)


TRUNCATION = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
UNREADABLE = r"^\S+/tokenizer.json cannot be read [^\n]+$"


@pytest.mark.parametrize(
  "changes, vocabulary, line",
  [
    ({"truncation": TRUNCATION}, {}, UNREADABLE),  # it would not keep the text
    ({"decoder": None}, {}, UNREADABLE),
    ({"model": {"type": "BPE", "vocab": {}, "merges": []}}, {}, UNREADABLE),
    ({"model": {"type": "BPE", "vocab": [], "merges": []}}, {}, UNREADABLE),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, {}, UNREADABLE),
    ({}, {"a": -1}, UNREADABLE),
    # Tokens of their own for both decisions, or they would always be equally probable.
    ({"added_tokens": []}, {"<|BIG|>": 0}, "lacks the decision tokens"),
    # A router of 340 tokens would read another row in silence.
    ({}, {"Q": 340}, "the token 340, beyond --config.router.vocab_size=340"),
  ],
)
def test_a_tokenizer_that_does_not_fit_is_one_line(
  changes, vocabulary, line, router_config, tokenizer_dir, tmp_path
):
  """At the normalizer, the package panics."""
  fields = json.loads((tokenizer_dir / "tokenizer.json").read_text()) | changes
  if vocabulary:
    fields["model"]["vocab"] |= vocabulary
  (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=line):
    View(router_config, tmp_path)
