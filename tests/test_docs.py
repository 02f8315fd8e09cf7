"""README and docs: links, files, flags and stages exist."""

import importlib.util
import re
from pathlib import Path

import pytest
from tiny import ROOT

import main
from baar_jax.config import Config
from baar_serve.config import ServeConfig

FOLDERS = ("baar_jax", "baar_serve", "configs", "docs", "examples", "tests", "tools")
README = ROOT / "README.md"
PAGE_FILES = [
  README,
  ROOT / "baar_serve" / "README.md",
  *sorted((ROOT / "docs").glob("*.md")),
]
PAGES = pytest.mark.parametrize(
  "page", PAGE_FILES, ids=lambda page: f"{page.parent.name}-{page.stem}"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"--config\.([a-z_.]+)")
STAGE = re.compile(r"--stage=([a-z]+)")
MODULE = re.compile(r"python -m ([a-z_.]+)")
SPAN = re.compile(r"`([^`\n]+)`")
# A file of Python, or a path in one of the folders. Names in upper case are examples.
PATH = re.compile(
  r"(?<![\w./<>-])((?:[a-z0-9_.*-]+/)*[a-z0-9_*-]+\.py\b"
  rf"|(?:{'|'.join(FOLDERS)})/[a-z0-9_./*-]*)"
)
# The files that a reader of docs/extending.md or baar_serve/README.md writes.
NEW_FILES = {
  "rate.py",
  "families/rloo.py",
  "tests/test_rloo.py",
}
FILES = [*ROOT.iterdir()]
for folder in FOLDERS:
  FILES += (ROOT / folder).rglob("*")


def list_lost_paths(text: str) -> list[str]:
  """List the paths in code spans at which this repository has no file.

  A path may leave out the first folders, as in `rollout/specs.py`.
  """
  paths = []
  for span in SPAN.findall(text):
    paths += [path for path in PATH.findall(span) if path not in NEW_FILES]
  return [path for path in paths if not any(file.match(path) for file in FILES)]


def is_setting(name: str) -> bool:
  """Tell whether a dotted name is a field of one of the two configurations.

  What follows env.options is an option of an environment.
  """
  for value in (Config(), ServeConfig()):
    fields = name.partition("options.")[0].rstrip(".").split(".")
    while fields and hasattr(value, fields[0]):
      value = getattr(value, fields.pop(0))
    if not fields:
      return True
  return False


def list_anchors(page: Path) -> set[str]:
  """List the anchors that headings of a page have."""
  anchors = set()
  for heading in re.findall(r"(?m)^#+ (.*)$", page.read_text()):
    text = re.sub(r"[^\w\- ]", "", heading.lower())
    anchors.add(text.replace(" ", "-"))
  return anchors


@PAGES
def test_links_lead_to_files_and_headings(page):
  for target in LINK.findall(page.read_text()):
    if not target.startswith("http"):
      path, _, anchor = target.partition("#")
      file = (page.parent / path).resolve() if path else page
      assert file.exists(), target
      assert not anchor or anchor in list_anchors(file), target


@PAGES
def test_commands_have_flags_stages_and_modules_that_exist(page):
  text = page.read_text()
  flags = [name.rstrip(".") for name in FLAG.findall(text)]
  assert [name for name in flags if not is_setting(name)] == []
  assert {*STAGE.findall(text)} <= {"all", *main.STAGES}
  for module in MODULE.findall(text):
    assert importlib.util.find_spec(module), module


@PAGES
def test_files_in_code_spans_exist(page):
  assert list_lost_paths(page.read_text()) == []


def test_readme_links_the_files_of_the_afternoon_in_order():
  lines = (ROOT / "docs" / "afternoon.txt").read_text().splitlines()
  table = README.read_text().partition("in an afternoon\n")[2].partition("\n## ")[0]
  files = [line.split()[0] for line in lines]
  assert len(files) > 9 and all((ROOT / file).is_file() for file in files)
  assert re.findall(r"\]\((baar_jax/[^)]*)\)", table) == files
