"""GGUF files: SmolLM2's real weights, made ones exactly, and what is refused in one line."""

import json

import gguf
import hf
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from baar_jax.router import weights
from baar_jax.router.gguf import convert, set_up
from baar_jax.router.tokenizer import adopt_tokenizer, read_tokenizer
from baar_jax.router.view import View
from baar_jax.router.weights import weights_directory

SHAPE = hf.SHAPES["grouped"] | {"num_hidden_layers": 2}
TEXT = "Budget: 12 large calls.\n\nThe door to the kitchen is open; "
TEXT += "you see a stove (turned off), 2 apples and é☂.\n"
# The log-probabilities of TEXT's tokens but the first, by transformers 5.23.0 and torch 2.13.0 (it
# reads the GGUF file as a Llama: AutoModelForCausalLM.from_pretrained(DIRECTORY, gguf_file=FILE)).
LOGP = """-13.59 -10.53 -3.15 -1.03 -3.07 -12.69 -11.01 -3.19 -0.99 -1.06 -2.27 -9.34 -3.01
-0.44 -3.93 -0.84 -3.17 -5.08 -2.55 -6.11 -1.26 -8.77 -5.59 -7.61 -0.86 -2.63 -2.33 -4.16 -1.32
-7.06 -2.69 -14.82 -15.86 -1.22 -3.35 -3.92 -1.86"""


@pytest.fixture(scope="module")
def smollm2():
  """The converted directory, in the user's cache; the first time this takes a download of 93 MB."""
  try:
    set_up("smollm2")
  except ValueError as error:
    assert "download" in str(error)
    pytest.skip(str(error))
  return weights_directory("smollm2")


@jax.jit
def log_probabilities(model, tokens_BxT):
  return jax.nn.log_softmax(model.logits(model(tokens_BxT)))


def test_real_weights_predict_what_another_program_predicts(smollm2):
  ids = read_tokenizer(smollm2).encode(TEXT).ids
  logp_BxTxV = log_probabilities(weights.load_qwen2(smollm2), np.array([ids]))
  logp_T = [float(logp) for logp in LOGP.split()]
  np.testing.assert_allclose(
    logp_BxTxV[0, np.arange(len(ids) - 1), ids[1:]], logp_T, atol=6e-3
  )


def test_real_weights_answer_a_question(smollm2):
  model, tokenizer = weights.load_qwen2(smollm2), read_tokenizer(smollm2)
  question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
  ids, answer = tokenizer.encode(question).ids, []
  while len(answer) < 12 and answer[-1:] != [tokenizer.token_to_id("<|im_end|>")]:
    padded = np.pad(ids + answer, (0, 32 - len(ids + answer)))[None]
    answer.append(
      int(log_probabilities(model, padded)[0, len(ids + answer) - 1].argmax())
    )
  assert tokenizer.decode(answer) == "The capital of France is Paris."


def write_gguf(directory, kind, **changes):
  """Writes made.gguf with other fields and tensors (None: without it); returns its tensors by their
  Hugging Face names."""
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
  }
  sizes |= {"head_count_kv": K, "context_length": 64, "rope_freq_base": 1e4}
  for name, number in (sizes | {"layer_norm_rms_eps": 1e-6}).items():
    getattr(writer, f"add_{name}")(number)
  original, names = (
    dict(hf.tensors(SHAPE)),
    gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers),
  )
  stored = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "qwen2"}
  for name, numbers in original.items():
    heads, theirs = (
      N if "q_proj" in name else K,
      names.get_name(name, (".weight", ".bias")),
    )
    if kind == "llama" and name.endswith(".bias"):
      original[name] = np.zeros_like(numbers)
    elif kind == "llama" and (
      "q_proj" in name or "k_proj" in name
    ):  # as llama.cpp reorders them
      halves = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
      stored[theirs] = np.ascontiguousarray(
        halves.swapaxes(1, 2).reshape(numbers.shape)
      )
    else:
      stored[theirs] = numbers
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
  original, file = write_gguf(tmp_path, kind), str(tmp_path / "made.gguf")
  directory = weights_directory(file)
  with pytest.raises(
    ValueError, match="config.json cannot be read .* or run --stage=setup"
  ):
    weights.load_qwen2(directory)
  directory.with_suffix(".tmp").mkdir(parents=True)  # was interrupted
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
  adopt_tokenizer(
    directory, tmp_path / "adopted"
  )  # whose decisions take the place of no token
  assert View(router_config, tmp_path / "adopted").decision_ids == [300, 301]


def test_what_no_qwen2_computes_is_refused_and_what_is_damaged(tmp_path):
  for kind, changes, said in [
    ("gpt2", {}, "architecture is 'gpt2'"),
    ("llama", {"blk.1.attn_q.weight": None}, "it lacks 'blk.1.attn_q.weight'"),
    ("qwen2", {"blk.1.attn_q.bias": None}, "it lacks 'blk.1.attn_q.bias'"),
    ("llama", {"rope_freqs.weight": np.ones(4, "f")}, "rope_freqs.weight has no place"),
    (
      "llama",
      {"output_norm.weight": np.ones(4, "f")},
      "output_norm.weight is .4,., its sizes",
    ),
    ("llama", {"tokenizer.ggml.pre": "gpt-4o"}, "tokenizer is gpt2, gpt-4o"),
    ("llama", {"llama.rope.scaling.type": "yarn"}, "rotations are scaled"),
  ]:
    write_gguf(tmp_path, kind, **changes)
    with pytest.raises(ValueError, match=f"made.gguf cannot be converted: .*{said}"):
      convert(tmp_path / "made.gguf", tmp_path / "converted")
  whole = (tmp_path / "made.gguf").read_bytes()
  for part in (b"", b"text", whole[:20], whole[:5000], whole[:-3000]):
    (tmp_path / "cut.gguf").write_bytes(part)
    with pytest.raises(ValueError, match="cut.gguf cannot be converted"):
      convert(tmp_path / "cut.gguf", tmp_path / "converted")
  assert not (tmp_path / "converted").exists()
