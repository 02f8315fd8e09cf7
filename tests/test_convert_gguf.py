"""Test the conversion of a GGUF file, against the weights that it was made from."""

import json

import numpy as np
import pytest
import qwen2_checkpoint as hf
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from safetensors.numpy import load_file

from baar_jax.config import RouterConfig
from baar_jax.router.view import read_tokenizer
from baar_jax.router.weights import check_pretrained
from tools.convert_gguf import FIELDS, convert

SHAPE = hf.SHAPES["grouped"] | {"hidden_size": 96, "intermediate_size": 64}
PARTS = {
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.o_proj": "attn_output",
  "self_attn.": "attn_",
  "mlp.": "ffn_",
  "_proj": "",
  "model.layers": "blk",
}


def write_gguf(path, base):
  """Write a GGUF file with a padded vocabulary, and the embedding twice."""
  tokenizer = read_tokenizer(base)
  model = json.loads(tokenizer.to_str())["model"]
  texts = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
  kinds = [TokenType.NORMAL] * len(model["vocab"])
  kinds += [TokenType.CONTROL] * (len(texts) - len(kinds))
  padding = SHAPE["vocab_size"] - len(texts)
  writer = GGUFWriter(path, "qwen2")
  fields = hf.CONFIG | SHAPE
  for name, field in FIELDS.items():
    is_float = isinstance(fields[name], float)
    add = writer.add_float32 if is_float else writer.add_uint32
    add(f"qwen2.{field}", fields[name])
  writer.add_token_list(texts + [f"[PAD{n}]" for n in range(padding)])
  writer.add_token_types(kinds + [TokenType.UNUSED] * padding)
  writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
  writer.add_eos_token_id(texts.index("<|im_end|>"))
  writer.add_chat_template("{{ messages }}")
  for name, array in hf.tensors(SHAPE):
    for old, new in PARTS.items():
      name = name.replace(old, new)
    if name == "token_embd.weight":
      writer.add_tensor("output.weight", array)
      coarse = GGMLQuantizationType.Q4_0
      writer.add_tensor(name, quantize(array, coarse), raw_dtype=coarse)
    else:
      writer.add_tensor(name, array)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def test_a_gguf_file_becomes_a_directory(tmp_path):
  base = hf.write(tmp_path / "base", SHAPE, tokens=300)
  write_gguf(tmp_path / "file.gguf", base)
  convert(tmp_path / "file.gguf", tmp_path / "whole")
  convert(tmp_path / "file.gguf", tmp_path / "cut", 1, 280)
  expected = dict(hf.tensors(SHAPE))
  expected["model.embed_tokens.weight"] = expected["model.embed_tokens.weight"][:300]
  whole = load_file(tmp_path / "whole" / "model.safetensors")
  assert whole.keys() == expected.keys()
  for name, numbers in expected.items():
    np.testing.assert_array_equal(whole[name], numbers)
  text = "kalomi SALLTA cafe\u0301<|im_end|>"
  ids = read_tokenizer(base).encode(text).ids
  assert read_tokenizer(tmp_path / "whole").encode(text).ids == ids
  for name, rows in (("whole", 300), ("cut", 283)):
    check_pretrained(RouterConfig(weights=str(tmp_path / name)))
    tokenizer = read_tokenizer(tmp_path / name)
    assert tokenizer.encode(text).ids[-1] == rows - 1 == tokenizer.get_vocab_size() - 1
  with pytest.raises(OSError):
    convert(tmp_path / "file.gguf", tmp_path / "cut")
