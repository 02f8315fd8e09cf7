"""Stage bench: how fast the router, its training and the rollout loop are on this machine."""

import copy
import dataclasses
import json
import math
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from flax import nnx

from baar_jax.config import MARKUP_TOKENS, Config, RouterConfig
from baar_jax.envs.base import Env
from baar_jax.envs.sandbox import Rules, Sandbox
from baar_jax.episode import Call, Episode, Reply, Step, Task, Usage
from baar_jax.rollout.live import Job, Live, Policy, random_rule
from baar_jax.rollout.loop import run_episodes
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.qwen2 import Qwen2Config
from baar_jax.router.tokenizer import adopt_tokenizer, train_tokenizer
from baar_jax.router.view import View, Window, text_pieces
from baar_jax.router.weights import build_model, load_pretrained, load_qwen2, save_qwen2
from baar_jax.run import Run
from baar_jax.train.batches import Batcher, length_buckets, make_batch
from baar_jax.train.fit import update_policy
from baar_jax.train.losses import bopo_loss, sft_batch_loss
from baar_jax.train.trainer import ShardedRouter, Trainer, bopo_optimizer, sft_optimizer

# The router that is measured, unless the run's router has weights; and the steps of an episode.
WIDTHS = {"hidden_size": 512, "intermediate_size": 2752, "head_dim": 64, "max_tokens": 1792}
COUNTS = {"num_layers": 8, "num_heads": 8, "num_kv_heads": 2, "buckets": 4}
ROUTER, STEPS = RouterConfig(**WIDTHS, **COUNTS, action_tokens=20, result_tokens=44), 20
# Figures of live decisions: the view, how many episodes are live, and whether the cache is lost.
DECISIONS = [("cached_decision_ms", "transcript", 1, False)]
DECISIONS += [("whole_decision_ms", "transcript", 1, True), ("paper_decision_ms", "paper", 1, True)]
DECISIONS += [("cached_16_step_ms", "transcript", 16, False)]
MATMUL_SIZES = 1024, 2048, 4096, 8192
SEED = 7_000_000  # of episodes that are measured and not stored
LIVE, WAITING_STEPS, MEDIAN_S, P99_S = 64, 4, 0.5, 5.0  # episodes that wait, and lognormal replies
Figure = tuple[str, float, str]  # a name that ends in its unit, a value, and a remark
RANDOM = Policy("bench", lambda live: random_rule(live, 0.5))


def main(run: Run) -> None:
  """Prints a table and saves report/bench.json; of the run's results nothing changes."""
  if run.pair.kind != "scripted":
    raise ValueError("--stage=bench plays scripted models alone: set --config.models.kind=scripted")
  run.print(f"{jax.devices()[0].device_kind}, {psutil.cpu_count()} cores, jax {jax.__version__}")
  figures: dict[str, float] = {}
  with tempfile.TemporaryDirectory() as directory:
    bench = RouterBench(run.config, Path(directory))
    parts = bench.decide(), bench.score(), bench.train(), bench.load(), wait(), run_envs(run)
    for name, value, remark in chain(*parts):
      figures[name] = value
      shown = f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
      run.print(f"{name:24}{shown:>10}  {remark}".rstrip())
  path = run.dir / "report" / "bench.json"
  path.parent.mkdir(exist_ok=True)
  path.write_text(json.dumps(figures, indent=2))


def measure_s(call: Callable[[], object], repeats: int = 3) -> float:
  """Seconds until the call's arrays are ready: the fastest repeat after a first call, which
  compiles; without repeats the first call."""
  seconds = []
  for _ in range(1 + repeats):
    start = time.perf_counter()
    jax.block_until_ready(call())
    seconds.append(time.perf_counter() - start)
  return min(seconds[1:] or seconds)


