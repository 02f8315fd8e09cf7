"""Compute the dollars of calls: list prices or the user's, and prompt caches.

Axes: A models.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from baar_jax.config import STORED, ZERO_SHOT, Config, ModelsConfig
from baar_jax.episode import SMALL, Call, Episode, Step, Usage
from baar_jax.llms.provider import ImpossibleUsage, Meter, endpoints

# Price of prompt tokens that are written to the prompt cache for an hour, as a multiple
# of the price of input (Anthropic's).
HOUR_WRITE = 2.0
# An upper bound on the service tier of a request that names none, as a multiple of the
# list price: the costliest tier that a project at OpenAI can be set to.
COSTLIEST_TIER = 2.5
# A cost above its bound by no more than this share is a rounding error of floats.
ROUNDING = 1e-9


@dataclasses.dataclass(frozen=True)
class CacheRule:
  """The rule of a prompt cache, which belongs to a family of models.

  Attributes:
    min_tokens: the fewest tokens of a prompt that are cached.
    block_tokens: the number of cached tokens is a multiple of this number.
    lifetime_s: seconds after its last use in which a prompt stays in the cache.
  """

  min_tokens: int
  block_tokens: int = 1
  lifetime_s: float = 300.0


@dataclasses.dataclass(frozen=True)
class Price:
  """The prices of a model in dollars per million tokens, for each kind of token.

  Attributes:
    input: price of prompt tokens that are not in the prompt cache.
    cached_input: price of prompt tokens that are read from the prompt cache.
    output: price of the reply's tokens.
    cache_write: price of prompt tokens that are written to the prompt cache; None means
      the price of input.
    tiers: pairs of a number of prompt tokens and a price, in ascending order. The price
      holds for all tokens of a call whose prompt has more tokens than that number.
  """

  input: float
  cached_input: float
  output: float
  cache_write: float | None = None
  tiers: tuple[tuple[int, "Price"], ...] = ()

  def worst_case_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
    """Compute the worst case of a call in dollars, over all tiers and cache states.

    Args:
      prompt_tokens: an upper bound on the tokens of the prompt.
      completion_tokens: an upper bound on the tokens of the reply.
    """
    prompt_price = output_price = 0.0
    for price in (self, *dict(self.tiers).values()):
      write_price = price.cache_write or 0.0
      prompt_price = max(prompt_price, price.input, price.cached_input, write_price)
      output_price = max(output_price, price.output)
    return (prompt_tokens * prompt_price + completion_tokens * output_price) / 1e6

  def cost_usd(self, usage: Usage) -> float:
    """Compute the dollars of a call whose usage is possible; see `Meter.usage`."""
    for start, price in reversed(self.tiers):
      if usage.prompt_tokens > start:
        return price.cost_usd(usage)
    written = usage.cache_write_tokens
    cached = usage.cached_tokens
    fresh = usage.prompt_tokens - cached - written
    write_price = self.input if self.cache_write is None else self.cache_write
    prompt = fresh * self.input + cached * self.cached_input + written * write_price
    prompt += usage.hour_write_tokens * (HOUR_WRITE * self.input - write_price)
    return (prompt + usage.completion_tokens * self.output) / 1e6

  def read_usage(self, meter: Meter) -> Usage:
    """Compute the tokens of a provider's answer, and check its stated dollars.

    Raises:
      ImpossibleUsage: the usage is missing or impossible, or the provider states more
        dollars than these prices give.
    """
    usage = meter.usage()
    usd = self.cost_usd(usage)
    if meter.cost_usd > usd * (1 + ROUNDING):
      raise ImpossibleUsage(
        f"The provider states ${meter.cost_usd:g}, but the prices give ${usd:g}. "
        "Correct --config.models.prices."
      )
    return usage


# The names of prices per token in genai-prices. Every model needs REQUIRED; KINDS also
# has those of the prompt cache, which a model may lack.
REQUIRED = {"input_mtok", "output_mtok"}
KINDS = REQUIRED | {"cache_read_mtok", "cache_write_mtok"}
# genai-prices' names of prices for what no call here uses: searches, and prompts with
# sound or video.
UNUSED = re.compile("searches_kcount|(input|cache)_(audio|video).*_mtok|_1h_")


# The date or the number of a model's version, at the end of its name.
VERSION = re.compile(r"[-@](\d{4}-\d\d-\d\d|\d{8}|\d{3}|\d\d-\d\d|latest)$")


def drop_version(name: str) -> str:
  """Remove the date from a model's name, such as gpt-4.1-2025-04-14.

  Providers answer with a dated name when they are asked for the model without a date.
  """
  return VERSION.sub("", name)


def find_model(name: str) -> Any:
  """Find a model in the list of genai-prices; return None if the list lacks it.

  The list finds many models by the beginning of a name. A name that adds more than a
  date belongs to another model.
  """
  # The import is slow, and it also imports an HTTP client.
  from genai_prices.data_snapshot import get_snapshot

  try:
    model = get_snapshot().find_provider_model(name, None, None, None)[1]
  except LookupError:
    return None
  undated = drop_version(name)
  # If the model is found without the last letter, too, the name has more than it needs.
  is_exact = undated == model.id or not model.is_match(undated[:-1])
  return model if is_exact else None


def list_price(name: str, days: int = 0) -> Price:
  """Look up the list price of a model, which can change at midnight UTC.

  Args:
    name: the model's name.
    days: the number of days from today.

  Raises:
    ValueError: the model is unknown, or it is not priced by its tokens alone.
  """
  return _price_on(name, datetime.now(UTC).date() + timedelta(days))


@functools.cache
def _price_on(name: str, day: date) -> Price:
  """Look up the list price of a model on a day."""
  model = find_model(name)
  if model is None:
    raise ValueError(
      f"The model {name!r} has no list price. Set --config.models.prices."
    )
  from genai_prices.types import TimeOfDateConstraint

  # A price is plain if it is the same at every time of day.
  is_plain = True
  if isinstance(model.prices, list):
    for dated in model.prices:
      is_plain &= not isinstance(dated.constraint, TimeOfDateConstraint)
  by_kind = {}
  # No prompt reaches a tier that begins above the model's window.
  window = model.context_window or math.inf
  starts = set()
  for kind, price in vars(model.get_prices(datetime.combine(day, time(), UTC))).items():
    if price is None or UNUSED.search(kind):
      continue
    by_kind[kind] = price
    tiers = getattr(price, "tiers", ())
    starts.update(tier.start for tier in tiers if tier.start < window)
  if not is_plain or not REQUIRED <= by_kind.keys() <= KINDS:
    raise ValueError(
      f"The model {name!r} is not priced by tokens alone. Set --config.models.prices."
    )
  tiers = tuple((start, _price(by_kind, start)) for start in sorted(starts))
  return dataclasses.replace(_price(by_kind, -1), tiers=tiers)


def _price(by_kind: dict, start: int) -> Price:
  """Collect the prices of all kinds of tokens for the prompts of one tier.

  Without a price for cached input, cached input has the price of input.

  Args:
    by_kind: genai-prices' price of each kind, a number or a price with tiers.
    start: number of prompt tokens above which the tier holds; -1 is the lowest tier.
  """
  usd = {}
  for kind, price in by_kind.items():
    usd[kind] = float(getattr(price, "base", price))
    for tier in getattr(price, "tiers", ()):
      if tier.start <= start:
        usd[kind] = float(tier.price)
  input_usd = usd["input_mtok"]
  cached_usd = usd.get("cache_read_mtok", input_usd)
  return Price(input_usd, cached_usd, usd["output_mtok"], usd.get("cache_write_mtok"))


def prices_of(config: ModelsConfig) -> tuple[Price, ...]:
  """Look up the price of each configured model: the user's, else the list price.

  Raises:
    ValueError: a model has no list price.
  """
  user_prices = tuple(Price(*row) for row in config.prices)
  return user_prices or tuple(list_price(name) for name in config.names)


def check_models(config: Config) -> None:
  """Raise an error unless the models have prices and keys, and the cheapest is first.

  Raises:
    ValueError: a price or a key is missing, or the models are not in the order of their
      prices. The message is one line with the field's name.
  """
  groups = {"models": config.models}
  if ZERO_SHOT in config.baselines.rivals:
    groups["baselines.judge"] = config.baselines.judge
  for group_name, group in groups.items():
    try:
      prices = prices_of(group)
      for endpoint in endpoints(group) if config.models.kind == "chat" else ():
        if config.env.kind != STORED:
          endpoint.key()
        # Reading the port checks it: urllib raises ValueError if it is above 65535.
        _ = urlsplit(endpoint.base_url).port
    except ValueError as error:
      raise ValueError(str(error).replace(".models.", f".{group_name}.")) from None
    for cheaper, costlier in itertools.pairwise(prices):
      if cheaper.input > costlier.input and cheaper.output > costlier.output:
        raise ValueError(
          f"--config.{group_name}.names is {group.names!r}; one of them is costlier "
          "than the next: name the cheapest first, or set "
          f"--config.{group_name}.prices"
        )


class PricedModel:
  """A configured model, whose price is looked up at each call.

  Attributes:
    config: the configuration of the models.
    config_index: the model's index in the configuration.
  """

  config: ModelsConfig
  config_index: int

  @property
  def price(self) -> Price:
    """Look up today's price."""
    return self._price_in(days=0)

  def _price_in(self, days: int) -> Price:
    """Look up the price some days from today: the user's, else the list price."""
    if self.config.prices:
      return Price(*self.config.prices[self.config_index])
    return list_price(self.config.names[self.config_index], days)

  def worst_case_usd(self, prompt_tokens: int, completion_tokens: int) -> float:
    """Compute the worst case of a call in dollars; see `Price.worst_case_usd`.

    A call that is in flight at midnight may cost today's or tomorrow's price.
    """
    today = self.price.worst_case_usd(prompt_tokens, completion_tokens)
    tomorrow = self._price_in(days=1).worst_case_usd(prompt_tokens, completion_tokens)
    return max(today, tomorrow)


