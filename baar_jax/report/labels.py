"""Write the labels of policies for readers."""

from collections.abc import Mapping
from typing import Protocol

from baar_jax.rollout.specs import PolicySpec

# Words for a policy's parameters and cap in its label, by name.
PARAMETERS = {
  "lam": "λ {:g}",
  "threshold": "LARGE from probability {:g}",
  "share": "LARGE share {:g} in training",
  "cost_weight": "cost weight {:g}",
  "blind": "cap-blind",
  "p": "LARGE with probability {:g}",
  "mu": "μ {:g}",
  "rank": "model {:g}",
  "patience": "patience {:g}",
  "calls": "at most {} LARGE calls",
  "usd": "at most ${:g}",
}


class Labelled(Protocol):
  """A row of the table of families."""

  label: str


def label_policy(spec: PolicySpec, families: Mapping[str, Labelled]) -> str:
  """Write a policy's label for readers.

  An example is "budget-conditioned router, cost weight 0.5, cap-blind, at most 3
  LARGE calls". Parameters that are equal for all policies of a run, such as the
  number of updates, are left out.

  Args:
    spec: the policy.
    families: the table of families, with their labels.
  """
  words = [families[spec.family].label]
  # Only the budget-conditioned router has both variants, cap-conditioned and cap-blind,
  # so only its labels tell which one it is.
  if spec.cap and spec.cap_conditioned and spec.cost_weight is not None:
    words.append("cap-conditioned")
  settings = spec.settings | vars(spec.cap)
  # The threshold 0.5 is the usual one, and is left out of the label.
  if spec.threshold == 0.5:
    del settings["threshold"]
  for name, value in settings.items():
    if name in PARAMETERS and value is not None:
      words.append(PARAMETERS[name].format(value))
  return ", ".join(words).replace(" 1 LARGE calls", " 1 LARGE call")
