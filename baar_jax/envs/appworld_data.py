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
JOINED = datetime(2022, 1, 1)  # when the people opened their accounts
APPS = get_all_apps(skip_admin=True)
ACCOUNTS = [app for app in APPS if app not in ("api_docs", "supervisor")]
SAVED = [*APPS, "admin"]
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
            added.sort(key=lambda record: record.receiver_id)
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


def write_base(root: Path) -> None:
  """Writes the API docs and the databases that all tasks share."""
  docs = ApiDocCollection.build(load_apps=tuple(APPS), include_response_schemas=True)
  models = ModelCollection.load(to_db_home_path=":memory:base", load_apps=SAVED, create_db=True)
  place = root / "data" / "api_docs" / "standard"
  place.mkdir(parents=True)
  with freeze_time(JOINED):
    for app, apis in docs.items():
      marked = {name: dict(doc) | {"canary_string": CANARY_STRING} for name, doc in apis.items()}
      (place / f"{app}.json").write_text(json.dumps(marked))
      for doc in apis.values():
        fields = {name: value for name, value in doc.items() if name != "app_name"}
        models.api_docs.ApiDoc.create_save(app_name_=app, **fields)
    for person in PEOPLE:
      models.admin.MainUser.create_save(**person._asdict(), sex="female")
      for app in ACCOUNTS:
        fields = person._asdict() | {"verified": True, "venmo_balance": 2000.0}
        columns = fields.keys() & models[app].User.__fields__.keys()
        account = {name: fields[name] for name in columns}
        models[app].User.create_save(**account, password=f"{person.last_name}-{app}")
      for other, relationship in zip(person.contacts(), RELATIONSHIPS):
        fields = other._asdict() | {"user_id": person.id, "relationships": [relationship]}
        models.phone.Contact.create_save(**fields)
  models.save(db_home_path=str(root / "data" / "base_dbs"), format="full", app_names=SAVED)
  models.close()
  CachedDBHandler.reset()


def write_task(root: Path, task_id: str, level: int, scenario: Scenario) -> None:
  """Writes a task; its directory appears as a whole or not at all."""
  draw = random.Random(task_id)
  me = draw.choice(PEOPLE)
  place = root / "data" / "tasks" / task_id
  draft = place.with_name(f"{task_id}.tmp")
  shutil.rmtree(draft, ignore_errors=True)
  (draft / "ground_truth").mkdir(parents=True)
  base, copy = str(root / "data" / "base_dbs"), f":memory:task_input-{task_id}"
  models = ModelCollection.load(from_db_home_path=base, to_db_home_path=copy, load_apps=SAVED)
  with freeze_time(NOW):
    problem = scenario(models, me, draw)
    models.supervisor.Supervisor.create_save(**me._asdict())
    models.supervisor.Task.create_save(supervisor_id=1, instruction=problem.instruction)
    for app in ACCOUNTS:
      account = {"account_name": app, "password": f"{me.last_name}-{app}"}
      models.supervisor.AccountPassword.create_save(supervisor_id=1, **account)
    models.save(db_home_path=str(draft / "dbs"), format="changes", app_names=SAVED)
  models.close()
  CachedDBHandler.reset()
  specs = {"instruction": problem.instruction, "supervisor": me._asdict()}
  specs |= {"datetime": NOW.isoformat(), "db_version": DB_VERSION, "canary_string": CANARY_STRING}
  (draft / "specs.json").write_text(json.dumps(specs))
  write_ground_truth(draft / "ground_truth", problem, level)
  os.replace(draft, place)


def write_ground_truth(place: Path, problem: Problem, level: int) -> None:
  solution = solution_of(problem)
  for name, code in (
    ("evaluation", EVALUATION),
    ("solution", solution),
    ("compiled_solution", solution),
  ):
    (place / f"{name}.py").write_text(f"# Canary String: {CANARY_STRING}\n{code}")
  calls = re.findall(r"apis\.(\w+)\.", solution)
  apps = sorted(set(calls) - {"supervisor"})
  sizes = {
    "num_apps": len(apps),
    "num_apis": len(calls),
    "num_solution_code_lines": len(solution.split("\n")),
  }
  idle = "no_op_fail" if problem.added else "no_op_pass"  # what a run that does nothing gets
  for name, value in {
    "metadata": {"mode": "full", "difficulty": level, **sizes},
    "required_apps": apps,
    "public_data": {},
    "private_data": {"added": problem.added},
    "answer": problem.answer,
    "test_data": [
      {"requirement": "the answer is right", "label": "no_op_fail"},
      {"requirement": "the changes are right", "label": idle},
    ],
  }.items():
    (place / f"{name}.json").write_text(json.dumps(value))