def cost_usd(model_name: str, usage: Usage) -> float:
  """Compute the dollars of a call at today's list price.

  Raises:
    ValueError: the model has no list price, or the usage is impossible.
  """
  return list_price(model_name).cost_usd(usage)


# The rules of prompt caches by family, the first that matches a model's name; docs/
# models_and_money.md has a source for each number. Caches that a request has to ask for
# (Claude's) are assumed to be asked for.
CACHE_RULES = {
  r"gpt-5\.[6-9]|gpt-[6-9]": CacheRule(1024, lifetime_s=1800.0),
  r"claude.*(opus-4.[56]|haiku-4.5)": CacheRule(4096),
  r"claude.*(opus-4.7|haiku-3|3.5-haiku|3-haiku)": CacheRule(2048),
  r"claude-(opus|fable|mythos)-5|claude-(sonnet|haiku)-5.5": CacheRule(512),
  r"claude": CacheRule(1024),
  r"gemini-2.5": CacheRule(2048),
  r"gemini": CacheRule(4096),
  r"stral|xtral": CacheRule(64, block_tokens=64),
  r"": CacheRule(1024, block_tokens=128),
}
# The least number of US dollars to divide by, because models may be free of charge.
TINY_USD = 1e-9
# Generated tokens per second of SMALL and of LARGE (paper, "Latency Analysis").
SMALL_RATE = 90.0
LARGE_RATE = 80.0
STEP_S = 1.0  # Seconds of simulated time that an environment's step takes (our choice).
# Tokens are estimated from characters, because the tokenizers of API models are not
# available offline (our choice).
CHARS_PER_TOKEN = 4


