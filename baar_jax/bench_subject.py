"""What the bench measures: a router, synthetic episodes, and the views between them."""

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from baar_jax import router
from baar_jax.batches import length_buckets
from baar_jax.config import VIEWS, Config
from baar_jax.episode import Episode, Step, Task
from baar_jax.qwen2 import Qwen2
from baar_jax.training import Scorer
from baar_jax.view import TOKEN_CHARS, View, Window, adopt_tokenizer, text_pieces, train_tokenizer

SEED = 0
WORDS = 400  # that the synthetic texts are made of
LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER_EPISODES = 8  # that the yardstick's tokenizer is trained on


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
  def training_episodes(self) -> list[Episode]:
    """Those of one gradient step."""
    return self.episodes[: self.config.bench.episodes]

  @property
  def buckets(self) -> list[int]:
    return length_buckets(self.config.router.max_tokens, self.config.router.buckets)

  def windows(self, episode: Episode, view: str = "transcript") -> list[Window]:
    return self.views[view].episode_windows(self.tasks[episode.task_id], episode)

  def lengths(self, episodes: Sequence[Episode], view: str = "transcript") -> list[int]:
    """Tokens of each window of the episodes, without padding."""
    return [len(window.tokens) for e in episodes for window in self.windows(e, view)]


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
    episodes=config.bench.episodes or (2 if cpu else 64),
    micro_episodes=config.bench.micro_episodes or (1 if cpu else 16),
  )
  config = dataclasses.replace(
    config,
    router=c,
    env=dataclasses.replace(config.env, max_steps=bench.steps),
    sft=dataclasses.replace(config.sft, micro_episodes=bench.micro_episodes),
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
  views = {name: View(dataclasses.replace(c, view=name), tokenizer) for name in VIEWS}
  view = views["transcript"]
  model = router.load_pretrained(c, view) if c.weights else router.build_model(c, SEED)
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
    return Step(observation, draw.randrange(2), action, 0.0, 0, 0, 0, logp=float(np.log(0.5)))

  tasks = [Task(f"bench-{i}", "test", text(c.description_tokens), steps) for i in range(count)]
  made = [[step() for _ in range(steps)] for _ in tasks]
  return tasks, [Episode(t.id, "bench", SEED, its, 1.0, "done") for t, its in zip(tasks, made)]
