"""Measure sentences and numbers of README and docs."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"(?<![\w.-])[-+$−~]?\$?\d[\d,.]*(?:e-?\d+)?")


def list_sentences(text: str) -> list[str]:
  """List the sentences of a page without its tables, code, headings and addresses.

  A code span counts as one word. A list's item and a paragraph end a sentence.
  """
  text = re.sub(r"(?ms)^```.*?^```", "\n\n", text)
  text = re.sub(r"(?m)^(    |\t|\||#|!\[|<).*$", "", text)
  text = re.sub(r"`[^`]*`", "CODE", text)
  text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
  text = re.sub(r"https?://\S+", "ADDRESS", text)
  sentences = []
  for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
    block = re.sub(r"^\s*(?:[-*]|\d+\.) ", "", block)
    line = " ".join(block.split()).replace("*", "")
    line = re.sub(r"\b(e\.g|i\.e|vs|Eq|Fig|al|etc)\.", r"\1", line)
    sentences += [s for s in re.split(r"(?<=[.!?])['\")]*\s+(?=\S)", line) if s]
  return sentences


def count_words(sentence: str) -> int:
  """Count a sentence's words."""
  return len([w for w in sentence.split() if re.search(r"\w", w)])


def measure(text: str) -> tuple[float, float]:
  """Measure words per sentence, and numbers per 100 words."""
  sentences = list_sentences(text)
  words = [count_words(sentence) for sentence in sentences]
  numbers = sum(len(NUMBER.findall(sentence)) for sentence in sentences)
  total = max(1, sum(words))
  return total / max(1, len(words)), 100 * numbers / total
