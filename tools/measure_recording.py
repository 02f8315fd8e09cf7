"""Measure what two recorded models did at functions, as docs/real_models.md tells.

    python -m tools.measure_recording FILE.jsonl.gz

A path is the models that tried, such as 01 for SMALL, then LARGE. Brackets are 95 %
intervals over functions.
"""

import sys

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import RidgeClassifier
from sklearn.model_selection import StratifiedGroupKFold, cross_val_score
from sklearn.preprocessing import scale

from baar_jax.config import fail
from baar_jax.envs.code.adapter import Recording, read_functions, read_recording

FOLDS = 10  # of the functions, for predictions
DRAWS = 1000  # of functions, for intervals
PENALTY = 3.0  # of the weights of a prediction


def read_tries(recording: Recording) -> pd.DataFrame:
  """Return a row for each node of complete trials.

  The columns are function, trial, path, end, solved and repeated.
  The end is how the first failed test ended, in two words; "" after a success. A second
  try is repeated if it has exactly the code of the first one.
  """
  rows = []
  for node in recording.nodes.values():
    if node.trial >= recording.trials:
      continue
    first = recording.nodes[node.function, node.trial, node.path[0]]
    failed = next(filter(None, node.results), "")
    rows.append(
      {
        "function": node.function,
        "trial": node.trial,
        "path": node.path,
        "end": " ".join(failed.split()[:3]) if "raised" in failed else failed[:7],
        "solved": float(not failed),
        "repeated": float(node.code == first.code),
      }
    )
  return pd.DataFrame(rows)


def describe(values: pd.Series, digits: int = 3) -> str:
  """Return a mean with its 95 % interval, resampling the first level of the index."""
  sums = values.groupby(level=0).agg(["sum", "count"]).to_numpy()
  drawn = np.random.default_rng(0).integers(0, len(sums), (DRAWS, len(sums)))
  total, count = sums[drawn].sum(axis=1).T
  low, high = np.percentile(total / count, [2.5, 97.5])
  shown = [f"{value:.{digits}f}" for value in (values.mean(), low, high)]
  return f"{shown[0]} [{shown[1]}, {shown[2]}] of {len(values)}"


def measure(tries: pd.DataFrame) -> dict[str, str]:
  """Return the rates of tries, first tries of both models, and agreement of trials."""
  figures = {}
  for path, rows in tries.set_index("function").groupby("path"):
    figures[f"solved by {path}"] = describe(rows.solved)
    if len(path) == 2:
      figures[f"{path} repeats the code"] = describe(rows.repeated)
  firsts = tries[tries.path.str.len() == 1]
  solved = firsts.pivot(index=["function", "trial"], columns="path", values="solved")
  for small, large in np.ndindex(2, 2):
    is_pair = solved.dropna().eq([small, large]).all(axis=1).astype(float)
    figures[f"SMALL solves {small}, LARGE {large}"] = describe(is_pair)
  for path in solved:
    trials = solved[path].unstack().dropna()
    n = trials.shape[1]
    count = trials.sum(axis=1)
    if n > 1 and len(trials):
      pairs = count * (count - 1) + (n - count) * (n - count - 1)
      figures[f"two trials of {path} agree"] = describe(pairs / (n * (n - 1)))
  return figures


def read_features(tries: pd.DataFrame) -> dict[str, np.ndarray]:
  """Return what may predict the end of tries, a matrix with their rows for each."""
  functions = {function.id: function for function in read_functions("")}
  asked = [functions[name] for name in tries.function]
  words = TfidfVectorizer(sublinear_tf=True, token_pattern="[a-z]+")
  text = words.fit_transform([function.prompt() for function in asked]).toarray()
  length = 3 * scale(np.log([[len(function.text)] for function in asked]))
  kind = pd.get_dummies(tries.function.str.rpartition("-")[0]).to_numpy(float)
  first = tries[tries.path == "0"].set_index(["function", "trial"]).end
  ends = first.reindex(pd.MultiIndex.from_frame(tries[["function", "trial"]]))
  end = pd.get_dummies(ends.to_numpy()).to_numpy(float)
  before = np.hstack([text, kind, length])
  return {
    "kind": kind,
    "words": text,
    "length of the text": length,
    "all three": before,
    "these and SMALL's first try": np.hstack([before, end]),
  }


def predict_failures(tries: pd.DataFrame) -> pd.DataFrame:
  """Return how well failures of each path are predicted on other functions.

  A figure is the area under the ROC curve of a ridge regression, its mean over folds of
  the functions, with the 95 % interval of this mean.
  """
  features = read_features(tries)
  rows = {}
  for path in ("0", "1", "00", "01"):
    chosen = (tries.path == path).to_numpy()
    failed_N = tries.solved[chosen] == 0
    if np.bincount(failed_N, minlength=2).min() < FOLDS:
      continue  # Too few to tell.
    for name, x_NxF in features.items():
      if path != "0" or "first try" not in name:
        areas = cross_val_score(
          RidgeClassifier(PENALTY),
          x_NxF[chosen],
          failed_N,
          groups=tries.function[chosen],
          cv=StratifiedGroupKFold(FOLDS),
          scoring="roc_auc",
        )
        margin = 1.96 * areas.std(ddof=1) / FOLDS**0.5
        rows[name, f"{path} fails"] = f"{areas.mean():.2f} ± {margin:.2f}"
  return pd.Series(rows).unstack()


def main() -> int:
  """Print all figures of a recording of our own functions."""
  try:
    if len(sys.argv) != 2:
      raise ValueError("name a recording: python -m tools.measure_recording FILE")
    tries = read_tries(read_recording(sys.argv[1]))
    print(pd.Series(measure(tries)).to_string())
    print("area under the ROC curve of predicted failures:")
    print(predict_failures(tries).to_string())
  except (ValueError, KeyError) as error:
    return fail(error)
  return 0


if __name__ == "__main__":
  sys.exit(main())
