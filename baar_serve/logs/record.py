"""Define the record that every reader of logs yields: one call of a model."""

import dataclasses

from baar_jax.episode import Usage


@dataclasses.dataclass(frozen=True)
class LoggedCall:
  """One call of a model that another program has recorded.

  A session is the list of its calls, in their order. The calls of one session may come
  between those of others.

  Attributes:
    session: the session's name.
    task: the task's name; the same for all tries at one task.
    text: the task's text.
    model: the model's name, as the log has it.
    observation: what is new before the action: the results of the last action, and
      later texts of the user; "" before the first action. What the log repeats from
      earlier calls is left out.
    action: the reply: its tool calls and its text.
    at_s: the time of the call in seconds since 1970; None if it is unknown.
    usage: the billed tokens; None if they are unknown.
    cost_usd: the dollars that the log states; None if it states none.
    return_code: the exit code that `observation` reports, the last one that is not 0;
      1 for an error without a code; None if the log does not tell.
    score: the session's score in [0, 1]; None if the log does not tell it here.
  """

  session: str
  task: str
  text: str
  model: str
  observation: str
  action: str
  at_s: float | None = None
  usage: Usage | None = None
  cost_usd: float | None = None
  return_code: int | None = None
  score: float | None = None
