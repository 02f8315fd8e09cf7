"""Build episodes by hand, and configure the smallest run of the sandbox, for all tests."""

from itertools import zip_longest
from pathlib import Path

from baar_jax.config import Config
from baar_jax.episode import Call, Episode, Step, Task, Usage

ROOT = Path(__file__).parents[1]
SANDBOX = f"{ROOT}/examples/sandbox.py:Sandbox"  # The world of the fastest runs.
# The letter of each model, cheapest first, and the dollars of its step.
DOLLARS = {"S": 1.0, "L": 5.0, "T": 25.0}
TASK = Task("plant-0", "train", "find the plant", 40)
# The settings of a run that takes seconds. Only one episode is live at a time, so that no
# result depends on timing.
SIZES = dict(train_tasks=6, dev_tasks=2, test_tasks=3, max_steps=10)
SECTIONS = dict(
  env=dict(processes=1, live_per_process=1, **SIZES),
  # These are for runs with --config.router.weights.
  router=dict(max_tokens=300, description_tokens=8, action_tokens=6, result_tokens=16),
  profile=dict(trials=2),
  references=dict(samples=3),
  sft=dict(updates=2, batch_episodes=8, micro_episodes=8, learning_rate=1e-2),
  bopo=dict(
    lam=(0.1,),
    updates=2,
    tasks_per_update=2,
    group_size=2,
    learning_rate=1e-2,
  ),
  evaluate=dict(seeds=1, random_p=(0.5,), call_budgets=(1,)),
)


def call(model=0, usd=1.0, tokens=1, kind="act", replayed=False) -> Call:
  """Make a call with a prompt of 10 tokens and a reply of `tokens` tokens."""
  return Call(model, Usage(10, 0, tokens), usd, kind=kind, replayed=replayed)


def episode(
  task_id="t",
  policy="p",
  trial=0,
  models="SL",
  score=1.0,
  cost_usd=None,
  stop="done",
  logps=(),
  retry_usd=0.0,
  purpose="profile",
) -> Episode:
  """Make an episode in which each step has its own observation and action.

  Args:
    task_id: id of the task.
    policy: key of the policy.
    trial: the number of the trial.
    models: the model of each step, as a letter of DOLLARS.
    score: score of the episode.
    cost_usd: dollars of the whole episode, the same at each step; None takes DOLLARS.
    stop: the reason of the episode's end.
    logps: log-probability of each step's decision; missing ones are None, and further
      ones count for nothing.
    retry_usd: dollars of a failed attempt: they are on the bill, and no cost of the
      method.
    purpose: what the episode was played for.
  """
  steps = []
  for i, (letter, logp) in enumerate(zip_longest(models, logps[: len(models)])):
    model = [*DOLLARS].index(letter)
    usd = DOLLARS[letter] if cost_usd is None else cost_usd / len(models)
    steps.append(
      Step(f"see lamp {i}", model, f"open door {i}", [call(model, usd)], logp)
    )
  if retry_usd:
    steps[0].calls.append(call(0, retry_usd, kind="retry"))
  return Episode(task_id, policy, purpose, trial, steps, score, stop)


def follow(env, until=lambda oracle: False) -> list[tuple[str, str]]:
  """Play the expert's actions, at most 60.

  Args:
    env: an environment after `reset`.
    until: tells from the expert's next action whether to stop.

  Returns:
    Each action with its observation.
  """
  tape = []
  done = False
  while not done and len(tape) < 60 and not until(env.oracle()):
    action = env.oracle().action
    observation, done = env.step(action)
    tape.append((action, observation))
  return tape


def config(runs, name="tiny", **env) -> Config:
  """Configure the smallest run of the sandbox.

  Args:
    runs: directory of the runs.
    name: name of the run.
    env: other settings of the environment.
  """
  result = Config(name=name, runs=str(runs))
  for section, fields in SECTIONS.items():
    vars(getattr(result, section)).update(fields)
  vars(result.env).update({"kind": SANDBOX} | env)
  return result


def flags(runs, *given: str) -> list[str]:
  """Write the settings of `config` as flags of the command line, after the given flags.

  They also replace settings of a configuration file that would take long. A setting that
  is given is left out.
  """
  values = {
    "name": "tiny",
    "runs": runs,
    "evaluate.thresholds": (),
    "value.updates": 20,
    "value.heads": 2,
    "value.widths": (8, 8),
    "value.cost_weights": (0.5,),
    "value.capped_cost_weights": (0.5,),
  }
  for section, fields in SECTIONS.items():
    values |= {f"{section}.{name}": value for name, value in fields.items()}
  names = {flag.partition("=")[0] for flag in given}
  usual = [f"--config.{name}={value}" for name, value in values.items()]
  return [*given, *(flag for flag in usual if flag.partition("=")[0] not in names)]
