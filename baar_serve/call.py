"""Hold a client's call: what it asks, and the session it belongs to."""

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from baar_jax.llms.history import bound_tokens
from baar_serve.forms.wire import WireForm, drop_reasoning
from baar_serve.records import Conversation, Purse
from baar_serve.request import (
  CONVERSATION,
  CONVERSATION_NAMES,
  PARENT_NAME,
  SESSION,
  SESSION_NAMES,
  CallFields,
  ClientHistory,
  ClientKey,
  drop_nulls,
  find_names,
)

LAST_NOTE = (
  "(The budget of this task ends with your next reply. Call no tool: hand back what "
  "there is.)"
)


@dataclasses.dataclass(eq=False)
class ClientCall:
  """A client's call of a model.

  Attributes:
    key: the client's key.
    form: the wire form.
    headers: the headers.
    body: the JSON body, as it came.
    url_name: the NAME in the URL /s/NAME/v1; None without one.
    query: the query of the URL.
    start_s: when the call arrived, in seconds of the monotonic clock.
    call_s: seconds from the conversation's first call to this one.
    note: what the model is told of the caps; "" is nothing.
    is_last: whether it is the last turn of its session, without a call of a tool.
    aside_usd: the US dollars that stay set aside for the last turn.
    prefix: what the call leaves in a prompt cache: the number of messages and their
      hash, as in `Cache`; None if no later call can use it.
    history: the messages of the body, read as an unfinished episode. This and all that
      follows is set by `place`.
    purse: the purse that pays.
    conversation: the conversation; None for a side call, which is no step.
    prompt: the body with the note.
    bound_tokens: an upper bound on the tokens of the prompt.
    offers: what each model may be asked; empty before the first look at budgets.
  """

  key: ClientKey
  form: WireForm
  headers: Mapping[str, str]
  body: dict
  url_name: str | None = None
  query: str = ""
  start_s: float = dataclasses.field(default_factory=time.monotonic)
  call_s: float = 0.0
  note: str = ""
  is_last: bool = False
  aside_usd: float = 0.0
  prefix: tuple[int, str] | None = None

  @functools.cached_property
  def fields(self) -> CallFields:
    """Read the fields of the call; one with the value null counts as missing.

    Raises:
      Refusal: a field is missing, has another type, or is out of its bounds.
    """
    session = next(self.list_names(), None)
    names = [*find_names(self.headers, *CONVERSATION_NAMES)]
    if PARENT_NAME in self.headers:
      names += [*find_names(self.headers, *SESSION_NAMES)][:1]
    fields = drop_nulls(self.body)
    for name, value in self.headers.items():
      if name.startswith("x-"):
        fields[name] = value
    fields[SESSION] = session
    # A conversation's name counts within its session.
    fields[CONVERSATION] = "/".join(map(str, names)) * (session is not None)
    return CallFields.read(fields)

  @functools.cached_property
  def text(self) -> str:
    """Return the body as JSON with sorted keys, in ASCII."""
    return json.dumps(self.body, sort_keys=True)

  @property
  def is_hourly(self) -> bool:
    """Tell whether the call asks for cache writes that live for an hour."""
    return '"1h"' in self.text

  def list_names(self) -> Iterator[object]:
    """List the names of the session in the call; the first one counts."""
    metadata = self.body.get("metadata")
    if not isinstance(metadata, dict):
      metadata = {}
    yield from find_names(self.headers, "x-baar-session-id")
    if self.url_name is not None:
      yield self.url_name
    yield from find_names(self.headers, PARENT_NAME, *SESSION_NAMES)
    # Claude Code's name is the metadata's user_id.
    fields = {**metadata, **drop_nulls(self.body)}
    yield from find_names(
      fields, "session_id", "litellm_session_id", "user_id", "prompt_cache_key"
    )

  def place(
    self, history: ClientHistory, purse: Purse, conversation: Conversation | None
  ) -> None:
    """Set what the call belongs to."""
    self.history = history
    self.purse = purse
    self.conversation = conversation
    if conversation:
      self.call_s = time.time() - conversation.state.began_s
    self.prompt = self.body
    self.bound_tokens = bound_tokens(self.body)
    self.offers = []

  def warn(self, share: float | None) -> None:
    """Tell the model what is left, from a used share of the caps on.

    The client's own messages stay as they are, so that the conversation is known again.
    """
    left = self.purse.remaining_caps
    is_late = share and self.conversation and self.purse.used_share >= share
    if self.is_last or not is_late:
      return
    amounts = []
    if left.usd is not None:
      amounts.append(f"${left.usd:.6f}")
    if left.calls is not None:
      amounts.append(f"{left.calls} calls of the larger model")
    self.tell(f"(Left for this task: {' and '.join(amounts)}. Finish it soon.)")

  def tell(self, note: str) -> None:
    """Add a note to the newest message, in place of one before."""
    noted = self.form.add_note(self.body, note)
    if noted:
      self.bound_tokens += len(note.encode()) - len(self.note.encode())
      self.note = note
      self.prompt = noted

  def begin_last_turn(self) -> None:
    """Let the model hand back what there is, at the end of a session's cap."""
    self.is_last = True
    self.offers = []
    self.tell(LAST_NOTE)

  def write_prompt(self, model: int) -> dict:
    """Return the prompt without the reasoning up to the last reply of another model.

    Models sign or encrypt their reasoning, and no other model can read it.
    """
    history = self.form.history
    entries = self.prompt[history]
    own = len(entries)
    for record in reversed(self.conversation.records if self.conversation else ()):
      if record.step.model != model:
        kept = drop_reasoning(entries[:own]) + entries[own:]
        return {**self.prompt, history: kept}
      if record.cache:
        own = record.cache.messages
    return self.prompt

  @property
  def answer_headers(self) -> dict[str, str]:
    """Return the headers of an answer with the purse's dollars and remaining caps."""
    purse = self.purse
    left = purse.remaining_caps
    values = {
      "session-id": quote(purse.name, safe=" "),
      "conversation": self.conversation and self.conversation.id,
      "session-usd": purse.dollars.settled_usd,
      "left-usd": left.usd,
      "left-large-calls": left.calls,
    }
    headers = {}
    for name, value in drop_nulls(values).items():
      text = f"{value:.9f}" if isinstance(value, float) else str(value)
      headers[f"x-baar-{name}"] = text
    return headers
