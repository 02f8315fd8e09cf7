"""What several tests share: hand-made episodes, and the smallest run of the sandbox."""

import operator

from baar_jax.config import (
  BoPOConfig,
  Config,
  EnvConfig,
  EvaluateConfig,
  ProfileConfig,
  ReferencesConfig,
  RouterConfig,
  SFTConfig,
)
from baar_jax.episode import Call, Episode, Step, Usage

DOLLARS = {"S": 1.0, "L": 5.0}


def call(model=0, usd=1.0, tokens=1, kind="act", replayed=False) -> Call:
  """A call with a prompt of 10 tokens and a reply of `tokens`."""
  return Call(model, Usage(10, 0, tokens), usd, kind=kind, replayed=replayed)


def episode(task_id="t", policy="p", seed=0, models="SL", score=1.0, cost_usd=None, stop="done"):
  """An episode whose steps are named by a letter per model; SMALL costs $1, LARGE $5.

  Args:
    cost_usd: of the whole episode, spread over its steps.
  """
  each = None if cost_usd is None else cost_usd / len(models)
  steps = []
  for i, letter in enumerate(models):
    model, usd = "SL".index(letter), DOLLARS[letter] if each is None else each
    steps.append(Step(f"seen {i}", model, f"do {i}", [call(model, usd)]))
  return Episode(task_id, policy, seed, steps, score, stop)


def config(runs, name="tiny", **env) -> Config:
  """A sandbox run of seconds. One episode lives at a time, so that nothing depends on timing."""
  sizes = {"train_tasks": 6, "test_tasks": 3, "max_steps": 10, "processes": 1}
  return Config(
    name=name,
    runs=str(runs),
    env=EnvConfig(**{"kind": "sandbox", "live_per_process": 1, **sizes, **env}),
    router=RouterConfig(
      vocab_size=1024,
      hidden_size=16,
      intermediate_size=32,
      num_layers=1,
      num_heads=2,
      head_dim=8,
      max_tokens=300,
      description_tokens=8,
      action_tokens=6,
      result_tokens=16,
    ),
    profile=ProfileConfig(trials=2),
    references=ReferencesConfig(samples=3),
    sft=SFTConfig(updates=2, batch_episodes=8, micro_episodes=8, learning_rate=1e-2),
    bopo=BoPOConfig(
      lam=(0.1,), updates=2, tasks_per_update=2, group_size=2, learning_rate=1e-2, batch_episodes=2
    ),
    evaluate=EvaluateConfig(seeds=1, random_p=(0.5,), call_budgets=(1,), bootstrap=20),
  )


FLAGS = """name runs env.train_tasks env.test_tasks env.max_steps env.processes env.live_per_process
router.vocab_size router.hidden_size router.intermediate_size router.num_layers router.head_dim
router.max_tokens profile.trials references.samples sft.updates sft.batch_episodes
sft.micro_episodes bopo.lam bopo.updates bopo.tasks_per_update bopo.group_size evaluate.seeds
evaluate.random_p evaluate.call_budgets evaluate.bootstrap"""


def flags(runs) -> list[str]:
  """The numbers of `config` for the command line, whatever else a configuration says."""
  c = config(runs)
  values = {name: operator.attrgetter(name)(c) for name in FLAGS.split()}
  values |= {"pretrain.batch_episodes": 16, "evaluate.thresholds": ()}
  return [f"--config.{name}={value}" for name, value in values.items()]
