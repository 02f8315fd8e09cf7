"""The look of the report: its colours on light and on dark, its figures' style, its words."""

# name -> (on light, on dark). In the page's SVG every light colour becomes the variable --name.
COLORS = {
  "ink": ("#1d2530", "#e6e9ee"),
  "muted": ("#5f6875", "#9aa4b2"),
  "rule": ("#dfe3e8", "#333b47"),
  "small": ("#1e2630", "#e5e8ed"),
  "bopo": ("#c9452c", "#ff8466"),
  "sft": ("#2f6cb3", "#74abea"),
  "random": ("#848b96", "#a0a8b4"),
  "first-large": ("#2f8a5b", "#61c48d"),
  "oracle": ("#8a5eb0", "#c09be3"),
  "optimum": ("#ad7a10", "#e6b649"),
  "zero-shot": ("#0f8a94", "#4cc3cc"),
  "cascade": ("#7a5a2e", "#c39b63"),
  "single-turn": ("#b8408f", "#ee86c6"),
  "vanilla": ("#3c4cc0", "#96a2ff"),
  "no-stratified": ("#6d7d1f", "#b6c95a"),
  "no-reference": ("#0d6e5e", "#4fbfa8"),
  "no-hard-bonus": ("#a05a7a", "#db9cb8"),
  "easy": ("#82bfa6", "#6cae94"),
  "hard": ("#dd8a4b", "#dd8a4c"),
  "intractable": ("#8e8bb8", "#8f8cba"),
}
LIGHT = {name: light for name, (light, _) in COLORS.items()}
MARKERS = {
  "bopo": "o",
  "sft": "s",
  "random": "^",
  "first-large": "D",
  "oracle": "P",
  "optimum": "*",
  "zero-shot": "X",
  "cascade": "v",
  "single-turn": "<",
  "vanilla": "h",
  "no-stratified": "v",
  "no-reference": "D",
  "no-hard-bonus": "^",
}
FAMILIES = {
  "always-small": "always SMALL",
  "always-large": "always LARGE",
  "random": "random",
  "first-large": "First-Large",
  "zero-shot": "zero-shot LLM",
  "cascade": "cascade",
  "single-turn": "single-turn",
  "vanilla": "vanilla RL",
  "sft": "SFT only",
  "bopo": "BoPO",
  "no-stratified": "no stratified sampling",
  "no-reference": "no reference advantage",
  "no-hard-bonus": "no hard bonus",
  "oracle": "oracle (privileged)",
  "optimum": "optimum (exact policy)",
}
STYLE = {
  "font.family": "DejaVu Sans",
  "font.size": 9,
  "axes.edgecolor": LIGHT["muted"],
  "axes.labelcolor": LIGHT["ink"],
  "axes.titlecolor": LIGHT["ink"],
  "axes.titlesize": 9,
  "axes.titlelocation": "left",
  "axes.linewidth": 0.8,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.grid": True,
  "axes.axisbelow": True,
  "grid.color": LIGHT["rule"],
  "grid.linewidth": 0.7,
  "text.color": LIGHT["ink"],
  "xtick.color": LIGHT["muted"],
  "ytick.color": LIGHT["muted"],
  "legend.frameon": False,
  "legend.fontsize": 8,
  "svg.hashsalt": "report",
}


def sr_name(metric: str) -> str:
  return {"score": "mean score", "success": "success rate"}[metric] + ", %"


def parameter_text(parameters: dict) -> str:
  """Parameters as a reader wants them; the training length and the plain argmax go unsaid."""
  symbols = {"lam": "λ", "mu": "μ", "threshold": "t"}
  return ", ".join(
    f"share {100 * v:g} %" if k == "share" else f"{symbols.get(k, k)} = {v:g}"
    for k, v in parameters.items()
    if k != "update" and (k, v) != ("threshold", 0.5)
  )


def shown_metrics(results: dict) -> tuple[str, ...]:
  """The environment's own metric first; one suffices where every score is 0 or 1."""
  first = results["run"]["sr_metric"]
  same = all(p["score_percent"] == p["success_percent"] for p in results["policies"])
  return (first,) if same else (first, "success" if first == "score" else "score")


def variables(mode: int) -> str:
  """CSS declarations of the colours, on light (0) or on dark (1)."""
  return " ".join(f"--{name}: {pair[mode]};" for name, pair in COLORS.items())
