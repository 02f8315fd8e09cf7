"""Compute bopo.npz: the gradient of BoPO's loss (paper Eq. 8) by torch, in float64.

  cd tests && python -m golden.make_bopo

This needs torch. The stored file was computed with torch 2.13.0 on a CPU.
"""

from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("bopo.npz")
KL_BETA = 0.5


def main() -> None:
  """Draw five episodes with up to six decisions between three models, and write the file."""
  import torch

  draw = np.random.default_rng(0)
  logits_BxSxA = draw.normal(size=(5, 6, 3))
  ref_logits_BxSxA = draw.normal(size=(5, 6, 3))
  action_BxS = draw.integers(0, 3, (5, 6))
  adv_B = draw.normal(size=5)
  mask_BxS = draw.random((5, 6)) < 0.6
  logits = torch.tensor(logits_BxSxA, requires_grad=True)
  policy = torch.distributions.Categorical(logits=logits)
  reference = torch.distributions.Categorical(logits=torch.tensor(ref_logits_BxSxA))
  mask = torch.tensor(mask_BxS)
  logp = policy.log_prob(torch.tensor(action_BxS))
  ratio = torch.exp(torch.where(mask, logp - logp.detach(), 0.0).sum(dim=1))
  kl = torch.distributions.kl_divergence(policy, reference)[mask].mean()
  objective = (ratio * torch.tensor(adv_B)).mean() - KL_BETA * kl
  (-objective).backward()
  np.savez_compressed(
    FILE,
    logits_BxSxA=logits_BxSxA,
    ref_logits_BxSxA=ref_logits_BxSxA,
    action_BxS=action_BxS,
    mask_BxS=mask_BxS,
    adv_B=adv_B,
    gradient_BxSxA=logits.grad.numpy(),
  )


if __name__ == "__main__":
  main()
