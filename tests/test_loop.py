"""Test the rollout loop against a tape of events, with simple environments and models."""

import itertools
import re
import threading

import pytest
from hand import (
  JUDGE_USD,
  LARGE_USD,
  SMALL_USD,
  USAGE,
  USD,
  HandCascade,
  HandEnv,
  HandPair,
  HandPolicy,
  job,
)

from baar_jax.envs.base import EnvDied
from baar_jax.episode import Call, Episode, Step
from baar_jax.llms.history import NO_ACTION, NoAnswer
from baar_jax.rollout import loop as rollout
from baar_jax.rollout.budget import BudgetSpent
from baar_jax.rollout.loop import Trial, run_episodes
from baar_jax.rollout.specs import Cap

NINE = [job(f"t{number}") for number in range(9)]


@pytest.fixture
def inline(monkeypatch):
  """Let nothing wait, so that the order of events is fixed, and no thread starts."""
  monkeypatch.setattr(HandEnv, "waits", False)
  monkeypatch.setattr(rollout, "ThreadPoolExecutor", None)


@pytest.fixture
def tape():
  """Return the list of events; check that the loop's threads have ended after the test."""
  yield []
  assert not [t for t in threading.enumerate() if t.name.startswith("episode")]


def start(tape, jobs, envs=None, policy=None, pair=None, cap=Cap(), **limits):  # noqa: B008
  policy = policy or HandPolicy(tape)
  policy.spec = policy.spec.under(cap)
  pair = pair or HandPair(tape)
  trials = [Trial(policy, job) for job in jobs]
  return run_episodes(trials, pair, envs or [HandEnv(tape)], **limits)


def run(*args, **limits):
  return [ended.episode or ended for ended in start(*args, **limits)]


def models_of(episode):
  return "".join("SL"[step.model] for step in episode.steps)


def test_one_episode_has_its_order_of_events(tape):
  """The second reply has no action. It is answered, paid for and counted as a step."""
  pair = HandPair(tape, {1: "I would rather not."})
  policy = HandPolicy(tape, "SLS")
  episodes = run(tape, [job(seed=7)], None, policy, pair)
  first = [
    "reset t1",
    "start t1 7",
    "choose",
    "ask small",
    "step go 0",
    "choose",
    "ask large",
  ]
  assert tape == [*first, "choose", "ask small", "step go 2", "score"]
  assert policy.finished == [("t1", 7, 3)]
  small, large = (Call(model, USAGE, usd) for model, usd in enumerate(USD))
  steps = [
    Step("seen 0", 0, "go 0", [small], 0.0, 1e-6),
    Step("seen 1", 1, "", [large], -1.0, 1e-6),
    Step(NO_ACTION, 0, "go 2", [small], -2.0, 1e-6),
  ]
  assert episodes == [Episode("t1", "by-hand", "profile", 7, steps, 0.5, "done")]
  messages = [
    ("system", "Act."),
    ("user", "Task: Do t1.\n\nseen 0"),
    ("assistant", "Thought: now.\n\nAction: go 0"),
    ("user", "seen 1"),
    ("assistant", "I would rather not."),
    ("user", NO_ACTION),
  ]
  *_, last = pair.shown
  assert [(message["role"], message["content"]) for message in last] == messages
  assert pair.shown == [last[:2], last[:4], last]


GONE = BudgetSpent("failed attempts have spent the dollars of the call")
# LARGE's worst case is twice its cost.
DEAR = {"bounds": (SMALL_USD, 2 * LARGE_USD)}
# A judge, or SMALL, is asked before each decision.
JUDGE = {"asks": "judge"}
SMALL = {"asks": "small"}
LITTLE = 1.5 * SMALL_USD + LARGE_USD


