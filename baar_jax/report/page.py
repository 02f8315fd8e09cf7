"""The report's files: index.html (one self-contained page), PNGs, results.json, hard_budget.*"""

import base64
import json
import math
from collections.abc import Mapping
from io import StringIO
from pathlib import Path

import jinja2
from matplotlib.figure import Figure

from baar_jax.report import plots, spend, tables
from baar_jax.report.results import plain

HERE = Path(__file__).parent


def write(results: Mapping, directory: Path) -> Path:
  """Writes the files; returns the page's path."""
  directory.mkdir(parents=True, exist_ok=True)
  text = json.dumps(plain(results), indent=1, allow_nan=False)
  (directory / "results.json").write_text(text, encoding="utf-8")
  if len(results["hard_budget"]):
    frame, bold = tables.hard_budget(results)
    narrow = frame.columns.get_level_values(1).isin(["Family", "Candidates", "SR", "Use%"])
    for ending, export in (("md", tables.to_markdown), ("tex", tables.to_latex)):
      text = export(frame.loc[:, narrow], bold.loc[:, narrow])
      (directory / f"hard_budget.{ending}").write_text(text, encoding="utf-8")
  figures = plots.draw_all(results)
  for name, figure in figures.items():
    figure.savefig(directory / f"{name}.png", dpi=144, facecolor="white")
  path = directory / "index.html"
  path.write_text(render(results, figures), encoding="utf-8")
  return path


def render(results: Mapping, figures: Mapping[str, Figure]) -> str:
  """The page. Whatever the results hold, the template escapes it."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True
  )
  context = {"r": results, "t": tables, "spend": spend, "exp": math.exp}
  images = {name: _data_url(figure) for name, figure in figures.items()}
  style = (HERE / "report.css").read_text(encoding="utf-8")
  page = environment.get_template("page.html.j2").render(context, images=images, style=style)
  return page.replace(" %", "\u00a0%")


def _data_url(figure: Figure) -> str:
  file = StringIO()
  figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date")))
  return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue().encode()).decode()
