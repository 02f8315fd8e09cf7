"""Writes AppWorld's data directory as its engine reads it: API docs, databases, files of a task."""

import json
import os
import random
import re
import shutil
import textwrap
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from appworld.apps import get_all_apps
from appworld.apps.model_lib import CachedDBHandler
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import CANARY_STRING, DB_VERSION
from appworld.common.utils import freeze_time

NOW = datetime(2024, 5, 16, 12, 0)  # the time of every task
APPS = get_all_apps(skip_admin=True)
ACCOUNTS = [app for app in APPS if app not in ("api_docs", "supervisor")]
DATABASES = [*APPS, "admin"]
NAMES = (
  *("Amber Archer", "Boris Becker", "Clara Castillo", "Derek Dalton", "Elena Eriksen"),
  *("Felix Fontaine", "Greta Gupta", "Hamid Hendricks", "Irene Ivanov", "Jonas Jansen"),
  *("Katya Kimura", "Lucas Lindqvist", "Megan Moreau", "Nadia Novak", "Oscar Okafor"),
)
RELATIONSHIPS = ("roommate",) * 3 + ("coworker",) * 4 + ("friend",) * 5


class Person(NamedTuple):
  """Someone with an account in every app."""

  first_name: str
  last_name: str
  email: str
  phone_number: str
  birthday: str

  @property
  def id(self) -> int:  # in all databases
    return PEOPLE.index(self) + 1

  def contacts(self, relationship: str = "") -> list["Person"]:
    """The people in this person's phone, all of them or those of one relationship."""
    pairs = zip((PEOPLE * 2)[self.id :], RELATIONSHIPS)
    return [other for other, known_as in pairs if relationship in ("", known_as)]


PEOPLE = [
  Person(
    *name.split(),
    email=f"{name.replace(' ', '.').lower()}@example.com",
    phone_number=f"555{number * 104_729:07d}",
    birthday=f"{1970 + number}-0{1 + number % 5}-15",
  )
  for number, name in enumerate(NAMES, 1)
]


class Problem(NamedTuple):
  """What a task asks for.

  Attributes:
    code: solves the task and leaves an answer in the variable `answer`. `APP.API(...)` stands for
      the call with a token, and `NAME = all APP.API(...)` for a loop over the API's pages.
    answer: None if the task is no question.
    added: the records that the task adds, as {model: [{field: value}]}; nothing else may change.
  """

  instruction: str
  code: str
  answer: object = None
  added: dict[str, list[dict]] = {}


Scenario = Callable[[ModelCollection, Person, random.Random], Problem]
EVALUATION = """\
import json

SIDE_EFFECTS = {"venmo.User", "venmo.Notification", "phone.UserTextMessage"}


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    with test("the answer is right"):
        test.answer(json.loads(models.end.supervisor.Task.first().answer), ground_truth_answer)
    with test("the changes are right"):
        test.case(models.changed_model_names() - SIDE_EFFECTS, "==", set(private_data.added))
        for model, rows in private_data.added.items():
            added, updated, removed = models.changed_records(model)
            added = sorted(added, key=lambda record: record.receiver_id)
            found = [{name: getattr(record, name) for name in rows[0]} for record in added]
            test.case([found, updated, removed], "==", [rows, [], []])
"""


def solution_of(problem: Problem) -> str:
  """Python with the function `solution` that AppWorld's own solutions have."""
  lines = [
    "accounts = apis.supervisor.show_account_passwords()",
    "passwords = {account['account_name']: account['password'] for account in accounts}",
    "profile = apis.supervisor.show_profile()",
  ]
  loop = r"page = 0\n\1 = []\nwhile rows := \2(page_index=page, \3):\n    \1 += rows\n    page += 1"
  code = re.sub(r"(?m)^(\w+) = all ([\w.]+)\((.*)\)$", loop, problem.code.strip())
  code = re.sub(r"\b(simple_note|phone|venmo)\.(\w+)\(", r"apis.\1.\2(access_token=\1, ", code)
  for app in dict.fromkeys(re.findall(r"apis\.(\w+)\.", code)):
    name = "phone_number" if app == "phone" else "email"
    login = f"apis.{app}.login(username=profile['{name}'], password=passwords['{app}'])"
    lines.append(f"{app} = {login}['access_token']")
  answer = "" if problem.answer is None else "answer=answer"
  lines += [code, f"apis.supervisor.complete_task({answer})"]
  return "def solution(apis, requester):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"


