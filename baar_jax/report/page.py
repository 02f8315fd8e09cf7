"""results -> report/index.html: one self-contained page."""

import html
from pathlib import Path
from string import Template

from baar_jax.report import sections, theme

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>
$style
</style>
</head>
<body>
<main>
$body
</main>
</body>
</html>
""")


def render(results: dict, svg: dict[str, str]) -> str:
  """The page. `svg` holds the figures by name; a section without its figure or data is left out."""
  run = results["run"]
  parts = (
    sections.opening(results),
    sections.soft(results, svg),
    sections.areas(results),
    sections.ablations(results, svg),
    sections.budgets(results, svg),
    sections.dollars(results),
    sections.spend(results, svg),
    sections.progress(results, svg),
    sections.seconds(results),
    sections.episodes(results),
    sections.beside_the_paper(results),
    sections.training(results, svg),
    sections.every_policy(results),
    sections.method(results),
  )
  body = "\n".join(part for part in parts if part).replace(" %", "\u00a0%")
  title = f"Budget-aware routing: {html.escape(run['name'])}"
  return _PAGE.substitute(title=title, style=_style(), body=body)


def _style() -> str:
  style = Template(Path(__file__).with_name("report.css").read_text(encoding="utf-8"))
  return style.substitute(light=theme.variables(0), dark=theme.variables(1))
