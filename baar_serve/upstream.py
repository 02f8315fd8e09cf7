"""Ask upstream models for a client, within the limits that each model has."""

import asyncio
import dataclasses
import functools
import json
import math
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
import httpx2

from baar_jax.episode import FAILED
from baar_jax.llms.history import bound_tokens
from baar_jax.llms.prices import (
  CHARS_PER_TOKEN,
  COSTLIEST_TIER,
  HOUR_WRITE,
  ROUNDING,
  PricedModel,
  find_model,
  find_row,
)
from baar_jax.llms.provider import (
  UNREADABLE,
  Endpoint,
  Outcome,
  clean,
  explain,
  read_error,
  read_refusal,
)
from baar_serve.call import ClientCall
from baar_serve.client import LOST, NOT_SENT, Stream, Whole, find_proxy, open_http
from baar_serve.config import ServeConfig, UpstreamsConfig
from baar_serve.forms.wire import WireForm, pick_headers
from baar_serve.meter import AnswerMeter, Bill
from baar_serve.request import PASSED_HEADERS, Refusal, hash_prefix
from baar_serve.settings import CALL_IDS, Change, find_change, fit_ids

# The lowest limit on the tokens of a reply to which a cap may shrink it (our choice).
LEAST_REPLY = 256
# The most changes of one call that a model may ask for (our choice).
MOST_CHANGES = 5
# The tokens by which the prompt may grow between the call before the last turn and this
# turn, the limit on its reply (both our choice), and the tokens of the choice "none".
GROWTH = 16_384
LAST_REPLY = 1024
CHOICE_TOKENS = 64
# Headers of a provider's error that go on to the client.
RETRY_HEADERS = ("retry-after", "retry-after-ms", "x-should-retry")
# An answer that has another form than expected raises one of these exceptions.
MALFORMED = (LookupError, TypeError, AttributeError, ValueError)


# The name of the tokenizer and the longest reply in tokens, by family of models. The
# first pattern that matches a model's name counts. "" stands for a tokenizer that no
# other model is known to have, and 0 for a limit that is not known. The limits are
# those of LiteLLM's list of models (1.110.2), at the models' own providers.
FAMILIES = {
  r"gpt-4\.1": ("o200k", 32_768),
  r"gpt-4o|gpt-5(\.[1-3])?-chat": ("o200k", 16_384),
  r"gpt-[56]": ("o200k", 128_000),
  r"\bo[134]\b": ("o200k", 100_000),
  r"claude-\w+-4[-.]6": ("claude", 128_000),
  r"claude-\w+-4[-.]5": ("claude", 64_000),
  r"claude-(3|\w+-4(?![-.][7-9]))": ("claude", 0),
  r"claude-\w+-[45]": ("", 128_000),
  r"gemini-2\.5-(pro|flash)(-lite)?$": ("gemini", 65_536),
  r"gemini-3": ("", 65_536),
  r"deepseek-(v4|flash)": ("deepseek", 393_216),
  r"deepseek": ("deepseek", 0),
  r"": ("", 0),
}
# The longest reply that is assumed if neither it nor the window is known (our choice).
# It bounds the cost of a reply without a limit.
ASSUMED_REPLY = 128_000


class Limits(NamedTuple):
  """The limits of a model.

  Attributes:
    tokenizer: a name. Models with one name count the same tokens in a text.
    reply_tokens: the tokens of the longest reply, known or assumed.
    is_known: whether `reply_tokens` is known, and not assumed.
    context_tokens: the tokens of the window, which holds the prompt and the reply;
      infinite if it is not known.
  """

  tokenizer: str
  reply_tokens: int
  is_known: bool
  context_tokens: float


def find_limits(config: UpstreamsConfig, index: int) -> Limits:
  """Find the limits of a model: those of the configuration, or the known ones.

  Args:
    config: the configuration of the models.
    index: the model's index.
  """
  name = config.names[index]
  tokenizer, reply_tokens = find_row(FAMILIES, name)
  model = find_model(name)
  window = model and model.context_window
  if config.context_tokens:
    window = config.context_tokens[index] or window
  known = reply_tokens or window
  return Limits(
    tokenizer or name, known or ASSUMED_REPLY, bool(known), window or math.inf
  )


