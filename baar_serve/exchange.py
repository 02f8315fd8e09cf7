"""Choose a model for each call of a client, and book its cost."""

import asyncio
import contextlib
import random
import re
import sqlite3
import sys
from collections.abc import AsyncIterator, Callable, Mapping

from baar_jax.decide import Decider
from baar_jax.episode import Episode, Task
from baar_jax.llms.history import hash_text
from baar_jax.llms.provider import endpoints
from baar_jax.rollout.policy import Policy
from baar_jax.rollout.specs import Decision, Job, Live
from baar_jax.router.view import list_remaining_caps
from baar_jax.run import Run
from baar_serve.call import ClientCall
from baar_serve.client import Whole
from baar_serve.config import ServeConfig
from baar_serve.episodes import add_session
from baar_serve.forms import responses
from baar_serve.records import Purse
from baar_serve.request import END, Refusal, SessionScore
from baar_serve.routed import Budgets, RoutedCall
from baar_serve.sessions import Sessions
from baar_serve.upstream import Upstream

# What has sound in the JSON text of a request. A text that quotes it has a backslash
# before each quotation mark.
SOUND = re.compile(r'"type": "(input_audio|audio_url)"|"\w*(url|data)": "data:audio/')
# Most finished answers that are kept for retries.
MOST_ANSWERS = 256


class Delivery:
  """An answer that is being made, for its client and for the retries of the call.

  It is made to its end even if all clients leave, so that its cost is known.

  Attributes:
    call: the client's call; None at the end, unless a retry may continue it.
    begun: the whole answer with its headers, or {} for a stream; or the error.
    blocks: the events of a stream so far.
    is_done: whether the answer is complete.
    readers: the number of clients that read the stream now.
    is_dropped: whether a client left before the answer was complete.
  """

  def __init__(self, call: ClientCall) -> None:
    """Start without an answer. An event loop must be running."""
    self.call: ClientCall | None = call
    self.begun: asyncio.Future[tuple[dict, dict]] = asyncio.Future()
    self.blocks: list[bytes] = []
    self.is_done = False
    self.readers = 0
    self.is_dropped = False
    self._changed = asyncio.Event()

  @property
  def is_repeatable(self) -> bool:
    """Tell whether a retry may get this answer: it has no error so far."""
    return not self.begun.done() or not self.begun.exception()

  @property
  def is_over(self) -> bool:
    """Tell whether no later call can get this answer or continue its call."""
    return self.is_done and not (self.call or self.is_dropped or self.readers)

  def drop(self, leaving: asyncio.Future) -> None:
    """Note that a client left before the answer, unless the watch was cancelled."""
    self.is_dropped |= not leaving.cancelled()

  def add(self, block: bytes) -> None:
    """Add an event of the stream."""
    self.blocks.append(block)
    self._wake()

  def finish(self) -> None:
    """Mark the answer as complete."""
    self.is_done = True
    self._wake()

  def _wake(self) -> None:
    """Wake all that wait for a change."""
    self._changed.set()
    self._changed = asyncio.Event()

  async def follow(self) -> AsyncIterator[bytes]:
    """Yield all events of the stream, from the first one on."""
    sent = 0
    self.readers += 1
    try:
      while sent < len(self.blocks) or not self.is_done:
        if sent == len(self.blocks):
          await self._changed.wait()
          continue
        sent += 1
        yield self.blocks[sent - 1]
    finally:
      self.readers -= 1
      # Some clients leave at the reply's end, before the last events.
      is_cut = sent < len(self.blocks) or not self.is_done
      self.is_dropped |= is_cut and not any(map(END.search, self.blocks[:sent]))


