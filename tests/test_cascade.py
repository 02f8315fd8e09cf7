"""Check what the cascade's scorer learns, by hand."""

import pytest
from tiny import episode

from baar_jax.families.cascade import FAILURES


@pytest.mark.parametrize("score, fails", [(1.0, 0), (0.9, 1)])
def test_proposals_of_cheaper_models_are_labelled_with_failure(score, fails):
  """The costliest model's step is no proposal, so it has no label."""
  proposed = FAILURES.rewrite(episode(models="SLTS", score=score), 3)
  assert FAILURES.decide(proposed) == [fails, fails, None, fails]
  assert [step.proposal for step in proposed.steps][:2] == [
    "open door 0",
    "open door 1",
  ]
