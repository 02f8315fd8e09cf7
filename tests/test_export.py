"""A trained router leaves as a Hugging Face directory, and comes back as the router it was."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from flax import nnx

from baar_jax.router.build import load_pretrained
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.stages import bopo, export, references, sft
from baar_jax.stages import profile as taxonomy
from baar_jax.stages.sft import load_sft


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  with tiny.compiled_once():
    run = Run(tiny.config(tmp_path_factory.mktemp("runs")))
    for stage in (taxonomy, references, sft):
      stage.main(run)
    yield run
    run.close()


def test_what_is_not_trained_is_not_exported(run):
  with pytest.raises(ValueError, match="has 0 of 2 updates: run --stage=bopo first"):
    export.main(run)
  assert not (run.dir / "export" / "bopo-lam0.1").exists()


def test_an_exported_router_is_a_checkpoint_to_start_from(run, capsys):
  bopo.main(run)
  export.main(run)
  export.main(run)  # what is there stays
  assert capsys.readouterr().out.count("export: ") == 4
  directory = run.dir / "export" / "sft"
  config = dataclasses.replace(run.config.router, weights=str(directory))
  trained = load_sft(run)
  again = load_pretrained(config, View(config, directory))
  # The decisions' rows are among them: a trained router keeps what it has learned.
  jax.tree.map(np.testing.assert_array_equal, nnx.split(trained)[1], nnx.split(again)[1])
