"""AppWorld's data directory as its engine reads it: API docs, databases, and the files of a task.

Imported by the engine's own Python alone.
"""

import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from appworld.apps import get_all_apps
from appworld.apps.model_lib import CachedDBHandler
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import CANARY_STRING, DB_VERSION
from appworld.common.utils import freeze_time

from baar_jax.envs.appworld_made import Made
from baar_jax.envs.appworld_people import ARTISTS, NOW, PEOPLE, SONGS, Person, contacts_of

APPS = get_all_apps(skip_admin=True)
ACCOUNTS = [app for app in APPS if app not in ("api_docs", "supervisor")]
SAVED = [*APPS, "admin"]
JOINED = NOW - datetime.timedelta(days=900)  # when everything of the base was made
BALANCE_USD = 2000.0

EVALUATION = """\
import json


def value_of(record, field):
    for name in field.split("."):
        record = getattr(record, name)
    return record


def rows_of(records, fields):
    return sorted([value_of(record, field) for field in fields] for record in records)


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    answer = json.loads(models.end.supervisor.Task.first().answer)
    with test("assert that the answer is right."):
        test.answer(answer, ground_truth_answer)
    with test("assert that records changed in the right models alone."):
        changed = models.changed_model_names() - set(private_data.side_effects)
        test.case(changed, "==", set(private_data.records))
    for model, wanted in private_data.records.items():
        with test(f"assert that the right records of {model} were added, updated and removed."):
            found = [rows_of(records, wanted.fields) for records in models.changed_records(model)]
            test.case(found, "==", [wanted.added, wanted.updated, wanted.removed])
"""


def make_base(root: Path) -> None:
  """Writes the API docs and the databases that all tasks share."""
  docs = ApiDocCollection.build(load_apps=tuple(APPS), include_response_schemas=True)
  by_app = {app: {name: dict(doc) for name, doc in apis.items()} for app, apis in docs.items()}
  directory = root / "data" / "api_docs" / "standard"
  directory.mkdir(parents=True)
  for app, apis in by_app.items():
    marked = {name: doc | {"canary_string": CANARY_STRING} for name, doc in apis.items()}
    (directory / f"{app}.json").write_text(json.dumps(marked))
  models = ModelCollection.load(to_db_home_path=":memory:base", load_apps=SAVED, create_db=True)
  with freeze_time(JOINED):
    fields = ("api_name", "path", "method", "description", "parameters", "response_schemas")
    models.api_docs.ApiDoc.save_all(
      [
        models.api_docs.ApiDoc.create(
          app_name_=doc["app_name"], **{field: doc[field] for field in fields}
        )
        for apis in by_app.values()
        for doc in apis.values()
      ]
    )
    _add_songs(models)
    for person in PEOPLE:
      _add_person(models, person)
    for person in PEOPLE:
      _add_contacts(models, person)
  models.save(db_home_path=str(root / "data" / "base_dbs"), format="full", app_names=SAVED)
  models.close()
  CachedDBHandler.reset()


def _add_songs(models: ModelCollection) -> None:
  for number, name in enumerate(ARTISTS, 1):
    genre = next(song.genre for song in SONGS if song.artist_id == number)
    models.spotify.Artist.create_save(name=name, genre=genre)
  for song in SONGS:
    models.spotify.Song.create_save(
      title=song.title,
      artist_ids=[song.artist_id],
      duration=song.duration,
      release_date=JOINED - datetime.timedelta(days=37 * song.id),
      genre=song.genre,
      play_count=song.play_count,
    )


def _add_person(models: ModelCollection, person: Person) -> None:
  """An account in every app. The person's number is the id of all of them."""
  names = {"first_name": person.first_name, "last_name": person.last_name}
  reached = {"email": person.email, "phone_number": person.phone_number}
  user = models.admin.MainUser.create_save(
    **names, **reached, birthday=person.birthday, sex=("female", "male")[person.number % 2]
  )
  for app in ACCOUNTS:
    password = person.password(app)
    models.admin.AccountPassword.create_save(
      main_user_id=user.id, account_name=app, password=password
    )
    known = models[app].User.__fields__
    more = {"verified": True, "venmo_balance": BALANCE_USD} | reached
    account = models[app].User.create_save(
      **names, password=password, **{name: more[name] for name in more if name in known}
    )
    if account.id != person.number:
      raise AssertionError(f"{person.name} has id {account.id} in {app}")
  inbox = models.todoist.Project.create_save(name="Inbox", user_id=person.number, is_inbox=True)
  models.todoist.ProjectCollaboratorLink.create_save(project_id=inbox.id, user_id=person.number)
  for path in ("/", "/home/", f"/home/{person.first_name.lower()}/"):
    models.file_system.Directory.create_save(path=path, user_id=person.number)


