"""Turn episodes into the text and the tokens that a router reads.

A transcript (the default) is one text that grows with its episode, in which each
decision is a token; a prompt (the paper's) is written anew for every step. Both are cut
to windows of `max_tokens`. The tokenizer is that of the weights. In these texts LARGE
is called BIG, as in the paper's prompts.
"""

import functools
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import decoders, pre_tokenizers

from baar_jax.config import RouterConfig
from baar_jax.episode import Episode, Step, Task
from baar_jax.rollout.specs import Cap, Live
from baar_jax.store import require_file

# What a directory of weights may have beside them, their shape and tokenizer.json.
COMPANIONS = ("chat_template.jinja", "generation_config.json", "tokenizer_config.json")

# All these texts are part of the input of trained routers, with words such as
# "dearer" that the project's code and documentation avoid. Do not change a character of
# these texts: routers and tokenizers that are already trained would read another input.
CUT_MARK = " ..."  # text that marks the end of a text that was cut
RECENT_STEPS = 10  # largest number of previous steps in the prompt of a capped episode

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
ASK = "Which model should act next, SMALL or BIG?\nDecision:"
ASK_SPENT = "The answer has to be SMALL.\nDecision:"
# The chat template of Qwen2.5: the texts before the system's part of a prompt, before
# the user's part, and before the answer. The paper calls its whole prompt the system's;
# that the question is the user's is our choice.
CHAT_TURNS = (
  "<|im_start|>system\n",
  "<|im_end|>\n<|im_start|>user\n",
  "<|im_end|>\n<|im_start|>assistant\n",
)


def decision_words(models: int) -> tuple[str, ...]:
  """Return the words that name the models in prompts and answers, the cheapest first.

  Two models are SMALL and BIG, as in the paper's prompts. More models are named by rank
  (our choice).

  Args:
    models: number of models.
  """
  if models == 2:
    return ("SMALL", "BIG")
  return tuple(f"M{rank}" for rank in range(1, models + 1))


class Window(NamedTuple):
  """A sequence of tokens that the router reads, and the places of decisions in it.

  Attributes:
    tokens: The token ids. With --config.router.view=transcript, a decision token
      follows each position except the last.
    positions: Indices in `tokens`, ascending. At each one the router predicts the
      decision of a step; steps follow each other. With --config.router.view=paper there
      is one position.
  """

  tokens: list[int]
  positions: list[int]


