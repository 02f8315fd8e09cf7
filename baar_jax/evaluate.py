"""Stage evaluate: every policy on the held-out tasks, the same way."""

import dataclasses
from collections.abc import Callable

from baar_jax.config import Config
from baar_jax.envs.sandbox_optimum import optimal_choice
from baar_jax.policies import RulePolicy, always, oracle, random_large
from baar_jax.rollout import Job, Policy
from baar_jax.run import Run

FIRST_LARGE = "first-large"  # always-large under a call budget: the first K calls


@dataclasses.dataclass(frozen=True)
class Entry:
  """One line of the evaluation.

  Attributes:
    family: "always-small", "always-large", "random", "first-large", "sft", "bopo", "oracle" or
      "optimum"; points of one family make one frontier.
    parameters: of the policy within its family, such as {"p": 0.25} or {"lam": 0.3,
      "threshold": 0.5}.
    policy: the name under which its episodes are stored.
    call_budget: K, or None for the soft budget.
  """

  family: str
  parameters: dict[str, float]
  policy: str
  call_budget: int | None = None
