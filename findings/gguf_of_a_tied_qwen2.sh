#!/usr/bin/env bash
# transformers 5.24.0 with gguf 0.19.0, reading a Qwen2 whose embedding is tied.
#
# Quantisers store the table of a tied model twice, as token_embd and as output, because
# the output deserves finer numbers. They also pad the vocabulary with tokens [PAD0],
# [PAD1] and so on, of the type UNUSED, up to the rows of the table. A GGUF file says
# which tokeniser it has by tokenizer.ggml.pre = "qwen2", whose texts Qwen2 brings into
# normal form C first.
#
# One would guess that from_pretrained(gguf_file=...) gives back the model that was
# quantised: tied, without padding tokens, and with the normaliser. Seen instead:
# 1. the model is untied, and its two tables differ;
# 2. each padding token is a word of the vocabulary, so a new token gets an id behind
#    them all, beyond the rows of the table;
# 3. the tokeniser has no normaliser, so "e" with a combining accent gives other tokens
#    than the accented letter does. With the original tokeniser they are the same.
# So a tied checkpoint gets larger by a whole table (136 million numbers for Qwen2.5
# 0.5B, 233 million for 1.5B), and ids that should be free for new tokens are taken.
set -euo pipefail
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
python3 -m venv "$dir/venv"
"$dir/venv/bin/pip" install --quiet torch==2.14.1 transformers==5.24.0 \
  accelerate==1.15.0 gguf==0.19.0 tokenizers==0.23.3
cd "$dir"
HF_HUB_OFFLINE=1 "$dir/venv/bin/python" - <<'P'
import unicodedata

import numpy as np
import tokenizers
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from transformers import AutoModelForCausalLM, AutoTokenizer

WIDTH, LAYERS, PADS = 32, 1, 8
rng = np.random.default_rng(0)


def numbers(*shape):
  return rng.normal(size=shape).astype(np.float32)


# The 256 bytes, one merge that joins the bytes of "é", the end, and the padding.
byte_level = tokenizers.pre_tokenizers.ByteLevel
names = sorted(byte_level.alphabet())
((pair, _),) = byte_level(add_prefix_space=False).pre_tokenize_str("é")
first, second = pair
texts = [*names, pair, "<|endoftext|>", "<|im_end|>"]
kinds = [TokenType.NORMAL] * (len(texts) - 2) + [TokenType.CONTROL] * 2
real = len(texts)
texts += [f"[PAD{n}]" for n in range(PADS)]
kinds += [TokenType.UNUSED] * PADS

writer = GGUFWriter("tied.gguf", "qwen2")
writer.add_block_count(LAYERS)
writer.add_context_length(64)
writer.add_embedding_length(WIDTH)
writer.add_feed_forward_length(WIDTH)
writer.add_head_count(2)
writer.add_head_count_kv(1)
writer.add_rope_freq_base(1e6)
writer.add_layer_norm_rms_eps(1e-6)
writer.add_tokenizer_model("gpt2")
writer.add_tokenizer_pre("qwen2")
writer.add_token_list(texts)
writer.add_token_types(kinds)
writer.add_token_merges([f"{first} {second}"])
writer.add_eos_token_id(real - 1)
table = numbers(len(texts), WIDTH)
coarse = GGMLQuantizationType.Q4_0
writer.add_tensor("token_embd.weight", quantize(table, coarse), raw_dtype=coarse)
fine = GGMLQuantizationType.Q8_0
writer.add_tensor("output.weight", quantize(table, fine), raw_dtype=fine)
writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
for name in ("attn_norm", "ffn_norm"):
  writer.add_tensor(f"blk.0.{name}.weight", np.ones(WIDTH, np.float32))
for name, rows in (("q", WIDTH), ("k", WIDTH // 2), ("v", WIDTH // 2)):
  writer.add_tensor(f"blk.0.attn_{name}.weight", numbers(rows, WIDTH))
  writer.add_tensor(f"blk.0.attn_{name}.bias", numbers(rows))
for name in ("attn_output", "ffn_gate", "ffn_up", "ffn_down"):
  writer.add_tensor(f"blk.0.{name}.weight", numbers(WIDTH, WIDTH))
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()

model = AutoModelForCausalLM.from_pretrained(".", gguf_file="tied.gguf")
tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="tied.gguf")
embedding, head = (x.weight.detach().numpy() for x in (
  model.get_input_embeddings(), model.get_output_embeddings()))
gap = np.abs(embedding - head).mean() / np.abs(head).mean()
print("tied:", model.config.tie_word_embeddings, "  tables differ by", round(gap, 3))
pad = tokenizer.get_vocab().get("[PAD3]")
tokenizer.add_tokens(["a new one"])
new = tokenizer.convert_tokens_to_ids("a new one")
print("real tokens:", real, "  [PAD3] is", pad, "  a new token is", new,
      "  rows:", len(embedding))
composed = "é"
apart = unicodedata.normalize("NFD", composed)
print("normaliser:", tokenizer.backend_tokenizer.normalizer,
      "  composed", tokenizer.encode(composed), "  apart", tokenizer.encode(apart))
assert not model.config.tie_word_embeddings and 0 < gap < 0.2
assert pad == real + 3 and new == real + PADS == len(embedding)
assert tokenizer.backend_tokenizer.normalizer is None
assert tokenizer.encode(composed) != tokenizer.encode(apart)
P
