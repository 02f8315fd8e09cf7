"""The tokenizer: no text is lost or read as a decision, and files that do not fit are named."""

import json

import hf
import pytest

from baar_jax.router.tokenizer import CUT_MARK, Tokenizer, adopt_tokenizer
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


def test_long_texts_are_cut_and_marked(tokenizer):
  # Letters that no merge joins: each is a token.
  assert tokenizer.decode(tokenizer.encode("QWQW", 4)) == "QWQW"
  assert tokenizer.decode(tokenizer.encode("QWQWQ", 4)) == f"QWQW{CUT_MARK}"


def test_a_directory_without_the_decision_tokens(tmp_path):
  with pytest.raises(ValueError, match=r"tokenizer.json cannot .*: .* run --stage=profile first"):
    Tokenizer(tmp_path)
  hf.write_tokenizer(tmp_path, 300)
  with pytest.raises(ValueError, match="lacks the decision tokens"):
    Tokenizer(tmp_path)


TRUNCATION = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}
PADDING = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 7, "pad_type_id": 0, "pad_token": "x"}


@pytest.mark.parametrize(
  "changes, model_changes",
  [
    ({}, {"vocab": []}),
    ({}, {"vocab": {}, "merges": []}),  # every text would be empty
    ({}, {"vocab": {"a": -1}}),
    ({}, {"merges": ["a"]}),
    ({}, {"continuing_subword_prefix": "####"}),  # the package panics, as at the next and the last
    ({"truncation": TRUNCATION}, {}),
    ({"padding": PADDING}, {}),
    ({"pre_tokenizer": None}, {}),
    ({"decoder": None}, {}),
    ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "b"}}, {}),
    ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, {}),
  ],
)
def test_a_tokenizer_of_the_wrong_shape_is_one_line(
  changes, model_changes, tokenizer_dir, tmp_path
):
  fields = json.loads((tokenizer_dir / "tokenizer.json").read_text()) | changes
  fields["model"] |= model_changes
  (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match=r"^\S+/tokenizer.json cannot be read [^\n]+$"):
    Tokenizer(tmp_path)


def test_decisions_that_share_a_token_are_refused(tokenizer_dir, tmp_path):
  text = (tokenizer_dir / "tokenizer.json").read_text()
  fields = json.loads(text.replace("<|BIG|>", "<|LARGE|>"))
  fields["model"]["vocab"]["<|BIG|>"] = 0  # SMALL's: both would always be equally probable
  (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match="lacks the decision tokens"):
    Tokenizer(tmp_path)


def test_a_token_beyond_the_routers_vocabulary_is_refused(router_config, tokenizer_dir, tmp_path):
  fields = json.loads((tokenizer_dir / "tokenizer.json").read_text())
  fields["model"]["vocab"]["Q"] = 340  # the router of 340 tokens would read another row in silence
  (tmp_path / "tokenizer.json").write_text(json.dumps(fields))
  with pytest.raises(ValueError, match="the token 340, beyond --config.router.vocab_size=340"):
    View(router_config, tmp_path)


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[\n]", "[" * 100_000])
def test_a_checkpoints_tokenizer_that_cannot_be_read(text, tmp_path):
  if text is not None:
    (tmp_path / "tokenizer.json").write_text(text)
  with pytest.raises(ValueError, match=r"^\S+/tokenizer.json cannot be read [^\n]+$"):
    adopt_tokenizer(tmp_path, tmp_path / "adopted")
  assert not (tmp_path / "adopted").exists()
