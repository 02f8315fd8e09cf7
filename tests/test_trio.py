"""Test three models: their texts, the cascade, error rates, and a whole small run."""

import dataclasses

import pytest
import tiny
from hand import TRIO_USD, HandCascade, HandEnv, HandPair, job
from program import finish, results, start
from tiny_router import ROUTER, make_tokenizer

from baar_jax.envs.base import Oracle
from baar_jax.rollout.budget import BudgetSpent
from baar_jax.rollout.loop import Trial, run_episodes
from baar_jax.rollout.specs import Cap, Decision
from baar_jax.router.view import View
from examples.sandbox import SandboxErrors


def test_texts_name_models_by_rank():
  """Each model has a decision token."""
  tokenizer = make_tokenizer(models=3)
  config = dataclasses.replace(
    ROUTER, action_tokens=40, result_tokens=40, max_tokens=2000
  )
  paper = View(dataclasses.replace(config, view="paper"), tokenizer, models=3)
  view = View(config, tokenizer, models=3)
  episode = dataclasses.replace(tiny.episode("plant-0", models="SLTS"), call_budget=4)
  (window,) = view.episode_windows(tiny.TASK, episode)
  ids = [window.tokens[at + 1] for at in window.positions[:-1]]
  assert len({*ids}) == 3 and ids == view.decision_ids == view.logit_ids
  text = paper.tokenizer.decode(paper.episode_windows(tiny.TASK, episode)[-1].tokens)
  assert (
    "Step 2 [Model: M2]" in text
    and "Which model should act next, M1 or M2 or M3?" in text
  )
  assert (
    "at most 4 dearer calls, 2 used, 2 left." in text
    and "only M1 is left. 2 dearer" in text
  )


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
  (episode,) = run_episodes([Trial(policy, job(max_steps=1))], pair, [HandEnv(tape)])
  assert "".join(event[4] for event in tape if event.startswith("ask")) == asked
  # All decisions were asked for.
  assert next(left, None) is None
  (step,) = episode.steps
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
  assert episode.large_calls == step.model == acted


def test_the_rates_of_the_intermediate_model_are_halfway():
  plain, tricky = (Oracle("", 0, critical, False) for critical in (False, True))
  rates = [SandboxErrors(3).lapse(1, "t", oracle).rate for oracle in (plain, tricky)]
  assert rates == pytest.approx([0.06, 0.45])


def test_a_whole_run_of_three_ends_with_its_report(tmp_path):
  names = "('gpt-4.1-nano','gpt-4.1-mini','gpt-4.1')"
  flags = [
    f"--config.models.names={names}",
    "--config.baselines.rivals=('zero-shot','cascade','single-turn')",
    "--config.evaluate.shares=(0.4,)",
  ]
  finish(start(tmp_path, *flags))
  assert "always(rank=2)" in {row["policy"] for row in results(tmp_path)["dev"]}
