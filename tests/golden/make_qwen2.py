"""Compute qwen2.npz: outputs of transformers' Qwen2 for tests/qwen2_checkpoint.py.

  cd tests && PYTHONPATH=.. python -m golden.make_qwen2

This needs torch and transformers. The stored file was computed with torch 2.13.0 and
transformers 5.23.0 on a CPU, in float32.
"""

import tempfile
from pathlib import Path

import numpy as np
import qwen2_checkpoint as hf

# For each shape of tests/qwen2_checkpoint.py: the rows and tokens of its batch, and the positions whose
# outputs are stored.
CASES = {
  "grouped": ((2, 24), (0, 1, 9, 23)),
  "multihead": ((2, 24), (0, 1, 9, 23)),
  "long": ((1, 3_000), (0, 1, 700, 1_999, 2_000, 2_999)),
}
FILE = Path(__file__).with_name("qwen2.npz")


def main() -> None:
  """Compute the outputs of all shapes in float32, and write the file."""
  import torch
  from transformers import AutoModelForCausalLM

  arrays = {}
  for number, (name, (sizes, kept)) in enumerate(CASES.items()):
    tokens_BxT = np.random.default_rng(number).integers(
      0, hf.SHAPES[name]["vocab_size"], sizes
    )
    with tempfile.TemporaryDirectory() as directory:
      weights = hf.write(Path(directory), hf.SHAPES[name])
      model = AutoModelForCausalLM.from_pretrained(
        weights, dtype=torch.float32, attn_implementation="eager"
      ).eval()
    with torch.no_grad():
      hidden_BxTxD = model.model(torch.tensor(tokens_BxT)).last_hidden_state
      logits_BxTxV = model.lm_head(hidden_BxTxD)
    arrays |= {
      f"{name}/tokens_BxT": tokens_BxT.astype(np.int16),
      f"{name}/kept_S": np.array(kept, np.int16),
      f"{name}/hidden_BxSxD": hidden_BxTxD[:, kept].numpy(),
      f"{name}/logits_BxSxV": logits_BxTxV[:, kept].numpy(),
    }
  np.savez_compressed(FILE, **arrays)


if __name__ == "__main__":
  main()
