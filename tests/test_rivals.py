"""The rivals by hand: preference data and what a scorer reads."""

import tiny

from baar_jax.router.view import View
from baar_jax.stages.train import find_winners
from baar_jax.train.dataset import add_proposals
from baar_jax.train.trainer import label_failures


def trial(seed, score, models="S"):
  return tiny.episode("t", seed=seed, score=score, models=models)


def test_the_cheapest_that_succeeds_wins():
  small = [trial(seed, score) for seed, score in enumerate((1, 0, 0, 1, 0))]
  large = [trial(seed, score) for seed, score in zip((0, 1, 2, 3, 9), (1, 1, 0.9, 0, 1))]
  assert find_winners(small, large) == {("t", 0): 0, ("t", 1): 1, ("t", 2): 0, ("t", 3): 0}
  middle = [trial(seed, score) for seed, score in enumerate((1, 0, 1))]
  assert find_winners(small, middle, large) == {("t", 0): 0, ("t", 1): 2, ("t", 2): 1}


def test_a_scorer_learns_failures_where_any_but_the_dearest_acted():
  assert label_failures(trial(0, 1, "SS")) == [0, 0]
  assert label_failures(trial(1, 0.5, "LSS")) == [None, 1, 1]
  assert label_failures(trial(1, 0, "TLS"), dearest=2) == [None, 1, 1]


def test_the_proposal_stands_before_the_decision_and_is_not_repeated(
  make_task, view, router_config, tokenizer_dir
):
  episode, task = add_proposals(tiny.episode(models="SL")), make_task()
  assert [step.proposal for step in episode.steps] == ["open door 0", None]
  plain = view.episode_windows(task, tiny.episode(models="SL"))
  assert view.episode_windows(task, episode) == plain
  proposing = View(router_config, tokenizer_dir, proposals=True)
  (window,) = proposing.episode_windows(task, add_proposals(tiny.episode(models="SLS")))
  text = proposing.tokenizer.decode(window.tokens)
  # The decision tokens are special: they are not in the text.
  assert text[text.index("step 1") :].split("\n") == [
    "step 1 proposal: open door ... model:",
    "result: see lamp 1",
    "step 2 model: action: open door ...",
    "result: see lamp 2",
    "step 3 proposal: open door ... model:",
  ]
  ids = [window.tokens[at + 1] for at in window.positions[:-1]]
  assert ids == [proposing.decision_ids[0], proposing.decision_ids[1]]
