"""What AppWorld's own tasks are made of: one person's records, the solution, the wanted changes."""

import dataclasses
import datetime
import random
import re
import textwrap
from collections.abc import Sequence
from typing import Any

from baar_jax.envs.appworld_people import NOW, SONGS, Person, Song, contacts_of


@dataclasses.dataclass(frozen=True)
class Change:
  """The records of one model that a task is to change, as rows of values of `fields`.

  A field may lead to another record's, as in "sender.email".
  """

  fields: tuple[str, ...]
  added: Sequence[tuple] = ()
  updated: Sequence[tuple] = ()
  removed: Sequence[tuple] = ()

  def as_dict(self) -> dict:
    kinds = ("added", "updated", "removed")
    return {"fields": list(self.fields)} | {
      kind: sorted(map(list, getattr(self, kind))) for kind in kinds
    }


@dataclasses.dataclass(frozen=True)
class Made:
  """A task.

  Attributes:
    instruction: what the agent is asked.
    code: solves it; `solution` is the whole of it, with the logins that it needs.
    answer: that the agent has to give; None if it is not asked a question.
    changes: by model; every other model has to stay as it is, except
    side_effects: models that the apps change by themselves.
  """

  instruction: str
  code: str
  answer: object = None
  changes: dict[str, Change] = dataclasses.field(default_factory=dict)
  side_effects: tuple[str, ...] = ()

  @property
  def solution(self) -> str:
    """Python with a function `solution(apis, requester)`."""
    lines = [
      "accounts = apis.supervisor.show_account_passwords()",
      "passwords = {account['account_name']: account['password'] for account in accounts}",
      "profile = apis.supervisor.show_profile()",
    ]
    for app in self._apps_of(self.code):
      name = "phone_number" if app == "phone" else "email"
      login = f"apis.{app}.login(username=profile['{name}'], password=passwords['{app}'])"
      lines.append(f"{app} = {login}['access_token']")
    lines.append(textwrap.dedent(self.code).strip())
    answer = "" if self.answer is None else "answer=answer"
    lines.append(f"apis.supervisor.complete_task({answer})")
    return "def solution(apis, requester):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"

  @staticmethod
  def _apps_of(code: str) -> list[str]:
    return list(dict.fromkeys(re.findall(r"apis\.(\w+)\.", code)))

  @property
  def apis(self) -> list[str]:
    return sorted(set(re.findall(r"apis\.(\w+\.\w+)", self.solution)))

  @property
  def apps(self) -> list[str]:
    return sorted(self._apps_of(self.code))


def all_pages(name: str, api: str, arguments: str = "") -> str:
  """Code that reads all pages of an API ("app.api") into a list of that name."""
  app = api.split(".")[0]
  more = f", {arguments}" if arguments else ""
  return (
    f"page = 0\n{name} = []\n"
    f"while found := apis.{api}(access_token={app}{more}, page_index=page):\n"
    f"    {name} += found\n    page += 1\n"
  )


class Life:
  """One person's records for one task, written into its databases.

  Attributes:
    me: the supervisor.
    draw: all that is random about the task.
    contacts: whom the supervisor's phone knows, by relationship.
  """

  def __init__(self, models: Any, me: Person, draw: random.Random) -> None:
    self.me = me
    self.draw = draw
    self.contacts = contacts_of(me)
    self._models = models
    self._minutes = 0

  def past(self, most_days: int) -> datetime.datetime:
    """A moment of the last days, no two the same."""
    self._minutes += 1
    days = self.draw.randrange(1, most_days)
    return NOW - datetime.timedelta(days=days, minutes=self._minutes)

  def dollars(self, low: int, high: int) -> float:
    return float(self.draw.randrange(low, high))

  def pay(self, sender: Person, receiver: Person, usd: float, what: str, when) -> None:
    self._models.venmo.Transaction.create_save(
      sender_id=sender.number,
      receiver_id=receiver.number,
      amount=usd,
      description=what,
      created_at=when,
      updated_at=when,
    )

  def ask_to_pay(self, sender: Person, receiver: Person, usd: float, what: str, paid: bool) -> None:
    """A payment request, pending or paid."""
    when = self.past(40)
    self._models.venmo.PaymentRequest.create_save(
      sender_id=sender.number,
      receiver_id=receiver.number,
      amount=usd,
      description=what,
      created_at=when,
      updated_at=when,
      approved_at=when + datetime.timedelta(hours=2) if paid else None,
    )

  def note(self, title: str, content: str, tags: Sequence[str] = ()) -> None:
    when = self.past(200)
    self._models.simple_note.Note.create_save(
      user_id=self.me.number,
      title=title,
      content=content,
      tags=list(tags),
      created_at=when,
      updated_at=when,
      pinned=False,
    )

  def project(self, name: str, titles: Sequence[str], done: Sequence[str] = ()) -> None:
    """A Todoist project with its tasks."""
    project = self._models.todoist.Project.create_save(name=name, user_id=self.me.number)
    self._models.todoist.ProjectCollaboratorLink.create_save(
      project_id=project.id, user_id=self.me.number
    )
    for place, title in enumerate(titles):
      self._models.todoist.Task.create_save(
        project_id=project.id,
        user_id=self.me.number,
        title=title,
        priority="medium",
        order_index=place,
        is_completed=title in done,
      )

  def library(self, count: int) -> list[Song]:
    """Puts as many songs into the Spotify library."""
    songs = self.draw.sample(SONGS, count)
    for song in songs:
      self._models.spotify.UserLibrarySong.create_save(
        user_id=self.me.number, song_id=song.id, created_at=self.past(300)
      )
    return songs

  def text(self, sender: Person, receiver: Person, message: str, when) -> None:
    sent = self._models.phone.GlobalTextMessage.create_save(
      sender_id=sender.number, receiver_id=receiver.number, message=message, created_at=when
    )
    for person in (sender, receiver):
      self._models.phone.UserTextMessage.create_save(
        global_text_message_id=sent.id, user_id=person.number, created_at=when
      )

  def file(self, path: str, content: str) -> None:
    """A file under the home directory, with the directories that it needs."""
    made = self._models.file_system
    home = f"/home/{self.me.first_name.lower()}/"
    parts = path.split("/")
    for depth in range(1, len(parts)):
      directory = home + "/".join(parts[:depth]) + "/"
      if not made.Directory.find_one(user_id=self.me.number, path=directory):
        made.Directory.create_save(path=directory, user_id=self.me.number)
    made.File.create_save(path=home + path, user_id=self.me.number, content=content)