def format_usd(usd: float) -> str:
  """Write dollars with two decimals; below a dollar, with two significant digits."""
  decimals = 2
  if 0 < usd < 1:
    decimals = 1 - math.floor(math.log10(usd))
  return f"${usd:,.{decimals}f}"


def count_tokens(text: str) -> int:
  """Estimate the tokens of a text."""
  return math.ceil(len(text) / CHARS_PER_TOKEN)


def find_row(table: Mapping[str, Any], name: str) -> Any:
  """Find the first row of a table whose pattern matches a model's name."""
  return next(row for pattern, row in table.items() if re.search(pattern, name))


class Read(NamedTuple):
  """A prompt that a model has read.

  Attributes:
    tokens: its first tokens that the prompt of the next call begins with, too.
    at_s: the time of the call in seconds.
  """

  tokens: int
  at_s: float


def cached_tokens(
  rule: CacheRule, reads: Sequence[Read], prompt_tokens: int, now_s: float
) -> int:
  """Count the tokens of a prompt that the model's prompt cache holds.

  Args:
    rule: the rule of the model's prompt cache.
    reads: the earlier prompts of the episode that this model has read. What another
      model has read is not in its cache.
    prompt_tokens: all tokens of the prompt.
    now_s: the time of the call in seconds, on the clock of the reads.
  """
  shared = 0
  for read in reads:
    if now_s - read.at_s <= rule.lifetime_s:
      shared = max(shared, min(read.tokens, prompt_tokens))
  warm_tokens = shared - shared % rule.block_tokens
  return warm_tokens if warm_tokens >= rule.min_tokens else 0


def measure_tokens(episodes: Sequence[Episode]) -> tuple[float, float]:
  """Compute the mean tokens of an episode's first prompt, and those of a reply."""
  opening_tokens = []
  reply_tokens = []
  for episode in episodes:
    for number, step in enumerate(episode.steps):
      for call in step.calls:
        # A reply without usage has no tokens.
        if call.kind == "act" and call.usage.prompt_tokens:
          reply_tokens.append(call.usage.completion_tokens)
          if number == 0:
            opening_tokens.append(call.usage.prompt_tokens)
  return float(np.mean(opening_tokens or 0)), float(np.mean(reply_tokens or 0))


