"""The router in use: live decisions, scoring finished episodes, loading a checkpoint."""

import dataclasses
import resource
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from baar_jax.episode import Episode
from baar_jax.rollout.live import Job, Live
from baar_jax.router import policy as router
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.view import Window
from baar_jax.router.weights import load_qwen2, save_qwen2
from baar_jax.stages.bench_figures import MB, Figures, first_and_steady, timed
from baar_jax.stages.bench_subject import Subject
from baar_jax.train.batches import Batch, bucket_of, make_batch

MANY_STEPS = 5  # that many live episodes are decided for; the first two compile
SAMPLED = 0, 3  # of each four steps, those that are decided slowly: their mean is that of all


def decisions(subject: Subject, figures: Figures) -> None:
  """Live decisions: from the cache, by whole forwards, and with the paper's prompts."""
  shapes = router._extend._cache_size()
  policy = _policy(subject, "transcript")
  steps = range(subject.config.bench.steps)
  sampled = [s for s in steps if s % 4 in SAMPLED]
  first = subject.episodes[:1]
  _, compiling_s = play(subject, policy, subject.episodes[-1:], steps)
  one_s, more_s = play(subject, policy, first, steps)
  many_s, _ = play(subject, policy, subject.episodes[: subject.many], steps[:MANY_STEPS])
  del policy  # its cache and its copy of the weights
  paper_s, _ = play(subject, _policy(subject, "paper"), first, sampled, again=True)
  whole_s = one_by_one(subject, partial(_text_so_far, subject, first[0]), sampled)
  rows = (
    ("cached", one_s, 1, "cached transcript, 1 live"),
    ("cached_many", many_s, subject.many, f"cached transcripts, {subject.many} live"),
    ("uncached", whole_s, 1, "whole transcript at each step"),
    ("paper", paper_s, 1, "the paper's prompts, 1 live"),
  )
  figures.section(
    "Decisions of live episodes",
    "mean over an episode's steps, each once, with its text encoded; without what compiled; "
    f"many live: the first {MANY_STEPS} steps; what starts anew at each step: every second one",
  )
  for name, seconds, live, label in rows:
    step_s = float(np.mean(seconds))
    figures.add(f"{name}_decisions_per_s", live / step_s, label, "decisions/s")
    figures.add(f"{name}_step_ms", 1e3 * step_s, "  one step", "ms")
  for other, words in (("uncached", "whole transcripts"), ("paper", "the paper's prompts")):
    names = "cached_decisions_per_s", f"{other}_decisions_per_s"
    figures.ratio(*names, f"{{}} x as fast as {words}")
  figures.ratio("cached_many_decisions_per_s", "cached_decisions_per_s", "{} x as fast as 1 live")
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
  steps: Sequence[int],
  again: bool = False,
) -> tuple[list[float], list[float]]:
  """Has the policy decide in episodes that go the way they went, all at once.

  Args:
    steps: those that are decided, in order.
    again: where a call compiled, make it again: for a view that keeps nothing.

  Returns:
    Seconds of each call; those that compiled are in a list of their own.
  """
  lives = [Live(Job(subject.tasks[e.task_id], e.seed), None) for e in episodes]
  steady_s: list[float] = []
  compiling_s: list[float] = []
  for s in steps:
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


def one_by_one(
  subject: Subject, window: Callable[[int], Window], steps: Sequence[int]
) -> list[float]:
  """Seconds of each step's decision by a forward of one window, once its bucket is compiled."""
  seen, times = set(), []

  def decide(s: int):
    return subject.scorer.logits(last_decision(window(s), subject.buckets))

  for s in steps:
    bucket = bucket_of(len(window(s).tokens), subject.buckets)
    if bucket not in seen:
      timed(partial(decide, s))
    seen.add(bucket)
    times.append(timed(partial(decide, s)))
  return times


def _text_so_far(subject: Subject, episode: Episode, s: int) -> Window:
  beginning = dataclasses.replace(episode, steps=episode.steps[: s + 1])
  return subject.windows(beginning)[-1]


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
  paper_s = sum(one_by_one(subject, prompts.__getitem__, range(steps)))
  figures.section(
    "Scoring the decisions of a finished episode",
    "transcript: fastest of a few; prompts: each once; after a warm-up, padded to their buckets",
  )
  figures.add("transcript_scored_per_s", steps / transcript_s, "transcript, once", "decisions/s")
  figures.add("transcript_score_ms", 1e3 * transcript_s, "  the episode", "ms")
  figures.add("paper_scored_per_s", steps / paper_s, "the paper's prompts, 1 by 1", "decisions/s")
  figures.add("paper_score_ms", 1e3 * paper_s, "  the episode", "ms")
  words = "{} x as fast as the paper's prompts"
  figures.ratio("transcript_scored_per_s", "paper_scored_per_s", words)


def score(subject: Subject, episode: Episode) -> jax.Array:
  """logits_1xSxA of an episode's transcript, in one forward if it has not been cut."""
  windows, steps = [subject.windows(episode)], subject.config.bench.steps
  batch = make_batch([episode], windows, rows=1, decisions=steps, buckets=subject.buckets)
  return subject.scorer.logits(batch)


def loading(subject: Subject, figures: Figures) -> None:
  """A checkpoint into memory, and the most memory that was taken so far."""
  directory = Path(subject.config.router.weights)
  if not subject.config.router.weights:
    directory = subject.directory / "saved"
    save_qwen2(subject.model, directory, subject.directory / "tokenizer" / "tokenizer.json")
  size = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
  first_s, load_s = first_and_steady(lambda: nnx.split(load_qwen2(directory))[1])
  figures.section("Loading", "files are in the system's memory; then float32 on the device")
  figures.add("checkpoint_mb", size / MB, "a Hugging Face directory", "MB")
  figures.add("load_s", load_s, "loading it, fastest of a few", "s")
  figures.add("load_mb_per_s", size / MB / load_s, "  of its files", "MB/s")
  figures.add("first_load_s", first_s, "loading it the first time, compiling", "s")
  unit = 1 if sys.platform == "darwin" else 1024  # bytes of ru_maxrss
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
  figures.add("peak_memory_mb", peak / MB, "most memory of this process so far", "MB")
  device = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
  device_mb = None if device is None else device / MB
  figures.add("device_peak_memory_mb", device_mb, "  of the device's own", "MB")