def write_base(data: Path) -> None:
  """Writes the API docs and the databases that all tasks share."""
  docs = ApiDocCollection.build(load_apps=tuple(APPS), include_response_schemas=True)
  models = ModelCollection.load(to_db_home_path=":memory:base", load_apps=DATABASES, create_db=True)
  with freeze_time(datetime(2022, 1, 1)):
    for app, apis in docs.items():
      marked = {name: dict(doc) | {"canary_string": CANARY_STRING} for name, doc in apis.items()}
      write(data / "api_docs" / "standard", {f"{app}.json": marked})
      rows = [dict(doc) | {"app_name_": app} for doc in apis.values()]
      models.api_docs.ApiDoc.save_all([models.api_docs.ApiDoc.create(**row) for row in rows])
    for person in PEOPLE:
      models.admin.MainUser.create_save(**person._asdict(), sex="female")
      for app in ACCOUNTS:
        fields = person._asdict() | {"verified": True, "venmo_balance": 2000.0}
        columns = models[app].User.__fields__
        fields = {name: value for name, value in fields.items() if name in columns}
        models[app].User.create_save(**fields, password=f"{person.last_name}-{app}")
      for other, relationship in zip(person.contacts(), RELATIONSHIPS):
        fields = other._asdict() | {"user_id": person.id, "relationships": [relationship]}
        models.phone.Contact.create_save(**fields)
  save(models, data / "base_dbs", "full")


def save(models: ModelCollection, place: Path, form: str) -> None:
  models.save(db_home_path=str(place), format=form, app_names=DATABASES)
  models.close()
  CachedDBHandler.reset()


def write(place: Path, files: dict[str, object]) -> None:
  """Writes a directory's files, Python as it is and values as JSON."""
  place.mkdir(parents=True, exist_ok=True)
  for name, content in files.items():
    (place / name).write_text(content if name.endswith(".py") else json.dumps(content))


def write_task(data: Path, task_id: str, level: int, scenario: Scenario) -> None:
  """Writes a task; its directory appears as a whole or not at all."""
  draw = random.Random(task_id)
  me = draw.choice(PEOPLE)
  draft = data / "tasks" / f"{task_id}.tmp"
  shutil.rmtree(draft, ignore_errors=True)
  base, copy = str(data / "base_dbs"), f":memory:task_input-{task_id}"
  models = ModelCollection.load(from_db_home_path=base, to_db_home_path=copy, load_apps=DATABASES)
  with freeze_time(NOW):
    problem = scenario(models, me, draw)
    models.supervisor.Supervisor.create_save(**me._asdict())
    models.supervisor.Task.create_save(supervisor_id=1, instruction=problem.instruction)
    for app in ACCOUNTS:
      account = {"account_name": app, "password": f"{me.last_name}-{app}"}
      models.supervisor.AccountPassword.create_save(supervisor_id=1, **account)
    save(models, draft / "dbs", "changes")
  specs = {"instruction": problem.instruction, "supervisor": me._asdict()}
  specs |= {"datetime": NOW.isoformat(), "db_version": DB_VERSION, "canary_string": CANARY_STRING}
  write(draft, {"specs.json": specs})
  write(draft / "ground_truth", ground_truth(problem, level))
  os.replace(draft, data / "tasks" / task_id)


def ground_truth(problem: Problem, level: int) -> dict[str, object]:
  solution = f"# Canary String: {CANARY_STRING}\n{solution_of(problem)}"
  calls = re.findall(r"apis\.(\w+)\.", solution)
  apps = sorted(set(calls) - {"supervisor"})
  sizes = {"num_apps": len(apps), "num_apis": len(calls), "num_solution_code_lines": len(solution)}
  idle = "no_op_fail" if problem.added else "no_op_pass"  # what a run that does nothing gets
  return {
    "evaluation.py": f"# Canary String: {CANARY_STRING}\n{EVALUATION}",
    "solution.py": solution,
    "compiled_solution.py": solution,
    "metadata.json": {"mode": "full", "difficulty": level, **sizes},
    "required_apps.json": apps,
    "public_data.json": {},
    "private_data.json": {"added": problem.added},
    "answer.json": problem.answer,
    "test_data.json": [
      {"requirement": "the answer is right", "label": "no_op_fail"},
      {"requirement": "the changes are right", "label": idle},
    ],
  }
