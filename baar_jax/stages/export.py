"""Stage export: the trained routers as Hugging Face directories, for transformers or vLLM."""

from baar_jax.router.weights import save_qwen2
from baar_jax.run import Run
from baar_jax.train.checkpoint import load_router


def main(run: Run) -> None:
  """Writes <run>/export/sft and <run>/export/bopo-lam<lam>, of the first training seed; a directory
  that exists stays."""
  bopo = [(f"bopo-lam{lam:g}", "bopo", lam) for lam in run.config.bopo.lam]
  for name, family, lam in [("sft", "sft", None), *bopo]:
    directory = run.dir / "export" / name
    if not directory.exists():
      model = load_router(run.dir, run.config, run.mesh, family, lam)
      save_qwen2(model, directory, run.tokenizer / "tokenizer.json", run.config.router.dtype)
    run.print(f"export: {directory}")