@pytest.mark.parametrize(
  "calls, usd, settings, asked, taken",
  [
    # Two calls of LARGE are allowed, and a third is not. Calls of SMALL are not counted.
    (2, None, {}, "LLSS", "LLss"),
    (0, None, {}, "SSSS", "ssss"),
    # The last call fits exactly.
    (None, 4 * LARGE_USD, {}, "LLLL", "LLLL"),
    (None, 2 * LARGE_USD + 2 * SMALL_USD, {}, "LLSS", "LLss"),
    # In the end not even SMALL fits.
    (None, LARGE_USD + 2.5 * SMALL_USD, {}, "LSS", "Lss-"),
    (None, 0.5 * SMALL_USD, {}, "", "-"),
    (None, 4 * LARGE_USD, DEAR, "LLLS", "LLLs"),
    # SMALL acts if the judge cannot be asked, even if LARGE would fit.
    (None, 1.0 + 4 * LARGE_USD, JUDGE, "JLJLSSSS", "LLssss"),
    # If all attempts fail, a cheaper model acts, and LARGE's call is given back.
    (2, 1.0, {"texts": {(1, "large"): GONE}}, "LLSLS", "LsLs"),
    (2, 1.0, {"texts": {1: GONE}}, "SLS", "S-"),
    # In a cascade SMALL proposes first; tests/test_trio.py has its other cases. In the
    # end neither model fits; after the paid proposal LARGE does not fit.
    (None, LITTLE, SMALL, "SL", "L-"),
    (None, LITTLE, SMALL, "SS", "Ss"),
  ],
)
def test_budgets_prune_the_models_of_a_step(tape, calls, usd, settings, asked, taken):
  """A small letter in `taken` is a step of SMALL in place of LARGE, without a logp.

  The dash is the end of an episode in which no model is affordable for LARGE's step.
  """
  models = re.sub("[s-]", "L", taken)
  pair = HandPair(tape, settings.get("texts", ()), settings.get("bounds", USD))
  kind = HandCascade if settings.get("asks") == "small" else HandPolicy
  policy = kind(tape, models, settings.get("asks"))
  envs = [HandEnv(tape, len(models))]
  (episode,) = run(tape, [job()], envs, policy, pair, cap=Cap(calls, usd))
  assert episode.stop == ("budget" if taken.endswith("-") else "done")
  assert episode.call_budget == calls
  assert episode.usd_budget == usd
  taken = taken.removesuffix("-")
  assert models_of(episode) == taken.upper()
  assert "".join(re.findall("^ask (.)", "\n".join(tape), re.M)).upper() == asked
  logps = [-float(s) if letter.isupper() else None for s, letter in enumerate(taken)]
  assert [step.logp for step in episode.steps] == logps
  # Each call is paid for, in a step or as lost dollars. No cap is exceeded.
  usd_of = {"S": SMALL_USD, "L": LARGE_USD, "J": JUDGE_USD}
  spent_usd = sum(usd_of[letter] for letter in asked)
  assert episode.spent_usd == pytest.approx(spent_usd, rel=1e-12)
  assert usd is None or episode.spent_usd <= usd
  assert tape[-1] == "score" and episode.score == 0.5


def test_ready_episodes_are_decided_together(tape, inline):
  """Each episode has its own budget."""
  envs = [HandEnv(tape, length) for length in (2, 3, 4, 9)]
  policy = HandPolicy(tape, "LLLL")
  episodes = run(tape, NINE[:3], envs, policy, cap=Cap(2))
  assert policy.groups == [[(f"t{i}", step) for i in range(3)] for step in (0, 1)]
  assert list(map(models_of, episodes)) == ["LL", "LLS", "LLSS"]


def test_policies_play_at_once_and_decide_apart(tape, inline):
  policies = HandPolicy(tape, "SS"), HandPolicy(tape, "LL")
  trials = [Trial(policy, job) for policy in policies for job in NINE[:2]]
  ended = run_episodes(trials, HandPair(tape), [HandEnv(tape), HandEnv(tape)])
  episodes = [running.episode for running in ended]
  assert [episode.task_id for episode in episodes] == ["t0", "t0", "t1", "t1"]
  assert {models_of(e) for e in episodes[:2]} == {"SS", "LL"}
  for policy in policies:
    assert policy.groups == [[(name, step)] for name in ("t0", "t1") for step in (0, 1)]


def test_a_slow_episode_delays_no_other(tape):
  released = threading.Event()
  in_time = []

  def wait(call):
    if call == "step go 1":
      in_time.append(released.wait(30))

  envs = [HandEnv(tape, 3, fault=wait), HandEnv(tape, 5)]
  ended = start(tape, [job("a slow one"), job("quick"), job("quick", 1)], envs)
  episodes = (running.episode for running in ended)
  assert [next(episodes).task_id, next(episodes).task_id] == ["quick", "quick"]
  released.set()
  assert [(e.task_id, len(e.steps)) for e in episodes] == [("a slow one", 3)]
  assert in_time == [True]


def raises(error, call, times=9):
  """Make a fault that raises an error at an event, for a number of times."""
  remaining = iter(range(times))

  def fault(event):
    if event == call and next(remaining, None) is not None:
      raise error

  return fault


DIED = EnvDied("the process was killed")
NO_ANSWER = NoAnswer("no content (6 attempts)")
ENDS = [(call, 2, {}, "done", 3) for call in ("step go 1", "reset t1", "score")]
ENDS += [("step go 1", 3, {}, DIED, 3), ("", 0, {1: NO_ANSWER}, NO_ANSWER, 1)]


