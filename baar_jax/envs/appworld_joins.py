"""Scenarios of AppWorld tasks that change something in one app after what another one says."""

from baar_jax.envs.appworld_chores import MONTHS, PAYMENT, PLACES, TEXT
from baar_jax.envs.appworld_made import Change, Life, Made, all_pages
from baar_jax.envs.appworld_questions import EVENTS


def approve_requests(life: Life) -> Made:
  relationship = life.draw.choice(("roommate", "coworker", "sibling"))
  approved = []
  for group, people in life.contacts.items():
    for other in people:
      usd, what = life.dollars(5, 60), life.draw.choice(EVENTS)
      paid = group != "friend" and life.draw.random() < 0.3
      life.ask_to_pay(other, life.me, usd, what, paid)
      if group == relationship and not paid:
        approved.append((life.me.email, other.email, usd, what))
  last = life.contacts[relationship][0]
  life.ask_to_pay(last, life.me, 7.0, "Parking", paid=False)
  approved.append((life.me.email, last.email, 7.0, "Parking"))
  code = all_pages("contacts", "phone.search_contacts", f"relationship='{relationship}'")
  code += all_pages("requests", "venmo.show_received_payment_requests", "status='pending'")
  code += """\
emails = [contact['email'] for contact in contacts]
for request in requests:
    if request['sender']['email'] in emails:
        apis.venmo.approve_payment_request(access_token=venmo, \
payment_request_id=request['payment_request_id'])
"""
  return Made(
    instruction=(
      f"Approve all pending Venmo payment requests from my {relationship}s, paid from my Venmo "
      "balance. Leave all other requests as they are."
    ),
    code=code,
    changes={
      "venmo.Transaction": Change(PAYMENT, added=approved),
      "venmo.PaymentRequest": Change(
        ("receiver.email", "sender.email", "amount", "description", "denied_at"),
        updated=[(*row, None) for row in approved],
      ),
    },
    side_effects=("venmo.User", "venmo.Notification"),
  )


def trip_shares(life: Life) -> Made:
  """A note says who came and what it cost; the phone knows them, Venmo asks them."""
  place, other = life.draw.sample(PLACES, 2)
  mates = life.draw.sample(life.contacts["friend"] + life.contacts["sibling"], 3)
  shares = {person: life.dollars(20, 300) for person in mates}
  lines = [f"{person.name}: ${shares[person]:g}" for person in mates]
  life.note(f"Costs of {place}", "I paid. Shares of the others:\n" + "\n".join(lines), ("travel",))
  life.note(f"Costs of {other}", "Paid back by everyone.", ("travel",))
  code = f"""
notes = apis.simple_note.search_notes(access_token=simple_note, query='Costs of {place}')
note_id = [note['note_id'] for note in notes if note['title'] == 'Costs of {place}'][0]
note = apis.simple_note.show_note(access_token=simple_note, note_id=note_id)
lines = [line.split(': $') for line in note['content'].splitlines()[1:]]
shares = {{name: float(share) for name, share in lines}}
"""
  code += all_pages("contacts", "phone.search_contacts")
  code += f"""\
for contact in contacts:
    name = contact['first_name'] + ' ' + contact['last_name']
    if name in shares:
        apis.venmo.create_payment_request(access_token=venmo, user_email=contact['email'], \
amount=shares[name], description='{place}')
"""
  return Made(
    instruction=(
      f"My Simple Note 'Costs of {place}' says who owes me how much for our trip. Send each of "
      f"them a Venmo payment request over their share, with the description '{place}'. Their "
      "email addresses are in my phone's contacts."
    ),
    code=code,
    changes={
      "venmo.PaymentRequest": Change(
        PAYMENT, added=[(life.me.email, p.email, shares[p], place) for p in mates]
      )
    },
    side_effects=("venmo.Notification",),
  )


def split_bill(life: Life) -> Made:
  """A bill in a file is split among roommates, who are asked to pay and told so."""
  kind, month = life.draw.choice(("electricity", "internet", "water")), life.draw.randrange(1, 5)
  mates = life.contacts["roommate"]
  share = life.dollars(10, 50)
  for number in range(1, 5):
    usd = share * (len(mates) + 1) if number == month else 4 * life.dollars(10, 50)
    life.file(f"bills/{kind}-2024-{number:02d}.txt", f"{kind.title()} bill\nTotal: ${usd:g}\n")
  what, message = f"{kind} {MONTHS[month - 1]}", f"I have asked you for your share of the {kind}."
  code = f"""
bill = apis.file_system.show_file(access_token=file_system, \
file_path='~/bills/{kind}-2024-{month:02d}.txt')
total = float(bill['content'].split('$')[1])
"""
  code += all_pages("contacts", "phone.search_contacts", "relationship='roommate'")
  code += f"""\
share = total / (len(contacts) + 1)
for contact in contacts:
    apis.venmo.create_payment_request(access_token=venmo, user_email=contact['email'], \
amount=share, description='{what}')
for contact in contacts:
    apis.phone.send_text_message(access_token=phone, phone_number=contact['phone_number'], \
message='{message}')
"""
  return Made(
    instruction=(
      f"The {kind} bill of {MONTHS[month - 1]} 2024 is in ~/bills/ of my file system. I share it "
      "equally with my roommates. Send each of them a Venmo payment request over their share "
      f"with the description '{what}', and the text message '{message}'"
    ),
    code=code,
    changes={
      "venmo.PaymentRequest": Change(
        PAYMENT, added=[(life.me.email, mate.email, share, what) for mate in mates]
      ),
      "phone.GlobalTextMessage": Change(
        TEXT, added=[(life.me.phone_number, mate.phone_number, message) for mate in mates]
      ),
    },
    side_effects=("venmo.Notification", "phone.UserTextMessage"),
  )


def texted_artists(life: Life) -> Made:
  """A sibling has texted names of artists; their songs in the library are to be liked."""
  songs = life.library(life.draw.randrange(16, 24))
  artists = life.draw.sample(sorted({song.artist for song in songs}), 2)
  sibling, friend = life.contacts["sibling"][0], life.contacts["friend"][0]
  for number in range(7):
    life.text(
      friend, life.me, f"See you at the {life.draw.choice(EVENTS)}! ({number})", life.past(9)
    )
  life.text(sibling, life.me, f"You have to hear these: {'; '.join(artists)}", life.past(9))
  life.text(life.me, sibling, "Thanks, I will!", life.past(2))
  code = all_pages(
    "messages", "phone.search_text_messages", f"phone_number='{sibling.phone_number}'"
  )
  code += """\
text = [m['message'] for m in messages if m['message'].startswith('You have to hear')][0]
names = text.split(': ')[1].split('; ')
"""
  code += all_pages("songs", "spotify.show_song_library")
  code += """\
for song in songs:
    if song['artists'][0]['name'] in names:
        apis.spotify.like_song(access_token=spotify, song_id=song['song_id'])
"""
  liked = [song for song in songs if song.artist in artists]
  return Made(
    instruction=(
      f"My sibling {sibling.name} (phone number {sibling.phone_number}) has texted me the names "
      "of two artists. Like all songs by them that are in my Spotify song library."
    ),
    code=code,
    changes={
      "spotify.SongLike": Change(
        ("user.email", "song.title"), added=[(life.me.email, song.title) for song in liked]
      )
    },
    side_effects=("spotify.Song",),
  )
