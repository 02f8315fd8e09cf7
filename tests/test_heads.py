"""Check the calls that a cap leaves, and the terms that value heads read, by hand."""

import numpy as np
import pytest
from tiny import episode

from baar_jax.conditioned.heads import count_calls_left
from baar_jax.llms.prices import Outlook
from baar_jax.rollout.specs import Cap
from baar_jax.router.inputs import describe


def test_calls_left_by_hand():
  """A call costs $0.5 now and $0.2 when it is repeated; nothing cached, it costs $0.6."""
  outlook = Outlook(usd=0.5, repeat_usd=0.2, cold_usd=0.6)
  for cap, left in [
    (Cap(), np.inf),
    (Cap(3).after(episode(models="LS").steps), 2),
    (Cap(usd=0.59), 0),
    # $0.1 or $0.4 remain after the first call, too little for another cold prompt.
    (Cap(usd=0.6), 1),
    (Cap(usd=0.9), pytest.approx(1)),
    # Half way between one call and two. $0.6 remain, enough for one more; $1, for three.
    (Cap(usd=1.0), pytest.approx(1.5)),
    (Cap(usd=1.1), pytest.approx(2)),
    (Cap(usd=1.5), pytest.approx(4)),
    (Cap(2, 1.5), 2),
  ]:
    assert count_calls_left(cap, outlook) == left


def test_terms_by_hand():
  """tests/test_network.py has those of no cap."""
  (terms,) = describe(np.array([2]), 0.5, np.array([[1, 1, 4]]))
  expected = [0.1, np.log(3) / 3, 2 / 3, 0, 0.5, 0.5**0.5, 0.25, 0.5, 0.05]
  assert terms.tolist() == pytest.approx(expected)
