"""Stage export: the trained routers as Hugging Face directories, for transformers or vLLM."""

from baar_jax.router.weights import save_qwen2
from baar_jax.run import Run
from baar_jax.stages.bopo import load_bopo
from baar_jax.stages.sft import load_sft


def main(run: Run) -> None:
  """Writes <run>/export/sft and <run>/export/bopo-lam<lam>; what is there already stays."""
  run.alone("export")
  loads = {"sft": lambda: load_sft(run)}
  for lam in run.config.bopo.lam:
    loads[f"bopo-lam{lam:g}"] = lambda lam=lam: load_bopo(run, lam)
  for name, load in loads.items():
    directory = run.dir / "export" / name
    if not directory.exists():
      save_qwen2(load(), directory, run.tokenizer / "tokenizer.json", run.config.router.dtype)
    run.say(f"export: {directory}")
