"""Measure what two recorded models did at functions, as docs/real_models.md tells.

    python -m tools.measure_recording FILE.jsonl.gz

Brackets are 95 % intervals over functions.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from baar_jax.envs.code.adapter import Recording, read_functions, read_recording

SPLITS = 10  # of the functions, for predictions
DRAWS = 1000  # of functions, for intervals
PENALTY = 3.0  # of the weights of a prediction


def read_tries(recording: Recording) -> pd.DataFrame:
  """Return whether each node solved its function, by function and trial, and by path."""
  rows = []
  for (function, trial, path), node in recording.nodes.items():
    rows.append((function, trial, path, not node.observation))
  table = pd.DataFrame(rows, columns=["function", "trial", "path", "solved"])
  return table.pivot(index=["function", "trial"], columns="path", values="solved")


def measure(tries: pd.DataFrame) -> dict[str, str]:
  """Return the rates of tries, first tries of both models, and agreement of trials."""
  figures = {}
  for path in tries:
    figures[f"solved by {path}"] = describe(tries[path].dropna().astype(float))
  both = tries[["0", "1"]].dropna().astype(int)
  for small, large in np.ndindex(2, 2):
    is_pair = (both["0"] == small) & (both["1"] == large)
    figures[f"SMALL solves {small}, LARGE {large}"] = describe(is_pair.astype(float))
  for path in "01":
    trials = tries[path].unstack().dropna().astype(float)
    # Two of n trials agree if both or neither solve; the mean over all pairs.
    n = trials.shape[1]
    solved = trials.sum(axis=1)
    if n > 1:
      pairs = solved * (solved - 1) + (n - solved) * (n - solved - 1)
      figures[f"two trials of {path} agree"] = describe(pairs / (n * (n - 1)))
  return figures


def describe(values: pd.Series) -> str:
  """Return a mean over functions, with its interval."""
  means = values.groupby("function").mean().to_numpy()
  draws = np.random.default_rng(0).choice(means, (DRAWS, len(means))).mean(axis=1)
  low, high = np.percentile(draws, [2.5, 97.5])
  return f"{values.mean():.2f} [{low:.2f}, {high:.2f}] of {len(values)}"


def count_copies(recording: Recording) -> dict[str, str]:
  """Return how often a second try has exactly the code of the failed one."""
  rows = {}
  for (function, trial, path), node in recording.nodes.items():
    if len(path) == 2:
      first = recording.nodes[function, trial, path[0]]
      rows[function, trial, path] = float(node.code == first.code)
  table = pd.Series(rows).rename_axis(["function", "trial", "path"])
  return {
    f"{path} repeats the code": describe(copies)
    for path, copies in table.groupby("path")
  }


def read_features(names: Sequence[str]) -> dict[str, np.ndarray]:
  """Return the kinds and the words of functions, one row each."""
  functions = {}
  for split in read_functions("").values():
    functions |= {function.id: function for function in split}
  kinds = pd.get_dummies([name.rsplit("-", 1)[0] for name in names])
  counts = [
    Counter(re.findall(r"[a-z]+", functions[name].prompt().lower())) for name in names
  ]
  words = pd.DataFrame(counts).fillna(0.0)
  rarity = np.log(len(words) / (words > 0).sum())
  weighted = np.log1p(words) * rarity
  text = weighted.to_numpy() / np.linalg.norm(weighted, axis=1, keepdims=True)
  return {"kind": kinds.to_numpy(float), "text": text}


def predict(x_NxF: np.ndarray, y_N: np.ndarray, fold_N: np.ndarray) -> np.ndarray:
  """Predict each row by a ridge regression on the rows of other folds."""
  guess_N = np.zeros(len(y_N))
  for fold in range(SPLITS):
    fitted = fold_N != fold
    x, mean = x_NxF[fitted], y_N[fitted].mean()
    # The dual form, for there are more words than functions.
    weights = np.linalg.solve(x @ x.T + PENALTY * np.eye(len(x)), y_N[fitted] - mean)
    guess_N[~fitted] = x_NxF[~fitted] @ (x.T @ weights)
  return guess_N


def area(guess_N: np.ndarray, y_N: np.ndarray) -> float:
  """Return the area under the ROC curve."""
  gap = guess_N[y_N > 0][:, None] - guess_N[y_N == 0]
  return (1 + np.sign(gap).mean()) / 2


def predict_failures(tries: pd.DataFrame) -> pd.DataFrame:
  """Return the AUC of failures, by what is known of a function."""
  index = tries.index.get_level_values("function")
  features = read_features([*index])
  features["both"] = np.column_stack([*features.values()])
  fold_N = pd.factorize(index)[0] % SPLITS
  targets: dict[str, Callable[[], pd.Series]] = {
    "SMALL fails": tries["0"],
    "LARGE fails": tries["1"],
    "SMALL fails again": tries["00"],
    "LARGE fails after SMALL": tries["01"],
  }
  rows = {}
  for name, solved in targets.items():
    known = solved.notna().to_numpy()
    y_N = 1.0 - solved[known].astype(float).to_numpy()
    for what, x_NxF in features.items():
      guess_N = predict(x_NxF[known], y_N, fold_N[known])
      rows[name, what] = f"{area(guess_N, y_N):.2f}"
  other = tries[["0", "1"]].dropna().astype(float)
  failed = 1 - other["1"].to_numpy()
  rows["LARGE fails", "SMALL's try"] = f"{area(1 - other['0'].to_numpy(), failed):.2f}"
  return pd.Series(rows).unstack()


def main() -> None:
  """Print all figures of a recording."""
  recording = read_recording(sys.argv[1])
  tries = read_tries(recording)
  figures = measure(tries) | count_copies(recording)
  print(pd.Series(figures).to_string())
  print(predict_failures(tries).to_string())


if __name__ == "__main__":
  main()