class Outlook(NamedTuple):
  """A forecast of a model's next call.

  Attributes:
    usd: expected dollars of the call.
    repeat_usd: expected dollars of another call of the model right after it.
    cold_usd: worst case of the call with these tokens: nothing is cached, and the
      highest price of all tiers holds. A reservation may assume more tokens.
  """

  usd: float
  repeat_usd: float
  cold_usd: float


@dataclasses.dataclass(frozen=True)
class Billing:
  """Bill the calls of a run's models with their prices and prompt caches.

  Attributes:
    prices: the price of each model, cheapest first.
    rules: the rule of each model's prompt cache; None caches nothing.
  """

  prices: tuple[Price, ...]
  rules: tuple[CacheRule | None, ...]

  def bill(
    self,
    model: int,
    reads: Sequence[Read],
    prompt_tokens: int,
    completion_tokens: int,
    now_s: float,
  ) -> Call:
    """Bill a call as the model's provider would.

    Args:
      model: index of the model.
      reads: the earlier prompts that this model has read; see `cached_tokens`.
      prompt_tokens: the tokens of the prompt.
      completion_tokens: the tokens of the reply.
      now_s: the time of the call in seconds.
    """
    rule = self.rules[model]
    price = self.prices[model]
    cached = written = 0
    if rule:
      cached = cached_tokens(rule, reads, prompt_tokens, now_s)
      if price.cache_write is not None:
        whole = [Read(prompt_tokens, now_s)]
        written = cached_tokens(rule, whole, prompt_tokens, now_s) - cached
    usage = Usage(prompt_tokens, cached, completion_tokens, written)
    return Call(model, usage, price.cost_usd(usage))

  def wait_s(self, call: Call) -> float:
    """Return the seconds of a call: measured, or at the paper's token rates."""
    rate = SMALL_RATE if call.model == SMALL else LARGE_RATE
    return call.latency_s or call.usage.completion_tokens / rate

  def forecast_calls(
    self, steps: Sequence[Step], opening_tokens: float, reply_tokens: float
  ) -> list[Outlook]:
    """Forecast each model's next call in an episode.

    The forecast reads the usage of earlier calls and the last observation. It needs no
    clock and no prompt. Some steps tell their time; for other steps time is simulated.

    Args:
      steps: the steps; of the last one only observation and time are read.
      opening_tokens: tokens of an episode's first prompt.
      reply_tokens: expected tokens of a reply.
    """
    reads_A = [[] for _ in self.prices]
    prompt_tokens = round(float(opening_tokens))
    reply_tokens = round(float(reply_tokens))
    now_s = 0.0
    for number, step in enumerate(steps):
      if number:
        prompt_tokens += count_tokens(step.observation)
        now_s += STEP_S
      if step.started_s is not None:
        now_s = step.started_s
      if number == len(steps) - 1:
        break
      prompt_tokens += count_tokens(step.action)
      for call in step.calls:
        # A reply without usage has no tokens.
        if call.kind in ("act", "proposal") and call.usage.prompt_tokens:
          # Conversations grow, so the newest prompt contains the earlier ones.
          reads_A[call.model] = [Read(call.usage.prompt_tokens, now_s)]
          now_s += self.wait_s(call)
          if call.kind == "act":
            # A Python program reports no replies, but the next prompt has the action.
            replied = call.usage.completion_tokens or count_tokens(step.action)
            prompt_tokens = call.usage.prompt_tokens + replied
    outlooks = []
    for model, reads in enumerate(reads_A):
      call = self.bill(model, reads, prompt_tokens, reply_tokens, now_s)
      newest = [Read(prompt_tokens, now_s)]
      repeat = self.bill(model, newest, prompt_tokens, reply_tokens, now_s)
      cold_usd = self.prices[model].worst_case_usd(prompt_tokens, reply_tokens)
      outlooks.append(Outlook(call.cost_usd, repeat.cost_usd, cold_usd))
    return outlooks


def open_billing(config: ModelsConfig) -> Billing:
  """Collect the prices and the prompt caches of a run's models.

  Args:
    config: the configuration of the models.

  Raises:
    ValueError: a model has no list price.
  """
  rules = []
  for name in config.names:
    rules.append(find_row(CACHE_RULES, name) if config.prompt_cache else None)
  return Billing(prices_of(config), tuple(rules))
