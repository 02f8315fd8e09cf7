"""Stage bench: how fast the router, its training and the rollout loop are on this machine."""

import contextlib
import dataclasses
import json
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from baar_jax.config import MARKUP_TOKENS, Config, RouterConfig
from baar_jax.envs.base import Env
from baar_jax.envs.sandbox import Rules, Sandbox
from baar_jax.episode import Call, Episode, Reply, Step, Task, Usage
from baar_jax.rollout.live import Job, Live
from baar_jax.rollout.loop import run_episodes
from baar_jax.rollout.policies import random_large
from baar_jax.router.build import build_model, load_pretrained
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.qwen2 import Qwen2, Qwen2Config
from baar_jax.router.tokenizer import adopt_tokenizer, train_tokenizer
from baar_jax.router.view import View, text_pieces
from baar_jax.router.weights import load_qwen2, save_qwen2
from baar_jax.run import Run
from baar_jax.train.batches import Batcher, length_buckets, make_batch
from baar_jax.train.fit import policy_steps
from baar_jax.train.methods import METHODS, bopo_loss
from baar_jax.train.trainer import Scorer, Trainer, bopo_optimizer, sft_optimizer

SEED = 7_000_000  # of episodes that are measured and not stored
MATMUL_SIZES = 1024, 2048, 4096, 8192
LIVE, WAITING_STEPS, MEDIAN_S, P99_S = 64, 4, 0.5, 5.0  # episodes that wait, and lognormal replies
Report = Callable[..., None]  # report(name, value, remark): a figure, whose name ends in its unit


@dataclasses.dataclass
class Subject:
  """The router that is measured, synthetic episodes, and the views between them."""

  config: Config
  model: Qwen2
  views: dict[str, View]
  tasks: dict[str, Task]
  episodes: list[Episode]
  directory: Path

  def lengths(self, episodes: Sequence[Episode], view: str = "transcript") -> list[int]:
    windows = [self.views[view].episode_windows(self.tasks[e.task_id], e) for e in episodes]
    return [len(window.tokens) for windows_of_one in windows for window in windows_of_one]


def main(run: Run) -> None:
  """Prints a table and saves report/bench.json; of the run's results nothing changes."""
  run.alone("bench")
  if run.pair.kind != "scripted":
    raise ValueError("--stage=bench plays scripted models alone: set --config.models.kind=scripted")
  figures: dict[str, float] = {}

  def report(name: str, value: float, remark: str = "") -> None:
    figures[name] = value
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    run.say(f"{name:32}{shown:>14}  {remark}".rstrip())

  run.say(f"{jax.devices()[0].device_kind}, {psutil.cpu_count()} cores, jax {jax.__version__}")
  with tempfile.TemporaryDirectory() as directory, compiled_anew():
    subject = prepare(run.config, Path(directory))
    for part in (decisions, scoring, training, loading):
      part(subject, report)
  waiting(report)
  environment(run, report)
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures, indent=2))


@contextlib.contextmanager
def compiled_anew() -> Iterator[None]:
  """Compiles anew, although a disk may hold compiled functions: first calls show what it takes."""
  directory = jax.config.jax_compilation_cache_dir
  jax.config.update("jax_compilation_cache_dir", None)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def prepare(config: Config, directory: Path) -> Subject:
  """Synthetic episodes, a tokenizer of their text, and the router; files go to the directory."""
  b, cpu = config.bench, jax.default_backend() == "cpu"
  b = dataclasses.replace(
    b,
    episodes=b.episodes or (1 if cpu else 64),
    micro_episodes=b.micro_episodes or 1 + 15 * (not cpu),
  )
  c = dataclasses.replace(config.router if config.router.weights else b.router, view="transcript")
  sft = dataclasses.replace(config.sft, micro_episodes=b.micro_episodes)
  bopo = dataclasses.replace(config.bopo, epochs=1, batch_episodes=b.episodes)
  env = dataclasses.replace(config.env, max_steps=b.steps)
  config = dataclasses.replace(config, router=c, bench=b, sft=sft, bopo=bopo, env=env)
  tasks, episodes = synthetic(c, b.steps, max(16, b.episodes))
  tokenizer = directory / "tokenizer"
  if c.weights:
    adopt_tokenizer(Path(c.weights), tokenizer)
  else:
    texts = (text for t, e in zip(tasks[:8], episodes) for text in text_pieces(t, e))
    train_tokenizer(texts, c.vocab_size, tokenizer)
  views = {name: View(dataclasses.replace(c, view=name), tokenizer) for name in MARKUP_TOKENS}
  model = load_pretrained(c, views["transcript"]) if c.weights else build_model(c, 0)
  return Subject(config, model, views, {task.id: task for task in tasks}, episodes, directory)