@pytest.mark.parametrize("call, times, texts, end, tries", ENDS)
def test_an_episode_with_a_dead_environment_starts_again(
  tape, call, times, texts, end, tries
):
  """It may start again twice. Afterwards it fails, as it does after a model's failure.

  The next episode is not affected.
  """
  env = HandEnv(tape, fault=raises(DIED, call, times))
  policy = HandPolicy(tape)
  jobs = [job("t1", 3), job("t2", 4, max_steps=1)]
  ended, whole = run(tape, jobs, [env], policy, HandPair(tape, texts))
  if end == "done":
    assert ended.key == ("t1", "profile", 3)
    assert ended.stop == end
  else:
    assert (ended.trial, ended.error) == (Trial(policy, jobs[0]), end)
    ended = ended.live
  for number, step in enumerate(ended.steps):
    assert step.observation == f"seen {number}"
  assert whole.task_id == "t2"
  assert whole.stop == "max_steps"
  assert tape.count("reset t1") == tries
  assert [name for name, *_ in policy.finished] == ["t1"] * tries + ["t2"]


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["reset t1", "step go 1", "score"])
def test_any_other_exception_is_raised(tape, error, call):
  """This includes exceptions that end a worker thread."""
  env = HandEnv(tape, fault=raises(error("a bug"), call))
  with pytest.raises(error, match="a bug"):
    run(tape, NINE[:2], [env] * 2)


@pytest.mark.parametrize("error", [KeyboardInterrupt, GeneratorExit])
def test_ctrl_c_and_an_abandoned_loop_wait_for_no_step(tape, error):
  """An environment is closed during its step."""
  ended = []
  quick = HandEnv(tape)
  wait = lambda call: "step" in call and ended.append(slow.closed.wait(30))  # noqa: E731
  slow = HandEnv(tape, fault=wait)
  episodes = start(tape, NINE, [slow, quick])
  next(episodes)
  with pytest.raises(error):
    episodes.throw(error)
  assert ended[0] and quick.closed.is_set()
  assert tape.count("stop") == 1 and tape.count("score") < 9


@pytest.mark.parametrize(
  # An episode whose environment died has three attempts, and each of them counts.
  "call, texts, tries",
  [("step go 1", {}, "00011"), ("score", {}, "00011"), ("", {1: NO_ANSWER}, "01234")],
)
def test_failures_in_a_row_stop_the_loop(tape, monkeypatch, call, texts, tries):
  monkeypatch.setattr(rollout, "MAX_FAILURES", 5)
  env = HandEnv(tape, fault=raises(DIED, call))
  problem = "5 times in a row.*(was killed|6 attempts)"
  with pytest.raises(ValueError, match=problem):
    run(tape, NINE, [env], pair=HandPair(tape, texts))
  assert re.findall(r"reset t(\d)", " ".join(tape)) == [*tries]


def test_a_policy_that_succeeds_does_not_hide_one_that_fails(tape, monkeypatch):
  monkeypatch.setattr(rollout, "MAX_FAILURES", 3)
  policies = [HandPolicy(tape, "S" * 10), HandPolicy(tape, "L" * 10)]
  trials = [Trial(policy, job) for job in NINE for policy in policies]
  pair = HandPair(tape, {(0, "large"): NO_ANSWER})
  with pytest.raises(ValueError, match="3 times in a row"):
    list(run_episodes(trials, pair, [HandEnv(tape)]))
  assert tape.count("ask large") == 3


def test_a_success_ends_a_row_of_failures(tape, monkeypatch):
  """The environment dies twice in each of three episodes, which then succeed."""
  monkeypatch.setattr(rollout, "MAX_FAILURES", 3)
  lives = itertools.cycle([False, False, True])

  def fault(event):
    if event == "score" and not next(lives):
      raise DIED

  episodes = run(tape, NINE[:3], [HandEnv(tape, fault=fault)])
  assert [episode.task_id for episode in episodes] == ["t0", "t1", "t2"]


def test_a_step_has_the_score_after_its_action(tape):
  env = HandEnv(tape, 3)
  env.scores_steps = True
  env.score = lambda: [None, 0.0, 0.25, 1.0][env.steps]
  (episode,) = run(tape, [job()], [env])
  assert [step.score for step in episode.steps] == [0.0, 0.25, 1.0]
  assert episode.score == 1.0


def test_with_an_opening_each_step_is_a_new_conversation(tape):
  """It begins in the middle of the observation, and a reply without action is a step."""
  env = HandEnv(tape)
  env.opening = "een"
  pair = HandPair(tape, {1: "I would rather not."})
  (episode,) = run(tape, [job()], [env], pair=pair)
  shown = []
  for text in ("een 0", "een 1"):
    shown.append(
      [{"role": "system", "content": "Act."}, {"role": "user", "content": text}]
    )
  assert pair.shown == shown
  assert tape[-2:] == ["step ", "score"]
  assert episode.steps[1].observation == "seen 1"
