"""What the router reads: nothing but the past, append-only, cut in whole steps, in both views."""

import dataclasses
import re

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tiny import call

from baar_jax.episode import Episode, Step, Task
from baar_jax.router import view as view_module
from baar_jax.router.tokenizer import CUT_MARK
from baar_jax.router.view import View

SMALL, BIG = "<|SMALL|>", "<|BIG|>"


@pytest.fixture(scope="module")
def views(router_config, tokenizer_dir):
  """views(max_tokens=220, ...): a view with other settings, each made once."""
  made = {}

  def get(**changes):
    key = tuple(sorted(changes.items()))
    if key not in made:
      made[key] = View(dataclasses.replace(router_config, **changes), tokenizer_dir)
    return made[key]

  return get


@pytest.fixture(scope="module")
def decode(tokenizer_dir):
  tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_dir / "tokenizer.json"))
  return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


texts = st.text(st.sampled_from("abc\n é☂<|>"), max_size=30) | st.sampled_from([SMALL, f"a{BIG}b"])
models = st.integers(0, 1)


@st.composite
def episodes(draw, max_steps=14):
  steps = [
    Step(draw(texts), draw(models), draw(texts)) for _ in range(draw(st.integers(1, max_steps)))
  ]
  used = sum(step.model for step in steps)
  budget = draw(st.none() | st.integers(used, 20))
  return Episode("plant-0", "test", 0, steps, 1.0, "done", budget)


def live_windows(view, task, episode):
  """What the router saw at each step."""
  return [
    view.windows(task, episode.steps[:s], step.observation, episode.call_budget)
    for s, step in enumerate(episode.steps)
  ]


class TestBothViews:
  @pytest.mark.parametrize("kind, max_tokens", [("transcript", 220), ("paper", 640)])
  @given(episode=episodes())
  def test_training_reads_what_the_router_saw(self, views, make_task, kind, max_tokens, episode):
    """Every decision is in exactly one window, behind what was visible live and nothing else."""
    view, task = views(view=kind, max_tokens=max_tokens), make_task()
    windows = view.episode_windows(task, episode)
    owner = {w.first + i: (w, p) for w in windows for i, p in enumerate(w.positions)}
    assert sum(len(w.positions) for w in windows) == len(owner) == len(episode.steps)
    assert sorted(owner) == list(range(len(episode.steps)))
    assert all(len(w.tokens) <= max_tokens for w in windows)
    for s, seen in enumerate(live_windows(view, task, episode)):
      window, position = owner[s]
      assert seen[-1].tokens == window.tokens[: position + 1]
      assert seen[-1].positions[-1] == len(seen[-1].tokens) - 1

  @pytest.mark.parametrize("kind", ["transcript", "paper"])
  def test_the_last_step_and_what_came_of_it_are_not_read(self, views, make_task, kind):
    """The action that the last decision led to is unknown when it is made."""
    view, task = views(view=kind, max_tokens=640), make_task()
    steps = [Step("seen", 0, "open"), Step("then", 1, "close")]
    episode = Episode("plant-0", "test", 0, steps, 1.0, "done")
    other = dataclasses.replace(steps[1], model=0, action="go", calls=[], logp=-1.0)
    assert view.episode_windows(task, episode) == view.episode_windows(
      task, dataclasses.replace(episode, steps=[steps[0], other], score=0.0, stop="max_steps")
    )

  @pytest.mark.parametrize("kind", ["transcript", "paper"])
  def test_a_budget_is_shown_only_where_wanted(self, views, make_task, kind):
    steps = [Step("seen", 1, "open")]
    for show in (True, False):
      view = views(view=kind, max_tokens=900, show_budget=show)
      with_budget = view.windows(make_task(), steps, "then", 3)
      without = view.windows(make_task(), steps, "then", None)
      assert (with_budget != without) == show


