"""The people and songs of AppWorld's own tasks: made up, and the same every time."""

import dataclasses
import datetime
import random

NOW = datetime.datetime(2024, 5, 16, 12, 0)  # a Thursday; every task happens then
RELATIONSHIPS = {"roommate": 3, "sibling": 2, "coworker": 4, "friend": 5}
GENRES = ("rock", "jazz", "folk", "indie", "techno")


def listed(text: str) -> tuple[str, ...]:
  """The parts of a text, separated by bars or, without any, by spaces."""
  return tuple(text.split("|" if "|" in text else None))


FIRST_NAMES = listed(
  "Amber Boris Clara Derek Elena Felix Greta Hamid Irene Jonas Katya Lucas "
  "Megan Nadia Oscar Paula Quinn Ravi Sonia Tomas Ursula Victor Wanda Yusuf"
)
LAST_NAMES = listed(
  "Archer Becker Castillo Dalton Eriksen Fontaine Gupta Hendricks Ivanov Jansen Kimura Lindqvist "
  "Moreau Novak Okafor Petrov Quigley Rossi Sandoval Turner Ueda Vargas Whitfield Zeller"
)
ADJECTIVES = listed("Amber Broken Crimson Distant Electric Frozen Gentle Hollow Ivory Silent")
NOUNS = listed("Harbor Lantern Meadow Orchard Parade River Shadow Signal Thunder Window")
ARTISTS = listed(
  "The Paper Kites of June|Nora Valentine|Copper Coast|Brass Monkeys United|Milo and the Mills|"
  "Sable Row|Ada Quartet|Northern Static"
)
SONGS_EACH = 10  # of an artist


@dataclasses.dataclass(frozen=True)
class Person:
  """Someone with an account in every app."""

  number: int
  first_name: str
  last_name: str

  @property
  def name(self) -> str:
    return f"{self.first_name} {self.last_name}"

  @property
  def email(self) -> str:
    return f"{self.first_name}.{self.last_name}@example.com".lower()

  @property
  def phone_number(self) -> str:
    return f"555{self.number * 104_729 % 10_000_000:07d}"

  @property
  def birthday(self) -> str:
    day = datetime.date(1980, 1, 1) + datetime.timedelta(days=(self.number + 3) * 397 % 7000)
    return day.isoformat()

  def password(self, app: str) -> str:
    return random.Random(f"{app}|{self.number}").choice(NOUNS).lower() + f"-{app}-{self.number}"


@dataclasses.dataclass(frozen=True)
class Song:
  """A song; its id is its place in SONGS, from 1, and its artist's in ARTISTS likewise."""

  id: int
  title: str
  artist_id: int
  genre: str
  duration: int  # seconds
  play_count: int

  @property
  def artist(self) -> str:
    return ARTISTS[self.artist_id - 1]


def _songs() -> tuple[Song, ...]:
  draw = random.Random("songs")
  titles = [f"{adjective} {noun}" for adjective in ADJECTIVES for noun in NOUNS]
  draw.shuffle(titles)
  count = len(ARTISTS) * SONGS_EACH
  plays = draw.sample(range(100, 1000), count)
  return tuple(
    Song(
      id=number + 1,
      title=titles[number],
      artist_id=number // SONGS_EACH + 1,
      genre=draw.choice(GENRES),
      duration=draw.randrange(125, 415, 10),
      play_count=plays[number],
    )
    for number in range(count)
  )


PEOPLE = tuple(
  Person(number, first, last)
  for number, (first, last) in enumerate(zip(FIRST_NAMES, LAST_NAMES), 1)
)
SONGS = _songs()


def contacts_of(person: Person) -> dict[str, list[Person]]:
  """Whom a person's phone knows, by relationship."""
  others = [other for other in PEOPLE if other != person]
  random.Random(f"contacts|{person.number}").shuffle(others)
  found, start = {}, 0
  for relationship, count in RELATIONSHIPS.items():
    found[relationship] = others[start : start + count]
    start += count
  return found