class RouterBench:
  """The measured router, made or loaded, and episodes of random letters that are longer than their
  previews. Its tokenizer is in `directory`."""

  def __init__(self, config: Config, directory: Path):
    c = dataclasses.replace(config.router if config.router.weights else ROUTER, view="transcript")
    self.directory, self.config = directory, copy.deepcopy(config)
    self.config.router, self.config.env.max_steps, self.config.bopo.epochs = c, STEPS, 1
    cpu = jax.default_backend() == "cpu"
    self.config.bopo.batch_episodes, self.config.sft.micro_episodes = (1, 1) if cpu else (64, 16)
    draw = random.Random(0)
    text = lambda: "".join(draw.choices(string.ascii_lowercase + " ", k=1000))  # noqa: E731
    self.task, self.episodes = Task("bench", "test", text(), STEPS), []
    for _ in range(64):
      steps = [Step(text(), s % 2, text(), logp=math.log(0.5)) for s in range(STEPS)]
      self.episodes.append(Episode("bench", "bench", 0, steps, 1.0, "done"))
    if c.weights:
      adopt_tokenizer(Path(c.weights), directory)
    else:
      train_tokenizer(text_pieces(self.task, self.episodes[0]), c.vocab_size, directory)
    self.views = {v: View(dataclasses.replace(c, view=v), directory) for v in MARKUP_TOKENS}
    self.view = self.views["transcript"]
    self.model = load_pretrained(self.view) if c.weights else build_model(c, 0)
    self.placed = self.view.decision_ids, None, c.dtype  # tokens, mesh, dtype of a ShardedRouter

  def decide(self) -> Iterator[Figure]:
    """A step at which the router decides for all live episodes: from the cache, or with nothing
    left in it from the steps before."""
    first_s = None
    for name, view, count, forget in DECISIONS:
      policy = RouterPolicy("bench", self.model, self.views[view], Threshold(), count)
      for _ in range(2):  # the first time compiles
        lives, seconds = [Live(Job(self.task, 0), None) for _ in range(count)], []
        for s in range(STEPS):
          for live, episode in zip(lives, self.episodes):
            live.steps, live.observation = episode.steps[:s], episode.steps[s].observation
          seconds.append(measure_s(partial(policy.choose, lives), repeats=0))
          for live in lives if forget or s + 1 == STEPS else ():
            policy.finish(live)
      mean_s = float(np.mean(seconds))
      first_s = first_s or mean_s
      yield name, 1e3 * mean_s, f"{view}, {count} live: {mean_s / first_s:.3g} x the first"

  def score(self) -> Iterator[Figure]:
    """All decisions of a finished episode: by its transcript, and by the paper's prompts."""
    c, episode = self.config.router, self.episodes[0]
    scorer = ShardedRouter(self.model, *self.placed)
    buckets, seconds = length_buckets(c.max_tokens, c.buckets), {}
    for name, view in self.views.items():
      windows = view.episode_windows(self.task, episode)
      rows = [[[window]] for window in windows]
      batches = [make_batch([episode], x, size=1, decisions=STEPS, buckets=buckets) for x in rows]
      seconds[name] = measure_s(lambda batches=batches: list(map(scorer.logits, batches)))
    yield "transcript_score_ms", 1e3 * seconds["transcript"], "scoring a finished episode"
    remark = f"by the paper's prompts: {seconds['paper'] / seconds['transcript']:.3g} x as long"
    yield "paper_score_ms", 1e3 * seconds["paper"], remark
    squares = [jax.random.normal(jax.random.key(0), (n, n), c.dtype) for n in MATMUL_SIZES]
    peak = max(2 * len(x) ** 3 / measure_s(partial(jax.jit(jnp.matmul), x, x)) for x in squares)
    yield "matmul_gflop_per_s", peak / 1e9, "the fastest of a few matrix products"
    windows = self.view.episode_windows(self.task, episode)
    rate = count_flop(self.model.config, windows) / seconds["transcript"]
    yield "score_gflop_per_s", rate / 1e9, f"scoring: {rate / peak:.3g} of the matrix products"

  def train(self) -> Iterator[Figure]:
    """Gradient steps of SFT and BoPO as their stages make them, in real tokens."""
    c, model, placed = self.config, self.model, self.placed
    episodes = self.episodes[: c.bopo.batch_episodes]
    windows = [w for episode in episodes for w in self.view.episode_windows(self.task, episode)]
    batcher = Batcher(c, self.view, [self.task])
    trainer = Trainer(model, sft_batch_loss, sft_optimizer(c.sft, c.sft.learning_rates[0]), *placed)
    sft_s = measure_s(lambda: trainer.step(batcher.micro_batches(episodes)))
    del trainer  # its parameters and its optimizer's state
    trainer = Trainer(model, partial(bopo_loss, c.bopo), bopo_optimizer(c.bopo), *placed)
    anchor = ShardedRouter(model, *placed)
    adv_B = np.linspace(-1, 1, len(episodes), dtype="float32")
    update = partial(update_policy, trainer, anchor, batcher, episodes, adv_B, c.bopo, c.seed)
    bopo_s = measure_s(update)
    tokens = sum(len(window.tokens) for window in windows)
    yield "sft_tokens_per_s", tokens / sft_s, f"{len(episodes) / sft_s:.3g} episodes/s"
    yield "bopo_tokens_per_s", tokens / bopo_s, f"{sft_s / bopo_s:.3g} x SFT"
    rate = 3 * count_flop(model.config, windows) / sft_s
    yield "sft_gflop_per_s", rate / 1e9, "without the forward that is repeated to save memory"

  def load(self) -> Iterator[Figure]:
    """A Hugging Face checkpoint into memory, and the memory of this process."""
    weights = Path(self.config.router.weights or self.directory / "saved")
    if not self.config.router.weights:
      save_qwen2(self.model, weights, self.directory / "tokenizer.json")
    megabytes = sum(path.stat().st_size for path in weights.glob("*.safetensors")) / 1e6
    seconds = measure_s(lambda: nnx.split(load_qwen2(weights))[1])
    yield "load_mb_per_s", megabytes / seconds, f"a checkpoint of {megabytes:.3g} MB"
    yield "memory_mb", psutil.Process().memory_info().rss / 1e6, "of this process now"


