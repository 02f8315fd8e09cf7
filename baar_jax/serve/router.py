"""The policies of a server, such as a run's trained router, which decides also without one."""

import contextlib
import threading
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from baar_jax.config import Config
from baar_jax.episode import SMALL, Call, Step, Task, Usage
from baar_jax.mesh import one_device
from baar_jax.rollout import policies
from baar_jax.rollout.budget import DollarBudget
from baar_jax.rollout.policies import Decision, Job, Live, Policy, rule_policy
from baar_jax.router.policy import ConditionedPolicy, RouterPolicy, Sample, Threshold
from baar_jax.serve.decider import Decider, make_live
from baar_jax.serve.request import read_messages
from baar_jax.store import read_config
from baar_jax.train.checkpoint import Checkpoints, RouterFiles, load_router
from baar_jax.train.values import load_heads, load_trunk


def read_run(directory: Path) -> Config:
  """The configuration of a run's directory. Raises ValueError where it cannot be read."""
  if not (config := read_config(directory)):
    raise ValueError(f"{directory} is no directory of a run: it has no config.json")
  return config


def open_router(
  directory: Path, config: Config, mesh: Mesh, rows: int, sample: bool = False
) -> RouterPolicy:
  """The trained router of a run: the one that knows its budget, else BoPO's, else SFT's.

  To `sample` it is one of the last two, and samples for BoPO's next update. Of several weights of
  cost the first is taken. At most `rows` episodes are live at once. Raises ValueError if there is
  none.
  """
  families, lam = dict(policies.routers(config)), config.bopo.lam[0]
  files = RouterFiles(directory, config, mesh)
  value = files.checkpoints("value")
  if policies.CONDITIONED in families and value.exists() and not sample:
    name = policies.policy_name(policies.CONDITIONED, families[policies.CONDITIONED])
    trunk, view = load_trunk(files)
    heads = load_heads(files)
    return ConditionedPolicy(name, trunk, view, heads, config.value.prices, rows, mesh)
  with contextlib.closing(Checkpoints(files.checkpoints("bopo", lam))) as checkpoints:
    update = checkpoints.last_update  # 0 also where it has asked for sessions in vain
  family, settings = ("bopo", {"lam": lam, "update": update}) if update else ("sft", {})
  model = load_router(files, family, settings.get("lam"))
  settings = families[family] | settings | {"threshold": policies.ARGMAX}
  name, rule = policies.policy_name(family, settings), Threshold(policies.ARGMAX)
  if sample:
    name = policies.rollouts_name("bopo", lam, update + 1)
    rule = Sample(name)
  return RouterPolicy(name, model, files.open_view(), rule, rows, mesh)


def open_policies(directory: Path, config: Config, mesh: Mesh) -> dict[str, Policy]:
  """The policies that a client can name, with the configured one.

  Raises ValueError if it needs a router and there is none.
  """
  c = config.serve
  named = {
    "small": rule_policy(policies.ALWAYS_SMALL),
    "large": rule_policy(policies.ALWAYS_LARGE),
    "random": rule_policy("random", p=0.5),
    "stratified": rule_policy(policies.STRATIFIED, samples=config.references.samples),
  }
  if c.policy in ("router", "sample"):
    source = Path(c.router) if c.router else directory
    trained = read_run(source) if c.router else config
    if len(trained.models.names) != len(config.models.names):
      text = f"routes between {len(trained.models.names)} models"
      raise ValueError(f"--config.serve.router={c.router} {text}; name as many to be served")
    if not (source / "tokenizer").exists():
      text = f"{source} has no trained router: set --config.serve.router to a run that has one"
      raise ValueError(f"{text}, or --config.serve.policy=small")
    named[c.policy] = open_router(source, trained, mesh, c.max_sessions, c.policy == "sample")
  return named


class Choice(NamedTuple):
  model: str
  probabilities: dict[str, float]  # by model; of the router that knows its budget 1 for its choice


class Router:
  """Decides for sessions whose calls the caller makes; `Router.load` opens one.

  Of its newest sessions it remembers which model it chose at each step, and what was left then.
  """

  def __init__(self, policy: RouterPolicy, models: tuple[str, ...], max_steps: int, sessions: int):
    self._decider, self._lock = Decider(policy, sessions), threading.Lock()
    self._models, self._max_steps = models, max_steps

  @classmethod
  def load(cls, directory: str | Path, sessions: int = 16) -> "Router":
    """The router of a run that `--stage=serve` takes; ValueError if there is none."""
    directory = Path(directory)
    config = read_run(directory)
    policy = open_router(directory, config, one_device(), sessions)
    return cls(policy, config.models.names, config.env.max_steps, sessions)

  def decide(
    self, messages, *, tools=None, left_usd=None, left_large_calls=None, session=None
  ) -> Choice:
    """The model that is to answer `messages`, which are as of OpenAI's chat completions.

    `left_usd` and `left_large_calls` are left of the session's caps, None without one; the caller
    checks whether a call fits the dollars. Without a name for the `session`, its system text, tools
    and first user message tell it. Raises ValueError for what are no messages or no caps.
    """
    text = read_messages(messages, tools)
    if min(left_usd or 0, left_large_calls or 0) < 0:
      raise ValueError("left_usd and left_large_calls must not be negative")
    id_ = session or text.fingerprint
    job = Job(Task(id_, "test", text.task, self._max_steps), 0)
    with self._lock:
      last = self._decider.lives.get(id_) or Live(job, env=None)
      steps, model, before = last.steps[: len(text.actions)], last.step.model, last.dollar_budget
      for _ in text.actions[len(steps) :]:
        usd = 0.0 if None in (before.limit_usd, left_usd) else max(0.0, before.remaining - left_usd)
        steps.append(Step("", model, "", [Call(model, Usage(0, 0, 0), usd)]))
        model, before = SMALL, DollarBudget(None)  # of replies that were not asked for here
      live = make_live(job, text, steps, (left_usd, left_large_calls), self._models)
      decision = Decision(SMALL, p_A=[1.0] + [0.0] * len(self._models[1:]))
      if left_large_calls != 0:
        decision = self._decider.choose([live])[0]
      self._decider.keep(live).step.model = decision.model
      return Choice(self._models[decision.model], dict(zip(self._models, decision.p_A)))
