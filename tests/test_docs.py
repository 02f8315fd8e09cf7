"""README and docs: sentences are short, links lead somewhere, flags exist."""

import re
from pathlib import Path

import prose
import pytest

from baar_jax.config import Config

PAGES = pytest.mark.parametrize("page", prose.PAGES, ids=lambda page: page.stem)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"--config\.([a-z_.]+)")


def list_anchors(page: Path) -> set[str]:
  """List the anchors that headings of a page have."""
  anchors = set()
  for heading in re.findall(r"(?m)^#+ (.*)$", page.read_text()):
    text = re.sub(r"[^\w\- ]", "", heading.lower())
    anchors.add(text.replace(" ", "-"))
  return anchors


@PAGES
def test_sentences_are_short_and_numbers_are_in_tables(page):
  mean, longest, numbers = prose.measure(page.read_text())
  assert mean <= 18
  assert longest <= 35
  assert numbers <= 3


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
    value = Config()
    for part in name.rstrip(".").split("."):
      if isinstance(value, dict):
        break  # an option of an environment
      assert hasattr(value, part), name
      value = getattr(value, part)


def test_prose_counts_words_sentences_and_numbers():
  text = (
    "# Head 1\n\nOne `a b` two 3. Four\nfive.\n\n| 4 |\n\n    code 5\n- six 7.5 %\n"
  )
  # One CODE two 3; Four five; six 7.5 %.
  assert prose.list_sentences(text) == ["One CODE two 3.", "Four five.", "six 7.5 %"]
  mean, longest, numbers = prose.measure(text)
  assert (mean, longest, numbers) == (pytest.approx(8 / 3), 4, 25.0)