def _add_contacts(models: ModelCollection, person: Person) -> None:
  for relationship, others in contacts_of(person).items():
    for other in others:
      models.phone.Contact.create_save(
        user_id=person.number,
        first_name=other.first_name,
        last_name=other.last_name,
        email=other.email,
        phone_number=other.phone_number,
        relationships=[relationship],
        birthday=other.birthday,
      )


@contextlib.contextmanager
def task_databases(root: Path, name: str) -> Iterator[ModelCollection]:
  """The base, to which a task's records are added; time stands still."""
  models = ModelCollection.load(
    from_db_home_path=str(root / "data" / "base_dbs"),
    to_db_home_path=f":memory:task_input-{name}",
    load_apps=SAVED,
  )
  try:
    with freeze_time(NOW):
      yield models
  finally:
    models.close()
    CachedDBHandler.reset()


def write_task(
  root: Path, name: str, models: ModelCollection, person: Person, difficulty: int, made: Made
) -> None:
  """Writes all that AppWorld reads of a task; its directory appears at once or not at all."""
  supervisor = {
    "first_name": person.first_name,
    "last_name": person.last_name,
    "email": person.email,
    "phone_number": person.phone_number,
  }
  row = models.supervisor.Supervisor.create_save(**supervisor, birthday=person.birthday)
  models.supervisor.Task.create_save(supervisor_id=row.id, instruction=made.instruction)
  for app in ACCOUNTS:
    models.supervisor.AccountPassword.create_save(
      supervisor_id=row.id, account_name=app, password=person.password(app)
    )
  place = root / "data" / "tasks" / name
  draft = place.with_name(f"{name}.tmp")
  shutil.rmtree(draft, ignore_errors=True)
  truth = draft / "ground_truth"
  truth.mkdir(parents=True)
  models.save(
    db_home_path=str(draft / "dbs"), format="changes", app_names=SAVED, save_model_hashes=False
  )
  _write_json(
    draft / "specs.json",
    {
      "instruction": made.instruction,
      "supervisor": supervisor,
      "datetime": NOW.isoformat(),
      "db_version": DB_VERSION,
      "canary_string": CANARY_STRING,
    },
  )
  records = {model: change.as_dict() for model, change in made.changes.items()}
  _write_json(
    truth / "metadata.json",
    {
      "mode": "full",
      "difficulty": difficulty,
      "num_apps": len(made.apps),
      "num_apis": len(made.apis),
      "num_api_calls": len(made.apis),
      "num_solution_code_lines": len(made.solution.splitlines()),
    },
  )
  _write_json(truth / "public_data.json", {})
  hidden = {"records": records, "side_effects": made.side_effects}
  _write_json(truth / "private_data.json", hidden)
  _write_json(truth / "answer.json", made.answer)
  _write_json(truth / "required_apps.json", made.apps)
  _write_json(truth / "test_data.json", _tests(made))
  mark = f"# Canary String: {CANARY_STRING}\n"
  (truth / "evaluation.py").write_text(mark + EVALUATION)
  for file in ("solution.py", "compiled_solution.py"):
    (truth / file).write_text(mark + made.solution)
  os.replace(draft, place)


def _tests(made: Made) -> list[dict]:
  """The requirements of EVALUATION, and whether doing nothing meets them."""
  idle = "no_op_fail" if made.changes else "no_op_pass"
  tests = {
    "assert that the answer is right.": "no_op_fail",
    "assert that records changed in the right models alone.": idle,
  }
  for model in made.changes:
    requirement = f"assert that the right records of {model} were added, updated and removed."
    tests[requirement] = "no_op_fail"
  return [{"requirement": text, "label": label} for text, label in tests.items()]


def _write_json(path: Path, value: object) -> None:
  path.write_text(json.dumps(value, indent=2))
