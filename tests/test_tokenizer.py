"""The tokenizer: no text is lost or read as a decision, and files that do not fit are named."""

import pytest
import tokenizers

from baar_jax.router.tokenizer import CUT_MARK, Tokenizer, adopt_tokenizer


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
  tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
  with pytest.raises(ValueError, match="lacks the decision tokens"):
    Tokenizer(tmp_path)


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[\n]"])
def test_a_checkpoints_tokenizer_that_cannot_be_read(text, tmp_path):
  if text is not None:
    (tmp_path / "tokenizer.json").write_text(text)
  with pytest.raises(ValueError, match=r"^\S+/tokenizer.json cannot be read [^\n]+$"):
    adopt_tokenizer(tmp_path, tmp_path / "adopted")
  assert not (tmp_path / "adopted").exists()
