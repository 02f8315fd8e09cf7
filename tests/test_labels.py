"""Check the labels of policies, which readers see in place of their keys."""

import pytest

from baar_jax.report.labels import label_policy
from baar_jax.rivals.families import FAMILIES, list_specs
from baar_jax.rollout.specs import Cap, PolicySpec
from configs import reproduce

ROUTER = "budget-conditioned router"
BLIND = PolicySpec("conditioned", update=9, cost_weight=0.5, blind=1, cap=Cap(3))
TOLD = PolicySpec("conditioned", cost_weight=0.0, cap_conditioned=True)
LABELS = {
  f"{ROUTER}, cost weight 0.5, cap-blind, at most 3 LARGE calls": BLIND,
  f"{ROUTER}, cap-conditioned, cost weight 0, at most $0.02": TOLD.under(Cap(usd=0.02)),
  f"{ROUTER}, cost weight 0": TOLD,
  "BoPO, λ 0.5, at most 1 LARGE call": PolicySpec(
    "bopo", lam=0.5, update=9, seeds=3, threshold=0.5, cap=Cap(1)
  ),
  "BoSFT, LARGE from probability 0.25": PolicySpec("sft", threshold=0.25),
  "cascade, LARGE share 0.6 in training": PolicySpec("cascade", share=0.6),
  "random, LARGE with probability 0.5": PolicySpec("random", p=0.5),
  "always the intermediate model, model 2": PolicySpec("always", rank=2),
  "zero-shot router": PolicySpec("zero-shot", judge="gpt-5 a0b1c2"),
  "always-SMALL": PolicySpec("always-small"),
}


@pytest.mark.parametrize("label", LABELS)
def test_labels_have_the_parameters_in_words(label):
  assert label_policy(LABELS[label], FAMILIES) == label


def test_two_policies_of_a_run_never_share_a_label():
  config = reproduce.get_config()
  config.models.names = ("gpt-4.1-nano", "gpt-4.1-mini", "gpt-4.1")
  config.evaluate.usd_budgets = (0.02, 0.05)
  config.evaluate.thresholds = (0.3,)
  listed = list_specs(config)
  assert len({label_policy(spec, FAMILIES) for spec in listed}) == len(listed)
