"""Test the conversion of GGUF files: SmolLM2's, generated ones, and unsuitable ones."""

import json
import struct

import gguf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from baar_jax.router import weights
from baar_jax.router.gguf import convert, set_up
from baar_jax.router.view import View, adopt_tokenizer, read_tokenizer
from baar_jax.router.weights import weights_directory
from tools import qwen2_checkpoint as hf

SHAPE = hf.SHAPES["grouped"] | {"num_hidden_layers": 2}
TEXT = "Budget: 12 large calls.\n\nThe door to the kitchen is open; "
TEXT += "you see a stove (turned off), 2 apples and é☂.\n"
# The log-probabilities of all tokens of TEXT except the first. transformers 5.23.0 with
# torch 2.13.0 computed them. It read the GGUF file as a Llama, by
# AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=FILE).
LOGP = """-13.59 -10.53 -3.15 -1.03 -3.07 -12.69 -11.01 -3.19 -0.99 -1.06 -2.27 -9.34 -3.01
-0.44 -3.93 -0.84 -3.17 -5.08 -2.55 -6.11 -1.26 -8.77 -5.59 -7.61 -0.86 -2.63 -2.33 -4.16 -1.32
-7.06 -2.69 -14.82 -15.86 -1.22 -3.35 -3.92 -1.86"""


@pytest.fixture(scope="module")
def smollm2():
  """Return SmolLM2's converted directory in the user's cache.

  The first time this downloads 93 MB. Without a download the tests are skipped.
  """
  try:
    set_up("smollm2")
  except ValueError as error:
    assert "download" in str(error)
    pytest.skip(str(error))
  return weights_directory("smollm2")


@jax.jit
def log_probabilities(model, tokens_BxT):
  return jax.nn.log_softmax(model.logits(model(tokens_BxT)))


def test_smollm2_predicts_what_transformers_predicts(smollm2):
  ids = read_tokenizer(smollm2).encode(TEXT).ids
  logp_BxTxV = log_probabilities(weights.load_qwen2(smollm2), np.array([ids]))
  logp_T = [float(logp) for logp in LOGP.split()]
  np.testing.assert_allclose(
    logp_BxTxV[0, np.arange(len(ids) - 1), ids[1:]], logp_T, atol=6e-3
  )


def write_gguf(directory, kind, **changes):
  """Write made.gguf, a model of random weights.

  Args:
    directory: the file and a tokenizer.json are written there.
    kind: the architecture, "llama" or "qwen2".
    changes: fields and tensors to add or replace; None removes one.

  Returns:
    The model's tensors by Hugging Face's names.
  """
  hf.write_tokenizer(directory, 300)
  merges = json.loads((directory / "tokenizer.json").read_text())["model"]["merges"]
  vocabulary = read_tokenizer(directory).get_vocab()
  writer = gguf.GGUFWriter(directory / "made.gguf", kind)
  writer.add_token_list(
    sorted(vocabulary, key=vocabulary.get) + [f"[PAD{i}]" for i in range(7)]
  )
  writer.add_token_types([1] * 297 + [5] + [3] * 2 + [5] * 7)
  writer.add_token_merges([" ".join(pair) for pair in merges])
  V, D, F, layers, N, K, _ = (SHAPE[name] for name in hf.FIELDS)
  sizes = {
    "embedding_length": D,
    "feed_forward_length": F,
    "block_count": layers,
    "head_count": N,
    "head_count_kv": K,
    "context_length": 64,
    "rope_freq_base": 1e4,
    "layer_norm_rms_eps": 1e-6,
  }
  for name, number in sizes.items():
    getattr(writer, f"add_{name}")(number)
  original = dict(hf.tensors(SHAPE))
  names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
  stored = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
  for name, numbers in original.items():
    heads = N if "q_proj" in name else K
    gguf_name = names.get_name(name, (".weight", ".bias"))
    if kind == "llama" and name.endswith(".bias"):
      original[name] = np.zeros_like(numbers)
    elif kind == "llama" and ("q_proj" in name or "k_proj" in name):
      # llama.cpp reorders the rows of these kernels in the same way.
      halves = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
      reordered = halves.swapaxes(1, 2).reshape(numbers.shape)
      stored[gguf_name] = np.ascontiguousarray(reordered)
    else:
      stored[gguf_name] = numbers
  for name, value in (stored | changes).items():
    if value is not None:
      (writer.add_string if isinstance(value, str) else writer.add_tensor)(name, value)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return original


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_conversion_keeps_every_number(kind, tmp_path, monkeypatch, router_config):
  monkeypatch.setenv("BAAR_JAX_CACHE", str(tmp_path / "cache"))
  original = write_gguf(tmp_path, kind)
  file = str(tmp_path / "made.gguf")
  directory = weights_directory(file)
  # An interrupted conversion left this directory.
  directory.with_suffix(".tmp").mkdir(parents=True)
  for _ in range(2):
    set_up(file)
  written = load_file(directory / "model.safetensors")
  assert written.keys() == original.keys()
  for name, numbers in original.items():
    np.testing.assert_array_equal(written[name], numbers, strict=True)
  sizes = vars(weights.check_directory(directory)[0])
  expected = SHAPE | {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64}
  assert sizes == sizes | expected
  text = "<|im_start|>big lomi SALLTA 1234\n\n  don't e\u0301 ☂."
  tokens = [read_tokenizer(place).encode(text).ids for place in (tmp_path, directory)]
  assert tokens[0] == tokens[1]
  # The decision tokens get new ids, after all used tokens.
  adopt_tokenizer(directory, tmp_path / "adopted")
  assert View(router_config, tmp_path / "adopted").decision_ids == [300, 301]


def test_unsupported_and_damaged_files_are_refused(tmp_path):
  for kind, name in (("llama", "blk.1.attn_q.weight"), ("qwen2", "blk.1.attn_q.bias")):
    write_gguf(tmp_path, kind, **{name: None})
    with pytest.raises(ValueError, match=f"Cannot convert .* it has no '{name}'"):
      convert(tmp_path / "made.gguf", tmp_path / "converted")
  whole = (tmp_path / "made.gguf").read_bytes()
  # The array of tokens: its type, the type of its entries, and their number.
  name = b"tokenizer.ggml.tokens"
  start = whole.index(name) + len(name)
  entries, count = whole[start + 4 : start + 8], whole[start + 8 : start + 16]
  changed = []
  for kind in (entries, bytes(4), struct.pack("<I", 9)):
    for number in (count, struct.pack("<Q", 2**60)):
      changed.append(whole[: start + 4] + kind + number + whole[start + 16 :])
  nested = whole[: start + 4] + struct.pack("<IQ", 9, 1) * 5000
  for part in (
    b"",
    whole[:20],
    whole[:5000],
    whole[:-3000],
    nested,
    *changed[1:],
  ):
    (tmp_path / "cut.gguf").write_bytes(part)
    with pytest.raises(ValueError, match="Cannot convert .*cut.gguf: "):
      convert(tmp_path / "cut.gguf", tmp_path / "converted")
  assert not (tmp_path / "converted").exists()
