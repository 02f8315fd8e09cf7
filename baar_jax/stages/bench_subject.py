"""What the bench measures: a router, synthetic episodes, and the views between them."""

import dataclasses
import os
import platform
import random
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from baar_jax.config import MARKUP_TOKENS, Config
from baar_jax.episode import Episode, Step, Task
from baar_jax.router.build import build_model, load_pretrained
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.tokenizer import TOKEN_CHARS, adopt_tokenizer, train_tokenizer
from baar_jax.router.view import View, Window, text_pieces
from baar_jax.stages.bench_figures import Figures
from baar_jax.train.batches import Batcher, length_buckets
from baar_jax.train.trainer import Scorer

SEED = 0
WORDS = 400  # that the synthetic texts are made of
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER_EPISODES = 8  # that the yardstick's tokenizer is trained on
CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass
class Subject:
  """The router that is measured, and what it is measured on.

  Attributes:
    config: the run's, with this router, and with the sizes that are measured in place of others.
    views: "transcript" and "paper".
    many: how many live episodes are decided for at once.
    directory: for files of this bench alone.
  """

  config: Config
  model: Qwen2
  views: dict[str, View]
  scorer: Scorer
  tasks: dict[str, Task]
  episodes: list[Episode]
  many: int
  directory: Path

  @property
  def buckets(self) -> list[int]:
    return length_buckets(self.config.router.max_tokens, self.config.router.buckets)

  def windows(self, episode: Episode, view: str = "transcript") -> list[Window]:
    return self.views[view].episode_windows(self.tasks[episode.task_id], episode)

  def lengths(self, episodes: Sequence[Episode], view: str = "transcript") -> list[int]:
    """Tokens of each window of the episodes, without padding."""
    return [len(window.tokens) for e in episodes for window in self.windows(e, view)]

  def batcher(self, rows: int) -> Batcher:
    """Cuts episodes into micro-batches of so many transcripts."""
    sft = dataclasses.replace(self.config.sft, micro_episodes=rows)
    config = dataclasses.replace(self.config, sft=sft)
    return Batcher(config, self.views["transcript"], self.tasks)


def prepare(config: Config, directory: Path) -> Subject:
  """Makes the texts, the tokenizer and the model; files go to the directory.

  Raises:
    ValueError: the router's weights cannot be loaded.
  """
  cpu = jax.default_backend() == "cpu"
  many = 16 if cpu else 64
  chosen = config.router if config.router.weights else config.bench.router
  c = dataclasses.replace(chosen, view="transcript")
  bench = dataclasses.replace(
    config.bench,
    episodes=config.bench.episodes or (1 if cpu else 64),
    micro_episodes=config.bench.micro_episodes or (1 if cpu else 16),
  )
  config = dataclasses.replace(
    config,
    router=c,
    env=dataclasses.replace(config.env, max_steps=bench.steps),
    bopo=dataclasses.replace(config.bopo, epochs=1, batch_episodes=bench.episodes),
    bench=bench,
  )
  tasks, episodes = synthetic(config, max(many + 1, bench.episodes))
  tokenizer = directory / "tokenizer"
  if c.weights:
    adopt_tokenizer(Path(c.weights), tokenizer)
  else:
    few = zip(tasks[:TOKENIZER_EPISODES], episodes)
    train_tokenizer((text for t, e in few for text in text_pieces(t, e)), c.vocab_size, tokenizer)
  views = {name: View(dataclasses.replace(c, view=name), tokenizer) for name in MARKUP_TOKENS}
  view = views["transcript"]
  model = load_pretrained(c, view) if c.weights else build_model(c, SEED)
  scorer = Scorer(model, view.decision_ids, None, c.dtype)
  by_id = {task.id: task for task in tasks}
  return Subject(config, model, views, scorer, by_id, episodes, many, directory)


def synthetic(config: Config, count: int) -> tuple[list[Task], list[Episode]]:
  """Tasks and an episode of each, of made-up words, every text longer than its preview."""
  c, steps = config.router, config.bench.steps
  draw = random.Random(SEED)
  words = ["".join(draw.choices(LETTERS, k=draw.randint(3, 8))) for _ in range(WORDS)]

  def text(tokens: int) -> str:
    # Words of four characters and more with their spaces, and a token has at most TOKEN_CHARS.
    return " ".join(draw.choices(words, k=tokens * TOKEN_CHARS // 4 + 1))

  def step() -> Step:
    observation, action = text(c.result_tokens), text(c.action_tokens)
    return Step(observation, draw.randrange(2), action, logp=float(np.log(0.5)))

  tasks = [Task(f"bench-{i}", "test", text(c.description_tokens), steps) for i in range(count)]
  made = [[step() for _ in range(steps)] for _ in tasks]
  return tasks, [Episode(t.id, "bench", SEED, its, 1.0, "done") for t, its in zip(tasks, made)]


def describe(subject: Subject, figures: Figures) -> None:
  """What is measured, and on what."""
  c, episode = subject.config, subject.episodes[0]
  shape, leaves = subject.model.config, jax.tree.leaves(nnx.split(subject.model)[1])
  figures.section(
    "Setup",
    "episodes are synthetic: random words, every text cut to its preview; what else runs on the "
    "machine slows some of these figures more than others",
  )
  figures.add("device", device_name(), "device, one of them")
  figures.add("cores", os.cpu_count(), "cores of the machine")
  figures.add("load_average", os.getloadavg()[0], "  load average before")
  figures.add("jax_version", jax.__version__, "jax")
  figures.add("router", c.router.weights or "random weights", "router")
  figures.add("dtype", c.router.dtype, "computed in")
  figures.add("parameters", sum(x.size for x in leaves), "parameters")
  figures.add("hidden_size", shape.hidden_size, "hidden size")
  figures.add("layers", shape.num_hidden_layers, "layers")
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
