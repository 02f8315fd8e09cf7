"""Figures by name, their quotients, and the table and the JSON object that they make."""

import textwrap
import time
from collections.abc import Callable

import jax

REPEATS = 5  # of a timed call at most
ENOUGH_S = 1.0  # after which it is not repeated
MB = 1e6
GIGA = 1e9


class Figures:
  """Figures in sections, in the order in which they are added.

  Attributes:
    values: name -> value; a name ends in its unit, and a quotient's is `<name>_over_<other>`.
  """

  def __init__(self):
    self.values: dict[str, float | int | str | None] = {}
    self._sections: list[tuple[str, str, list[str]]] = []  # title, note, names
    self._labels: dict[str, tuple[str, str]] = {}  # name -> label, unit
    self._ratios: dict[str, list[str]] = {}  # name -> what is said beside it

  def section(self, title: str, note: str = "") -> None:
    """Opens a section; the note says how its figures were taken."""
    self._sections.append((title, note, []))

  def add(self, name: str, value: float | int | str | None, label: str, unit: str = "") -> None:
    """Adds a figure to the open section; None is one that this machine does not tell."""
    self.values[name] = value
    self._labels[name] = label, unit
    self._sections[-1][2].append(name)

  def ratio(self, name: str, other: str, words: str, beside: str = "") -> None:
    """Adds the quotient of two figures, said in the line of the first or of `beside`.

    Args:
      words: with a place for the quotient.
    """
    quotient = self.values[name] / self.values[other]
    self.values[f"{name}_over_{other}"] = quotient
    self._ratios.setdefault(beside or name, []).append(words.format(shown(quotient)))

  def table(self) -> str:
    """The sections as text: label, value, unit, and what it compares to."""
    lines = []
    for title, note, names in self._sections:
      lines += ["", title, *textwrap.wrap(note, 98, initial_indent="  ", subsequent_indent="  ")]
      for name in names:
        (label, unit), value = self._labels[name], self.values[name]
        line = f"  {label:44} {shown(value):>10} {'' if value is None else unit:14}"
        said = self._ratios.get(name, [""])
        lines.append(f"{line} {said[0]}".rstrip())
        lines += [f"{'':{len(line)}} {more}" for more in said[1:]]
    return "\n".join(lines[1:])


def shown(value: float | int | str | None) -> str:
  if value is None:
    return "not known"
  if isinstance(value, str):
    return value
  return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"


def timed(call: Callable[[], object]) -> float:
  """Seconds until the call's arrays are there."""
  start = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - start


def first_and_steady(call: Callable[[], object]) -> tuple[float, float]:
  """Seconds of the first call, which compiles, and of the fastest of a few after it."""
  first, times = timed(call), []
  while not times or (len(times) < REPEATS and sum(times) < ENOUGH_S):
    times.append(timed(call))
  return first, min(times)
