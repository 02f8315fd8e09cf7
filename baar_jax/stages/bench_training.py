"""The router in training: SFT and BoPO steps, and what share of the device's peak they reach."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from baar_jax.episode import Episode
from baar_jax.router.qwen2 import Qwen2Config
from baar_jax.stages.bench_figures import GIGA, Figures, first_and_steady
from baar_jax.stages.bench_subject import Subject
from baar_jax.train.fit import policy_steps
from baar_jax.train.methods import bopo_loss, sft_step_loss
from baar_jax.train.trainer import Loss, Trainer, bopo_optimizer, sft_optimizer

MATMUL_SIZES = 1024, 2048, 4096, 8192, 16384
LARGE_S = 0.1  # a matrix product that takes longer is large enough


def training(subject: Subject, figures: Figures) -> None:
  """Optimizer steps of SFT and BoPO as their stages make them."""
  c = subject.config
  episodes = subject.episodes[: c.bench.episodes]
  rows = c.bench.micro_episodes
  trainer = make_trainer(subject, sft_step_loss, sft_optimizer(c.sft))
  first_s, sft_s = first_and_steady(lambda: imitate(subject, trainer, episodes, rows))
  shapes = trainer.compiled
  del trainer  # its parameters and its optimizer's state

  optimizer = bopo_optimizer(c.bopo)
  trainer = make_trainer(subject, partial(bopo_loss, c.bopo), optimizer)
  adv_B = np.linspace(-1, 1, len(episodes), dtype=np.float32)
  batcher = subject.batcher(rows)
  arguments = trainer, subject.scorer, batcher, episodes, adv_B, c.bopo, c.seed
  _, bopo_s = first_and_steady(lambda: policy_steps(*arguments))

  tokens = sum(subject.lengths(episodes))
  figures.section(
    "Training",
    f"a step on {len(episodes)} episodes, {rows} in a micro-batch, encoding included; "
    "fastest of a few after the first; tokens are real ones, without padding",
  )
  for name, seconds, label in (("sft", sft_s, "SFT"), ("bopo", bopo_s, "BoPO")):
    figures.add(f"{name}_tokens_per_s", tokens / seconds, label, "tokens/s")
    figures.add(f"{name}_episodes_per_s", len(episodes) / seconds, "  whole ones", "episodes/s")
    figures.add(f"{name}_step_s", seconds, "  one step", "s")
  figures.ratio("bopo_tokens_per_s", "sft_tokens_per_s", "{} x as fast as SFT")
  figures.add("training_tokens", tokens, "  tokens of one step", "tokens")
  figures.add("gradient_compile_s", first_s - sft_s, "compiling SFT's step", "s")
  figures.add("gradient_shapes", shapes, "  shapes of its gradient")


def make_trainer(subject: Subject, loss: Loss, optimizer) -> Trainer:
  ids, dtype = subject.views["transcript"].decision_ids, subject.config.router.dtype
  return Trainer(subject.model, loss, optimizer, ids, None, dtype)


def imitate(subject: Subject, trainer: Trainer, episodes: Sequence[Episode], rows: int):
  """One step of SFT on the episodes' own decisions."""
  return trainer.step([batch for _, batch in subject.batcher(rows).micro_batches(episodes)])


def arithmetic(subject: Subject, figures: Figures) -> None:
  """The work that the figures before stand for, as a share of what the device can do."""
  c, shape, values = subject.config, subject.model.config, figures.values
  episodes = subject.episodes[: c.bench.episodes]
  peak = matmul_flop_per_s(c.router.dtype)
  step_flop = model_flop(shape, subject.lengths(episodes), gradient=True)
  forward_flop = model_flop(shape, subject.lengths(subject.episodes[:1]), gradient=False)
  figures.section(
    "Arithmetic",
    "6 FLOP a parameter of the layers' matrices and real token in training, 2 in a forward, and "
    "attention to the tokens before; what is computed twice to save memory counts once",
  )
  figures.add("matmul_gflop_per_s", peak / GIGA, "largest matrix products, measured", "GFLOP/s")
  rates = (
    ("sft", step_flop / values["sft_step_s"], "SFT"),
    ("forward", 1e3 * forward_flop / values["transcript_score_ms"], "scoring a transcript"),
  )
  for name, rate, label in rates:
    figures.add(f"{name}_gflop_per_s", rate / GIGA, label, "GFLOP/s")
    figures.ratio(f"{name}_gflop_per_s", "matmul_gflop_per_s", "{} of the matrix products")
  figures.add("layer_weights", layer_weights(shape), "parameters of the layers' matrices")
  figures.add("sft_step_gflop", step_flop / GIGA, "work of one step of SFT", "GFLOP")


def layer_weights(shape: Qwen2Config) -> int:
  """Entries of all matrices but the embedding and the head."""
  D, F, H = shape.hidden_size, shape.intermediate_size, shape.head_dim
  N, K = shape.num_attention_heads, shape.num_key_value_heads
  return shape.num_hidden_layers * (2 * D * N * H + 2 * D * K * H + 3 * D * F)


def model_flop(shape: Qwen2Config, lengths: Sequence[int], gradient: bool) -> int:
  """Multiplications and additions for sequences of these lengths, without any recomputation.

  Each matrix entry costs 2 for a token. Attention costs 4 N H in a layer, 2 for the score and 2
  for the weighted sum, for each pair of a token and one that it sees. A gradient costs twice its
  forward. Norms, rotations and the head, which is applied to decisions alone, are left out.
  """
  pairs = sum(T * (T + 1) // 2 for T in lengths)
  attention = 4 * shape.num_attention_heads * shape.head_dim * shape.num_hidden_layers * pairs
  forward = 2 * layer_weights(shape) * sum(lengths) + attention
  return 3 * forward if gradient else forward


def matmul_flop_per_s(dtype: str) -> float:
  """The best of a few sizes of square matrices."""
  best = 0.0
  multiply = jax.jit(jnp.matmul)
  for size in MATMUL_SIZES:
    x_NxN = jax.random.normal(jax.random.key(0), (size, size), dtype)
    _, seconds = first_and_steady(partial(multiply, x_NxN, x_NxN))
    best = max(best, 2 * size**3 / seconds)
    if seconds > LARGE_S:
      break
  return best
