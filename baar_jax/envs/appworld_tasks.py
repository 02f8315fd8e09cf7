"""Makes AppWorld tasks where the real ones cannot be downloaded: DIRECTORY TRAIN_TASKS TEST_TASKS.

Five scenarios over three apps at three levels of difficulty, each with any number of variants that
differ in people, amounts and records. Training and test tasks are different variants of the same
scenarios (AppWorld's own datasets share none). The engine's own Python runs this file. A task is
the same whenever it is made, and tasks that exist are kept.
"""

import itertools
import os
import random
import shutil
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

from appworld.collections.models import ModelCollection

from baar_jax.envs.appworld_data import NOW, Person, Problem, Scenario, write_base, write_task

VERSION = "2"  # tasks of another version are deleted
TOPICS = ("Lisbon", "Oslo", "Kyoto", "Cinema", "Groceries", "Pizza", "Concert", "Museum", "Fuel")


def payment(sender: Person, receiver: Person, usd: float, what: str) -> dict:
  """The fields of a transaction or a payment request."""
  ids = {"sender_id": sender.id, "receiver_id": receiver.id}
  return ids | {"amount": usd, "description": what}


def pay_friend(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  friend, topic = draw.choice(me.contacts("friend")), draw.choice(TOPICS)
  usd, name = float(draw.randrange(8, 120)), f"{friend.first_name} {friend.last_name}"
  instruction = f"Send ${usd:g} to {name} on Venmo with the note '{topic}'."
  code = f"""
people = venmo.search_users(query='{name}')
email = [p['email'] for p in people if p['last_name'] == '{friend.last_name}'][0]
venmo.create_transaction(receiver_email=email, amount={usd}, description='{topic}')
"""
  return Problem(instruction, code, added={"venmo.Transaction": [payment(me, friend, usd, topic)]})


def add_note(models: ModelCollection, me: Person, title: str, content: str, tag: str) -> None:
  fields = {"title": title, "content": content, "tags": [tag], "pinned": False}
  models.simple_note.Note.create_save(user_id=me.id, **fields)


def sum_distances(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  total, sport = 0, draw.choice(("running", "cycling", "swimming"))
  for number in range(draw.randrange(10, 16)):
    tag, km = draw.choice((sport, sport, "hiking")), draw.randrange(2, 20)
    total += km if tag == sport else 0
    add_note(models, me, f"Workout {number}", f"{km} km", tag)
  instruction = f"How many kilometers are in my Simple Notes with the tag '{sport}', all in all?"
  code = f"""
notes = all simple_note.search_notes(tags=['{sport}'])
details = [simple_note.show_note(note_id=note['note_id']) for note in notes]
answer = sum(int(note['content'].split()[0]) for note in details)
"""
  return Problem(instruction, code, answer=total)


def text_birthdays(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  month = draw.choice(me.contacts()).birthday[5:7]
  message = f"{draw.choice(('Happy birthday', 'Many happy returns'))}! Yours, {me.first_name}"
  instruction = (
    f"Send the text message '{message}' to everyone in my phone's contacts whose birthday is in "
    f"{date(2024, int(month), 1):%B}."
  )
  code = f"""
contacts = all phone.search_contacts()
born = [contact for contact in contacts if contact['birthday'][5:7] == '{month}']
for contact in born:
    phone.send_text_message(phone_number=contact['phone_number'], message='{message}')
"""
  ids = sorted(person.id for person in me.contacts() if person.birthday[5:7] == month)
  texts = [{"sender_id": me.id, "receiver_id": id_, "message": message} for id_ in ids]
  return Problem(instruction, code, added={"phone.GlobalTextMessage": texts})


def sum_payments(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  group = draw.choice(("roommate", "coworker"))
  direction, side = draw.choice((("sent to", "receiver"), ("received from", "sender")))
  total = 0.0
  for number in range(draw.randrange(18, 30)):
    other_group, other_side = draw.choice((group, "friend")), draw.choice(("sender", "receiver"))
    other, usd = draw.choice(me.contacts(other_group)), float(draw.randrange(5, 90))
    when = NOW - timedelta(days=draw.randrange(1, 270), minutes=number)
    pair = (other, me) if other_side == "sender" else (me, other)
    fields = payment(*pair, usd, draw.choice(TOPICS))
    models.venmo.Transaction.create_save(**fields, created_at=when, updated_at=when)
    if (other_group, other_side, when.year) == (group, side, NOW.year):
      total += usd
  instruction = f"How many dollars have I {direction} my {group}s on Venmo this year?"
  filters = f"direction='{direction.split()[0]}', min_created_at='{NOW.year}-01-01'"
  code = f"""
contacts = all phone.search_contacts(relationship='{group}')
payments = all venmo.show_transactions({filters})
emails = [contact['email'] for contact in contacts]
answer = sum(p['amount'] for p in payments if p['{side}']['email'] in emails)
"""
  return Problem(instruction, code, answer=total)


def ask_for_shares(models: ModelCollection, me: Person, draw: random.Random) -> Problem:
  topic, other = draw.sample(TOPICS, 2)
  mates = sorted(draw.sample(me.contacts("friend"), 3), key=lambda mate: mate.id)
  shares = [float(draw.randrange(20, 300)) for _ in mates]
  lines = [f"{mate.first_name} {mate.last_name}: ${usd:g}" for mate, usd in zip(mates, shares)]
  add_note(models, me, f"Costs of {topic}", "\n".join(lines), "money")
  add_note(models, me, f"Costs of {other}", "Everyone has paid.", "money")
  instruction = (
    f"My Simple Note 'Costs of {topic}' says how much some of my friends owe me. Send each of them "
    f"a Venmo payment request over their share, with the description '{topic}'. Their email "
    "addresses are in my phone's contacts."
  )
  code = f"""
notes = simple_note.search_notes(query='Costs of {topic}')
note_id = [note['note_id'] for note in notes if note['title'] == 'Costs of {topic}'][0]
note = simple_note.show_note(note_id=note_id)
shares = dict(line.split(': $') for line in note['content'].splitlines())
contacts = all phone.search_contacts()
for contact in contacts:
    usd = float(shares.get(contact['first_name'] + ' ' + contact['last_name'], 0))
    if usd:
        venmo.create_payment_request(user_email=contact['email'], amount=usd, description='{topic}')
"""
  requests = [payment(me, mate, usd, topic) for mate, usd in zip(mates, shares)]
  return Problem(instruction, code, added={"venmo.PaymentRequest": requests})


# A task's id is d<level of difficulty>a<number>_<variant>.
SCENARIOS: dict[str, Scenario] = {
  "d1a0000": pay_friend,
  "d2a0000": text_birthdays,
  "d3a0000": ask_for_shares,
  "d2a0001": sum_distances,
  "d3a0001": sum_payments,
}


def task_ids(dataset: int) -> Iterator[str]:
  """All training (0) or test (1) tasks that could be made: the scenarios in turn."""
  for variant in itertools.count(1 + dataset, 2):
    yield from (f"{scenario}_{variant}" for scenario in SCENARIOS)


def main(directory: str, train_tasks: str, test_tasks: str) -> None:
  """Makes what is missing and says in one line how many tasks there are."""
  root = Path(directory).absolute()
  os.environ["APPWORLD_ROOT"] = str(root)
  version, tasks, lists = root / "version.txt", root / "data" / "tasks", root / "data" / "datasets"
  if not version.exists() or version.read_text() != VERSION:
    shutil.rmtree(root, ignore_errors=True)
    write_base(root / "data")
    lists.mkdir()
    version.write_text(VERSION)
  total = new = 0
  for dataset, count in enumerate((int(train_tasks), int(test_tasks))):
    for task_id in itertools.islice(task_ids(dataset), count):
      if not (tasks / task_id).exists():
        scenario = SCENARIOS[task_id.partition("_")[0]]
        write_task(root / "data", task_id, int(task_id[1]), scenario)
        new += 1
    ids = list(itertools.takewhile(lambda task_id: (tasks / task_id).exists(), task_ids(dataset)))
    total += len(ids)
    for name in (("train",), ("dev", "test_normal"))[dataset]:
      (lists / f"{name}.tmp").write_text("\n".join(ids))
      os.replace(lists / f"{name}.tmp", lists / f"{name}.txt")
  print(f"{total} tasks in {root}, {new} of them new")


if __name__ == "__main__":
  main(*sys.argv[1:])