def synthetic(c: RouterConfig, steps: int, count: int) -> tuple[list[Task], list[Episode]]:
  """Tasks and an episode of each, of random words; every text is longer than its preview."""
  draw = random.Random(0)
  words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(400)]

  def text(tokens: int) -> str:
    return " ".join(draw.choices(words, k=4 * tokens))

  def step() -> Step:
    return Step(text(c.result_tokens), draw.randrange(2), text(c.action_tokens), logp=math.log(0.5))

  tasks = [Task(f"bench-{i}", "test", text(c.description_tokens), steps) for i in range(count)]
  return tasks, [
    Episode(task.id, "bench", 0, [step() for _ in range(steps)], 1.0, "done") for task in tasks
  ]


def timed(call: Callable[[], object]) -> float:
  """Seconds until the call's arrays are ready."""
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def first_and_steady(call: Callable[[], object]) -> tuple[float, float]:
  """Seconds of the first call, which compiles, and of the fastest of three after it."""
  return timed(call), min(timed(call) for _ in range(3))


def decisions(subject: Subject, report: Report) -> None:
  """Live decisions: from the cache, and from a whole new forward of either view."""
  live_s = {n: play(subject, "transcript", subject.episodes[:n]) for n in (1, 16)}
  paper_s = play(subject, "paper", subject.episodes[:1])
  scorer = Scorer(
    subject.model, subject.views["transcript"].decision_ids, None, subject.config.router.dtype
  )
  episode, steps = subject.episodes[0], subject.config.bench.steps
  beginnings = [dataclasses.replace(episode, steps=episode.steps[: s + 1]) for s in range(steps)]
  whole_s = [first_and_steady(partial(score, subject, scorer, e))[1] for e in beginnings[1::4]]
  report("cached_decision_ms", 1e3 * live_s[1], "a live decision, cached transcript")
  for name, seconds in (("whole", float(np.mean(whole_s))), ("paper", paper_s)):
    report(f"{name}_decision_ms", 1e3 * seconds, f"{seconds / live_s[1]:.3g} x as long as cached")
  per_s = 16 * live_s[1] / live_s[16]
  report("cached_16_step_ms", 1e3 * live_s[16], f"16 live: {per_s:.3g} x the decisions/s of one")


def play(subject: Subject, view: str, episodes: Sequence[Episode]) -> float:
  """Mean seconds of a step at which the router decides in all episodes, the second time over."""
  c = dataclasses.replace(subject.config.router, view=view)
  policy = RouterPolicy("bench", subject.model, subject.views[view], c, Threshold(), len(episodes))
  for _ in range(2):  # the first time compiles
    lives = [Live(Job(subject.tasks[e.task_id], e.seed), None) for e in episodes]
    seconds = []
    for s in range(subject.config.bench.steps):
      for live, episode in zip(lives, episodes):
        live.steps, live.observation = episode.steps[:s], episode.steps[s].observation
      seconds.append(timed(partial(policy.choose, lives)))
    for live in lives:
      policy.finish(live)
  return float(np.mean(seconds))


def score(subject: Subject, scorer: Scorer, episode: Episode, view: str = "transcript") -> list:
  """The logits of an episode's decisions, by one forward for each window of the view."""
  c, windows = (
    subject.config,
    subject.views[view].episode_windows(subject.tasks[episode.task_id], episode),
  )
  buckets = length_buckets(c.router.max_tokens, c.router.buckets)
  sizes = {"rows": 1, "decisions": c.bench.steps, "buckets": buckets}
  return [scorer.logits(make_batch([episode], [[window]], **sizes)) for window in windows]


