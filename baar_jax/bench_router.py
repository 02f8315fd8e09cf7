"""The router's speed: live decisions, scoring, training, loading and compiling."""

import contextlib
import dataclasses
import os
import platform
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from baar_jax import bopo, router, sft
from baar_jax.batches import Batch, bucket_of, make_batch
from baar_jax.bench_figures import Figures, first_and_steady, timed
from baar_jax.bench_subject import Subject
from baar_jax.episode import Episode
from baar_jax.qwen2 import Qwen2Config
from baar_jax.rollout import Job, Live
from baar_jax.router import RouterPolicy, Threshold
from baar_jax.training import Batcher, Scorer, Trainer
from baar_jax.view import Window
from baar_jax.weights import load_qwen2, save_qwen2

MANY_STEPS = 5  # that many live episodes are decided for; the first two compile
MATMUL_SIZES = 1024, 2048, 4096, 8192, 16384
LARGE_S = 0.1  # a matrix product that takes longer is large enough
CPU_INFO = Path("/proc/cpuinfo")


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
  """Takes nothing compiled from the disk, so that a first call shows what compiling takes."""
  directory = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def setup(subject: Subject, figures: Figures) -> None:
  """What is measured, and on what."""
  c, episode = subject.config, subject.episodes[0]
  leaves = jax.tree.leaves(nnx.split(subject.model)[1])
  figures.section("Setup", "episodes are synthetic: random words, every text cut to its preview")
  figures.add("device", device_name(), "device, one of them")
  figures.add("cores", os.cpu_count(), "cores of the machine")
  figures.add("jax_version", jax.__version__, "jax")
  figures.add("router", c.router.weights or "random weights", "router")
  figures.add("dtype", c.router.dtype, "computed in")
  figures.add("parameters", sum(x.size for x in leaves), "parameters")
  figures.add("layer_weights", layer_weights(subject.model.config), "  in its layers' matrices")
  figures.add("episode_steps", c.bench.steps, "an episode", "steps")
  figures.add("transcript_tokens", sum(subject.lengths([episode])), "  its transcript", "tokens")
  figures.add("paper_tokens", sum(subject.lengths([episode], "paper")), "  its prompts", "tokens")


def device_name() -> str:
  kind = jax.devices()[0].device_kind
  if kind != "cpu":
    return kind
  lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
  names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
  return names[0] if names else platform.machine()


def decisions(subject: Subject, figures: Figures) -> None:
  """Live decisions: from the cache, by whole forwards, and with the paper's prompts."""
  shapes = router._extend._cache_size()
  policy = _policy(subject, "transcript")
  _, compiling_s = play(subject, policy, subject.episodes[-1:])
  one_s, more_s = play(subject, policy, subject.episodes[:1])
  many_s, _ = play(subject, policy, subject.episodes[: subject.many], MANY_STEPS)
  paper_s, _ = play(subject, _policy(subject, "paper"), subject.episodes[:1], again=True)
  whole_s = one_by_one(subject, partial(_text_so_far, subject, subject.episodes[0]))
  rows = (
    ("cached", one_s, 1, "cached transcript, 1 live"),
    ("cached_many", many_s, subject.many, f"cached transcripts, {subject.many} live"),
    ("uncached", whole_s, 1, "whole transcript at each step"),
    ("paper", paper_s, 1, "the paper's prompts, 1 live"),
  )
  figures.section(
    "Decisions of live episodes",
    "mean over an episode's steps, each once, encoding included; calls that compiled left out",
  )
  for name, seconds, live, label in rows:
    step_s = float(np.mean(seconds))
    figures.add(f"{name}_decisions_per_s", live / step_s, label, "decisions/s")
    figures.add(f"{name}_step_ms", 1e3 * step_s, "  one step", "ms")
  for other, words in (("uncached", "whole transcripts"), ("paper", "the paper's prompts")):
    names = "cached_decisions_per_s", f"{other}_decisions_per_s"
    figures.ratio(*names, f"x as fast as {words}")
  figures.ratio("cached_many_decisions_per_s", "cached_decisions_per_s", "x as fast as 1 live")
  figures.add("many_live", subject.many, "live at once, of many", "episodes")
  first_s = compiling_s + more_s
  compile_s = sum(first_s) - len(first_s) * float(np.mean(one_s))
  figures.add("decision_compile_s", compile_s, "compiling what 1 live episode needs", "s")
  compiled = router._extend._cache_size() - shapes
  figures.add("decision_shapes", compiled, "shapes compiled, of all the above with a cache")


def _policy(subject: Subject, view: str) -> RouterPolicy:
  c = dataclasses.replace(subject.config.router, view=view)
  return RouterPolicy("bench", subject.model, subject.views[view], c, Threshold(), subject.many)


def play(
  subject: Subject,
  policy: RouterPolicy,
  episodes: Sequence[Episode],
  steps: int | None = None,
  again: bool = False,
) -> tuple[list[float], list[float]]:
  """Has the policy decide in episodes that go the way they went, all at once.

  Args:
    steps: how many of them; None is all.
    again: where a call compiled, make it again: for a view that keeps nothing.

  Returns:
    Seconds of each call; those that compiled are in a list of their own.
  """
  lives = [Live(Job(subject.tasks[e.task_id], e.seed), None, None, None) for e in episodes]
  steady_s: list[float] = []
  compiling_s: list[float] = []
  for s in range(subject.config.bench.steps)[:steps]:
    for live, episode in zip(lives, episodes):
      live.steps, live.observation = episode.steps[:s], episode.steps[s].observation
    shapes = router._extend._cache_size()
    seconds = timed(partial(policy.choose, lives))
    compiled = router._extend._cache_size() > shapes
    (compiling_s if compiled else steady_s).append(seconds)
    if compiled and again:
      steady_s.append(timed(partial(policy.choose, lives)))
  for live in lives:
    policy.finish(live)
  return steady_s, compiling_s


