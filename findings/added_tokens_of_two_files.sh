#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers 0.23.3, a Qwen2 tokeniser with two new tokens.
#
# A directory in Hugging Face's format lists added tokens twice: in tokenizer.json as
# added_tokens, and in tokenizer_config.json, where older releases wrote them, as
# added_tokens_decoder. Somebody who adds tokens with the library tokenizers saves the
# first file only, and copies the second one from the original model.
#
# One would guess that tokenizer.json decides, for it alone has the vocabulary and the
# merges, and that a list of some of its tokens takes none away. Seen instead:
# 1. without the list all tokens of tokenizer.json are there;
# 2. with a list of the original's own token the two new ones are gone: "<small>" is cut
#    into letters and unknown characters, without an error or a warning;
# 3. the id that "<small>" had is given away: this original has no <|endoftext|>, so the
#    class adds one, as 27, and a model reads the row of "<small>" for it.
# tokenizers alone reads the same directory as it was written.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet transformers==5.24.0 tokenizers==0.23.3
cd "$dir"
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" - <<'P'
import json
from pathlib import Path

import tokenizers
from transformers import AutoTokenizer

letters = {chr(ord("a") + i): i for i in range(26)}
made = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
made.add_special_tokens(["<end>"])  # the original's own token, 26
made.add_special_tokens(["<small>", "<large>"])  # the new ones, 27 and 28
own = {"content": "<end>", "special": True, "normalized": False}
own |= dict.fromkeys(("lstrip", "rstrip", "single_word"), False)
read = {}
for name, settings in {
  "without the list": {},
  "with the list": {"added_tokens_decoder": {"26": own}},
}.items():
  directory = Path(name)
  directory.mkdir()
  made.save(str(directory / "tokenizer.json"))
  (directory / "tokenizer_config.json").write_text(json.dumps(settings))
  (directory / "config.json").write_text('{"model_type": "qwen2"}')
  tokenizer = AutoTokenizer.from_pretrained(name)
  read[name] = tokenizer("ab<small>c<end>").input_ids
  print(f"{name}: {read[name]}, 27 is {tokenizer.convert_ids_to_tokens(27)}")
  alone = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
  assert alone.encode("ab<small>c<end>").ids == [0, 1, 27, 2, 26]
assert read["without the list"] == [0, 1, 27, 2, 26]
assert 27 not in read["with the list"] and len(read["with the list"]) > 5
assert tokenizer.convert_ids_to_tokens(27) == "<|endoftext|>"
P
# Output (2026-11-30):
# without the list: [0, 1, 27, 2, 26], 27 is <small>
# with the list: [0, 1, 18, 12, 0, 11, 11, 2, 26], 27 is <|endoftext|>
