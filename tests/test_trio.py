"""Test three models: their texts, the cascade, error rates, and a whole small run."""

import pytest
from hand import TRIO_USD, HandCascade, HandEnv, HandPair, job
from program import finish, results, start

from baar_jax.rollout.budget import BudgetSpent
from baar_jax.rollout.loop import Trial, run_episodes
from baar_jax.rollout.specs import Cap, Decision


@pytest.mark.parametrize(
  "choices, cap, texts, asked, acted",
  [
    ("0", Cap(), {}, "s", 0),
    ("11", Cap(), {}, "slt", 2),
    ("1", Cap(1), {}, "sl", 1),  # after the only call there is nothing to decide
    # The second proposal is taken if all attempts of the third model failed.
    ("11", Cap(usd=1.0), {(0, "third"): BudgetSpent("")}, "slt", 1),
  ],
)
def test_a_cascade_goes_on_model_by_model(choices, cap, texts, asked, acted):
  class Chain(HandCascade):
    """A cascade with fixed decisions: 1 goes on to the next model."""

    def choose(self, ready):
      assert ready[0].history[-1].proposal == "go 0"
      return [Decision(x.draft.model + int(next(left)), 0.0, 1e-6, 2.0) for x in ready]

  tape, left = [], iter(choices)
  policy, pair = Chain(tape), HandPair(tape, texts, TRIO_USD)
  policy.spec = policy.spec.under(cap)
  (ended,) = run_episodes([Trial(policy, job(max_steps=1))], pair, [HandEnv(tape)])
  assert "".join(event[4] for event in tape if event.startswith("ask")) == asked
  # All decisions were asked for.
  assert next(left, None) is None
  (step,) = ended.episode.steps
  assert [call.model for call in step.calls] == [*reversed(range(acted + 1))]
  assert [call.kind for call in step.calls] == ["act"] + ["proposal"] * acted
  assert step.cost_usd == pytest.approx(sum(TRIO_USD[: acted + 1]))
  assert (step.router_cost_usd, step.router_latency_s) == (
    len(choices) * 1e-6,
    len(choices) * 2.0,
  )
  assert step.proposal == "go 0"
  # Under these caps a budget has decided in the end.
  assert (step.logp is None) == bool(cap)
  # A proposal of M2 counts as a call, also if it is not taken.
  assert ended.episode.large_calls == step.model == acted


def test_a_whole_run_of_three_ends_with_its_report(tmp_path):
  names = "('gpt-4.1-nano','gpt-4.1-mini','gpt-4.1')"
  flags = [
    f"--config.models.names={names}",
    "--config.baselines.rivals=('zero-shot','cascade','single-turn')",
    "--config.evaluate.shares=(0.4,)",
  ]
  finish(start(tmp_path, *flags))
  assert "always(rank=2)" in {row["policy"] for row in results(tmp_path)["dev"]}
