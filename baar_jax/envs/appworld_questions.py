"""Scenarios of AppWorld tasks that end in an answer and change nothing."""

from baar_jax.envs.appworld_made import Life, Made, all_pages
from baar_jax.envs.appworld_people import NOW

EVENTS = ("Cinema", "Groceries", "Taxi", "Pizza", "Concert", "Museum", "Coffee", "Books", "Fuel")


def long_songs(life: Life) -> Made:
  songs = life.library(life.draw.randrange(12, 24))
  minutes = life.draw.choice((3, 4, 5))
  code = all_pages("songs", "spotify.show_song_library")
  code += f"answer = len([song for song in songs if song['duration'] > {60 * minutes}])\n"
  return Made(
    instruction=f"How many songs in my Spotify song library are longer than {minutes} minutes?",
    code=code,
    answer=sum(song.duration > 60 * minutes for song in songs),
  )


def favourite_artist(life: Life) -> Made:
  """Needs a page loop and a look at every song."""
  songs = life.library(life.draw.randrange(9, 15))
  most = life.draw.random() < 0.5
  found = (max if most else min)(songs, key=lambda song: song.play_count)
  code = all_pages("songs", "spotify.show_song_library")
  code += f"""\
details = [apis.spotify.show_song(song_id=song['song_id']) for song in songs]
answer = {"max" if most else "min"}(details, key=lambda song: song['play_count'])['title']
"""
  return Made(
    instruction=(
      f"What is the title of the song in my Spotify song library that has been played the "
      f"{'most' if most else 'least'} by everybody on Spotify?"
    ),
    code=code,
    answer=found.title,
  )


def yearly_bills(life: Life) -> Made:
  kind = life.draw.choice(("electricity", "internet", "water"))
  year = life.draw.choice((2022, 2023))
  total = 0
  for other in ("electricity", "internet", "water"):
    for made_in in (2022, 2023):
      for month in life.draw.sample(range(1, 13), 3):
        usd = life.draw.randrange(20, 140)
        total += usd if (other, made_in) == (kind, year) else 0
        name = f"bills/{other}-{made_in}-{month:02d}.txt"
        life.file(name, f"{other.title()} bill\nMonth: {made_in}-{month:02d}\nTotal: ${usd}\n")
  code = f"""
paths = apis.file_system.show_directory(access_token=file_system, directory_path='~/bills/')
wanted = [path for path in paths if '{kind}-{year}' in path]
bills = [apis.file_system.show_file(access_token=file_system, file_path=path) for path in wanted]
answer = sum(int(bill['content'].split('$')[1]) for bill in bills)
"""
  return Made(
    instruction=(
      f"How many dollars have I paid for {kind} in {year}, all in all? The bills are in the "
      "directory ~/bills/ of my file system."
    ),
    code=code,
    answer=total,
  )


def sent_to(life: Life) -> Made:
  """Joins the phone's contacts with pages of transactions."""
  relationship = life.draw.choice(("roommate", "sibling", "coworker"))
  back = life.draw.random() < 0.4  # money received rather than sent
  total = 0.0
  everyone = [person for people in life.contacts.values() for person in people]
  close = life.contacts[relationship]
  for number in range(life.draw.randrange(18, 30)):
    other = life.draw.choice(close if number % 2 else everyone)
    sent = life.draw.random() < 0.5
    usd, when = life.dollars(5, 90), life.past(270)
    pair = (life.me, other) if sent else (other, life.me)
    life.pay(*pair, usd, life.draw.choice(EVENTS), when)
    if other in close and sent != back and when.year == NOW.year:
      total += usd
  direction, side = ("received", "sender") if back else ("sent", "receiver")
  code = all_pages("contacts", "phone.search_contacts", f"relationship='{relationship}'")
  code += all_pages(
    "transactions",
    "venmo.show_transactions",
    f"direction='{direction}', min_created_at='{NOW.year}-01-01'",
  )
  code += f"""\
emails = [contact['email'] for contact in contacts]
answer = sum(t['amount'] for t in transactions if t['{side}']['email'] in emails)
"""
  what = "received on Venmo from" if back else "sent on Venmo to"
  return Made(
    instruction=f"How many dollars have I {what} my {relationship}s since the year began?",
    code=code,
    answer=total,
  )


def unpaid_by(life: Life) -> Made:
  """Who has not paid: sent requests, joined with contacts."""
  event = life.draw.choice(EVENTS)
  friends = list(life.contacts["friend"])
  life.draw.shuffle(friends)
  waiting = friends[: life.draw.randrange(2, 4)]
  for friend in friends:
    life.ask_to_pay(life.me, friend, life.dollars(10, 40), event, paid=friend not in waiting)
  for other in life.contacts["coworker"]:
    what = life.draw.choice([name for name in EVENTS if name != event])
    life.ask_to_pay(life.me, other, life.dollars(10, 40), what, paid=life.draw.random() < 0.5)
  code = all_pages("requests", "venmo.show_sent_payment_requests", "status='pending'")
  code += f"""\
wanted = [request for request in requests if request['description'] == '{event}']
emails = [request['receiver']['email'] for request in wanted]
"""
  code += all_pages("contacts", "phone.search_contacts", "relationship='friend'")
  code += """\
numbers = [contact['phone_number'] for contact in contacts if contact['email'] in emails]
answer = ', '.join(sorted(numbers))
"""
  return Made(
    instruction=(
      f"I have asked all my friends on Venmo to pay me for '{event}'. Give me the phone numbers "
      "of those whose payment is still pending: a list in ascending order, separated by a comma "
      "and a space."
    ),
    code=code,
    answer=", ".join(sorted(friend.phone_number for friend in waiting)),
  )
