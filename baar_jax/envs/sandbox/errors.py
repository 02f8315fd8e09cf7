"""The rates of error in the sandbox."""

from baar_jax.envs.errors import Errors, Lapse, Oracle


class SandboxErrors(Errors):
  """Plain locks are easy for all models; SMALL mostly gets a critical one wrong."""

  PLAIN = (0.10, 0.05), (0.02, 0.05)  # rate and wrong, of SMALL and LARGE
  CRITICAL = (0.80, 0.5), (0.10, 0.3)

  def lapse(self, model: int, task_id: str, oracle: Oracle, spoiled: bool) -> Lapse:
    """State how a model may err at a lock; nothing is spoiled here."""
    rates = self.CRITICAL if oracle.critical else self.PLAIN
    return Lapse(*(self.between(ends, model) for ends in zip(*rates)))
