"""Scenarios of AppWorld tasks that change something: payments, notes, to-dos, songs, texts."""

from baar_jax.envs.appworld_made import Change, Life, Made, all_pages
from baar_jax.envs.appworld_people import GENRES, listed
from baar_jax.envs.appworld_questions import EVENTS

PAYMENT = ("sender.email", "receiver.email", "amount", "description")
TEXT = ("sender.phone_number", "receiver.phone_number", "message")
MONTHS = listed(
  "January February March April May June July August September October November December"
)
CHORES = listed(
  "Water the plants|Call the plumber|Renew the passport|Clean the oven|Order new filters|"
  "Return the parcel|Book the dentist|Fix the bike|Sort the receipts|Wash the curtains|"
  "Paint the fence|Update the will|Sweep the attic|Sell the old sofa"
)
PLACES = ("Lisbon", "Oslo", "Kyoto", "Quito", "Vienna", "Dakar", "Porto", "Hanoi", "Bergen")
TAKINGS = ("Umbrella", "Passport copies", "Sunscreen", "Power bank", "Hiking boots", "Guide book")


def pay_friend(life: Life) -> Made:
  friend = life.draw.choice(life.contacts["friend"])
  usd, what = life.dollars(8, 120), life.draw.choice(EVENTS)
  code = f"""
people = apis.venmo.search_users(access_token=venmo, query='{friend.name}')
email = [p['email'] for p in people if p['last_name'] == '{friend.last_name}'][0]
apis.venmo.create_transaction(access_token=venmo, receiver_email=email, amount={usd}, \
description='{what}')
"""
  return Made(
    instruction=f"Send ${usd:g} to {friend.name} on Venmo with the note '{what}'.",
    code=code,
    changes={
      "venmo.Transaction": Change(PAYMENT, added=[(life.me.email, friend.email, usd, what)])
    },
    side_effects=("venmo.User", "venmo.Notification"),
  )


def extend_note(life: Life) -> Made:
  places = life.draw.sample(PLACES, 6)
  taken = life.draw.sample(TAKINGS, 4)
  line = f"- {taken.pop()}"
  contents = {place: "\n".join(f"- {x}" for x in life.draw.sample(taken, 2)) for place in places}
  for place in places:
    life.note(f"Packing list for {place}", contents[place], ("travel",))
  title = f"Packing list for {places[0]}"
  code = f"""
notes = apis.simple_note.search_notes(access_token=simple_note, query='{title}')
note_id = [note['note_id'] for note in notes if note['title'] == '{title}'][0]
apis.simple_note.add_content_to_note(access_token=simple_note, note_id=note_id, \
append_or_prepend='append', added_content='{line}')
"""
  return Made(
    instruction=f"Add the line '{line}' at the end of my Simple Note '{title}'.",
    code=code,
    changes={
      "simple_note.Note": Change(
        ("title", "content"), updated=[(title, f"{contents[places[0]]}\n{line}")]
      )
    },
  )


def add_todos(life: Life) -> Made:
  names = life.draw.sample(("Home", "Garden", "Paperwork", "Errands"), 3)
  chores = life.draw.sample(CHORES, 10)
  for place, name in enumerate(names):
    life.project(name, chores[2 * place : 2 * place + 2])
  new, priority = chores[6 : 6 + life.draw.randrange(2, 5)], life.draw.choice(("high", "low"))
  code = all_pages("projects", "todoist.show_projects")
  code += f"""\
project_id = [project['project_id'] for project in projects if project['name'] == '{names[0]}'][0]
for title in {new}:
    apis.todoist.create_task(access_token=todoist, project_id=project_id, title=title, \
priority='{priority}')
"""
  return Made(
    instruction=(
      f"Add these tasks to my Todoist project '{names[0]}', with {priority} priority: "
      f"{', '.join(new)}."
    ),
    code=code,
    changes={
      "todoist.Task": Change(
        ("project.name", "title", "priority", "is_completed"),
        added=[(names[0], title, priority, False) for title in new],
      )
    },
  )


