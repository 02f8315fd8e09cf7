"""An episode so far -> the text that the router decides from -> its tokens."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, pre_tokenizers

from baar_jax.config import Config, RouterConfig
from baar_jax.episode import Episode, Step, Task, decision_words

TOKEN_CHARS = 12  # of the longest token: a short phrase, so that long phrases share their parts
CUT_MARK = " ..."  # stands behind a text that was cut
PROBE = "step 1:\n é☂"  # a text that every tokenizer has to keep
RECENT_STEPS = 10  # of the paper's hard-budget prompt

TASK, START, ACTION, RESULT = "task: ", "\nstart: ", " action: ", "\nresult: "
STEP, PROPOSAL, MODEL = "\nstep {number}{budget}", " proposal: ", " model:"
BUDGET = "/{steps}, {left} large calls left,"

ROLE = "You choose which language model acts next in a task of many steps."
ROLE_HARD = "You choose, within a budget, which language model acts next in a task of many steps."
CHOICES = "\nSMALL is fast and cheap. BIG is strong and expensive, for steps that need reasoning."
RANKED = "\nSMALL is cheap, each next one is stronger and dearer, BIG is for steps of reasoning."
HARD_LEFT = (
  "\nThe budget is strict: once it is spent, only SMALL is left. "
  "{left} BIG calls must last for up to {steps} steps; keep them for where they matter."
)
HARD_DOLLARS = (
  "\nThe budget is strict: a call that may not fit is not made. "
  "${left:.4f} must last for up to {steps} steps; keep it for where it matters."
)
HARD_SPENT = "\nThe budget is spent: only SMALL is left for up to {steps} steps."
ASK = "\nWhich model should act next, SMALL or BIG?\nDecision:"
ASK_SPENT = "\nThe answer has to be SMALL.\nDecision:"


@dataclasses.dataclass(frozen=True)
class Window:
  """One sequence that the router reads."""

  tokens: list[int]  # each position, except the last, is followed by its decision
  positions: list[int]  # where the decisions of steps `first`, `first` + 1, ... are predicted
  first: int  # the episode's step that the first position decides


def name_models(text: str, words: Sequence[str]) -> str:
  """A text of ours about SMALL and BIG, in the words for more models; for two as it is."""
  if len(words) == 2:
    return text
  text = text.replace(CHOICES, RANKED).replace("BIG calls", "dearer calls")
  text = text.replace("SMALL or BIG", " or ".join(words))
  return text.replace("SMALL", words[0]).replace("BIG", words[-1])


def text_pieces(task: Task, episode: Episode, models: int = 2) -> Iterator[str]:
  """The texts that the views encode one by one, uncut, to train a tokenizer on."""
  yield from (TASK, task.description, START)
  for number, step in enumerate(episode.steps, 1):
    for budget in ("", BUDGET.format(steps=task.max_steps, left=number % task.max_steps)):
      yield STEP.format(number=number, budget=budget) + MODEL
    yield from (ACTION, step.action, RESULT, step.observation)
  for text in (ROLE, ROLE_HARD, CHOICES, HARD_LEFT, HARD_SPENT, ASK, ASK_SPENT):
    yield name_models(text, decision_words(models))


class View:
  """Turns episodes into windows, in the same way for training and for live decisions.

  A transcript grows by whole steps until it is cut, so that a rollout can keep a KV cache. With a
  cascade's `proposals`, `logit_ids` are two: to take the shown proposal, or to go on.
  """

  def __init__(self, config: RouterConfig, directory: Path, proposals=False, models=2):
    """Raises ValueError if the directory's tokenizer cannot be read or has other tokens."""
    self.config, self.proposals, self.words = config, proposals, decision_words(models)
    self.tokenizer = read_tokenizer(directory)
    tokens, last_id = decision_tokens(models), max(self.tokenizer.get_vocab().values())
    self.decision_ids = [self.tokenizer.token_to_id(token) for token in tokens]
    self.logit_ids = self.decision_ids[:2] if proposals else self.decision_ids
    if len({*self.decision_ids} - {None}) < models:
      raise ValueError(f"{directory}/tokenizer.json lacks the decision tokens {', '.join(tokens)}")
    if not config.weights and last_id >= config.vocab_size:
      raise ValueError(f"{directory}/tokenizer.json has token {last_id}, beyond router.vocab_size")
    self._encode_text = functools.lru_cache(maxsize=1 << 16)(self._encode_text)
    self.cut_mark = self._encode_text(CUT_MARK, None)

  def episode_windows(self, task: Task, episode: Episode) -> list[Window]:
    """The sequences of an episode up to its last decision; each decision is in exactly one."""
    if not self.config.show_budget:
      episode = dataclasses.replace(episode, call_budget=None, usd_budget=None)
    paper = self.config.view == "paper"
    return (self._write_prompts if paper else self._write_transcript)(task, episode)

  def live_window(self, live) -> Window:
    """The sequence at whose end the next decision of a `rollout.policies.Live` is predicted."""
    # The action of an episode's last step is not read, its model only as the one that proposes.
    steps = [*live.steps, Step(live.observation, live.proposer, "", proposal=live.step.proposal)]
    caps = live.call_budget.limit, live.dollar_budget.limit_usd
    episode = Episode(live.task.id, "", 0, steps, 0.0, "", *caps)
    return self.episode_windows(live.task, episode)[-1]

  def encode(self, *pieces: str | tuple[str, int]) -> list[int]:
    """Tokens of texts, each encoded alone; of (text, limit) so many, then `cut_mark` if cut."""
    limited = [(piece, None) if isinstance(piece, str) else piece for piece in pieces]
    return [token for text, limit in limited for token in self._encode_text(text, limit)]

  def _encode_text(self, text: str, limit: int | None) -> tuple[int, ...]:
    # Without the escape, an environment could print a text that is read as a decision.
    ids = self.tokenizer.encode(text.replace("<|", "< |"), add_special_tokens=False).ids
    cut = limit is not None and len(ids) > limit
    return (*ids[:limit], *self.cut_mark) if cut else tuple(ids)

  def _write_transcript(self, task: Task, episode: Episode) -> list[Window]:
    """One text that grows by whole steps; over the limit a new window keeps its newer half."""
    c, steps = self.config, episode.steps
    head = self.encode(TASK, (task.description, c.description_tokens))
    windows = [Window(head + self.encode(START, (steps[0].observation, c.result_tokens)), [], 0)]
    blocks, answer = [], []
    for s, step in enumerate(steps):
      question = self._write_question(task, episode, s)
      if len(windows[-1].tokens) + len(answer) + len(question) <= c.max_tokens:
        windows[-1].tokens.extend(answer + question)
      else:
        free = c.max_tokens // 2 - len(head) - len(question)
        first = _find_first_block(blocks, [free] * s)
        omitted = self.encode(f"\nsteps 1-{first} omitted")
        windows.append(Window(head + omitted + sum(blocks[first:], []) + question, [], s))
      windows[-1].positions.append(len(windows[-1].tokens) - 1)
      if s + 1 < len(steps):
        # An action that was taken as proposed stands in the text already.
        outcome = self._write_outcome(steps, s, show_action=not self._show_proposal(step))
        answer = [self.decision_ids[step.model], *outcome]
        blocks.append(question + answer)
    return windows

  def _write_question(self, task: Task, episode: Episode, s: int) -> list[int]:
    """The line of a step up to its decision."""
    calls, usd = count_left(episode.call_budget, episode.usd_budget, episode.steps[:s])
    budget = "" if calls is None else BUDGET.format(steps=task.max_steps, left=calls)
    if usd is not None:
      budget = f"{budget or f'/{task.max_steps},'} ${usd:.4f} left,"
    line, proposal = STEP.format(number=s + 1, budget=budget), self._show_proposal(episode.steps[s])
    return self.encode(line, *proposal, MODEL) if proposal else self.encode(line + MODEL)

  def _write_prompts(self, task: Task, episode: Episode) -> list[Window]:
    """The paper's prompt for each step, with the newest of the steps before it that fit."""
    windows, blocks, omitted = [], [], [[]]
    for s, step in enumerate(episode.steps):
      head, tail = self._write_prompt(task, episode, s)
      free = [self.config.max_tokens - len(head) - len(line) - len(tail) for line in omitted]
      capped = (episode.call_budget, episode.usd_budget) != (None, None)
      first = _find_first_block(blocks, free, oldest=max(0, s - RECENT_STEPS) if capped else 0)
      tokens = head + omitted[first] + sum(blocks[first:], []) + tail
      windows.append(Window(tokens, [len(tokens) - 1], s))
      if s + 1 < len(episode.steps):
        title = f"\nStep {s + 1} [Model: {self.words[step.model]}]"
        blocks.append(self.encode(title) + self._write_outcome(episode.steps, s))
        omitted.append(self.encode(f"\n(steps 1-{s + 1} omitted)"))
    return windows

  def _write_prompt(self, task: Task, episode: Episode, s: int) -> tuple[list[int], list[int]]:
    """The paper's prompt (appendix "Prompts", in our words) before and after the previous steps."""
    c, limit, rules = self.config, episode.call_budget, []
    calls, usd = count_left(episode.call_budget, episode.usd_budget, episode.steps[:s])
    budget, steps_left = "\nBudget:", task.max_steps - s
    if calls is not None:
      budget += f" at most {limit} BIG calls, {limit - calls} used, {calls} left."
      rules.append((HARD_LEFT if calls > 0 else HARD_SPENT).format(left=calls, steps=steps_left))
    if usd is not None:
      budget += f" at most ${episode.usd_budget:.4f}, ${usd:.4f} left."
      rules.append(HARD_DOLLARS.format(left=usd, steps=steps_left))
    role, budget_pieces = ROLE, []
    if rules:
      role, environment = ROLE_HARD, (episode.steps[0].observation, c.result_tokens)
      budget += f" Step {s + 1} of {task.max_steps}."
      budget_pieces = ["\nEnvironment: ", environment, name_models(budget, self.words)]
    previous = "\nPrevious steps:" if s else "\nPrevious steps: none"
    description = task.description, c.description_tokens
    choices, *rules = (name_models(text, self.words) for text in (CHOICES, *rules))
    head = self.encode(f"{role}\nTask: ", description, *budget_pieces, choices, *rules, previous)
    ask = name_models(ASK if calls is None or calls > 0 else ASK_SPENT, self.words)
    return head, self.encode(*self._show_proposal(episode.steps[s]), ask)

  def _show_proposal(self, step: Step) -> list:
    # The episodes that a scorer learns from have no proposal where the dearest model acted.
    word, dearest = self.words[step.model], len(self.words) - 1
    shown = self.proposals and step.proposal is not None and step.model != dearest
    title = PROPOSAL if dearest == 1 else f" proposal of {word}: "
    # Where a budget allows no dearer model, one between acts without having proposed.
    return [title, (step.action or step.proposal, self.config.action_tokens)] if shown else []

  def _write_outcome(self, steps: Sequence[Step], s: int, show_action: bool = True) -> list[int]:
    action = [ACTION, (steps[s].action, self.config.action_tokens)] if show_action else []
    result = steps[s + 1].observation, self.config.result_tokens
    return self.encode(*action, RESULT, result)


