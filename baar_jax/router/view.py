"""An episode so far -> the text and tokens that the router decides from."""

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import tokenizers

from baar_jax.config import RouterConfig
from baar_jax.episode import DECISION_WORDS, SMALL, Episode, Step, Task

DECISION_TOKENS = ("<|SMALL|>", "<|BIG|>")
RECENT_STEPS = 10  # of the paper's hard-budget prompt
TOKEN_CHARS = 12  # longest merge: a short phrase, so that long ones share their parts
CUT_MARK = " ..."
NO_TOKENIZER = (
  "put the checkpoint's beside its weights, or let transformers write it: "
  "AutoTokenizer.from_pretrained(directory).save_pretrained(directory)"
)

TASK = "task: "
START = "\nstart: "
STEP = "\nstep {number}{budget}"
MODEL = " model:"
BUDGET = "/{steps}, {left} large calls left,"
PROPOSAL = " proposal: "
DOLLARS = " ${left:.4f} left,"  # behind the budget of calls, or in its place
ACTION = " action: "
RESULT = "\nresult: "

ROLE = "You choose which language model acts next in a task of many steps."
ROLE_HARD = "You choose, within a budget, which language model acts next in a task of many steps."
CHOICES = "\nSMALL is fast and cheap. BIG is strong and expensive, for steps that need reasoning."
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
  """One sequence that the router reads.

  Attributes:
    tokens: ids; the decisions taken so far are among them, the one to come is not.
    positions: where the decisions of steps `first`, `first` + 1, ... are predicted: the index of
      the token before each.
    first: the episode's step that the first position decides.
  """

  tokens: list[int]
  positions: list[int]
  first: int


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
  """Trains a byte-level BPE with the decision tokens and saves it as `tokenizer.json`.

  Merges may span words but not lines: an environment says few phrases often, and a whole phrase
  in one token keeps transcripts short.
  """
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
    [
      tokenizers.pre_tokenizers.Split("\n", "merged_with_next"),
      tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
  )
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(DECISION_TOKENS),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
    max_token_length=TOKEN_CHARS,
  )
  tokenizer.train_from_iterator(list(texts), trainer)  # a list: it is read in another thread
  _save(tokenizer, directory)


def adopt_tokenizer(source: Path, directory: Path) -> None:
  """Saves a checkpoint's tokenizer with the decisions as added tokens, behind all of its own.

  Raises:
    ValueError: the source has no `tokenizer.json`, or it cannot be read.
  """
  tokenizer = _read_tokenizer(source, NO_TOKENIZER)
  tokenizer.add_special_tokens(list(DECISION_TOKENS))
  _save(tokenizer, directory)


def has_decisions(directory: Path) -> bool:
  """Whether a checkpoint's tokenizer knows the decisions already: then it is a saved router."""
  tokenizer = _read_tokenizer(directory, NO_TOKENIZER)
  return None not in map(tokenizer.token_to_id, DECISION_TOKENS)


def count_tokens(directory: Path) -> int:
  """Tokens of a checkpoint's tokenizer, added ones among them. Raises ValueError if it has none."""
  return _read_tokenizer(directory, NO_TOKENIZER).get_vocab_size()


def _read_tokenizer(directory: Path, remedy: str) -> tokenizers.Tokenizer:
  path = directory / "tokenizer.json"
  if not path.exists():
    raise ValueError(f"{path} is missing: {remedy}")
  try:
    return tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:  # the package raises nothing narrower
    raise ValueError(f"{path} cannot be read ({error}); restore a copy of it") from error


