"""Generate AppWorld tasks from five scenarios.

Each task is a variant of a scenario. People, amounts and records are drawn with the
task's id as the random seed, so the same id always gives the same task. Training, dev
and test tasks are different variants. This file runs in the engine's Python.
"""

import json
import os
import random
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from appworld.apps import get_all_apps
from appworld.apps.model_lib import CachedDBHandler
from appworld.collections.api_docs import ApiDocCollection
from appworld.collections.models import ModelCollection
from appworld.common.constants import CANARY_STRING, DB_VERSION
from appworld.common.utils import freeze_time

NOW = datetime(2024, 5, 16, 12, 0)  # the world's clock in every task
APPS = get_all_apps(skip_admin=True)
ACCOUNTS = [app for app in APPS if app not in ("api_docs", "supervisor")]
DATABASES = [*APPS, "admin"]
NAMES = """Amber Archer, Boris Becker, Clara Castillo, Derek Dalton, Elena Eriksen,
Felix Fontaine, Greta Gupta, Hamid Hendricks, Irene Ivanov, Jonas Jansen, Katya Kimura,
Lucas Lindqvist, Megan Moreau, Nadia Novak, Oscar Okafor"""
RELATIONSHIPS = ("roommate",) * 3 + ("coworker",) * 4 + ("friend",) * 5
TOPICS = (
  "Lisbon",
  "Oslo",
  "Kyoto",
  "Cinema",
  "Groceries",
  "Pizza",
  "Concert",
  "Museum",
  "Fuel",
)


class Person(NamedTuple):
  """A user of the apps; the fields are columns of AppWorld's databases."""

  first_name: str
  last_name: str
  email: str
  phone_number: str
  birthday: str


class Problem(NamedTuple):
  """The contents of a task.

  Attributes:
    instruction: the text for the agent.
    code: the solution in a shorthand of Python. `APP.API()` is a call with the app's
      access token. `NAME = all APP.API()` is a loop over all pages of the API.
    answer: the right answer, or None if the task asks for no answer. The code assigns
      it to the variable `answer`.
    added: the records that a right solution adds, by the name of the database's table.
  """

  instruction: str
  code: str
  answer: float | None = None
  added: dict[str, list[dict]] = {}


PEOPLE: list[Person] = []  # A person's id in the databases is the index here plus 1.
for number, name in enumerate(re.split(r",\s", NAMES), 1):
  email = f"{name.replace(' ', '.').lower()}@example.com"
  phone = f"555{number * 104_729:07d}"
  birthday = f"{1970 + number}-0{1 + number % 5}-15"
  PEOPLE.append(Person(*name.split(), email, phone, birthday))


def id_of(person: Person) -> int:
  """Return a person's id in all databases."""
  return PEOPLE.index(person) + 1


def contacts(person: Person, group: str = "") -> list[Person]:
  """Return a person's contacts.

  Args:
    person: the owner of the contacts.
    group: "roommate", "coworker" or "friend"; "" lists all contacts.
  """
  others = (PEOPLE * 2)[id_of(person) :]
  pairs = zip(others, RELATIONSHIPS)
  return [contact for contact, relationship in pairs if group in ("", relationship)]


def payment(sender: Person, receiver: Person, usd: float, topic: str) -> dict:
  """Return a database record of a payment or of a payment request, by field."""
  return {
    "sender_id": id_of(sender),
    "receiver_id": id_of(receiver),
    "amount": usd,
    "description": topic,
  }


def add_note(
  models: ModelCollection, me: Person, title: str, content: str, tag: str
) -> None:
  """Add a note that a person owns to the database of the app Simple Note."""
  models.simple_note.Note.create_save(
    user_id=id_of(me), title=title, content=content, tags=[tag], pinned=False
  )