def scoring(subject: Subject, report: Report) -> None:
  """All decisions of a finished episode: by its transcript, and by the paper's prompts."""
  c, episode = subject.config, subject.episodes[0]
  scorer = Scorer(subject.model, subject.views["transcript"].decision_ids, None, c.router.dtype)
  transcript_s, paper_s = (
    first_and_steady(partial(score, subject, scorer, episode, view))[1] for view in subject.views
  )
  report("transcript_score_ms", 1e3 * transcript_s, "scoring a finished episode")
  remark = f"the paper's prompts: {paper_s / transcript_s:.3g} x as long as the transcript"
  report("paper_score_ms", 1e3 * paper_s, remark)
  peak = max(map(partial(matmul_flop_per_s, c.router.dtype), MATMUL_SIZES))
  flop = model_flop(subject.model.config, subject.lengths([episode]))
  report("matmul_gflop_per_s", peak / 1e9, "the fastest of a few matrix products")
  rate = flop / transcript_s
  report("score_gflop_per_s", rate / 1e9, f"scoring: {rate / peak:.3g} of the matrix products")


def training(subject: Subject, report: Report) -> None:
  """Gradient steps of SFT and BoPO as their stages make them, in real tokens."""
  c, view = subject.config, subject.views["transcript"]
  episodes = subject.episodes[: c.bench.episodes]
  tokens = sum(subject.lengths(episodes))
  batcher = Batcher(c, view, subject.tasks.values())
  placed = view.decision_ids, None, c.router.dtype
  trainer = Trainer(subject.model, METHODS["sft"].loss, sft_optimizer(c.sft), *placed)
  first_s, sft_s = first_and_steady(lambda: trainer.step(batcher.micro_batches(episodes)))
  del trainer  # its parameters and its optimizer's state
  trainer = Trainer(subject.model, partial(bopo_loss, c.bopo), bopo_optimizer(c.bopo), *placed)
  anchor = Scorer(subject.model, *placed)
  adv_B = np.linspace(-1, 1, len(episodes), dtype=np.float32)
  arguments = trainer, anchor, batcher, episodes, adv_B, c.bopo, c.seed
  _, bopo_s = first_and_steady(partial(policy_steps, *arguments))
  for name, seconds in (("sft", sft_s), ("bopo", bopo_s)):
    remark = f"{len(episodes) / seconds:.3g} episodes/s, {sft_s / seconds:.3g} x SFT"
    report(f"{name}_tokens_per_s", tokens / seconds, remark)
  report("gradient_compile_s", first_s - sft_s, "compiling SFT's step")
  rate = 3 * model_flop(subject.model.config, subject.lengths(episodes)) / sft_s
  report("sft_gflop_per_s", rate / 1e9, "without the forward that is repeated to save memory")


