"""Test the text that the router reads: its contents, its cuts and its tokens."""

import functools
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import TASK, call
from tiny_router import TOKENIZER, VIEW, make_view

from baar_jax.episode import Episode, Step, Task
from baar_jax.rollout.specs import Cap, Job, Live
from baar_jax.router import view as texts
from baar_jax.router.view import CUT_MARK

SMALL = "<|SMALL|>"
BIG = "<|BIG|>"


decode = functools.partial(TOKENIZER.decode, skip_special_tokens=False)


def episode_of(models, calls=(), **budgets) -> Episode:
  """Make an episode with the observations "see 1", ... and the actions "go 1", ...

  Args:
    models: the model of each step.
    calls: for each step, dollars and kind of its calls.
    budgets: the caps of the episode.
  """
  steps = [Step(f"see {i}", model, f"go {i}") for i, model in enumerate(models, 1)]
  for step, each in zip(steps, calls):
    step.calls = [call(step.model, usd, kind=kind) for usd, kind in each]
  return Episode("plant-0", "test", "profile", 0, steps, 1.0, "done", **budgets)


def live_window(view, episode, s):
  """Return the text that the router reads before step s, while the episode runs."""
  live = Live(Job(TASK, "test", 0), Cap(episode.call_budget, episode.usd_budget))
  live.steps = episode.steps[:s]
  live.observation = episode.steps[s].observation
  return view.live_window(live)


environment_texts = st.text(st.sampled_from("abc\n é☂<|>"), max_size=30) | st.just(
  f"a{BIG}b"
)


@st.composite
def episodes(draw):
  """Draw an episode with any texts and caps that it keeps."""
  row = st.builds(Step, environment_texts, st.integers(0, 1), environment_texts)
  steps = draw(st.lists(row, min_size=1, max_size=14))
  used = sum(step.model for step in steps)
  for step in steps:
    step.calls = [call(step.model, 0.01)]
  calls = draw(st.none() | st.integers(max(1, used), 20))
  usd = draw(st.none() | st.just(0.1))
  return Episode("plant-0", "test", "profile", 0, steps, 1.0, "done", calls, usd)


@pytest.mark.parametrize("kind, max_tokens", [("transcript", 220), ("paper", 640)])
@given(episode=episodes())
def test_training_and_live_decisions_read_the_same_text(kind, max_tokens, episode):
  """Each decision is in one window, after exactly the text that was visible live."""
  view = make_view(view=kind, max_tokens=max_tokens)
  windows = view.encode(TASK, episode)
  places = [(window, position) for window in windows for position in window.positions]
  assert len(places) == len(episode.steps)
  assert all(len(w.tokens) <= max_tokens for w in windows)
  for s, (window, position) in enumerate(places):
    live = live_window(view, episode, s)
    assert live.tokens == window.tokens[: position + 1]
    assert live.positions[-1] == position == len(live.tokens) - 1


def test_a_cut_keeps_whole_steps_in_three_quarters_of_the_limit():
  windows = make_view(max_tokens=220).encode(TASK, episode_of([0, 1] * 15))
  assert len(windows) > 2
  first = 0  # the number of steps before the window
  for before, window in itertools.pairwise(windows):
    first += len(before.positions)
    # These tokens are the window directly after the cut.
    tokens = window.tokens[: window.positions[0] + 1]
    assert 165 <= len(tokens) < 210
    text = decode(tokens)
    omitted = int(re.match(r"task: find the plant\nsteps 1-(\d+) omitted\n", text)[1])
    numbers = [int(n) for n in re.findall(r"\nstep (\d+) model:", text)]
    assert numbers == list(range(omitted + 1, first + 2))


def test_previews_are_cut_and_marked():
  view = make_view(
    description_tokens=5, action_tokens=3, result_tokens=4, max_tokens=640
  )
  # The tokenizer has no merges for these letters, so each letter is a token.
  steps = [Step("QWQWQW", 0, "JKJKJK"), Step("VWXY", 0, "")]
  episode = Episode("t", "p", "profile", 0, steps, 1.0, "done")
  task = Task("t", "train", "XYZXYZXYZ", 9)
  text = decode(view.encode(task, episode)[-1].tokens)
  assert f"task: XYZXY{CUT_MARK}\nstart: QWQW{CUT_MARK}\n" in text
  # "VWXY" has exactly the limit of 4 tokens, so it is not cut.
  assert f" action: JKJ{CUT_MARK}\nresult: VWXY\n" in text


# Of $0.05, 0.05 - 0.01 - 0.002 = 0.038 is left after step 1, and
# 0.038 - 0.02 - 0.003 = 0.015 after step 2.
CALLS = [(0.01, "act"), (0.002, "retry")], [(0.02, "act"), (0.003, "presumed")]


@pytest.mark.parametrize(
  "budgets, left",
  [
    ({}, []),
    # The only LARGE call is in step 2.
    ({"call_budget": 3}, ["3 large calls", "3 large calls", "2 large calls"]),
    (
      {"call_budget": 1, "usd_budget": 0.05},
      [
        "1 large calls left, $0.0500",
        "1 large calls left, $0.0380",
        "0 large calls left, $0.0150",
      ],
    ),
    ({"usd_budget": 0.02}, ["$0.0200", "$0.0080", "$0.0000"]),
  ],
)
def test_the_transcript_states_the_remaining_caps_at_each_step(budgets, left):
  episode = episode_of([0, 1, 0], CALLS, **budgets)
  (window,) = make_view(max_tokens=640).encode(TASK, episode)
  first, second, third = [f"/40, {each} left," for each in left] or [""] * 3
  text = "task: find the plant\nstart: see 1\n"
  text += f"step 1{first} model:{SMALL} action: go 1\n"
  text += f"result: see 2\nstep 2{second} model:{BIG} action: go 2\nresult: see 3\n"
  assert decode(window.tokens) == f"{text}step 3{third} model:"


def test_the_paper_prompt_has_ten_steps_or_the_dollars_left():
  """Without a cap it has all steps. tests/test_weights.py compares whole prompts."""
  view = make_view(view="paper", max_tokens=2000)

  def write(models, calls=(), **budgets):
    return decode(view.encode(TASK, episode_of(models, calls, **budgets))[-1].tokens)

  text = write([1, 0, 1, 1] + [0] * 10, call_budget=5)
  assert "Budget: at most 5 BIG calls, 3 used, 2 left. Step 14 of 40." in text
  # Steps 14 to 40 are 27 steps.
  assert texts.HARD_LEFT.format(left=2, steps=27) in text
  assert "\n(steps 1-3 omitted)\nStep 4 [Model: BIG] action: go 4\n" in text
  assert "steps:\nStep 1 [Model: SMALL] action: go 1\n" in write([0] * 14)
  text = write([0, 1, 0], CALLS, usd_budget=0.05)
  assert "at most $0.0500, $0.0150 left. Step 3 of 40." in text
  assert texts.HARD_DOLLARS.format(left=0.015, steps=38) in text


def test_any_text_is_kept_and_none_is_read_as_a_decision():
  for text in ("naïve ☂ \t\x00二\n\nb", "", "a<|BIG|>b", "<|<|SMALL|>", "<| BIG |>"):
    tokens = VIEW.tokenize(text)
    assert not set(tokens) & set(VIEW.decision_ids)
    assert TOKENIZER.decode(tokens) == text.replace("<|", "< |")