def open_view(config: Config, directory: Path, family: str = "") -> View:
  """The view of a run's router, whose tokenizer is in `directory`; a cascade's shows proposals."""
  return View(config.router, directory, family == "cascade", len(config.models.names))


def count_left(calls: int | None, usd: float | None, steps: Sequence[Step]) -> tuple:
  """LARGE calls and dollars that are left of caps after some steps; None without a cap."""
  if calls is not None:
    calls -= sum(step.large_calls for step in steps)
  if usd is not None:
    usd = max(0.0, usd - sum(step.spent_usd for step in steps))
  return calls, usd


def _find_first_block(blocks: list[list[int]], free: Sequence[int], oldest: int = 0) -> int:
  """Index of the oldest of the newest blocks that fit, if blocks[i:] may take `free[i]` tokens."""
  size = 0
  for first in reversed(range(oldest, len(blocks))):
    size += len(blocks[first])
    if size > free[first]:
      return first + 1
  return oldest


def decision_tokens(models: int) -> list[str]:
  return [f"<|{word}|>" for word in decision_words(models)]


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path, models=2) -> None:
  """Trains a byte-level BPE with the decision tokens and saves it as `tokenizer.json`.

  Merges may span words, but not lines: environments repeat a few phrases.
  """
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  split = pre_tokenizers.Split("\n", "merged_with_next")
  as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
  tokenizer.decoder = decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=decision_tokens(models),
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
    max_token_length=TOKEN_CHARS,
  )
  tokenizer.train_from_iterator(list(texts), trainer)  # a list, because another thread reads it
  _save(tokenizer, directory)


def adopt_tokenizer(source: Path, directory: Path, models: int = 2) -> None:
  """Saves a checkpoint's tokenizer with the decisions added behind all of its tokens."""
  tokenizer = read_tokenizer(source)
  tokenizer.add_special_tokens(decision_tokens(models))
  _save(tokenizer, directory)


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
  """A directory's `tokenizer.json`; ValueError if it cannot be read."""
  path = directory / "tokenizer.json"
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(require_file(path)))
    if tokenizer.decode(tokenizer.encode(PROBE).ids) != PROBE:
      raise ValueError("it does not keep the text")
    return tokenizer
  except BaseException as error:  # the package raises nothing narrower: its panics are these
    problem = f"{path} cannot be read ({str(error).partition(chr(10))[0]})"
    raise ValueError(f"{problem}: restore a copy; a run's is made by --stage=profile") from error


def require_file(path: Path) -> Path:
  """The path; ValueError unless it is a regular file. A pipe would be waited for."""
  if not path.is_file():
    raise ValueError("it is missing or no regular file")
  return path


def _save(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  temporary = directory / "tokenizer.tmp"
  tokenizer.save(str(temporary))
  os.replace(temporary, directory / "tokenizer.json")