def model_flop(shape: Qwen2Config, lengths: Sequence[int]) -> int:
  """Multiplications and additions of a forward; a gradient costs two more, and recomputes some.

  A matrix entry costs 2 for a token; attention costs 4 N H for a pair of a token and one that it
  sees, in each layer. Norms, rotations, the embedding and the head are left out.
  """
  D, F, H = shape.hidden_size, shape.intermediate_size, shape.head_dim
  N, K, L = shape.num_attention_heads, shape.num_key_value_heads, shape.num_hidden_layers
  entries = 2 * D * N * H + 2 * D * K * H + 3 * D * F
  pairs = sum(T * (T + 1) // 2 for T in lengths)
  return L * (2 * entries * sum(lengths) + 4 * N * H * pairs)


def matmul_flop_per_s(dtype: str, size: int) -> float:
  x_NxN = jax.random.normal(jax.random.key(0), (size, size), dtype)
  return 2 * size**3 / first_and_steady(partial(jax.jit(jnp.matmul), x_NxN, x_NxN))[1]


def loading(subject: Subject, report: Report) -> None:
  """A Hugging Face checkpoint into memory, and the memory of this process."""
  directory = Path(subject.config.router.weights)
  if not subject.config.router.weights:
    directory = subject.directory / "saved"
    save_qwen2(subject.model, directory, subject.directory / "tokenizer" / "tokenizer.json")
  megabytes = sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 1e6
  _, seconds = first_and_steady(lambda: nnx.split(load_qwen2(directory))[1])
  report("load_mb_per_s", megabytes / seconds, f"a checkpoint of {megabytes:.3g} MB")
  report("memory_mb", psutil.Process().memory_info().rss / 1e6, "of this process now")
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    report("device_peak_memory_mb", stats["peak_bytes_in_use"] / 1e6)


@dataclasses.dataclass(frozen=True)
class WaitingAgent:  # stands for a model whose latencies were drawn before
  latency_s_S: Sequence[float]

  def bound_usd(self, messages: object, step: int) -> float:
    return 0.0

  def reply(self, messages: object, step: int) -> Reply:
    time.sleep(self.latency_s_S[step])
    return Reply("Thought: I wait.\n\nAction: wait", Call(0, Usage(1, 0, 1), 0.0))


def waiting(report: Report) -> None:
  """Episodes that do nothing but wait for replies, all live at once, each in an environment."""
  draw, sigma = random.Random(0), math.log(P99_S / MEDIAN_S) / 2.3263  # at a normal's 99 %
  latency_s_BxS = [
    [MEDIAN_S * draw.lognormvariate(0, sigma) for _ in range(WAITING_STEPS)] for _ in range(LIVE)
  ]
  rules = Rules(attempts=WAITING_STEPS + 1)  # nobody opens the lock: episodes end at max_steps
  envs = [Sandbox(1, 1, WAITING_STEPS, rules) for _ in range(LIVE)]
  jobs = [Job(envs[0].tasks("test")[0], seed) for seed in range(LIVE)]
  start = time.monotonic()
  pair = SimpleNamespace(
    start=lambda env, task, seed, hold: [WaitingAgent(latency_s_BxS[seed])] * 2, stop=lambda: None
  )
  list(run_episodes(jobs, random_large(0.5, "bench"), pair, envs))
  seconds = time.monotonic() - start
  longest_s = max(map(sum, latency_s_BxS))
  barrier_s = sum(map(max, zip(*latency_s_BxS)))
  report("waiting_s", seconds, f"{seconds / longest_s:.3g} x the longest of {LIVE} live episodes")
  report("waiting_barrier_s", barrier_s, "what a barrier at each step would take, not run")


def environment(run: Run, report: Report) -> None:
  """Episodes of the run's environment through the rollout loop, and their actions alone."""
  tasks, envs, policy = run.tasks("test")[:12], run.envs(), random_large(0.5, "bench")
  rounds = [[Job(task, SEED + 2 * r + s) for task in tasks for s in (0, 1)] for r in (0, 1)]
  list(run_episodes(rounds[0], policy, run.pair, envs))  # Java compiles as it goes
  start = time.monotonic()
  episodes = list(run_episodes(rounds[1], policy, run.pair, envs))
  loop_s = time.monotonic() - start
  processes = envs[: run.live_episodes // run.config.env.live_per_process]
  shares = [episodes[i :: len(processes)] for i in range(len(processes))]
  start = time.monotonic()
  with ThreadPoolExecutor(len(processes)) as threads:
    list(threads.map(replay, processes, shares))
  replay_s = time.monotonic() - start
  steps = sum(len(episode.steps) for episode in episodes)
  report("steps_per_s", steps / loop_s, f"{run.config.env.kind}: the loop, random routing")
  remark = f"without models, policy or loop; the loop: {replay_s / loop_s:.3g} x as fast"
  report("replay_steps_per_s", steps / replay_s, remark)


def replay(env: Env, episodes: Sequence[Episode]) -> None:
  for episode in episodes:
    env.reset(episode.task_id)
    for step in episode.steps:
      env.step(step.action)
    env.score()
