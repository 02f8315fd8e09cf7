"""Stage bench: how fast the router, its training and the rollout loop are on this machine."""

import copy
import dataclasses
import json
import math
import random
import string
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx

from baar_jax.config import MARKUP_TOKENS, Config
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
from baar_jax.router.view import View, Window, text_pieces
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
  """The router that is measured, episodes of random letters, and the views between them."""

  config: Config
  model: Qwen2
  placed: tuple  # what a Scorer and a Trainer are given beside the model
  views: dict[str, View]
  task: Task
  episodes: list[Episode]

  def windows(self, episode: Episode, view: str = "transcript") -> list[Window]:
    return self.views[view].episode_windows(self.task, episode)


def main(run: Run) -> None:
  """Prints a table and saves report/bench.json; of the run's results nothing changes."""
  run.require_one_process("bench")
  if run.pair.kind != "scripted":
    raise ValueError("--stage=bench plays scripted models alone: set --config.models.kind=scripted")
  figures: dict[str, float] = {}

  def report(name: str, value: float, remark: str = "") -> None:
    figures[name] = value
    shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    run.say(f"{name:24}{shown:>10}  {remark}".rstrip())

  run.say(f"{jax.devices()[0].device_kind}, {psutil.cpu_count()} cores, jax {jax.__version__}")
  with tempfile.TemporaryDirectory() as directory:
    subject = prepare(run.config, Path(directory))
    for part in (decisions, scoring, training):
      part(subject, report)
    loading(subject, Path(directory), report)
  waiting(report)
  environment(run, report)
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures, indent=2))


def prepare(config: Config, directory: Path) -> Subject:
  """The router and its tokenizer, and episodes whose texts are all longer than their previews."""
  b, cpu = config.bench, jax.default_backend() == "cpu"
  c = dataclasses.replace(config.router if config.router.weights else b.router, view="transcript")
  config = copy.deepcopy(config)
  config.router, config.env.max_steps, config.bopo.epochs = c, b.steps, 1
  config.bopo.batch_episodes = b.episodes or (1 if cpu else 64)
  config.sft.micro_episodes = b.micro_episodes or (1 if cpu else 16)
  draw = random.Random(0)

  def text() -> str:
    return "".join(draw.choices(string.ascii_lowercase + " ", k=1000))

  task, episodes = Task("bench", "test", text(), b.steps), []
  for _ in range(max(16, config.bopo.batch_episodes)):
    steps = [Step(text(), s % 2, text(), logp=math.log(0.5)) for s in range(b.steps)]
    episodes.append(Episode(task.id, "bench", 0, steps, 1.0, "done"))
  if c.weights:
    adopt_tokenizer(Path(c.weights), directory / "tokenizer")
  else:
    train_tokenizer(text_pieces(task, episodes[0]), c.vocab_size, directory / "tokenizer")
  views = {v: View(dataclasses.replace(c, view=v), directory / "tokenizer") for v in MARKUP_TOKENS}
  model = load_pretrained(c, views["transcript"]) if c.weights else build_model(c, 0)
  placed = views["transcript"].decision_ids, None, c.dtype
  return Subject(config, model, placed, views, task, episodes)


def timed(call: Callable[[], object]) -> float:
  """Seconds until the call's arrays are ready."""
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def steady(call: Callable[[], object]) -> float:
  """Seconds of the fastest of three calls after a first one, which compiles."""
  return min([timed(call) for _ in range(4)][1:])


def decisions(subject: Subject, report: Report) -> None:
  """Live decisions: from the cache, and from a whole new forward of either view."""
  one_s, all_s = play(subject, "transcript", 1), play(subject, "transcript", 16)
  report("cached_decision_ms", 1e3 * one_s, "a live decision, cached transcript")
  for name, view in (("whole", "transcript"), ("paper", "paper")):
    seconds = play(subject, view, 1, forget=True)
    report(f"{name}_decision_ms", 1e3 * seconds, f"{seconds / one_s:.3g} x as long as cached")
  remark = f"16 live: {16 * one_s / all_s:.3g} x the decisions/s of one"
  report("cached_16_step_ms", 1e3 * all_s, remark)