class PromptBound(NamedTuple):
  """Numbers of tokens of a prompt: an upper bound, and an estimate."""

  tokens: int
  expected_tokens: int


class Offer(NamedTuple):
  """What one model may be asked for a call, and what this may cost.

  Attributes:
    request: the request, before its limit on the reply shrinks.
    least_tokens: the lowest limit on the reply that is sent.
    most_tokens: the limit on the reply if the budgets have room for it.
    is_ours: whether neither the client nor the configuration sets the limit.
    prompt_usd: the worst case of the prompt in US dollars.
    token_usd: the worst case of each token of the reply's limit.
    fits_window: whether the prompt is expected to fit the model's window.
    aside_usd: the worst case of a last turn after this call in US dollars.
    reply_tokens: the limit on the tokens of the reply.
    is_sent: whether the request has the limit. Without a cap, this server adds none.
  """

  request: dict
  least_tokens: int
  most_tokens: int
  is_ours: bool
  prompt_usd: float
  token_usd: float
  fits_window: bool
  aside_usd: float
  reply_tokens: int = 0
  is_sent: bool = True

  @property
  def worst_case_usd(self) -> float:
    """Return the worst case of the call in US dollars."""
    return self.prompt_usd + self.reply_tokens * self.token_usd

  def shrink(self, room_usd: float) -> "Offer":
    """Shrink the limit on the reply to what the budgets have room for."""
    tokens = self.most_tokens
    most_usd = self.prompt_usd + tokens * self.token_usd
    if self.token_usd and most_usd > room_usd:
      tokens = int((1 - ROUNDING) * (room_usd - self.prompt_usd) / self.token_usd)
    tokens = min(self.most_tokens, max(self.least_tokens, tokens))
    is_sent = not self.is_ours or room_usd < math.inf
    return self._replace(reply_tokens=tokens, is_sent=is_sent)


def is_refused(answer: Whole | Stream | Outcome) -> bool:
  """Tell whether a model has refused a request as wrong."""
  return isinstance(answer, Outcome) and answer.status in (400, 422)