def pay_friend(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  """Write a task that asks for a payment to a friend."""
  friend = draw.choice(contacts(me, "friend"))
  topic = draw.choice(TOPICS)
  usd = float(draw.randrange(8, 120))
  name = f"{friend.first_name} {friend.last_name}"
  code = f"""
people = venmo.search_users(query='{name}')
email = [p['email'] for p in people if p['last_name'] == '{friend.last_name}'][0]
venmo.create_transaction(receiver_email=email, amount={usd}, description='{topic}')"""
  instruction = f"Send ${usd:g} to {name} on Venmo with the note '{topic}'."
  added = {"venmo.Transaction": [payment(me, friend, usd, topic)]}
  return Problem(instruction, code, added=added)


def sum_distances(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  """Write a task that asks for the sum of the kilometers in tagged notes."""
  total = 0
  sport = draw.choice(("running", "cycling", "swimming"))
  for number in range(draw.randrange(10, 16)):
    tag = draw.choice((sport, sport, "hiking"))
    km = draw.randrange(2, 20)
    if tag == sport:
      total += km
    add_note(models, me, f"Workout {number}", f"{km} km", tag)
  code = f"""
notes = all simple_note.search_notes(tags=['{sport}'])
details = [simple_note.show_note(note_id=note['note_id']) for note in notes]
answer = sum(int(note['content'].split()[0]) for note in details)"""
  instruction = f"""\
How many kilometers are in my Simple Notes with the tag '{sport}', all in all?"""
  return Problem(instruction, code, total)


def text_birthdays(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  """Write a task that asks for text messages to all contacts born in one month."""
  month = draw.choice(contacts(me)).birthday[5:7]
  greeting = draw.choice(("Happy birthday", "Many happy returns"))
  message = f"{greeting}! Yours, {me.first_name}"
  code = f"""
contacts = all phone.search_contacts()
born = [contact for contact in contacts if contact['birthday'][5:7] == '{month}']
for contact in born:
    phone.send_text_message(phone_number=contact['phone_number'], \
message='{message}')"""
  instruction = f"""\
Send the text message '{message}' to everyone in my phone's contacts whose \
birthday is in {datetime(2024, int(month), 1):%B}."""
  born = [person for person in contacts(me) if person.birthday[5:7] == month]
  texts = []
  for receiver_id in sorted(map(id_of, born)):
    texts.append(
      {"sender_id": id_of(me), "receiver_id": receiver_id, "message": message}
    )
  return Problem(instruction, code, added={"phone.GlobalTextMessage": texts})


def sum_payments(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  """Write a task that asks for the sum of this year's payments with a group."""
  total = 0.0
  group = draw.choice(("roommate", "coworker"))
  sides = (("sent to", "receiver"), ("received from", "sender"))
  direction, side = draw.choice(sides)
  for number in range(draw.randrange(18, 30)):
    partner_group = draw.choice((group, "friend"))
    partner_side = draw.choice(("sender", "receiver"))
    partner = draw.choice(contacts(me, partner_group))
    usd = float(draw.randrange(5, 90))
    time = NOW - timedelta(days=draw.randrange(1, 270), minutes=number)
    pair = (partner, me) if partner_side == "sender" else (me, partner)
    fields = payment(*pair, usd, draw.choice(TOPICS))
    models.venmo.Transaction.create_save(**fields, created_at=time, updated_at=time)
    if (partner_group, partner_side, time.year) == (group, side, NOW.year):
      total += usd
  instruction = f"How many dollars have I {direction} my {group}s on Venmo this year?"
  filters = f"direction='{direction.split()[0]}', min_created_at='{NOW.year}-01-01'"
  code = f"""
contacts = all phone.search_contacts(relationship='{group}')
payments = all venmo.show_transactions({filters})
emails = [contact['email'] for contact in contacts]
answer = sum(p['amount'] for p in payments if p['{side}']['email'] in emails)"""
  return Problem(instruction, code, total)


def ask_for_shares(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  """Write a task that asks to send friends payment requests, as listed in a note."""
  topic, other_topic = draw.sample(TOPICS, 2)
  friends = draw.sample(contacts(me, "friend"), 3)
  lines = []
  requests = []
  for mate in sorted(friends, key=id_of):
    usd = float(draw.randrange(20, 300))
    lines.append(f"{mate.first_name} {mate.last_name}: ${usd:g}")
    requests.append(payment(me, mate, usd, topic))
  add_note(models, me, f"Costs of {topic}", "\n".join(lines), "money")
  add_note(models, me, f"Costs of {other_topic}", "Everyone has paid.", "money")
  code = f"""
notes = simple_note.search_notes(query='Costs of {topic}')
note_id = [note['note_id'] for note in notes if note['title'] == 'Costs of {topic}'][0]
note = simple_note.show_note(note_id=note_id)
shares = dict(line.split(': $') for line in note['content'].splitlines())
contacts = all phone.search_contacts()
for contact in contacts:
    usd = float(shares.get(contact['first_name'] + ' ' + contact['last_name'], 0))
    if usd:
        venmo.create_payment_request(user_email=contact['email'], amount=usd, \
description='{topic}')
"""
  instruction = f"""\
My Simple Note 'Costs of {topic}' says how much some of my friends owe me. Send each \
of them a Venmo payment request over their share, with the description '{topic}'. \
Their email addresses are in my phone's contacts."""
  return Problem(instruction, code, added={"venmo.PaymentRequest": requests})


# Each function writes the tasks of one scenario. The function's arguments are the
# databases, to which it may add records, the person who asks, and a random generator. A
# scenario's key is d<level of difficulty>a<number>. A task's id is <key>_<number of the
# variant>.
SCENARIOS = {
  "d1a0000": pay_friend,
  "d2a0000": text_birthdays,
  "d3a0000": ask_for_shares,
  "d2a0001": sum_distances,
  "d3a0001": sum_payments,
}
TESTS = ("the answer is right", "the changes are right")
# AppWorld runs this Python code to judge a task. It contains the two names in TESTS.
EVALUATION = """\
import json

SIDE_EFFECTS = {"venmo.User", "venmo.Notification", "phone.UserTextMessage"}


def evaluate(test, public_data, private_data, main_user, models, ground_truth_answer):
    with test("the answer is right"):
        test.answer(json.loads(models.end.supervisor.Task.first().answer), \
ground_truth_answer)
    with test("the changes are right"):
        test.case(models.changed_model_names() - SIDE_EFFECTS, "==", \
set(private_data.added))
        for model, rows in private_data.added.items():
            added, updated, removed = models.changed_records(model)
            added = sorted(added, key=lambda record: record.receiver_id)
            found = [{name: getattr(record, name) for name in rows[0]} \
for record in added]
            test.case([found, updated, removed], "==", [rows, [], []])
"""


def solution_of(code: str, is_question: bool) -> str:
  """Write the Python code of a task's solution, in the form of AppWorld's solutions.

  Args:
    code: the solution in the shorthand of `Problem.code`.
    is_question: whether the task asks for an answer.
  """
  loop = r"page = 0\n\1 = []\nwhile rows := \2(page_index=page, \3):\n"
  loop += r"    \1 += rows\n    page += 1"
  code = re.sub(r"(?m)^(\w+) = all ([\w.]+)\((.*)\)$", loop, code.strip())
  token = r"apis.\1.\2(access_token=\1, "
  code = re.sub(r"\b(simple_note|phone|venmo)\.(\w+)\(", token, code)
  lines = [
    "accounts = apis.supervisor.show_account_passwords()",
    "passwords = {account['account_name']: account['password'] "
    "for account in accounts}",
    "profile = apis.supervisor.show_profile()",
  ]
  for app in dict.fromkeys(re.findall(r"apis\.(\w+)\.", code)):
    name = "phone_number" if app == "phone" else "email"
    user = f"username=profile['{name}'], password=passwords['{app}']"
    lines.append(f"{app} = apis.{app}.login({user})['access_token']")
  lines.append(code)
  lines.append(f"apis.supervisor.complete_task({'answer=answer' * is_question})")
  body = textwrap.indent("\n".join(lines), "    ")
  return f"def solution(apis, requester):\n{body}\n"


def write(path: Path, content: object) -> None:
  """Write a file: a text unchanged, any other content as JSON."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(content if isinstance(content, str) else json.dumps(content))


def save(models: ModelCollection, directory: Path, form: str) -> None:
  """Write databases to a directory and close them.

  Args:
    models: the databases.
    directory: where to write.
    form: AppWorld's name of the format: "full", or "changes", which has only the
      changes to the databases that all tasks share.
  """
  models.save(db_home_path=str(directory), format=form, app_names=DATABASES)
  models.close()
  CachedDBHandler.reset()


def write_base(data: Path) -> None:
  """Write the documentation of the APIs and the databases that all tasks share."""
  docs = ApiDocCollection.build(load_apps=tuple(APPS), include_response_schemas=True)
  models = ModelCollection.load(
    to_db_home_path=":memory:base", load_apps=DATABASES, create_db=True
  )
  with freeze_time(datetime(2022, 1, 1)):
    for app, apis in docs.items():
      marked = {}
      rows = []
      for name, doc in apis.items():
        marked[name] = dict(doc) | {"canary_string": CANARY_STRING}
        rows.append(models.api_docs.ApiDoc.create(**doc, app_name_=app))
      write(data / "api_docs" / "standard" / f"{app}.json", marked)
      models.api_docs.ApiDoc.save_all(rows)
    for person in PEOPLE:
      write_person(models, person)
  save(models, data / "base_dbs", "full")


def write_person(models: ModelCollection, person: Person) -> None:
  """Write a person's accounts and contacts to the databases."""
  models.admin.MainUser.create_save(**person._asdict(), sex="female")
  facts = person._asdict() | {"verified": True, "venmo_balance": 2000.0}
  for app in ACCOUNTS:
    user = models[app].User
    fields = {name: facts[name] for name in facts if name in user.__fields__}
    user.create_save(**fields, password=f"{person.last_name}-{app}")
  for contact, relationship in zip(contacts(person), RELATIONSHIPS):
    models.phone.Contact.create_save(
      **contact._asdict(), user_id=id_of(person), relationships=[relationship]
    )


def write_task(data: Path, task_id: str) -> None:
  """Generate the task of an id, and write the task's directory.

  The directory gets its final name only after all files are written. So an interruption
  leaves no incomplete task.
  """
  draw = random.Random(task_id)
  me = draw.choice(PEOPLE)
  draft = data / "tasks" / f"{task_id}.tmp"
  shutil.rmtree(draft, ignore_errors=True)
  models = ModelCollection.load(
    from_db_home_path=str(data / "base_dbs"),
    to_db_home_path=f":memory:task_input-{task_id}",
    load_apps=DATABASES,
  )
  with freeze_time(NOW):
    problem = SCENARIOS[task_id.partition("_")[0]](models, me, draw)
    instruction = problem.instruction
    models.supervisor.Supervisor.create_save(**me._asdict())
    models.supervisor.Task.create_save(supervisor_id=1, instruction=instruction)
    for app in ACCOUNTS:
      models.supervisor.AccountPassword.create_save(
        supervisor_id=1, account_name=app, password=f"{me.last_name}-{app}"
      )
    save(models, draft / "dbs", "changes")
  specs = {
    "instruction": instruction,
    "supervisor": me._asdict(),
    "datetime": NOW.isoformat(),
    "db_version": DB_VERSION,
  }
  write(draft / "specs.json", specs)
  metadata = {
    "mode": "minimal",
    "difficulty": int(task_id[1]),
    # The engine requires the next two numbers but does not use them.
    "num_apps": 0,
    "num_solution_code_lines": 0,
  }
  ground_truth = {
    "evaluation.py": EVALUATION,
    "compiled_solution.py": solution_of(problem.code, problem.answer is not None),
    "metadata.json": metadata,
    "public_data.json": {},
    "private_data.json": {"added": problem.added},
    "answer.json": problem.answer,
    "test_data.json": [{"requirement": name, "label": "no_op_fail"} for name in TESTS],
  }
  for name, content in ground_truth.items():
    write(draft / "ground_truth" / name, content)
  os.replace(draft, data / "tasks" / task_id)


def main(directory: str, sizes: Sequence[int]) -> None:
  """Generate the missing tasks of a directory, and the data that all tasks share.

  Args:
    directory: the root directory of the data; the tasks are below its data/.
    sizes: number of tasks in the splits train, dev and test.
  """
  root = Path(directory).absolute()
  os.environ["APPWORLD_ROOT"] = str(root)
  data = root / "data"
  complete = root / "version.txt"
  if not complete.exists():
    shutil.rmtree(root, ignore_errors=True)  # removes data that were left incomplete
    write_base(data)
    complete.touch()
  train, dev, test = sizes
  # The dataset "dev" has tasks for both splits dev and test; see configs/appworld.py.
  datasets = {"train": train, "dev": dev + test, "test_normal": test}
  for first, dataset in enumerate(datasets, 1):
    ids: list[str] = []
    for number in range(datasets[dataset]):
      rounds, scenario = divmod(number, len(SCENARIOS))
      ids.append(f"{[*SCENARIOS][scenario]}_{first + 3 * rounds}")
    for task_id in ids:
      if not (data / "tasks" / task_id).exists():
        write_task(data, task_id)
    write(data / "datasets" / f"{dataset}.txt", "\n".join(ids))


if __name__ == "__main__":
  main(sys.argv[1], [*map(int, sys.argv[2:])])