def play(subject: Subject, view: str, count: int, forget: bool = False) -> float:
  """Mean seconds of a step at which the router decides in `count` episodes, after a first play.

  With `forget` nothing is left in the cache from the steps before.
  """
  c, episodes = dataclasses.replace(subject.config.router, view=view), subject.episodes[:count]
  policy = RouterPolicy("bench", subject.model, subject.views[view], c, Threshold(), count)
  for _ in range(2):  # the first time compiles
    lives, seconds = [Live(Job(subject.task, 0), None) for _ in episodes], []
    for s in range(subject.task.max_steps):
      for live, episode in zip(lives, episodes):
        live.steps, live.observation = episode.steps[:s], episode.steps[s].observation
      seconds.append(timed(partial(policy.choose, lives)))
      for live in lives if forget or s + 1 == subject.task.max_steps else ():
        policy.finish(live)
  return float(np.mean(seconds))


def scoring(subject: Subject, report: Report) -> None:
  """All decisions of a finished episode: by its transcript, and by the paper's prompts."""
  c, episode = subject.config.router, subject.episodes[0]
  scorer, seconds = Scorer(subject.model, *subject.placed), {}
  sizes = {"rows": 1, "decisions": subject.task.max_steps}
  sizes["buckets"] = length_buckets(c.max_tokens, c.buckets)
  for view in subject.views:
    windows = subject.windows(episode, view)
    batches = [make_batch([episode], [[window]], **sizes) for window in windows]
    seconds[view] = steady(lambda batches=batches: list(map(scorer.logits, batches)))
  report("transcript_score_ms", 1e3 * seconds["transcript"], "scoring a finished episode")
  ratio = seconds["paper"] / seconds["transcript"]
  remark = f"the paper's prompts: {ratio:.3g} x as long as the transcript"
  report("paper_score_ms", 1e3 * seconds["paper"], remark)
  squares = [jax.random.normal(jax.random.key(0), (size, size), c.dtype) for size in MATMUL_SIZES]
  peak = max(2 * len(x) ** 3 / steady(partial(jax.jit(jnp.matmul), x, x)) for x in squares)
  report("matmul_gflop_per_s", peak / 1e9, "the fastest of a few matrix products")
  rate = model_flop(subject.model.config, subject.windows(episode)) / seconds["transcript"]
  report("score_gflop_per_s", rate / 1e9, f"scoring: {rate / peak:.3g} of the matrix products")


def training(subject: Subject, report: Report) -> None:
  """Gradient steps of SFT and BoPO as their stages make them, in real tokens."""
  c, model = subject.config, subject.model
  episodes = subject.episodes[: c.bopo.batch_episodes]
  windows = [window for episode in episodes for window in subject.windows(episode)]
  batcher = Batcher(c, subject.views["transcript"], [subject.task])
  trainer = Trainer(model, METHODS["sft"].loss, sft_optimizer(c.sft), *subject.placed)
  sft_s = steady(lambda: trainer.step(batcher.micro_batches(episodes)))
  del trainer  # its parameters and its optimizer's state
  trainer = Trainer(model, partial(bopo_loss, c.bopo), bopo_optimizer(c.bopo), *subject.placed)
  anchor, adv_B = Scorer(model, *subject.placed), np.linspace(-1, 1, len(episodes), dtype="float32")
  bopo_s = steady(lambda: policy_steps(trainer, anchor, batcher, episodes, adv_B, c.bopo, c.seed))
  tokens = sum(len(window.tokens) for window in windows)
  report("sft_tokens_per_s", tokens / sft_s, f"{len(episodes) / sft_s:.3g} episodes/s")
  report("bopo_tokens_per_s", tokens / bopo_s, f"{sft_s / bopo_s:.3g} x SFT")
  rate = 3 * model_flop(model.config, windows) / sft_s
  report("sft_gflop_per_s", rate / 1e9, "without the forward that is repeated to save memory")


