"""Seconds of an episode: from the paper's token rates, and as measured."""

from collections.abc import Sequence

from baar_jax.report.samples import Sample

# Generated tokens per second (paper, "Latency Analysis"): SMALL and LARGE after OpenAI's targets,
# the router after a benchmark of Qwen2.5-1.5B. Reading the prompt and the network do not count.
SMALL_RATE, LARGE_RATE, ROUTER_RATE = 90.0, 80.0, 180.0


def latency(rows: Sequence[dict], samples: Sequence[Sample], scripted: bool) -> list[dict]:
  """Mean seconds per episode of some policies.

  A router's decision is one token of its own. A judge's answers are at LARGE's rate, a cascade's
  proposals that were not taken at SMALL's.

  Args:
    rows: family, parameters and index of each policy.
    samples: of all policies.
    scripted: whether the models are scripts, whose seconds are not those of an API.

  Returns:
    Per row: family, parameters, index; small_s, large_s, router_s, total_s and router_share by
    the rates; measured_router_s, and measured_decision_s of one decision; measured_models_s (None
    for scripts, and where replies were replayed); and measured_router_share, of the measured
    seconds of the models, else of those by the rates. None is what was not measured.
  """
  result = []
  for row in rows:
    mean = samples[row["index"]].mean
    small_s = (mean("small_tokens") + mean("proposal_tokens")) / SMALL_RATE
    large_s = mean("large_tokens") / LARGE_RATE
    router_s = mean("decisions") / ROUTER_RATE + mean("judge_tokens") / LARGE_RATE
    total_s = small_s + large_s + router_s
    measured_s, decisions = mean("router_latency_s"), mean("decisions") + mean("judgements")
    measured = measured_s > 0 and decisions > 0
    models_s = None if scripted or mean("replayed") else mean("latency_s")
    all_s = measured_s + (small_s + large_s if models_s is None else models_s)
    result.append(
      {
        **{name: row[name] for name in ("family", "parameters", "index")},
        "small_s": small_s,
        "large_s": large_s,
        "router_s": router_s,
        "total_s": total_s,
        "router_share": router_s / total_s if total_s else None,
        "measured_router_s": measured_s if measured else None,
        "measured_decision_s": measured_s / decisions if measured else None,
        "measured_models_s": models_s,
        "measured_router_share": measured_s / all_s if measured else None,
      }
    )
  return result