class TestTranscript:
  def test_text(self, views, decode, make_task):
    view = views(action_tokens=40, result_tokens=40, description_tokens=40)
    steps = [Step("a hall", 1, "open the red door")]
    windows = view.windows(make_task(), steps, "a kitchen", None)
    assert [(w.first, len(w.positions)) for w in windows] == [(0, 2)]
    assert decode(windows[0].tokens) == (
      "task: find the plant\nstart: a hall\n"
      "step 1 model:<|BIG|> action: open the red door\nresult: a kitchen\n"
      "step 2 model:"
    )

  def test_budget_text(self, views, decode, make_task):
    """3 calls, one used in step 1, none in step 2, one in step 3."""
    view = views(max_tokens=640)
    steps = [Step("see", m, "go") for m in (1, 0, 1)]
    text = decode(view.windows(make_task(max_steps=30), steps, "end", 3)[-1].tokens)
    asks = re.findall(r"\nstep ([^:]*) model:", text)
    assert asks == [
      "1/30, 3 large calls left,",
      "2/30, 2 large calls left,",
      "3/30, 2 large calls left,",
      "4/30, 1 large calls left,",
    ]

  @given(episode=episodes())
  def test_only_grows_until_a_cut(self, views, make_task, episode):
    view, task = views(max_tokens=220), make_task()
    before = None
    for s, windows in enumerate(live_windows(view, task, episode)):
      now = windows[-1].tokens
      if before is not None and len(windows) == len(before):
        held = before[-1].tokens
        assert now[: len(held)] == held and len(now) > len(held)
        # The decision stands right behind the position that predicted it.
        assert now[len(held)] == view.decision_ids[episode.steps[s - 1].model]
      elif before is not None:
        assert windows[:-1] == before and windows[-1].first == s
      before = windows

  @given(episode=episodes())
  def test_decision_tokens_are_decisions_alone(self, views, make_task, episode):
    """Whatever actions and observations say, and however they say it."""
    view = views(max_tokens=1600)
    (window,) = view.episode_windows(make_task(), episode)
    found = [(i, t) for i, t in enumerate(window.tokens) if t in view.decision_ids]
    made = [(p + 1, view.decision_ids[s.model]) for p, s in zip(window.positions, episode.steps)]
    assert found == made[:-1]

  def test_a_cut_keeps_whole_steps_in_about_half_the_room(self, views, decode, make_task):
    view, task, limit = views(max_tokens=220), make_task(), 220
    steps = [Step(f"see {s:02}", s % 2, f"go {s:02}") for s in range(30)]
    windows = view.episode_windows(task, Episode("plant-0", "x", 0, steps, 1.0, "done"))
    assert len(windows) > 2
    step_tokens = max(b - a for w in windows for a, b in zip(w.positions, w.positions[1:]))
    for window in windows[:-1]:
      assert limit - step_tokens < len(window.tokens) <= limit  # not before it is full
    for window in windows[1:]:
      start = window.positions[0] + 1  # tokens right after the cut
      assert limit / 2 - step_tokens < start <= limit / 2 + 20
      text = decode(window.tokens[:start])
      assert text.startswith("task: find the plant\nsteps 1-")
      omitted = int(re.search(r"\nsteps 1-(\d+) omitted\n", text)[1])
      numbers = [int(n) for n in re.findall(r"\nstep (\d+) model:", text)]
      assert numbers == list(range(omitted + 1, window.first + 2))
      for n in numbers[:-1]:  # each with its decision, action and result
        word = (SMALL, BIG)[(n - 1) % 2]
        assert f"\nstep {n} model:{word} action: go {n - 1:02}\nresult: see {n:02}\n" in text

  def test_previews_are_cut_and_marked(self, views, decode):
    view = views(description_tokens=5, action_tokens=3, result_tokens=4, max_tokens=640)
    task = Task("t", "train", "XYZXYZXYZ", 9)  # letters of no merge: a token each
    steps = [Step("QWQWQW", 0, "JKJKJK")]
    text = decode(view.windows(task, steps, "VWXY", None)[-1].tokens)
    assert f"task: XYZXY{CUT_MARK}\nstart: QWQW{CUT_MARK}\n" in text
    assert f" action: JKJ{CUT_MARK}\nresult: VWXY\n" in text  # just as long: not cut


