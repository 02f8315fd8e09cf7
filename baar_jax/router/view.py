"""An episode so far -> the text that the router decides from -> its tokens."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from baar_jax.config import RouterConfig
from baar_jax.episode import Episode, Step, Task, decision_words
from baar_jax.rollout.specs import Cap, Live
from baar_jax.router.tokenizer import decision_tokens, read_tokenizer

CUT_MARK = " ..."  # stands behind a text that was cut
RECENT_STEPS = 10  # of the paper's hard-budget prompt

TASK = "task: "
START = "\nstart: "
STEP = "\nstep {number}{budget}"
PROPOSAL = " proposal: "
MODEL = " model:"
ACTION = " action: "
RESULT = "\nresult: "

ROLE = "You choose which language model acts next in a task of many steps."
ROLE_HARD = (
  "You choose, within a budget, which language model acts next in a task of many steps."
)
CHOICES = (
  "\nSMALL is fast and cheap. "
  "BIG is strong and expensive, for steps that need reasoning."
)
RANKED = (
  "\nSMALL is cheap, each next one is stronger and dearer, "
  "BIG is for steps of reasoning."
)
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
  positions: list[int]  # where the decisions of steps `first`, ... are predicted
  first: int  # the episode's step that the first position decides


class View:
  """Turns episodes into windows, in the same way for training and for live decisions.

  With a cascade's `proposals`, `logit_ids` are two: to take the shown proposal,
  or to go on.
  """

  def __init__(
    self,
    config: RouterConfig,
    directory: Path,
    proposals: bool = False,
    models: int = 2,
  ) -> None:
    """Read the directory's tokenizer.

    Raises:
      ValueError: it cannot be read or has other tokens.
    """
    self.config = config
    self.proposals = proposals
    self.words = decision_words(models)
    self.tokenizer = read_tokenizer(directory)
    tokens = decision_tokens(models)
    self.decision_ids = [self.tokenizer.token_to_id(token) for token in tokens]
    self.logit_ids = self.decision_ids[:2] if proposals else self.decision_ids
    if len({*self.decision_ids} - {None}) < models:
      lacks = f"lacks the decision tokens {', '.join(tokens)}"
      raise ValueError(f"{directory}/tokenizer.json {lacks}")
    last_id = max(self.tokenizer.get_vocab().values())
    if not config.weights and last_id >= config.vocab_size:
      has = f"has token {last_id}, beyond router.vocab_size"
      raise ValueError(f"{directory}/tokenizer.json {has}")
    self.encode = functools.lru_cache(maxsize=1 << 16)(self._encode)
    self.cut_mark = self.encode(CUT_MARK)

  def episode_windows(self, task: Task, episode: Episode) -> list[Window]:
    """Write an episode up to its last decision; each is in exactly one window."""
    cap = Cap(episode.call_budget, episode.usd_budget)
    return self._write(task, episode.steps, list_left(cap, episode.steps))

  def live_window(self, live: Live) -> Window:
    """Write the window that ends with the next decision of a live episode."""
    # The action of an episode's last step is not read, its model only as the proposer.
    step = Step(live.observation, live.proposer, "", proposal=live.proposal)
    steps = [*live.steps, step]
    left = live.told or list_left(live.cap, steps)
    return self._write(live.task, steps, left)[-1]

  def _write(
    self, task: Task, steps: Sequence[Step], left: Sequence[Cap]
  ) -> list[Window]:
    """Write windows; `left` is what is left of the caps before each step."""
    if not self.config.show_budget:
      left = [Cap()] * len(steps)
    if self.config.view == "paper":
      return write_prompts(self, task, steps, left)
    return write_transcript(self, task, steps, left)

  def encode_rule(self, text: str) -> tuple[int, ...]:
    """Encode a text of ours about SMALL and BIG in the words for the models."""
    return self.encode(name_models(text, self.words))

  def preview(self, title: str, text: str, limit: int) -> tuple[int, ...]:
    """Encode a title, and a text that is cut to `limit` tokens."""
    return self.encode(title) + self.encode(text, limit)

  def encode_proposal(self, step: Step) -> tuple[int, ...]:
    """Encode what a step's model proposed; nothing where no proposal is shown."""
    # The episodes that a scorer learns from lack it where the dearest model acted.
    dearest = len(self.words) - 1
    if not self.proposals or step.proposal is None or step.model == dearest:
      return ()
    title = PROPOSAL
    if dearest > 1:
      title = f" proposal of {self.words[step.model]}: "
    # Where a budget allows no dearer model, an intermediate one acts without proposing.
    return self.preview(title, step.action or step.proposal, self.config.action_tokens)

  def _encode(self, text: str, limit: int | None = None) -> tuple[int, ...]:
    """Encode a text by itself; a text over the limit is cut and marked."""
    # Without the escape, an environment could print what is read as a decision.
    escaped = text.replace("<|", "< |")
    ids = self.tokenizer.encode(escaped, add_special_tokens=False).ids
    if limit is None or len(ids) <= limit:
      return tuple(ids)
    return (*ids[:limit], *self.cut_mark)