class View:
  """Turn episodes into windows, in the same way for training and live decisions.

  Attributes:
    config: The router's settings.
    words: The word for each model in texts, cheapest first.
    tokenizer: The router's tokenizer.
    decision_ids: The decision token of each model, cheapest first.
    logit_ids: The decision tokens whose logits decide.
    turns: The tokens of `CHAT_TURNS`; without roles if the tokenizer lacks the special
      tokens of the chat template.
    tokenize: Encodes a text separately from other texts, and caches the result.
    cut_mark: The tokens that follow a text that was cut.
  """

  def __init__(
    self,
    config: RouterConfig,
    tokenizer: tokenizers.Tokenizer,
    models: int = 2,
    answers: int | None = None,
  ) -> None:
    """Find the decision tokens.

    Args:
      config: the router's settings.
      tokenizer: a tokenizer with a decision token for each model.
      models: number of models.
      answers: number of answers between which the router decides; None is one for each
        model.
    """
    self.config = config
    self.words = decision_words(models)
    self.tokenizer = tokenizer
    self.decision_ids = [*map(tokenizer.token_to_id, decision_tokens(models))]
    self.logit_ids = self.decision_ids[:answers]
    turns = CHAT_TURNS
    if tokenizer.token_to_id("<|im_start|>") is None:
      turns = ("", "\n", "")
    self.turns = [
      tokenizer.encode(turn, add_special_tokens=False).ids for turn in turns
    ]
    self.tokenize = functools.lru_cache(maxsize=1 << 16)(self._tokenize)
    self.cut_mark = self.tokenize(CUT_MARK)

  def encode(self, task: Task, episode: Episode) -> list[Window]:
    """Write an episode as windows, up to its last decision.

    Returns:
      Windows in the order of the steps. Each decision is in exactly one window.
    """
    cap = Cap(episode.call_budget, episode.usd_budget)
    return self._write(task, episode.steps, list_remaining_caps(cap, episode.steps))

  def live_window(self, live: Live) -> Window:
    """Write the window in which the router predicts a live episode's next decision.

    Returns:
      A window. At its last position the router predicts this decision.
    """
    steps = live.history
    caps = live.remaining_caps or list_remaining_caps(live.cap, steps)
    return self._write(live.task, steps, caps)[-1]

  def _write(
    self, task: Task, steps: Sequence[Step], remaining_caps: Sequence[Cap]
  ) -> list[Window]:
    """Write steps as windows, in the configured view: transcripts or prompts.

    Args:
      task: the task of the episode.
      steps: the steps. The last step is written only up to its decision.
      remaining_caps: the cap that remains before each step.
    """
    if self.config.view == "paper":
      return write_prompts(self, task, steps, remaining_caps)
    return write_transcript(self, task, steps, remaining_caps)

  def encode_rule(self, text: str) -> tuple[int, ...]:
    """Encode one of these texts, after `name_models` has put in the words."""
    return self.tokenize(name_models(text, self.words))

  def preview(self, title: str, text: str, limit: int) -> tuple[int, ...]:
    """Encode a title and a text, and cut the text to a limit of tokens.

    Args:
      title: the words before the text, such as " action: "; they are not cut.
      text: the text.
      limit: largest number of tokens of the text; `cut_mark` is added if it is cut.
    """
    return self.tokenize(title) + self.tokenize(text, limit)

  def encode_proposal(self, step: Step) -> tuple[int, ...]:
    """Encode the action that a model proposed in a step; see families/cascade.py.

    Returns:
      Token ids; none if the text shows no proposal for this step.
    """
    # No proposal is written for a step of the costliest model, because the episodes
    # that train the router have none there.
    costliest = len(self.words) - 1
    if step.proposal is None or step.model == costliest:
      return ()
    title = PROPOSAL
    if costliest > 1:
      title = f" proposal of {self.words[step.model]}: "
    # A step that waits for its decision has no action yet, so its proposal is written.
    # A past step's action is written: the accepted proposal, or the action of an
    # intermediate model that acted at once because no costlier model was affordable.
    return self.preview(title, step.action or step.proposal, self.config.action_tokens)

  def _tokenize(self, text: str, limit: int | None = None) -> tuple[int, ...]:
    """Encode a text separately from other texts, and cut it to a limit of tokens.

    Args:
      text: any text; decision tokens in it are escaped.
      limit: largest number of tokens; None is no limit. `cut_mark` follows a text that
        was cut.
    """
    # Without the escape, an environment could print a text that the router reads as a
    # decision.
    escaped = text.replace("<|", "< |")
    ids = self.tokenizer.encode(escaped, add_special_tokens=False).ids
    if limit is None or len(ids) <= limit:
      return tuple(ids)
    return (*ids[:limit], *self.cut_mark)


def list_remaining_caps(cap: Cap, steps: Sequence[Step]) -> list[Cap]:
  """Compute the cap that remains before each step."""
  caps = []
  large_calls = 0
  usd = 0.0
  for step in steps:
    caps.append(cap.minus(large_calls, usd))
    large_calls += step.large_calls
    usd += step.counted_usd
  return caps