def _save(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  temporary = directory / "tokenizer.tmp"
  tokenizer.save(str(temporary))
  os.replace(temporary, directory / "tokenizer.json")


def text_pieces(task: Task, episode: Episode) -> Iterator[str]:
  """The texts that both views encode one by one, uncut, to train a tokenizer on."""
  yield from (TASK, task.description, START)
  left = 0
  for number, step in enumerate(episode.steps, 1):
    left = (left + 1) % task.max_steps
    budget = BUDGET.format(steps=task.max_steps, left=left)
    for text in ("", budget):
      yield STEP.format(number=number, budget=text) + MODEL
    yield from (ACTION, step.action, RESULT, step.observation)
  yield from (ROLE, ROLE_HARD, CHOICES, HARD_LEFT, HARD_SPENT, ASK, ASK_SPENT)


def _left(
  steps: Sequence[Step], call_budget: int | None, usd_budget: float | None
) -> tuple[int | None, float | None]:
  """LARGE calls and dollars that are left of each budget; None where there is none."""
  calls = None if call_budget is None else call_budget - sum(s.model != SMALL for s in steps)
  if usd_budget is None:
    return calls, None
  return calls, max(0.0, usd_budget - sum(step.spent_usd for step in steps))


class View:
  """Turns episodes into windows, one way for training and for live decisions.

  The text before a decision depends on nothing but what was visible then, and a longer episode's
  text extends a shorter one's, so that a rollout can keep a KV cache.
  """

  def __init__(self, config: RouterConfig, directory: Path, proposals: bool = False):
    """Reads `tokenizer.json` from the directory. Raises ValueError if it is not there.

    Args:
      proposals: show what SMALL proposes before each decision, as a cascade's scorer reads it.
    """
    self._tokenizer = _read_tokenizer(directory, "run --stage=profile first")
    self.decision_ids = [self._tokenizer.token_to_id(token) for token in DECISION_TOKENS]
    if None in self.decision_ids:
      raise ValueError(
        f"{directory / 'tokenizer.json'} lacks the decision tokens {DECISION_TOKENS}"
      )
    self.config = config
    self._proposals = proposals
    self.cut_mark = self._tokenizer.encode(CUT_MARK, add_special_tokens=False).ids
    self._encode = functools.lru_cache(maxsize=1 << 16)(self._encode_uncached)

  @property
  def word_ids(self) -> list[tuple[int, ...]]:
    """The tokens of each decision's word, as they stand behind "model:"."""
    return [self._encode(f" {word}", None) for word in DECISION_WORDS]

  def windows(
    self,
    task: Task,
    steps: Sequence[Step],
    observation: str | None,
    call_budget: int | None,
    usd_budget: float | None = None,
    proposal: str | None = None,
  ) -> list[Window]:
    """The sequences of an episode so far.

    Args:
      steps: what has been done.
      observation: what the agent sees now, and the last window ends where its decision is
        predicted; None ends with the decision of the last step.
      call_budget: the cap on large calls, written where the config shows budgets; None is none.
      usd_budget: the cap on dollars, in the same way.
      proposal: SMALL's action for the decision to come, written where the view shows them.
    """
    budgets = (call_budget, usd_budget) if self.config.show_budget else (None, None)
    observations = [step.observation for step in steps]
    # What LARGE was asked instead of is not shown any more: the episodes that a scorer learns from
    # have no proposal there.
    proposals = [step.proposal if step.model == SMALL else None for step in steps]
    if observation is not None:
      observations.append(observation)
      proposals.append(proposal)
    if not self._proposals:
      proposals = [None] * len(proposals)
    if self.config.view == "paper":
      return [
        Window(tokens, [len(tokens) - 1], s)
        for s in range(len(observations))
        for tokens in [self._prompt(task, steps, observations, proposals[s], s, budgets)]
      ]
    return self._transcript(task, steps, observations, proposals, budgets)

  def episode_windows(self, task: Task, episode: Episode) -> list[Window]:
    """The sequences of a finished episode, every decision in exactly one of them."""
    return self.windows(task, episode.steps, None, episode.call_budget, episode.usd_budget)

  def outcome(self, step: Step, result: str) -> list[int]:
    """The tokens that a decision is followed by: previews of the action and of its result."""
    c = self.config
    return [*self._encode(step.action, c.action_tokens), *self._encode(result, c.result_tokens)]

  def text(self, window: Window) -> str:
    """What a window says, for a model that reads text."""
    return self._tokenizer.decode(window.tokens)

  def _transcript(self, task, steps, observations, proposals, budgets) -> list[Window]:
    """One append-only text; over the limit its older half is cut, in whole steps."""
    c = self.config
    head = [*self._encode(TASK, None), *self._encode(task.description, c.description_tokens)]
    start = [*self._encode(START, None), *self._encode(observations[0], c.result_tokens)]
    asks = [self._ask(task, steps, s, budgets, proposals[s]) for s in range(len(observations))]
    acts = [
      [self.decision_ids[step.model], *self._outcome(step, result, proposal)]
      for step, result, proposal in zip(steps, observations[1:], proposals)
    ]
    windows = [Window(head + start + asks[0], [], 0)]
    for s in range(len(observations)):
      grown = [] if s == 0 else acts[s - 1] + asks[s]
      if len(windows[-1].tokens) + len(grown) > c.max_tokens:
        first, kept = s, asks[s]
        while first > 0:
          step = asks[first - 1] + acts[first - 1]
          if len(head) + len(step) + len(kept) > c.max_tokens // 2:
            break
          first, kept = first - 1, step + kept
        omitted = [*self._encode(f"\nsteps 1-{first} omitted", None)]
        windows.append(Window(head + omitted + kept, [], s))
      else:
        windows[-1].tokens.extend(grown)
      windows[-1].positions.append(len(windows[-1].tokens) - 1)
    return windows

  def _prompt(self, task, steps, observations, proposal, s, budgets) -> list[int]:
    """The paper's prompt for one step (appendix "Prompts"): its fields in its order, our words.

    The paper has none for dollars; ours says of them what it says of calls.
    """
    c = self.config
    left, left_usd = _left(steps[:s], *budgets)
    hard = left is not None or left_usd is not None
    spent = left is not None and left <= 0
    description = self._encode(task.description, c.description_tokens)
    head = [*self._encode(f"{ROLE_HARD if hard else ROLE}\nTask: ", None), *description]
    if hard:
      head += self._encode("\nEnvironment: ", None)
      head += self._encode(observations[0], c.result_tokens)
      block, (call_budget, usd_budget) = "\nBudget:", budgets
      if left is not None:
        block += f" at most {call_budget} BIG calls, {call_budget - left} used, {left} left."
      if left_usd is not None:
        block += f" at most ${usd_budget:.4f}, ${left_usd:.4f} left."
      head += self._encode(f"{block} Step {s + 1} of {task.max_steps}.", None)
    head += self._encode(CHOICES, None)
    if left is not None:
      text = HARD_SPENT if spent else HARD_LEFT
      head += self._encode(text.format(left=left, steps=task.max_steps - s), None)
    if left_usd is not None:
      head += self._encode(HARD_DOLLARS.format(left=left_usd, steps=task.max_steps - s), None)
    head += self._encode("\nPrevious steps:" if s else "\nPrevious steps: none", None)
    tail = [*self._proposal(proposal), *self._encode(ASK_SPENT if spent else ASK, None)]
    oldest = max(0, s - RECENT_STEPS) if hard else 0
    recent, first, omitted = [], s, self._omitted(s)
    while first > oldest:
      step = steps[first - 1]
      word = DECISION_WORDS[step.model]
      block = [*self._encode(f"\nStep {first} [Model: {word}]", None)]
      block += self._outcome(step, observations[first])
      fewer = self._omitted(first - 1)
      if len(head) + len(fewer) + len(block) + len(recent) + len(tail) > c.max_tokens:
        break
      recent, first, omitted = block + recent, first - 1, fewer
    return [*head, *omitted, *recent, *tail]

  def _omitted(self, steps: int) -> tuple[int, ...]:
    return self._encode(f"\n(steps 1-{steps} omitted)", None) if steps else ()

  def _proposal(self, proposal: str | None) -> list[int]:
    if proposal is None:
      return []
    return [*self._encode(PROPOSAL, None), *self._encode(proposal, self.config.action_tokens)]

  def _ask(self, task, steps, s, budgets, proposal) -> list[int]:
    left, left_usd = _left(steps[:s], *budgets)
    budget = "" if left is None else BUDGET.format(steps=task.max_steps, left=left)
    if left_usd is not None:
      budget = (budget or f"/{task.max_steps},") + DOLLARS.format(left=left_usd)
    step = STEP.format(number=s + 1, budget=budget)
    if proposal is None:
      return list(self._encode(step + MODEL, None))
    return [*self._encode(step, None), *self._proposal(proposal), *self._encode(MODEL, None)]

  def _outcome(self, step: Step, result: str, proposal: str | None = None) -> list[int]:
    """What was done, unless that has been read as the proposal, and what came of it."""
    c = self.config
    result_tokens = [*self._encode(RESULT, None), *self._encode(result, c.result_tokens)]
    if proposal is not None and step.model == SMALL:
      return result_tokens
    action = [*self._encode(ACTION, None), *self._encode(step.action, c.action_tokens)]
    return [*action, *result_tokens]

  def _encode_uncached(self, text: str, limit: int | None) -> tuple[int, ...]:
    # What an environment prints must not be read as a decision.
    ids = self._tokenizer.encode(text.replace("<|", "< |"), add_special_tokens=False).ids
    if limit is not None and len(ids) > limit:
      ids = ids[:limit] + self.cut_mark
    return tuple(ids)