@dataclasses.dataclass(eq=False)
class Upstream(PricedModel):
  """An upstream model, to which this server forwards clients' calls.

  Attributes:
    config: the configuration of the models.
    config_index: the model's index in the configuration.
    endpoint: the model's name and address.
    name: the name.
    multiples: the multiples of the list price that the last answer told. Before one,
      a public endpoint may have the costliest service tier.
    limits_A: the limits of all models.
    limits: the limits of this one.
    changes: what the model has never taken so far, by wire form and field.
  """

  config: UpstreamsConfig
  config_index: int
  endpoint: Endpoint

  def __post_init__(self) -> None:
    """Find the key and the proxy of the endpoint, and the limits of all models.

    Raises:
      ValueError: the key is missing, or the proxy or the certificates that the
        environment names cannot be used.
    """
    indices = range(len(self.config.names))
    self.limits_A = [find_limits(self.config, index) for index in indices]
    self.limits = self.limits_A[self.config_index]
    self.changes: dict[tuple[str, str], Change] = {}
    self.name = self.endpoint.model
    tier = 1.0 if self.endpoint.is_private else COSTLIEST_TIER
    self.multiples = {"service_tier": tier}
    self._key = self.endpoint.key()
    self._proxy = find_proxy(self.endpoint.base_url)
    try:
      self._tls = httpx2.create_ssl_context()
    except OSError:
      raise ValueError(
        "SSL_CERT_FILE or SSL_CERT_DIR names no certificates: correct or unset it"
      ) from None

  @functools.cached_property
  def http(self) -> aiohttp.ClientSession:
    """Open the HTTP client, in the event loop that needs it."""
    return open_http(self.config.timeout_s, self._proxy, self._tls)

  def offers(self, form: WireForm) -> bool:
    """Tell whether the model's endpoint offers a wire form (`models.forms`)."""
    forms = self.config.forms
    # One text counts for all models.
    return form.path in forms[self.config_index % len(forms)].split()

  def prepare(self, call: ClientCall, config: ServeConfig) -> Offer:
    """Write a call's request to this model, and bound its tokens and dollars.

    The limit on the reply of a client that sets none is the configured one, else the
    model's longest reply, as far as the window has room for it.
    """
    form = call.form
    request = form.write_request(call.write_prompt(self.config_index), self.endpoint)
    pattern = find_row(CALL_IDS, self.name)
    if pattern and 'id": ' in call.text:
      request[form.history] = fit_ids(request[form.history], pattern)
    for (path, _), change in self.changes.items():
      if path == form.path:
        request = change.apply(request)
    prompt = self._bound_prompt(call, request)
    prompt_tokens = prompt.tokens
    if call.is_last:
      request = form.forbid_tools(request)
      prompt_tokens += CHOICE_TOKENS
    limits = [request.get(name) or 0 for name in form.limits]
    most = max(limits) or config.max_reply_tokens
    is_ours = not most
    if is_ours:
      most = max(LEAST_REPLY, self.limits.context_tokens - 2 * prompt.expected_tokens)
    if is_ours or self.limits.is_known:
      most = int(min(self.limits.reply_tokens, most))
    least = min(LEAST_REPLY, most)
    # The costlier one of the tiers that the last answer and the request name counts.
    terms = AnswerMeter(multiples={**self.multiples})
    terms.note_terms(request)
    multiple = math.prod(terms.multiples.values())
    prompt_usd = multiple * self.worst_case_usd(prompt_tokens, 0)
    if call.is_hourly:
      prompt_usd += multiple * prompt_tokens * HOUR_WRITE * self.price.input / 1e6
    token_usd = multiple * self.worst_case_usd(0, request.get("n") or 1)
    grown_usd = prompt_usd * (1 + GROWTH / prompt_tokens)
    return Offer(
      request,
      least,
      most,
      is_ours,
      prompt_usd,
      token_usd,
      prompt.expected_tokens + least <= self.limits.context_tokens,
      grown_usd + min(LAST_REPLY, most) * token_usd,
    )

  def _bound_prompt(self, call: ClientCall, request: dict) -> PromptBound:
    """Bound the tokens of a request's prompt.

    If a model with this model's tokenizer has already read the first messages in an
    earlier call, these messages count with the tokens that were billed for them, and
    with the template of this model if it is another one.
    """
    form = call.form
    best = PromptBound(call.bound_tokens, call.bound_tokens // CHARS_PER_TOKEN)
    caches = call.conversation.caches if call.conversation else {}
    for model, cache in caches.items():
      is_shared = self.limits_A[model].tokenizer == self.limits.tokenizer
      digest = hash_prefix(form, request, cache.messages)
      if not is_shared or digest != cache.digest:
        continue
      other_fields = dict(request)
      for name in ("model", form.history, *form.limits, *form.opening):
        other_fields.pop(name, None)
      history = request[form.history]
      new = [other_fields, history[cache.messages :]]
      tokens = cache.tokens
      if model != self.config_index:
        opening = [request.get(name) for name in form.opening]
        tokens += bound_tokens([opening, history[: cache.messages]], lambda text: 0)
      new_tokens = bound_tokens(new)
      expected_tokens = cache.tokens + new_tokens // CHARS_PER_TOKEN
      best = min(best, PromptBound(tokens + new_tokens, expected_tokens))
    return best

  async def attempt(self, call: ClientCall, offer: Offer) -> Whole | Stream | Outcome:
    """Send a call to this model once.

    If the model refuses a setting, the reasoning in the call, or a limit on the reply,
    the call is sent again without it, or with the limit that the refusal names. A
    refusal costs nothing, and what is sent instead costs no more than the offer. What
    the model never takes is left out of later requests.

    Args:
      offer: what the call may cost.

    Returns:
      A whole answer in the call's wire form, a stream, or the failure.
    """
    request = {**offer.request}
    if offer.is_sent:
      field = self.config.token_limit_field
      request = call.form.limit_reply(request, offer.reply_tokens, field)
    if self.endpoint.is_openai and call.conversation:
      # Calls with one key are more likely to find their prompt cache.
      request.setdefault("prompt_cache_key", f"baar-{call.conversation.id}")
    is_added = offer.is_ours and offer.reply_tokens == offer.most_tokens
    changes = []
    answer = await self.send(call, request)
    while is_refused(answer) and len(changes) < MOST_CHANGES:
      change = find_change(answer, request, call.form, is_added)
      changed = change.apply(request) if change else request
      if changed == request:
        break
      request = changed
      changes.append(change)
      # The tokens of a changed request bound no later one.
      call.prefix = None
      answer = await self.send(call, request)
    if changes and not is_refused(answer):
      lasting = {(call.form.path, x.field): x for x in changes if x.is_lasting}
      self.changes |= lasting
    if isinstance(answer, Whole):
      try:
        call.form.read_reply(answer.fields)
      except UnicodeError:  # Half a surrogate pair does no harm.
        pass
      except MALFORMED:
        answer = UNREADABLE
    return answer

  def bill(self, meter: AnswerMeter, worst_case_usd: float, most_tokens: int) -> Bill:
    """Compute the dollars of an answer; see `AnswerMeter.bill`."""
    return meter.bill(self.price, worst_case_usd, most_tokens)

  async def send(self, call: ClientCall, request: Mapping) -> Whole | Stream | Outcome:
    """Send a request for a call once.

    Returns:
      The whole answer; a stream if the request asks for a stream; or the outcome of an
      attempt that failed. No exception other than a cancellation is raised.
    """
    # The JSON text is pure ASCII: it escapes all other characters.
    content = json.dumps(request).encode()
    form = call.form
    url = f"{self.endpoint.base_url}/{form.path}?{call.query}".rstrip("?")
    headers = form.list_headers(self.endpoint, self._key)
    headers["content-type"] = "application/json"
    headers |= pick_headers(call.headers, PASSED_HEADERS)
    until_s = asyncio.get_running_loop().time() + self.config.timeout_s
    meter = AnswerMeter(counts_beside=form.counts_beside, is_hourly=call.is_hourly)
    try:
      async with asyncio.timeout_at(until_s):
        response = await self.http.post(
          url, data=content, headers=headers, allow_redirects=False
        )
        is_success = response.status // 100 == 2
        is_stream = response.content_type == "text/event-stream"
        if is_stream and is_success and request.get("stream"):
          return Stream(response, meter)
        body = await response.read()
    except NOT_SENT as failure:
      return dataclasses.replace(explain(failure), kind=FAILED)
    except LOST as failure:
      return explain(failure)
    if is_success:
      fields = meter.read(body)
      return UNREADABLE if fields is None else Whole(fields, meter)
    passed = pick_headers(response.headers, RETRY_HEADERS)
    return read_refusal(response.status, body, passed, self._key)

  def list_changes(self) -> list[dict]:
    """List what the model has never taken, and what is sent in its place."""
    return [
      dict(model=self.name, refuses=change.field, form=path, sent=change.value)
      for (path, _), change in self.changes.items()
    ]

  def refuse(self, outcome: Outcome) -> Refusal:
    """Make the error answer for a client after a failed attempt at this model."""
    # This server follows no redirects. A redirect (3xx) by the model's endpoint is
    # therefore reported as a bad gateway.
    status = outcome.status if outcome.status >= 400 else 502
    message = (
      outcome.message
      or f"The model {self.name} {outcome.problem}. Send the call again. "
      "If this error repeats, check --config.models of this server."
    )
    refusal = Refusal(
      status, message, outcome.type or "upstream_error", outcome.code or None
    )
    refusal.headers = outcome.headers
    return refusal

  def read_failure(self, data: bytes) -> str:
    """Read the message in an error event of a stream, without the key."""
    return clean(read_error(data).message, self._key)
