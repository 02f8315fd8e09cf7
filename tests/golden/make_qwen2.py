"""Makes qwen2.npz: slices of what transformers' Qwen2 computes from the weights of tests/hf.py.

  cd tests && python -m golden.make_qwen2

in an environment with torch and transformers; it was made with torch 2.13.0 and transformers
5.23.0 on a CPU, in float32.
"""

import tempfile
from pathlib import Path

import hf
import numpy as np

# Rows and tokens of the batch that each shape is given, and the positions that are kept.
CASES = {
  "grouped": ((2, 24), (0, 1, 9, 23)),
  "multihead": ((2, 24), (0, 1, 9, 23)),
  "long": ((1, 3_000), (0, 1, 700, 1_999, 2_000, 2_999)),
}
FILE = Path(__file__).with_name("qwen2.npz")


def outputs(directory: Path, tokens_BxT: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(hidden_BxTxD after the final norm, logits_BxTxV), float32."""
  import torch
  from transformers import AutoModelForCausalLM

  model = AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager"
  ).eval()
  with torch.no_grad():
    hidden_BxTxD = model.model(torch.tensor(tokens_BxT)).last_hidden_state
    return hidden_BxTxD.numpy(), model.lm_head(hidden_BxTxD).numpy()


def main():
  arrays = {}
  for number, (name, (sizes, kept)) in enumerate(CASES.items()):
    tokens_BxT = np.random.default_rng(number).integers(
      0, hf.SHAPES[name]["vocab_size"], sizes
    )
    with tempfile.TemporaryDirectory() as directory:
      hidden_BxTxD, logits_BxTxV = outputs(
        hf.write(Path(directory), hf.SHAPES[name]), tokens_BxT
      )
    arrays |= {
      f"{name}/tokens_BxT": tokens_BxT.astype(np.int16),
      f"{name}/kept_S": np.array(kept, np.int16),
      f"{name}/hidden_BxSxD": hidden_BxTxD[:, kept],
      f"{name}/logits_BxSxV": logits_BxTxV[:, kept],
    }
  np.savez_compressed(FILE, **arrays)
  print(f"{FILE}: {FILE.stat().st_size:,} bytes")


if __name__ == "__main__":
  main()
