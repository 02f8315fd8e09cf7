"""The rivals by hand: preference data and what a scorer reads."""

import tiny

from baar_jax.router.view import View
from baar_jax.stages.train import find_winners
from baar_jax.train.batches import label_episodes, label_failures, make_batch
from baar_jax.train.dataset import add_proposals


def trial(seed, score, models="S"):
  return tiny.episode("t", seed=seed, score=score, models=models)


def test_the_cheapest_that_succeeds_wins():
  small = [trial(seed, score) for seed, score in enumerate((1, 0, 0, 1, 0))]
  large = [trial(seed, score) for seed, score in zip((0, 1, 2, 3, 9), (1, 1, 0.9, 0, 1))]
  assert find_winners(small, large) == {("t", 0): 0, ("t", 1): 1, ("t", 2): 0, ("t", 3): 0}
  middle = [trial(seed, score) for seed, score in enumerate((1, 0, 1))]
  assert find_winners(small, middle, large) == {("t", 0): 0, ("t", 1): 2, ("t", 2): 1}


def test_what_is_to_be_decided(view, make_task):
  """The winner at every state of a trial; the failure where SMALL acted."""
  episodes = [trial(0, 1, "SS"), trial(1, 0.5, "LSS"), trial(1, 1, "LL")]
  windows = [view.episode_windows(make_task(), e) for e in episodes]
  batch = make_batch(episodes, windows, size=4, decisions=3, buckets=[320])
  labelled = label_episodes(batch, [False, True, True])
  assert labelled.action_BxS.tolist() == [[0, 0, 0], [1, 1, 1], [1, 1, 0], [0, 0, 0]]
  assert (labelled.mask_BxS == batch.mask_BxS).all()
  labelled = label_failures(batch, episodes)
  assert labelled.mask_BxS.tolist() == [[1, 1, 0], [0, 1, 1], [0, 0, 0], [0, 0, 0]]
  assert labelled.action_BxS.tolist() == [[0, 0, 0], [0, 1, 1], [0, 0, 0], [0, 0, 0]]


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