def list_left(cap: Cap, steps: Sequence[Step]) -> list[Cap]:
  """List what is left of a cap before each step."""
  return [cap.after(steps[:s]) for s in range(len(steps))]


def write_transcript(
  view: View, task: Task, steps: Sequence[Step], left: Sequence[Cap]
) -> list[Window]:
  """Write one text that grows by whole steps, so that a rollout can keep a KV cache.

  Over the limit a new window keeps the newer half of the text.
  """
  c = view.config
  head = view.preview(TASK, task.description, c.description_tokens)
  start = view.preview(START, steps[0].observation, c.result_tokens)
  windows = [Window([*head, *start], [], 0)]
  blocks = []
  answer = ()
  for s, step in enumerate(steps):
    question = _write_question(view, task, step, s, left[s])
    window = windows[-1]
    if len(window.tokens) + len(answer) + len(question) <= c.max_tokens:
      window.tokens.extend(answer + question)
    else:
      room = c.max_tokens // 2 - len(head) - len(question)
      first = _find_first_block(blocks, [room] * s)
      omitted = view.encode(f"\nsteps 1-{first} omitted")
      tokens = [*head, *omitted, *sum(blocks[first:], ()), *question]
      window = Window(tokens, [], s)
      windows.append(window)
    window.positions.append(len(window.tokens) - 1)
    if s + 1 < len(steps):
      answer = (view.decision_ids[step.model],)
      # An action that was taken as proposed stands in the text already.
      if not view.encode_proposal(step):
        answer += view.preview(ACTION, step.action, c.action_tokens)
      answer += view.preview(RESULT, steps[s + 1].observation, c.result_tokens)
      blocks.append(question + answer)
  return windows


def _write_question(
  view: View, task: Task, step: Step, s: int, left: Cap
) -> tuple[int, ...]:
  """Write the line of step s up to its decision."""
  line = STEP.format(number=s + 1, budget=_write_budget(task, left))
  proposal = view.encode_proposal(step)
  if proposal:
    return view.encode(line) + proposal + view.encode(MODEL)
  return view.encode(line + MODEL)


def _write_budget(task: Task, left: Cap) -> str:
  """Write what is left of the caps into a transcript; nothing without one."""
  text = ""
  if left.calls is not None:
    text = f" {left.calls} large calls left,"
  if left.usd is not None:
    text += f" ${left.usd:.4f} left,"
  return text and f"/{task.max_steps},{text}"