def complete_todos(life: Life) -> Made:
  """What a note says is done."""
  project, other = life.draw.sample(("Home", "Garden", "Paperwork", "Errands"), 2)
  chores = life.draw.sample(CHORES, 12)
  life.project(project, chores[:9], done=chores[8:9])
  life.project(other, chores[9:])
  done = life.draw.sample(chores[:8], life.draw.randrange(3, 5))
  weekday = life.draw.choice(("Monday", "Tuesday", "Wednesday"))
  life.note(f"Done on {weekday}", "\n".join(f"* {title}" for title in done), ("diary",))
  life.note("Done last week", "\n".join(f"* {title}" for title in chores[9:]), ("diary",))
  code = f"""
notes = apis.simple_note.search_notes(access_token=simple_note, query='Done on {weekday}')
note_id = [note['note_id'] for note in notes if note['title'] == 'Done on {weekday}'][0]
note = apis.simple_note.show_note(access_token=simple_note, note_id=note_id)
titles = [line[2:] for line in note['content'].splitlines()]
"""
  code += all_pages("projects", "todoist.show_projects")
  code += f"""\
project_id = [project['project_id'] for project in projects if project['name'] == '{project}'][0]
tasks = apis.todoist.show_tasks(access_token=todoist, project_id=project_id)['no_section_tasks']
for task in tasks:
    if task['title'] in titles:
        apis.todoist.update_task(access_token=todoist, task_id=task['task_id'], is_completed=True)
"""
  return Made(
    instruction=(
      f"Mark the tasks of my Todoist project '{project}' as completed that are listed in my "
      f"Simple Note 'Done on {weekday}'."
    ),
    code=code,
    changes={
      "todoist.Task": Change(
        ("project.name", "title", "is_completed"),
        updated=[(project, title, True) for title in done],
      )
    },
  )


def genre_playlist(life: Life) -> Made:
  songs = life.library(life.draw.randrange(14, 22))
  genre = life.draw.choice([g for g in GENRES if any(song.genre == g for song in songs)])
  title = f"{life.draw.choice(('Best of', 'Mostly', 'Pure'))} {genre}"
  code = all_pages("songs", "spotify.show_song_library")
  code += f"""\
details = [apis.spotify.show_song(song_id=song['song_id']) for song in songs]
chosen = [song['song_id'] for song in details if song['genre'] == '{genre}']
playlist = apis.spotify.create_playlist(access_token=spotify, title='{title}')
for song_id in chosen:
    apis.spotify.add_song_to_playlist(access_token=spotify, \
playlist_id=playlist['playlist_id'], song_id=song_id)
"""
  return Made(
    instruction=(
      f"Make a new Spotify playlist '{title}' of all songs in my song library whose genre is "
      f"{genre}."
    ),
    code=code,
    changes={
      "spotify.Playlist": Change(("user.email", "title"), added=[(life.me.email, title)]),
      "spotify.PlaylistSong": Change(
        ("playlist.title", "song.title"),
        added=[(title, song.title) for song in songs if song.genre == genre],
      ),
    },
  )


def birthday_texts(life: Life) -> Made:
  people = [person for group in life.contacts.values() for person in group]
  month = int(life.draw.choice(people).birthday[5:7])
  message = f"Happy birthday! Yours, {life.me.first_name}"
  code = all_pages("contacts", "phone.search_contacts")
  code += f"""\
born = [contact for contact in contacts if contact['birthday'][5:7] == '{month:02d}']
for contact in born:
    apis.phone.send_text_message(access_token=phone, phone_number=contact['phone_number'], \
message='{message}')
"""
  return Made(
    instruction=(
      f"Send the text message '{message}' to everyone in my phone's contacts whose birthday is "
      f"in {MONTHS[month - 1]}."
    ),
    code=code,
    changes={
      "phone.GlobalTextMessage": Change(
        TEXT,
        added=[
          (life.me.phone_number, person.phone_number, message)
          for person in people
          if int(person.birthday[5:7]) == month
        ],
      )
    },
    side_effects=("phone.UserTextMessage",),
  )


def tidy_downloads(life: Life) -> Made:
  ending, topic = life.draw.choice(("pdf", "csv", "jpg")), life.draw.choice(("tax", "trip"))
  names = [f"{topic}-{number}.{end}" for number in range(1, 5) for end in ("pdf", "csv", "jpg")]
  names = life.draw.sample(names, 8) + [f"{topic}-9.{ending}"]
  contents = {name: f"{name}: {life.draw.randrange(10**6)}" for name in names}
  for name, content in contents.items():
    life.file(f"downloads/{name}", content)
  life.file(f"documents/{topic}/readme.txt", "Sorted by hand.")
  home = f"/home/{life.me.first_name.lower()}"
  moved = [name for name in names if name.endswith(ending)]
  code = f"""
paths = apis.file_system.show_directory(access_token=file_system, directory_path='~/downloads/')
moved = [path for path in paths if path.endswith('.{ending}')]
for path in moved:
    name = path.split('/')[-1]
    apis.file_system.move_file(access_token=file_system, source_file_path=path, \
destination_file_path='~/documents/{topic}/' + name)
"""
  return Made(
    instruction=(
      f"Move all {ending} files from ~/downloads/ to ~/documents/{topic}/ in my file system. "
      "Keep their names."
    ),
    code=code,
    changes={
      "file_system.File": Change(
        ("path", "content"),
        added=[(f"{home}/documents/{topic}/{name}", contents[name]) for name in moved],
        removed=[(f"{home}/downloads/{name}", contents[name]) for name in moved],
      )
    },
    side_effects=("file_system.Directory",),
  )