class Exchange:
  """Route the calls of all sessions: decide, call the model, and book the cost.

  All of its methods run in one event loop.

  Attributes:
    deciders: the decider of each rule, such as "small" or "router".
    items: the items of the newest responses.
  """

  def __init__(
    self,
    config: ServeConfig,
    run: Run,
    policies: Mapping[str, Policy],
  ):
    """Set up the policies, the upstream models and the stored sessions.

    Args:
      run: the run that the endpoint records.
      policies: the policies that clients can select, by rule.

    Raises:
      ValueError: a model has no price or no key.
    """
    self.config = config
    self._run = run
    models = config.models
    self.upstreams: list[Upstream] = []
    for index, endpoint in enumerate(endpoints(models)):
      self.upstreams.append(Upstream(models, index, endpoint))
    # The newest answers by the client, the call's fields and the hash of its body.
    self._deliveries: dict[tuple, list[Delivery]] = {}
    self.items = responses.Items()
    # Tasks whose results nobody awaits: the event loop keeps only weak references.
    self._tasks: set[asyncio.Task] = set()
    rows = config.max_sessions
    self.deciders = {rule: Decider(policy, rows) for rule, policy in policies.items()}
    # Whoever ends the exchange closes the ledger, so nothing may fail after this line.
    self.sessions = Sessions(run.dir / "episodes.sqlite", run.budget)
    self.budgets = Budgets(config, self.sessions, self.upstreams)

  def deliver(
    self, call: ClientCall, receive: Callable[[ClientCall], None]
  ) -> Delivery:
    """Answer a call, or find the answer that is being made for a retry of it.

    An equal call gets an answer that its client has left, and no other call gets it
    then. In a session with a name, it also gets the answer that is being made. Without
    a name it may be another task, so it only continues one call that has failed.

    Args:
      receive: finds the purse and the conversation of the call.

    Raises:
      Refusal: the call has a wrong field.
    """
    fields = call.fields
    if SOUND.search(call.text):
      raise Refusal(
        400,
        "This server refuses sound, whose tokens have a price of their own. "
        "Send its text.",
      )
    place = (
      call.key.name,
      call.form.path,
      fields.model_dump_json(),
      hash_text(call.text),
    )
    earlier = [found for found in self._deliveries.get(place, ()) if not found.is_over]
    for delivery in earlier:
      is_shared = fields.session and not delivery.is_done
      if delivery.is_repeatable and (is_shared or delivery.is_dropped):
        delivery.is_dropped = False
        return delivery
    failed = next((found for found in earlier if found.is_done and found.call), None)
    if failed:
      earlier.remove(failed)
    # An equal task may have brought the conversation as far since then.
    mine = failed and failed.call.conversation
    if failed and not (mine and mine.last_place >= len(failed.call.history.actions)):
      # The client repeats a call after an error; its session has no other name.
      call.place(failed.call.history, failed.call.purse, failed.call.conversation)
    else:
      receive(call)
    call.purse.callers += 1
    delivery = Delivery(call)
    # The newest place is the last one.
    self._deliveries.pop(place, None)
    self._deliveries[place] = [*earlier, delivery]
    for old_place in [*self._deliveries][: len(self._deliveries) - MOST_ANSWERS]:
      if all(old.is_done for old in self._deliveries[old_place]):
        del self._deliveries[old_place]
    task = asyncio.get_running_loop().create_task(self._make(delivery))
    self._tasks.add(task)
    task.add_done_callback(self._tasks.discard)
    return delivery

  async def close(self) -> None:
    """End what is being made, at its worst case, and close all connections."""
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)
    for upstream in self.upstreams:
      await upstream.http.close()
    self.sessions.close()

  async def _make(self, delivery: Delivery) -> None:
    """Make an answer to its end: decide, call the model, and book the cost."""
    call = delivery.call
    routed = None
    limit_s = self.config.call_timeout_s
    until_s = asyncio.get_running_loop().time() + limit_s
    try:
      async with asyncio.timeout_at(until_s):
        routed = await self.decide(call)
        answer = await routed.ask(self.config.models.retries)
      if isinstance(answer, Whole):
        routed.answer = answer.fields
        routed.book_reply(answer.meter)
        usage = answer.fields.get("usage")
        usage = dict(usage if isinstance(usage, dict) else {}, cost=routed.usd)
        fields = answer.fields | {"usage": usage, "model": routed.upstream.name}
        delivery.begun.set_result((fields, routed.headers))
      else:
        delivery.begun.set_result(({}, routed.headers))
        async for block in routed.relay(answer, until_s):
          delivery.add(block)
      if call.form is responses.FORM:
        self.items.record(call.purse.client, call.body, routed.answer)
    except Exception as error:
      if isinstance(error, TimeoutError):
        error = Refusal(
          504,
          f"No answer within --config.call_timeout_s={limit_s:g}. "
          "The model hangs. Call again.",
          "timeout",
        )
      if isinstance(error, Refusal):
        error.headers = call.answer_headers | error.headers
      if not delivery.begun.done():
        delivery.begun.set_exception(error)
        delivery.begun.exception()  # The client may have left.
      elif not isinstance(error, Refusal | sqlite3.OperationalError):
        print(f"error: {type(error).__name__} in a stream", file=sys.stderr)
    finally:
      if routed and routed.last_attempt:
        routed.book_reply()
      call.purse.callers -= 1
      if delivery.is_repeatable or call.fields.session or not routed:
        delivery.call = None
      if not routed:
        with contextlib.suppress(sqlite3.OperationalError):
          self.sessions.forget(call.purse)
      delivery.finish()

  async def decide(self, call: ClientCall) -> RoutedCall:
    """Choose the model that answers a call; a side call goes to SMALL.

    The chosen model's call fits all budgets when this method returns. The caller must
    reserve its cost before the next await, because other tasks spend dollars too.

    Raises:
      Refusal: no model's call fits the budgets, or the conversation was scored during
        the decision.
    """
    conversation = call.conversation
    models = await self.budgets.find_affordable(call)
    decision = Decision(models[0])
    if conversation:
      async with conversation.deciding:
        if len(models) > 1:
          decider = self.deciders[conversation.state.rule]
          decision = await decider.decide(self._make_live(call))
        # Other calls may have spent dollars since.
        models = await self.budgets.find_affordable(call)
      if conversation.score is not None:
        raise Refusal(
          409, "The task was scored during this call. Send the call of the next task."
        )
      decision = decision.within(models)
    observation = call.history.observations[-1] * self.config.record_text
    step = decision.make_step(observation, started_s=call.call_s)
    return RoutedCall(call, self.budgets, step)

  def _make_live(self, call: ClientCall) -> Live:
    """Make the live episode of a call's conversation, from which its policy decides."""
    conversation = call.conversation
    history = call.history
    # A client may repeat a call, which gives two steps at one place. The last one
    # counts.
    played = {record.place: record.step for record in conversation.records}
    steps = history.write_steps(played)
    # The id seeds the policy's random draws, and the trial number below, which sets the
    # probability of LARGE in a stratified sample. A session that is played again under
    # its name gets the same ones.
    purse = conversation.purse
    id_ = f"{purse.client}/{purse.name}/{conversation.state.opening}"
    task = Task(id_, "test", history.task, self._run.config.env.max_steps)
    trial = random.Random(id_).randint(1, self._run.config.references.samples)
    return Live(
      Job(task, "reference", trial),
      purse.cap,
      models=len(self.upstreams),
      cost_weight=conversation.state.cost_weight,
      steps=steps,
      observation=history.observations[-1],
      remaining_caps=[
        *list_remaining_caps(purse.cap, steps),
        purse.remaining_caps,
      ],
      started_s=call.call_s,
    )

  def score(self, purse: Purse, scored: SessionScore) -> None:
    """End the task of a session with its score, and store its episode.

    The score is of the newest conversation of the main agent, and all others of the
    purse end without one.

    Raises:
      Refusal: the task already has a score, has no step, or has a call in flight.
    """
    self.sessions.commit()
    conversations = self.sessions.list_conversations(
      "purse = ? AND changed_s >= 0", purse.id
    )
    # The newest first, those of the session's main agent before all others.
    main = min(
      conversations,
      key=lambda found: (not found.records, found.name not in ("", purse.name)),
      default=None,
    )
    if not (main and main.records) or main.id in purse.open.values():
      raise Refusal(
        409,
        "This session is scored already, has had no call, or has a call in flight. "
        "Score it once, after the answer to its last call.",
      )
    # If the server is killed before it saves the score, the client will send the score
    # again. The mark prevents a second copy of the episode.
    mark = f"conversation {main.id}"
    cap = purse.cap
    episode = Episode(
      scored.task or main.state.task_id,
      main.state.policy,
      "test",
      trial=0,
      steps=main.steps,
      score=scored.score,
      stop="done",
      call_budget=cap.calls,
      usd_budget=cap.usd,
      lost_usd=self.sessions.lost_usd(main),
    )
    text = main.state.description
    add_session(self._run.store, self._run.config, mark, episode, text)
    conversations.remove(main)
    self.sessions.finish(main, scored.score)
    for conversation in conversations:
      self.sessions.finish(conversation)