def one_by_one(subject: Subject, window: Callable[[int], Window]) -> list[float]:
  """Seconds of each step's decision by a forward of one window, once its bucket is compiled."""
  seen, times = set(), []

  def decide(s: int):
    return subject.scorer.logits(last_decision(window(s), subject.buckets))

  for s in range(subject.config.bench.steps):
    bucket = bucket_of(len(window(s).tokens), subject.buckets)
    if bucket not in seen:
      timed(partial(decide, s))
    seen.add(bucket)
    times.append(timed(partial(decide, s)))
  return times


def _text_so_far(subject: Subject, episode: Episode, s: int) -> Window:
  task, observation = subject.tasks[episode.task_id], episode.steps[s].observation
  return subject.views["transcript"].windows(task, episode.steps[:s], observation, None)[-1]


def last_decision(window: Window, buckets: Sequence[int]) -> Batch:
  """A batch of the last decision of one window."""
  tokens_RxT = np.zeros((1, bucket_of(len(window.tokens), buckets)), np.int32)
  tokens_RxT[0, : len(window.tokens)] = window.tokens
  zero_BxS, logp_BxS = np.zeros((1, 1), np.int32), np.zeros((1, 1), np.float32)
  position_BxS, mask_BxS = np.array([window.positions[-1:]], np.int32), np.ones((1, 1), bool)
  return Batch(tokens_RxT, zero_BxS, position_BxS, zero_BxS, logp_BxS, mask_BxS)


def scoring(subject: Subject, figures: Figures) -> None:
  """All decisions of an episode that is over: in one forward, and prompt by prompt."""
  episode, steps = subject.episodes[0], subject.config.bench.steps
  prompts = subject.windows(episode, "paper")
  _, transcript_s = first_and_steady(lambda: score(subject, episode))
  paper_s = sum(one_by_one(subject, prompts.__getitem__))
  figures.section(
    "Scoring the decisions of a finished episode",
    "transcript: fastest of a few; prompts: each once; after a warm-up, padded to their buckets",
  )
  figures.add("transcript_scored_per_s", steps / transcript_s, "transcript, once", "decisions/s")
  figures.add("transcript_score_ms", 1e3 * transcript_s, "  the episode", "ms")
  figures.add("paper_scored_per_s", steps / paper_s, "the paper's prompts, 1 by 1", "decisions/s")
  figures.add("paper_score_ms", 1e3 * paper_s, "  the episode", "ms")
  words = "x as fast as the paper's prompts"
  figures.ratio("transcript_scored_per_s", "paper_scored_per_s", words)


def score(subject: Subject, episode: Episode) -> jax.Array:
  """logits_1xSxA of an episode's transcript, in one forward if it has not been cut."""
  windows, steps = [subject.windows(episode)], subject.config.bench.steps
  batch = make_batch([episode], windows, rows=1, decisions=steps, buckets=subject.buckets)
  return subject.scorer.logits(batch)


def training(subject: Subject, figures: Figures) -> None:
  """Optimizer steps of SFT and BoPO as their stages make them."""
  c, episodes = subject.config, subject.training_episodes
  tokens = sum(subject.lengths(episodes))
  trainer = make_trainer(subject)
  first_s, sft_s = first_and_steady(lambda: imitate(subject, trainer, episodes))
  compiled = trainer.compiled
  del trainer  # its optimizer's state is large

  batcher = Batcher(c, subject.views["transcript"], subject.tasks)
  loss, placed = partial(bopo.improvement, c.bopo), (subject.scorer_ids, None, c.router.dtype)
  trainer = Trainer(subject.model, loss, bopo.make_optimizer(c.bopo), *placed)
  adv_B = np.linspace(-1, 1, len(episodes), dtype=np.float32)
  improve = partial(
    bopo.improve, trainer, subject.scorer, batcher, episodes, adv_B, c.bopo, c.seed
  )
  _, bopo_s = first_and_steady(improve)

  rows = f"{len(episodes)} episodes, {c.bench.micro_episodes} in a micro-batch"
  figures.section("Training", f"{rows}; fastest of a few after a warm-up; tokens without padding")
  for name, seconds, label in (("sft", sft_s, "SFT"), ("bopo", bopo_s, "BoPO")):
    figures.add(f"{name}_tokens_per_s", tokens / seconds, label, "tokens/s")
    figures.add(f"{name}_episodes_per_s", len(episodes) / seconds, "", "episodes/s")
    figures.add(f"{name}_step_s", seconds, "  one step", "s")
  figures.ratio("bopo_tokens_per_s", "sft_tokens_per_s", "x as fast as SFT")
  figures.add("training_tokens", tokens, "  its episodes", "tokens")
  figures.add("gradient_compile_s", first_s - sft_s, "compiling SFT's step", "s")
  figures.add("gradient_shapes", compiled, "shapes of its gradient")
