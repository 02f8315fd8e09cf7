"""The zero-shot router with a judge made by hand, and its keyless stand-in."""

import dataclasses
import functools

import pytest
import tiny
from tiny import call

from baar_jax.config import ModelsConfig
from baar_jax.episode import Call, Reply, Step, Usage
from baar_jax.llms.prices import Price
from baar_jax.llms.scripted import ScriptedJudge
from baar_jax.rollout.budget import CallBudget, DollarBudget, hold, unlimited
from baar_jax.rollout.live import Job, Live
from baar_jax.router.view import View
from baar_jax.router.zero_shot import ZeroShotPolicy, read_answer

PRICE = Price(1.0, 1.0, 2.0)  # dollars per million
CALL_USD = (100 * 1.0 + 10 * 2.0) / 1e6


class HandJudge:
  """Gives these answers; each takes a retry at $0.50 and a presumed call at $0.25."""

  def __init__(self, *answers):
    self.answers, self.asked = list(answers), []

  def __call__(self, task, seed, hold):
    return self

  def reply(self, messages, place):
    self.asked.append((messages[-1]["content"], place))
    lost = call(2, 0.5, kind="retry"), call(2, 0.25, kind="presumed")
    return Reply(self.answers.pop(0), Call(2, Usage(100, 0, 10), CALL_USD), lost)


@pytest.fixture
def paper_view(router_config, tokenizer_dir):
  config = dataclasses.replace(router_config, view="paper", result_tokens=40, action_tokens=40)
  return View(config, tokenizer_dir)


def live(make_task, steps=(), K=None):
  state = Live(Job(make_task(), 0), None, CallBudget(K))
  state.observation, state.steps = "see lamp 9", list(steps)
  return state


def step_usd(state, kind):
  return Step("", 0, "", state.judged.calls).usd(kind)


def test_answers_are_read_strictly():
  assert read_answer("Decision: SMALL.") == 0
  for text in ("**BIG**", "The step is hard, so BIG\nBIG"):
    assert read_answer(text) == 1
  for text in ("SMALL or BIG?", "small", "BIGGER", ""):
    assert read_answer(text) is None


def test_it_is_shown_the_papers_prompt_with_the_budget(paper_view, make_task, make_episode):
  judge = HandJudge("BIG")
  policy = ZeroShotPolicy("zero-shot", judge, paper_view)
  state = live(make_task, make_episode("LS").steps, K=3)
  policy.prepare(state)
  prompt = judge.asked[0][0]
  assert "Task: find the plant" in prompt
  assert "at most 3 BIG calls, 1 used, 2 left. Step 3 of 40." in prompt
  assert prompt.endswith("Decision:")
  assert [d.model for d in policy.choose([state])] == [1]
  assert step_usd(state, "judge") == pytest.approx(CALL_USD)


@pytest.mark.parametrize(
  "answers, model", [(["hm", "BIG"], 1), (["hm", "SMALL or BIG"], 0)], ids=["second", "none"]
)
def test_an_unreadable_answer_is_asked_for_once_more_and_billed(
  paper_view, make_task, answers, model
):
  judge, state = HandJudge(*answers), live(make_task)
  ZeroShotPolicy("zero-shot", judge, paper_view).prepare(state)
  assert [place for _, place in judge.asked] == [0, 1]
  assert state.judged.model == model
  assert step_usd(state, "judge") == pytest.approx(2 * CALL_USD)
  assert (step_usd(state, "retry"), step_usd(state, "presumed")) == (1.0, 0.5)


def test_the_stand_in_reads_the_prompt_and_pays(make_task):
  budget = DollarBudget(1.0)
  pay = functools.partial(hold, None, budget)
  judge = ScriptedJudge(Price(1.0, 1.0, 4.0), make_task(), 0, pay)
  done = "Previous steps:\nStep 1 [Model: SMALL] action: {}\nresult: {}\nDecision:"
  answers = {
    "Previous steps: none\nDecision:": "BIG",
    done.format("go", "a hall"): "SMALL",
    done.format("go", "Nothing happens."): "BIG",
    "Step 1 action: go\nresult: a hall\nStep 2 action: go\nresult: a hall\n": "BIG",
  }
  for text, answer in answers.items():
    assert judge.reply([{"role": "user", "content": text}], 0).text == answer
  # A token is 4 characters; answers of 3 and 5 characters are 1 or 2 tokens.
  tokens = sum(-(-len(text) // 4) for text in answers)
  assert budget.settled_usd == pytest.approx((tokens + 4.0 * (1 + 2 + 1 + 1)) / 1e6)


def test_the_pair_makes_its_judge_at_the_judges_price(tmp_path):
  from baar_jax.llms import pair as models

  pair = models.open_pair(tiny.config(tmp_path), tmp_path / "none.sqlite")
  judge = pair.judge(ModelsConfig(names=("own",), prices=((1.0, 0.5, 2.0),)))
  assert judge(None, 0, unlimited).price == Price(1.0, 0.5, 2.0)
  with pytest.raises(ValueError, match="no price for model 'nobody'"):
    pair.judge(ModelsConfig(names=("nobody",)))
