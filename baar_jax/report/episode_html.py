"""Chosen episodes as HTML: every step with who acted, the router's probability, and the cost."""

import html

from baar_jax.report.cells import cost_digits, stands
from baar_jax.report.theme import parameter_text


def episodes(results: dict) -> str:
  """A <details> for each; what environments and models wrote is escaped."""
  shown = results["episodes"]
  digits = cost_digits(results) + 1
  text = (
    f"<p>BoPO at {html.escape(parameter_text(shown['parameters']) or 'its threshold of 0.5')}: "
    f"{html.escape(shown['rule'])}. The bar is the router's probability of LARGE.</p>"
  )
  details = "\n".join(_episode(episode, digits) for episode in shown["episodes"])
  return f'{text}\n{details}\n<p class="note">{stands(results)}</p>'


def _episode(episode: dict, digits: int) -> str:
  steps = episode["steps"]
  calls = steps[-1]["large_calls"] if steps else 0
  summary = (
    f"<b>{html.escape(episode['task_id'])}</b> · {episode['why']} · score "
    f"{100 * episode['score']:.0f}, always SMALL {100 * episode['small_score']:.0f} · "
    f"{len(steps)} steps, {calls} LARGE · ${episode['cost_usd']:.{digits}f}"
  )
  lines = "\n".join(_step(place, step, digits) for place, step in enumerate(steps, 1))
  return f"""<details class="episode">
<summary>{summary}</summary>
<p>{html.escape(episode["description"])}</p>
<ol>
{lines}
</ol>
<p class="note">Seed {episode["seed"]}, ended by {html.escape(episode["stop"])}. Texts are cut.</p>
</details>"""


def _step(place: int, step: dict, digits: int) -> str:
  model, kind = ("LARGE", ' class="dear"') if step["model"] else ("SMALL", "")
  chance = ""
  if step["p_large"] is not None:
    width = 40 * step["p_large"]
    chance = (
      f'<span class="p">p(LARGE) {step["p_large"]:.2f} '
      '<svg viewBox="0 0 40 8" aria-hidden="true"><path d="M0 4H40" stroke="var(--rule)" '
      f'stroke-width="6"/><path d="M0 4H{width:.1f}" stroke="var(--bopo)" stroke-width="6"/></svg>'
      "</span> "
    )
  return (
    f'<li{kind}><div class="who"><span><b>{place}</b> {model}</span> {chance}'
    f"<span>${step['cost_usd']:.{digits}f}, {step['large_calls']} LARGE so far</span></div>"
    f'<p class="saw">{html.escape(step["observation"])}</p>'
    f'<p class="did">{html.escape(step["action"]) or "(no action in the reply)"}</p></li>'
  )