def model_flop(shape: Qwen2Config, windows: Sequence[Window]) -> int:
  """Multiplications and additions of a forward; a gradient costs two more, and recomputes some.

  A matrix entry costs 2 for a token; attention costs 4 N H for a pair of a token and one that it
  sees, in each layer. Norms, rotations, the embedding and the head are left out.
  """
  D, F, H = shape.hidden_size, shape.intermediate_size, shape.head_dim
  N, K, L = shape.num_attention_heads, shape.num_key_value_heads, shape.num_hidden_layers
  entries = 2 * D * N * H + 2 * D * K * H + 3 * D * F
  lengths = [len(window.tokens) for window in windows]
  pairs = sum(T * (T + 1) // 2 for T in lengths)
  return L * (2 * entries * sum(lengths) + 4 * N * H * pairs)


def loading(subject: Subject, directory: Path, report: Report) -> None:
  """A Hugging Face checkpoint into memory, and the memory of this process."""
  weights = Path(subject.config.router.weights or directory / "saved")
  if not subject.config.router.weights:
    save_qwen2(subject.model, weights, directory / "tokenizer" / "tokenizer.json")
  megabytes = sum(path.stat().st_size for path in weights.glob("*.safetensors")) / 1e6
  seconds = steady(lambda: nnx.split(load_qwen2(weights))[1])
  report("load_mb_per_s", megabytes / seconds, f"a checkpoint of {megabytes:.3g} MB")
  report("memory_mb", psutil.Process().memory_info().rss / 1e6, "of this process now")
  stats = jax.local_devices()[0].memory_stats() or {}
  if "peak_bytes_in_use" in stats:
    report("device_peak_memory_mb", stats["peak_bytes_in_use"] / 1e6)


def waiting_agent(latency_s_S: Sequence[float]) -> SimpleNamespace:
  """Stands for a model whose latencies were drawn before."""

  def reply(messages: object, step: int) -> Reply:
    time.sleep(latency_s_S[step])
    return Reply("Thought: I wait.\n\nAction: wait", Call(0, Usage(1, 0, 1), 0.0))

  return SimpleNamespace(bound_usd=lambda messages, step: 0.0, reply=reply)


def waiting(report: Report) -> None:
  """Episodes that do nothing but wait for replies, all live at once, each in an environment."""
  sigma = math.log(P99_S / MEDIAN_S) / 2.3263  # at a normal's 99 %
  latency_s_BxS = MEDIAN_S * np.random.default_rng(0).lognormal(0, sigma, (LIVE, WAITING_STEPS))
  rules = Rules(attempts=WAITING_STEPS + 1)  # nobody opens the lock: episodes end at max_steps
  envs = [Sandbox(1, 1, WAITING_STEPS, rules) for _ in range(LIVE)]
  jobs = [Job(envs[0].tasks("test")[0], seed) for seed in range(LIVE)]
  agents = [[waiting_agent(latency_s_S)] * 2 for latency_s_S in latency_s_BxS]
  pair = SimpleNamespace(start=lambda env, task, seed, hold: agents[seed], stop=lambda: None)
  seconds = timed(lambda: list(run_episodes(jobs, random_large(0.5, "bench"), pair, envs)))
  remark = f"{seconds / latency_s_BxS.sum(axis=1).max():.3g} x the longest of {LIVE} live episodes"
  report("waiting_s", seconds, remark)
  barrier_s = latency_s_BxS.max(axis=0).sum()
  report("waiting_barrier_s", barrier_s, "what a barrier at each step would take, not run")


def environment(run: Run, report: Report) -> None:
  """Episodes of the run's environment through the rollout loop, and their actions alone."""
  tasks, envs, policy = run.tasks("test")[:12], run.envs(), random_large(0.5, "bench")
  for seed in (SEED, SEED + 2):  # in the first round Java still compiles
    jobs, start = [Job(task, seed + i) for task in tasks for i in (0, 1)], time.perf_counter()
    episodes = list(run_episodes(jobs, policy, run.pair, envs))
    loop_s = time.perf_counter() - start
  processes = envs[: run.live_episodes // run.config.env.live_per_process]
  shares = [episodes[i :: len(processes)] for i in range(len(processes))]
  with ThreadPoolExecutor(len(processes)) as threads:
    replay_s = timed(lambda: list(threads.map(replay, processes, shares)))
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
