"""The zero-shot router: a strong model is shown the paper's prompt and answers SMALL or BIG."""

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from baar_jax.config import RouterConfig
from baar_jax.episode import DECISION_WORDS, SMALL, Task
from baar_jax.llms.agent import Agent, Hold
from baar_jax.rollout.live import Decision, Live, Policy
from baar_jax.router.view import View

# Room for a strong model (our choice).
SIZES = {"max_tokens": 4096, "description_tokens": 256, "action_tokens": 32, "result_tokens": 64}
TRIES = 2  # an answer that cannot be read is asked for once more; then SMALL acts (our choice)


def judged_view(config: RouterConfig, tokenizer: Path) -> View:
  """The paper's prompt with its budget."""
  return View(dataclasses.replace(config, view="paper", show_budget=True, **SIZES), tokenizer)


def read_answer(text: str) -> int | None:
  """The model that an answer names; None if it names none or several."""
  words = set(re.findall(rf"\b({'|'.join(DECISION_WORDS)})\b", text))
  return DECISION_WORDS.index(words.pop()) if len(words) == 1 else None


class ZeroShotPolicy(Policy):
  """Does what the judge says; the ledger counts the judge's calls beside the router's."""

  def __init__(self, name: str, judge: Callable[[Task, int, Hold], Agent], view: View):
    """`judge` is `Pair.judge`'s, and `view` is `judged_view`'s."""
    self.name, self._judge, self._view = name, judge, view

  def prepare(self, live: Live) -> None:
    prompt = self._view.tokenizer.decode(self._view.live_window(live).tokens)
    question = [{"role": "user", "content": prompt}]
    judge = self._judge(live.task, live.job.seed, live.hold)
    start, calls = time.monotonic(), []
    for attempt in range(TRIES):
      place = TRIES * len(live.steps) + attempt
      reply = judge.reply(question, place)
      calls += reply.calls("judge")
      model = read_answer(reply.text)
      if model is not None:
        break
    model, latency_s = SMALL if model is None else model, time.monotonic() - start
    live.judged = Decision(model, latency_s=latency_s, calls=calls)

  def choose(self, ready: Sequence[Live]) -> list[Decision]:
    return [Decision(live.judged.model) for live in ready]