def write_transcript(
  view: View, task: Task, steps: Sequence[Step], remaining_caps: Sequence[Cap]
) -> list[Window]:
  """Write an episode as one text that grows by whole steps.

  A policy can keep the KV cache of a text that only grows. If the next step would
  exceed --config.router.max_tokens, a new window begins. The new window omits as many
  of the oldest steps as leave at least three quarters of `max_tokens` tokens; it has
  fewer tokens only if one more step would not fit. The paper's router reads the most
  recent 2,000 tokens at each step; cutting rarely keeps the KV cache (our choice).

  Args:
    view: the tokenizer, the words for the models and the settings.
    task: the task of the episode.
    steps: the steps. The last step is written only up to its decision.
    remaining_caps: the cap that remains before each step.

  Returns:
    Windows with one or more decisions each.
  """
  config = view.config
  head = view.preview(TASK, task.description, config.description_tokens)
  start = view.preview(START, steps[0].observation, config.result_tokens)
  windows = [Window([*head, *start], [])]
  blocks = []
  answer = ()
  for s, step in enumerate(steps):
    question = _write_question(view, task, step, s, remaining_caps[s])
    window = windows[-1]
    if len(window.tokens) + len(answer) + len(question) <= config.max_tokens:
      window.tokens.extend(answer + question)
    else:
      room = config.max_tokens - len(head) - len(question)
      limit = room - len(view.tokenize(f"\nsteps 1-{s} omitted"))
      fitting = _find_first_block(blocks, [limit] * s, oldest=1)
      short = _find_first_block(blocks, [room - config.max_tokens // 4] * s, oldest=1)
      # One step more than those that leave the text too short, if it fits.
      first = max(fitting, short - 1)
      omitted = view.tokenize(f"\nsteps 1-{first} omitted")
      tokens = [*head, *omitted, *sum(blocks[first:], ()), *question]
      window = Window(tokens, [])
      windows.append(window)
    window.positions.append(len(window.tokens) - 1)
    if s + 1 < len(steps):
      answer = (view.decision_ids[step.model],)
      # The action is written only if the text shows no proposal for this step. If the
      # text shows a proposal, this proposal is the action.
      if not view.encode_proposal(step):
        answer += view.preview(ACTION, step.action, config.action_tokens)
      answer += view.preview(RESULT, steps[s + 1].observation, config.result_tokens)
      blocks.append(question + answer)
  return windows


def _write_question(
  view: View, task: Task, step: Step, s: int, remaining_cap: Cap
) -> tuple[int, ...]:
  """Write the transcript's line of step s up to its decision, as tokens."""
  line = STEP.format(number=s + 1, budget=_write_budget(task, remaining_cap))
  proposal = view.encode_proposal(step)
  if proposal:
    return view.tokenize(line) + proposal + view.tokenize(MODEL)
  return view.tokenize(line + MODEL)


def _write_budget(task: Task, remaining_cap: Cap) -> str:
  """Write the remaining cap for a transcript's line; "" without a cap.

  The paper tells it to BoPO and the judge; here each text router reads it (our choice).
  """
  text = ""
  if remaining_cap.calls is not None:
    text = f" {remaining_cap.calls} large calls left,"
  if remaining_cap.usd is not None:
    text += f" ${remaining_cap.usd:.4f} left,"
  return text and f"/{task.max_steps},{text}"


def write_prompts(
  view: View, task: Task, steps: Sequence[Step], remaining_caps: Sequence[Cap]
) -> list[Window]:
  """Write the paper's prompt for each step, with the newest previous steps that fit.

  Args:
    view: the tokenizer, the words for the models and the settings.
    task: the task of the episode.
    steps: the steps. The last step is written only up to its decision.
    remaining_caps: the cap that remains before each step.

  Returns:
    A window with one decision for each step.
  """
  config = view.config
  blocks = []
  omitted = [()]
  for number, (step, after) in enumerate(pairwise(steps), 1):
    title = view.tokenize(f"\nStep {number} [Model: {view.words[step.model]}]")
    action = view.preview(ACTION, step.action, config.action_tokens)
    result = view.preview(RESULT, after.observation, config.result_tokens)
    blocks.append(title + action + result)
    omitted.append(view.tokenize(f"\n(steps 1-{number} omitted)"))
  windows = []
  for s in range(len(steps)):
    head, tail = _write_prompt(view, task, steps, remaining_caps, s)
    limit = config.max_tokens - len(head) - len(tail)
    limits = [limit - len(line) for line in omitted]
    oldest = max(0, s - RECENT_STEPS) if remaining_caps[s] else 0
    first = _find_first_block(blocks[:s], limits, oldest)
    tokens = [*head, *omitted[first], *sum(blocks[first:s], ()), *tail]
    windows.append(Window(tokens, [len(tokens) - 1]))
  return windows


def _write_prompt(
  view: View, task: Task, steps: Sequence[Step], remaining_caps: Sequence[Cap], s: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
  """Write the parts of the paper's prompt around the list of previous steps.

  The prompt has the fields of the paper's appendix "Prompts" in the same order, in our
  words and without the models' names. The paper does not define the context after
  "Environment:"; here it is the first observation, cut (our choice).

  Returns:
    For the prompt of step s, the tokens before the list of previous steps, and the
    tokens after the list.
  """
  config = view.config
  cap = remaining_caps[0]
  calls = remaining_caps[s].calls
  usd = remaining_caps[s].usd
  steps_left = task.max_steps - s
  role = ROLE
  rules = [CHOICES]
  ask = ASK
  budget = "\nBudget:"
  if calls is not None:
    budget += f" at most {cap.calls} BIG calls, {cap.calls - calls} used, {calls} left."
    rule = HARD_LEFT
    if calls <= 0:
      rule = HARD_SPENT
      ask = ASK_SPENT
    rules.append(rule.format(left=calls, steps=steps_left))
  if usd is not None:
    budget += f" at most ${cap.usd:.4f}, ${usd:.4f} left."
    rules.append(HARD_DOLLARS.format(left=usd, steps=steps_left))
  budget_lines = ()
  if len(rules) > 1:
    role = ROLE_HARD
    budget += f" Step {s + 1} of {task.max_steps}."
    observation = steps[0].observation
    environment = view.preview("\nEnvironment: ", observation, config.result_tokens)
    budget_lines = environment + view.encode_rule(budget)
  title = f"{role}\nTask: "
  description = view.preview(title, task.description, config.description_tokens)
  head = description + budget_lines
  for rule in rules:
    head += view.encode_rule(rule)
  head += view.tokenize("\nPrevious steps:" if s else "\nPrevious steps: none")
  system, user, answer = view.turns
  tail = (*view.encode_proposal(steps[s]), *user, *view.encode_rule(ask), *answer)
  return (*system, *head), tail


def _find_first_block(
  blocks: Sequence[Sequence[int]], limits: Sequence[int], oldest: int = 0
) -> int:
  """Find the oldest step that fits into a text with all newer steps.

  Args:
    blocks: the tokens of each step, oldest step first.
    limits: for each i, the largest number of tokens that blocks[i:] may have.
    oldest: index of the oldest step that may be kept.

  Returns:
    The index of the step; len(blocks) if not even the newest step fits.
  """
  size = 0
  for first in reversed(range(oldest, len(blocks))):
    size += len(blocks[first])
    if size > limits[first]:
      return first + 1
  return oldest


def name_models(text: str, words: Sequence[str]) -> str:
  """Replace SMALL and BIG in a text by the words for more than two models.

  Args:
    text: one of these texts.
    words: the word for each model, cheapest first. With two words the text does not
      change.
  """
  if len(words) == 2:
    return text
  text = text.replace(CHOICES, RANKED).replace("BIG calls", "dearer calls")
  text = text.replace("SMALL or BIG", " or ".join(words))
  return text.replace("SMALL", words[0]).replace("BIG", words[-1])


def decision_tokens(models: int) -> list[str]:
  """Return the text of each model's decision token, cheapest model first.

  The paper decides by tokens SMALL and LARGE. Here these are added tokens that start as
  the first token of their word, and losses are normalised over them alone (our choice).
  """
  return [f"<|{word}|>" for word in decision_words(models)]


def make_byte_tokenizer(models: int = 2) -> tokenizers.Tokenizer:
  """Make a tokenizer with a token for each byte and each model's decision."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocab = {character: number for number, character in enumerate(alphabet)}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(decision_tokens(models))
  return tokenizer


def adopt_tokenizer(source: Path, directory: Path, models: int = 2) -> None:
  """Copy the tokenizer of pretrained weights, and add the decision tokens.

  A new token gets an id above all existing ids. A decision token that the tokenizer
  already has keeps its id. `COMPANIONS` are copied, too, for the export.

  Args:
    source: directory of the weights, which is not changed.
    directory: the copy is written there.
    models: number of models; each has a decision token.

  Raises:
    ValueError: the weights' tokenizer cannot be read.
  """
  tokenizer = read_tokenizer(source)
  tokenizer.add_special_tokens(decision_tokens(models))
  directory.mkdir(parents=True, exist_ok=True)
  for path in map(source.joinpath, COMPANIONS):
    if path.exists():
      shutil.copy(require_file(path), directory)
  # No reader sees half of the file.
  temporary = directory / "tokenizer.tmp"
  tokenizer.save(str(temporary))
  temporary.replace(directory / "tokenizer.json")


def read_tokenizer(directory: Path) -> tokenizers.Tokenizer:
  """Read the tokenizer from a directory's `tokenizer.json`.

  Raises:
    ValueError: the file is missing or damaged.
  """
  path = directory / "tokenizer.json"
  try:
    return tokenizers.Tokenizer.from_file(str(require_file(path)))
  # The tokenizers package raises a BaseException after an internal failure (a panic).
  # The exception has no narrower public class.
  except BaseException as error:
    line = str(error).partition("\n")[0]
    remedy = "Restore a copy, or (in a run) delete the file and run --stage=profile."
    raise ValueError(f"Cannot read {path} ({line}). {remedy}") from error