def write_prompts(
  view: View, task: Task, steps: Sequence[Step], left: Sequence[Cap]
) -> list[Window]:
  """Write the paper's prompt for each step, with the newest steps that fit."""
  c = view.config
  blocks = []
  omitted = [()]
  for number, (step, after) in enumerate(pairwise(steps), 1):
    title = view.encode(f"\nStep {number} [Model: {view.words[step.model]}]")
    action = view.preview(ACTION, step.action, c.action_tokens)
    result = view.preview(RESULT, after.observation, c.result_tokens)
    blocks.append(title + action + result)
    omitted.append(view.encode(f"\n(steps 1-{number} omitted)"))
  windows = []
  for s in range(len(steps)):
    head, tail = _write_prompt(view, task, steps, left, s)
    room = c.max_tokens - len(head) - len(tail)
    rooms = [room - len(line) for line in omitted]
    oldest = max(0, s - RECENT_STEPS) if left[s] else 0
    first = _find_first_block(blocks[:s], rooms, oldest)
    tokens = [*head, *omitted[first], *sum(blocks[first:s], ()), *tail]
    windows.append(Window(tokens, [len(tokens) - 1], s))
  return windows


def _write_prompt(
  view: View, task: Task, steps: Sequence[Step], left: Sequence[Cap], s: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Write the paper's prompt of step s, before and after the previous steps.

  It is that of the paper's appendix "Prompts" in our words.
  """
  c = view.config
  limit = left[0]
  calls = left[s].calls
  usd = left[s].usd
  steps_left = task.max_steps - s
  role = ROLE
  rules = [CHOICES]
  ask = ASK
  budget = "\nBudget:"
  if calls is not None:
    budget += (
      f" at most {limit.calls} BIG calls, {limit.calls - calls} used, {calls} left."
    )
    rule = HARD_LEFT
    if calls <= 0:
      rule = HARD_SPENT
      ask = ASK_SPENT
    rules.append(rule.format(left=calls, steps=steps_left))
  if usd is not None:
    budget += f" at most ${limit.usd:.4f}, ${usd:.4f} left."
    rules.append(HARD_DOLLARS.format(left=usd, steps=steps_left))
  capped = ()
  if len(rules) > 1:
    role = ROLE_HARD
    budget += f" Step {s + 1} of {task.max_steps}."
    observation = steps[0].observation
    environment = view.preview("\nEnvironment: ", observation, c.result_tokens)
    capped = environment + view.encode_rule(budget)
  description = view.preview(f"{role}\nTask: ", task.description, c.description_tokens)
  head = description + capped
  for rule in rules:
    head += view.encode_rule(rule)
  head += view.encode("\nPrevious steps:" if s else "\nPrevious steps: none")
  return head, view.encode_proposal(steps[s]) + view.encode_rule(ask)


def _find_first_block(
  blocks: Sequence[Sequence[int]], rooms: Sequence[int], oldest: int = 0
) -> int:
  """Find the oldest of the newest blocks that fit.

  Args:
    blocks: tokens of one step each.
    rooms: how many tokens blocks[i:] may take, for each i.
    oldest: the index of the first block that may be kept.

  Returns:
    The index of that block; len(blocks) if not even the newest fits.
  """
  size = 0
  for first in reversed(range(oldest, len(blocks))):
    size += len(blocks[first])
    if size > rooms[first]:
      return first + 1
  return oldest


def text_pieces(task: Task, episode: Episode, models: int = 2) -> Iterator[str]:
  """List the texts that the views encode one by one, uncut, to train a tokenizer on."""
  yield from (TASK, task.description, START)
  for number, step in enumerate(episode.steps, 1):
    for left in (None, number % task.max_steps):
      budget = _write_budget(task, Cap(left))
      yield STEP.format(number=number, budget=budget) + MODEL
    yield from (ACTION, step.action, RESULT, step.observation)
  words = decision_words(models)
  for text in (ROLE, ROLE_HARD, CHOICES, HARD_LEFT, HARD_SPENT, ASK, ASK_SPENT):
    yield name_models(text, words)


def name_models(text: str, words: Sequence[str]) -> str:
  """Write a text of ours about SMALL and BIG in the words for more models."""
  if len(words) == 2:
    return text
  text = text.replace(CHOICES, RANKED).replace("BIG calls", "dearer calls")
  text = text.replace("SMALL or BIG", " or ".join(words))
  return text.replace("SMALL", words[0]).replace("BIG", words[-1])