class TestPaper:
  def steps(self, choices):
    return [Step(f"see {i}", m, f"go {i}") for i, m in enumerate(choices, 1)]

  def in_order(self, text, parts):
    """Each part stands behind the one before."""
    at = 0
    for part in parts:
      found = text.find(part, at)
      assert found >= 0, (part, text)
      at = found + len(part)
    return at

  def test_soft_prompt(self, views, decode, make_task):
    view = views(view="paper", max_tokens=2000)
    windows = view.windows(make_task(), self.steps([0, 1]), "see 3", None)
    assert [(w.first, w.positions) for w in windows] == [
      (s, [len(w.tokens) - 1]) for s, w in enumerate(windows)
    ]
    first, _, text = (decode(w.tokens) for w in windows)
    fields = [view_module.ROLE, "Task: find the plant", view_module.CHOICES]
    self.in_order(first, [*fields, "Previous steps: none", "SMALL or BIG?", "Decision:"])
    steps = ["Step 1 [Model: SMALL]", "go 1", "see 2", "Step 2 [Model: BIG]", "go 2", "see 3"]
    end = self.in_order(text, [*fields, "Previous steps:", *steps, view_module.ASK])
    assert end == len(text) and text.endswith("Decision:")
    assert "budget" not in text.lower() and "omitted" not in text

  def test_soft_prompt_keeps_more_than_ten_steps(self, views, decode, make_task):
    view = views(view="paper", max_tokens=2000)
    text = decode(view.windows(make_task(), self.steps([0] * 13), "end", None)[-1].tokens)
    self.in_order(text, [f"Step {n} [" for n in range(1, 14)])

  def test_hard_prompt(self, views, decode, make_task):
    """5 calls of which 3 are used: 2 for steps 14 to 40, which are 27."""
    view = views(view="paper", max_tokens=2000)
    steps = self.steps([1, 0, 1, 1] + [0] * 9)
    text = decode(view.windows(make_task(max_steps=40), steps, "see 14", 5)[-1].tokens)
    shown = [part for n in range(4, 14) for part in (f"Step {n} [", f"go {n}", f"see {n + 1}")]
    end = self.in_order(
      text,
      [
        view_module.ROLE_HARD,
        "Task: find the plant",
        "Environment: see 1",
        *("at most 5", "3 used", "2 left", "Step 14 of 40"),
        view_module.CHOICES,
        *("2 BIG calls", "27 steps"),
        "Previous steps:",
        "(steps 1-3 omitted)",
        *shown,
        view_module.ASK,
      ],
    )
    assert end == len(text) and text.endswith("Decision:")
    assert "Step 3 [" not in text

  def test_hard_prompt_of_a_spent_budget(self, views, decode, make_task):
    view = views(view="paper", max_tokens=2000)
    text = decode(view.windows(make_task(), self.steps([1, 0, 1]), "end", 2)[-1].tokens)
    self.in_order(text, ["at most 2", "2 used", "0 left", "spent", "has to be SMALL", "Decision:"])
    assert "SMALL or BIG?" not in text and "omitted" not in text

  @pytest.mark.parametrize("budget", [None, 20])
  def test_over_the_limit_the_oldest_steps_go(self, views, decode, make_task, budget):
    """At every limit, so that the line about omitted steps is counted too."""
    steps = self.steps([0, 1] * 5)
    empty = views(view="paper", max_tokens=2000).windows(make_task(), [], "see 1", budget)
    seen = set()
    for limit in range(len(empty[0].tokens) + 60, len(empty[0].tokens) + 200):
      windows = views(view="paper", max_tokens=limit).windows(make_task(), steps, "end", budget)
      assert max(len(w.tokens) for w in windows) <= limit
      text = decode(windows[-1].tokens)
      omitted = int(re.search(r"\(steps 1-(\d+) omitted\)", text)[1])
      shown = [int(n) for n in re.findall(r"\nStep (\d+) \[", text)]
      assert shown == list(range(omitted + 1, 11))
      seen.add(omitted)
    assert len(seen) > 2


class TestTokenizer:
  def test_missing(self, router_config, tmp_path):
    with pytest.raises(ValueError, match="tokenizer.json is missing: run --stage=profile first"):
      View(router_config, tmp_path)

  def test_without_decision_tokens(self, router_config, tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="lacks the decision tokens"):
      View(router_config, tmp_path)

  def test_any_text_can_be_written(self, views, decode):
    view = views(description_tokens=200)
    for text in ("naïve ☂ \t\x00", "二", "a\n\nb"):
      (window,) = view.windows(Task("t", "train", text, 9), [], "", None)
      assert decode(window.tokens) == f"task: {text}\nstart: \nstep 1 model:"


class TestDollars:
  STEPS = [
    Step("see 1", 0, "open door", [call(0, 0.01), call(0, 0.002, kind="retry")]),
    Step("see 2", 1, "open door", [call(1, 0.02), call(1, 0.003, kind="presumed")]),
  ]

  def test_the_transcript_says_what_was_left_at_each_step(self, views, make_task, decode):
    view = views(max_tokens=640)
    text = decode(view.windows(make_task(max_steps=30), self.STEPS, "end", None, 0.05)[-1].tokens)
    assert "step 1/30, $0.0500 left, model:" in text
    assert "step 2/30, $0.0380 left, model:" in text  # 0.05 - 0.01 - 0.002
    assert "step 3/30, $0.0150 left, model:" in text  # and - 0.02 - 0.003
    both = decode(view.windows(make_task(max_steps=30), self.STEPS, "end", 3, 0.05)[-1].tokens)
    assert "step 3/30, 2 large calls left, $0.0150 left, model:" in both

  def test_the_paper_s_prompt_says_it_too(self, views, make_task, decode):
    view = views(view="paper", max_tokens=2000)
    text = decode(view.windows(make_task(max_steps=30), self.STEPS, "end", None, 0.05)[-1].tokens)
    assert "Budget: at most $0.0500, $0.0150 left. Step 3 of 30." in text
    assert "$0.0150 must last for up to 28 steps" in text and "BIG calls" not in text

  def test_training_reads_what_the_router_saw(self, views, make_task):
    view = views(max_tokens=640)
    episode = Episode("plant-0", "p", 0, self.STEPS, 1.0, "done", None, 0.05)
    (window,) = view.episode_windows(make_task(), episode)
    live = view.windows(make_task(), self.STEPS[:1], "see 2", None, 0.05)[-1].tokens
    assert window.tokens[: window.positions[1] + 1] == live

  def test_what_is_not_shown_is_not_there(self, views, make_task):
    view = views(max_tokens=640, show_budget=False)
    plain = view.windows(make_task(), self.STEPS, "end", None)
    assert view.windows(make_task(), self.STEPS, "end", None, 0.05) == plain
