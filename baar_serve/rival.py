"""Play another router's endpoint as one more policy, with the dollars of its usage."""

import dataclasses
import re

import httpx2

from baar_jax.decide import Decider
from baar_jax.families.rules import take_large
from baar_jax.llms.prices import list_price, prices_of
from baar_jax.llms.provider import Endpoint
from baar_jax.rollout.policy import RulePolicy
from baar_jax.rollout.specs import PolicySpec
from baar_jax.run import Run
from baar_serve.desk import SelectedPolicy
from baar_serve.exchange import Exchange
from baar_serve.meter import NO_USAGE, AnswerMeter, Bill
from baar_serve.plan import Need
from baar_serve.upstream import Upstream

# The environment variable with the key of rivals; those on this machine need none.
KEY = "RIVAL_API_KEY"


def open_endpoint(route: str) -> Endpoint:
  """Read the model name and the base URL of a rival, such as "auto=http://.../v1"."""
  name, _, url = route.partition("=")
  return Endpoint(name, url.rstrip("/"), KEY)


def find_spec(route: str) -> PolicySpec:
  """Return the policy under which a rival's sessions are stored."""
  return PolicySpec("rival-" + re.sub(r"[^\w.-]", "-", open_endpoint(route).model))


def check_answers(route: str) -> None:
  """Raise an error if a rival does not answer.

  Raises:
    ValueError: the key is missing, or the endpoint does not answer.
  """
  endpoint = open_endpoint(route)
  endpoint.key()
  try:
    httpx2.get(f"{endpoint.base_url}/models")
  except httpx2.HTTPError as error:
    raise ValueError(
      f"The rival {route} does not answer ({type(error).__name__}). Start it, or leave "
      "it out of --config.rivals."
    ) from None


def list_rival_needs(run: Run, route: str) -> list[Need]:
  """List the tests that a rival has not played."""
  spec = find_spec(route)
  played = {task_id for task_id, *_ in run.store.keys(spec.key)}
  needs = []
  for task in run.store.tasks("test"):
    if task.id not in played:
      needs.append(Need(task, SelectedPolicy(spec.family), 0))
  return needs


@dataclasses.dataclass(eq=False)
class Rival(Upstream):
  """An endpoint that itself chooses a model.

  A call is reserved at the worst case of LARGE, and settled at the cost that its answer
  states, or at the price of the model that its answer names.

  Attributes:
    problem: the reason why the dollars of an answer are unknown; "" so far.
  """

  problem: str = ""

  def bill(self, meter: AnswerMeter, worst_case_usd: float, most_tokens: int) -> Bill:
    """Compute the dollars of an answer."""
    names = self.config.names
    try:
      usage = meter.usage()
      usd = meter.cost_usd
      if not usd and meter.model in names:
        usd = prices_of(self.config)[names.index(meter.model)].cost_usd(usage)
      elif not usd:
        usd = list_price(str(meter.model)).cost_usd(usage)
      return Bill(usage, usd, "")
    except ValueError as error:
      self.problem = (
        f"The rival {self.name} reports no usage with a price ({error}). Let it state "
        "usage.cost or a known model, or leave it out of --config.rivals."
      )
      return Bill(NO_USAGE, worst_case_usd, self.problem)


def seat(exchange: Exchange, route: str) -> Rival:
  """Let a rival answer all calls of an exchange.

  Raises:
    ValueError: the rival's key is missing.
  """
  models = exchange.upstreams
  rival = Rival(exchange.config.models, len(models) - 1, open_endpoint(route))
  models[:] = [rival] * len(models)
  spec = find_spec(route)
  policy = RulePolicy(spec, take_large)
  exchange.deciders[spec.family] = Decider(policy, exchange.config.max_sessions)
  return rival