def count_flop(shape: Qwen2Config, windows: Sequence[Window]) -> int:
  """Multiplications and additions of a forward, without norms, rotations, embedding and head: 2 of
  a token and a matrix entry, 4 N H of a token and one that it sees, in each layer."""
  D, F, H = shape.hidden_size, shape.intermediate_size, shape.head_dim
  N, K, L = shape.num_attention_heads, shape.num_key_value_heads, shape.num_hidden_layers
  entries = 2 * D * N * H + 2 * D * K * H + 3 * D * F
  lengths = [len(window.tokens) for window in windows]
  pairs = sum(T * (T + 1) // 2 for T in lengths)
  return L * (2 * entries * sum(lengths) + 4 * N * H * pairs)


def wait() -> Iterator[Figure]:
  """Episodes that do nothing but wait for replies, all live at once."""
  sigma = math.log(P99_S / MEDIAN_S) / 2.3263  # at a normal's 99 %
  latency_s_BxS = MEDIAN_S * np.random.default_rng(0).lognormal(0, sigma, (LIVE, WAITING_STEPS))

  def start(env: Env, task: Task, seed: int, hold: object) -> list[SimpleNamespace]:
    def reply(messages: object, step: int) -> Reply:
      time.sleep(latency_s_BxS[seed, step])
      return Reply("Thought: I wait.\n\nAction: wait", Call(0, Usage(1, 0, 1), 0.0))

    return [SimpleNamespace(bound_usd=lambda messages, step: 0.0, reply=reply)] * 2

  rules = Rules(attempts=WAITING_STEPS + 1)  # nobody opens the lock: episodes end at max_steps
  envs = [Sandbox(1, 1, 1, WAITING_STEPS, rules) for _ in range(LIVE)]
  jobs = [Job(envs[0].tasks("test")[0], seed) for seed in range(LIVE)]
  pair = SimpleNamespace(start=start, stop=lambda: None)
  seconds = measure_s(lambda: list(run_episodes(jobs, RANDOM, pair, envs)), repeats=0)
  remark = f"{seconds / latency_s_BxS.sum(axis=1).max():.3g} x the longest of {LIVE} live episodes"
  yield "waiting_s", seconds, remark
  remark = "what a barrier at each step would take, not run"
  yield "waiting_barrier_s", latency_s_BxS.max(axis=0).sum(), remark


def run_envs(run: Run) -> Iterator[Figure]:
  """Episodes of the run's environment through the loop, and their actions alone."""
  tasks, envs = run.tasks("test")[:12], run.envs()
  for seed in (SEED, SEED + 2):  # in the first round Java still compiles
    jobs, start = [Job(task, seed + i) for task in tasks for i in (0, 1)], time.perf_counter()
    episodes = list(run_episodes(jobs, RANDOM, run.pair, envs))
    loop_s = time.perf_counter() - start

  def replay(number: int) -> None:
    env = envs[number]
    for episode in episodes[number :: len(envs)]:
      env.reset(episode.task_id)
      for step in episode.steps:
        env.step(step.action)
      env.score()

  with ThreadPoolExecutor(len(envs)) as threads:
    replay_s = measure_s(lambda: list(threads.map(replay, range(len(envs)))), repeats=0)
  steps = sum(len(episode.steps) for episode in episodes)
  yield "steps_per_s", steps / loop_s, f"{run.config.env.kind}: the loop, random routing"
  remark = f"without models, policy or loop; the loop: {replay_s / loop_s:.3g} x as fast"
  yield "replay_steps_per_s", steps / replay_s, remark
