"""README and docs: sentences are short; links, files, flags and settings exist."""

import dataclasses
import re
from pathlib import Path

import prose
import pytest

from baar_jax.config import Config

PAGES = pytest.mark.parametrize("page", prose.PAGES, ids=lambda page: page.stem)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"--config\.([a-z_.]+)")
SPAN = re.compile(r"`([^`\n]+)`")
FOLDERS = ("baar_jax", "configs", "docs", "examples", "tests", "tools")
# A file of Python, or a path in one of the folders. Names in upper case are examples.
PATH = re.compile(
  r"(?<![\w./<>-])((?:[a-z0-9_.*-]+/)*[a-z0-9_*-]+\.py\b"
  rf"|(?:{'|'.join(FOLDERS)})/[a-z0-9_./*-]*)"
)
# The files that a reader of docs/extending.md writes.
NEW_FILES = {"router/sticky.py", "llms/completions.py"}
SETTING = re.compile(r"([a-z]+\.[a-z_.]+)(=.*)?")
SECTIONS = [
  name for name, value in vars(Config()).items() if dataclasses.is_dataclass(value)
]
# The fields of older versions that the documentation names.
OLDER_SETTINGS = {"value.cache_facts", "value.return_share"}


def list_files() -> list[Path]:
  """List the files and folders of this repository, relative to its root."""
  files = [*prose.ROOT.iterdir()]
  for folder in FOLDERS:
    files += (prose.ROOT / folder).rglob("*")
  return [file.relative_to(prose.ROOT) for file in files]


FILES = list_files()


def list_lost_paths(text: str) -> list[str]:
  """List the paths in code spans at which this repository has no file.

  A path may leave out the first folders, as in `rollout/specs.py`.
  """
  paths = []
  for span in SPAN.findall(text):
    paths += [path for path in PATH.findall(span) if path not in NEW_FILES]
  return [path for path in paths if not any(file.match(path) for file in FILES)]


def list_lost_settings(text: str) -> list[str]:
  """List the settings in code spans that the configuration lacks."""
  matches = filter(None, map(SETTING.fullmatch, SPAN.findall(text)))
  names = {match[1] for match in matches if match[1].split(".")[0] in SECTIONS}
  return [name for name in sorted(names - OLDER_SETTINGS) if not is_setting(name)]


def is_setting(name: str) -> bool:
  """Tell whether a dotted name is a field of the configuration."""
  value = Config()
  for field in name.split("."):
    if isinstance(value, dict):
      return True  # an option of an environment
    if not hasattr(value, field):
      return False
    value = getattr(value, field)
  return True


def list_anchors(page: Path) -> set[str]:
  """List the anchors that headings of a page have."""
  anchors = set()
  for heading in re.findall(r"(?m)^#+ (.*)$", page.read_text()):
    text = re.sub(r"[^\w\- ]", "", heading.lower())
    anchors.add(text.replace(" ", "-"))
  return anchors


@PAGES
def test_sentences_are_short_and_numbers_are_in_tables(page):
  text = page.read_text()
  mean, numbers = prose.measure(text)
  assert mean <= 18
  assert numbers <= 3
  for sentence in prose.list_sentences(text):
    assert prose.count_words(sentence) <= 35, sentence


@PAGES
def test_links_lead_to_files_and_headings(page):
  for target in LINK.findall(page.read_text()):
    if not target.startswith("http"):
      path, _, anchor = target.partition("#")
      file = (page.parent / path).resolve() if path else page
      assert file.exists(), target
      assert not anchor or anchor in list_anchors(file), target


@PAGES
def test_flags_are_fields_of_the_configuration(page):
  for name in FLAG.findall(page.read_text()):
    assert is_setting(name.rstrip(".")), name


@PAGES
def test_files_and_settings_in_code_spans_exist(page):
  text = page.read_text()
  assert list_lost_paths(text) == []
  assert list_lost_settings(text) == []


def test_a_lost_file_or_setting_in_a_code_span_is_noticed():
  text = (
    "`main.py --config=configs/none.py` `configs/FILE.py` `llms/none.py:x` `docs/no.md`"
    " `rollout/specs.py` `tests/test_*.py` `tests/none_*.py` `baar_jax/llms/` `docs/no`"
    " `serve.guess` `serve.port=1` `env.options.any` `choice.model` `value.return_share`"
  )
  files = [
    "configs/none.py",
    "llms/none.py",
    "docs/no.md",
    "tests/none_*.py",
    "docs/no",
  ]
  assert list_lost_paths(text) == files
  assert list_lost_settings(text) == ["serve.guess"]


def test_prose_counts_words_sentences_and_numbers():
  text = (
    "# Head 1\n\nOne `a b` two 3. Four\nfive.\n\n| 4 |\n\n    code 5\n- six 7.5 %\n"
  )
  # One CODE two 3; Four five; six 7.5 %.
  assert prose.list_sentences(text) == ["One CODE two 3.", "Four five.", "six 7.5 %"]
  assert prose.count_words("One CODE two 3.") == 4
  assert prose.measure(text) == (pytest.approx(8 / 3), 25.0)
