"""The cascade: what its scorer learns from, what it is shown, and its calibration by hand."""

import dataclasses

import numpy as np
import pytest
from test_rollout import LARGE_USD, SMALL_USD, HandEnv, HandPair, task

from baar_jax.episode import SMALL
from baar_jax.rollout.live import Job
from baar_jax.rollout.loop import run_episodes
from baar_jax.router.policy import RouterPolicy, Threshold
from baar_jax.router.view import View
from baar_jax.stages.cascade import CascadePolicy, calibration, failures, proposed, split
from baar_jax.train.batches import make_batch


@pytest.fixture(scope="module")
def proposing(router_config, tokenizer_dir):
  return View(router_config, tokenizer_dir, proposals=True)


def batch_of(view, task, episodes):
  windows = [view.episode_windows(task, e) for e in episodes]
  return make_batch(episodes, windows, rows=3, decisions=4, buckets=[160, 320])


def test_small_steps_become_proposals(make_episode):
  episode = proposed(make_episode("SLS"))
  assert [step.proposal for step in episode.steps] == ["open door 0", None, "open door 2"]


def test_failure_is_the_label_where_small_acted(make_episode, make_task, proposing):
  good, bad = proposed(make_episode("SL")), proposed(make_episode("LSS"))
  bad.score = 0.5
  batch = failures([good, bad], batch_of(proposing, make_task(), [good, bad]))
  assert batch.mask_BxS.tolist() == [[1, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]
  assert batch.action_BxS.tolist() == [[0, 0, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]


def test_the_proposal_stands_before_the_decision_and_is_not_repeated(
  make_episode, make_task, proposing
):
  episode = proposed(make_episode("SLS"))
  (window,) = proposing.episode_windows(make_task(), episode)
  text = proposing.tokenizer.decode(window.tokens)
  start = text.index("step 1")
  # The decision tokens are special: they are not in the text.
  assert text[start:].split("\n") == [
    "step 1 proposal: open door ... model:",
    "result: see lamp 1",
    "step 2 model: action: open door ...",
    "result: see lamp 2",
    "step 3 proposal: open door ... model:",
  ]
  ids = [window.tokens[at + 1] for at in window.positions[:-1]]
  assert ids == [proposing.decision_ids[0], proposing.decision_ids[1]]


def test_live_text_is_the_text_that_is_learned_from(make_episode, make_task, proposing):
  """Live, LARGE's steps had a proposal too; the stored ones that a scorer learns from have none."""
  learned, task = proposed(make_episode("SLSS")), make_task()
  (whole,) = proposing.episode_windows(task, learned)
  lived = proposed(make_episode("SLSS"))
  lived.steps[1].proposal = "open door 9"
  for s, step in enumerate(lived.steps):
    shown = [*lived.steps[:s], dataclasses.replace(step, model=SMALL)]  # its model is not known yet
    (live,) = proposing.episode_windows(task, dataclasses.replace(lived, steps=shown))
    if s != 1:
      assert live.tokens == whole.tokens[: whole.positions[s] + 1]
    else:
      assert "proposal: open door" in proposing.tokenizer.decode(live.tokens).split("\n")[-1]


def test_a_view_without_proposals_does_not_show_them(make_episode, make_task, view):
  episode, task = make_episode("SL"), make_task()
  assert view.episode_windows(task, proposed(episode)) == view.episode_windows(task, episode)


def test_calibration_by_hand():
  # Squared errors .01, .04, .64, .01: Brier .7 / 4. Bins [.1, .2), [.8, .9), [.9, 1].
  found = calibration(np.array([0.1, 0.8, 0.8, 0.9]), np.array([0, 1, 0, 1]))
  assert found["brier"] == pytest.approx(0.175)
  assert found["base_rate"] == pytest.approx(0.5)
  assert found["bins"] == [
    {"predicted": pytest.approx(0.1), "observed": 0.0, "count": 1},
    {"predicted": pytest.approx(0.8), "observed": 0.5, "count": 2},
    {"predicted": pytest.approx(0.9), "observed": 1.0, "count": 1},
  ]
  assert calibration(np.array([1.0]), np.array([1]))["bins"][0]["count"] == 1


def test_every_sixth_task_is_held_out(make_task):
  known, held_out = split([make_task(f"t{i}") for i in range(1, 14)])
  assert held_out == {"t6", "t12"}
  assert len(known) == 11


@pytest.mark.parametrize(
  "kind, asked, cost_usd",
  [
    (CascadePolicy, ["small", "small", "large"], 2 * SMALL_USD + LARGE_USD),
    (RouterPolicy, ["small", "large"], SMALL_USD + LARGE_USD),  # the single-turn router's kind
  ],
)
def test_a_threshold_on_a_hand_made_episode(
  kind, asked, cost_usd, tiny_model, router_config, tokenizer_dir, monkeypatch
):
  """p(LARGE) .39 and .41 of two steps against .4: SMALL, then LARGE."""
  p_A = iter(([0.61, 0.39], [0.59, 0.41]))
  texts = []

  def probabilities(policy, rows, tokens):
    del policy, rows
    texts.append(view.tokenizer.decode(tokens[0]))
    return np.array([next(p_A)]), [1]

  monkeypatch.setattr(RouterPolicy, "_probabilities", probabilities)
  view = View(router_config, tokenizer_dir, proposals=kind is CascadePolicy)
  policy = kind("scored", tiny_model, view, router_config, Threshold(0.4), live_episodes=1)
  tape = []
  (episode,) = run_episodes([Job(task("t"), 0)], policy, HandPair(tape), [HandEnv(tape)])
  assert [step.model for step in episode.steps] == [0, 1]
  assert [event[4:] for event in tape if event.startswith("ask")] == asked
  assert episode.cost_usd == pytest.approx(cost_usd)
  assert ["proposal: go" in text for text in texts] == [kind is CascadePolicy] * 2
