"""Check the files of the budget-conditioned router and of the vocabulary."""

import jax
import numpy as np
import pytest
from tiny import episode

from baar_jax import run
from baar_jax.conditioned.heads import draw_heads
from baar_jax.config import Config
from baar_jax.episode import Task
from baar_jax.families import conditioned
from baar_jax.router.inputs import TERMS, follow_episodes, learn_vocabulary, read_states
from baar_jax.run import RouterFiles

TASKS = {id_: Task(id_, "train", "do it", 9) for id_ in ("b", "a", "one", "other")}


def test_heads_and_vocabulary_are_read_as_stored_or_damage_is_noticed(tmp_path):
  files = RouterFiles(tmp_path, Config(), mesh=None)
  episodes = [episode("a", models="SLS")]
  vocabulary = learn_vocabulary(TASKS, episodes)
  assert (vocabulary.opening_tokens, vocabulary.reply_tokens) == (10, 1)
  states = read_states(follow_episodes(vocabulary, TASKS, episodes))
  features = states.features_NxD.shape[1]
  # 26 facts, 48 of offers and 48 directions of words.
  assert features == 26 + 48 + 48
  heads = draw_heads(jax.random.key(0), 5, (64, 32), 2, features)
  assert heads.value[0][0].shape == (5, features + TERMS, 64)
  conditioned.save_heads(files, heads)
  run.save_vocabulary(tmp_path, vocabulary)
  texts = np.array('[[], 1.0, {"a": "b"}]')
  for name, load, written, other in (
    ("checkpoints/value/value_heads.npz", conditioned.load_heads, heads, {}),
    ("vocabulary.npz", run.load_vocabulary, vocabulary, texts),
  ):
    jax.tree.map(np.testing.assert_array_equal, load(files), written)
    path = tmp_path / name
    whole = path.read_bytes()
    arrays = dict(np.load(path))
    first = arrays["arr_0"]
    contents = [b"", whole[:-100]]
    for changes in (
      {"arr_0": first * np.nan},
      {"arr_0": np.array([{}])},  # a pickled object
      {"arr_3": other},
      {"foreign": first},
    ):
      np.savez(path, **arrays | changes)
      contents.append(path.read_bytes())
    for content in contents:
      path.write_bytes(content)
      with pytest.raises(ValueError, match=f"{name} .* damaged .*: delete it"):
        load(files)
