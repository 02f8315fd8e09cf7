"""Stage sft: the router imitates the decisions of the references (paper: BoSFT)."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax.numpy as jnp
import optax

from baar_jax.config import SFTConfig
from baar_jax.episode import Episode
from baar_jax.router.build import abstract_model
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.run import UNSTRATIFIED, Run
from baar_jax.stages.pretrain import load_initial
from baar_jax.train import losses
from baar_jax.train.batches import Batch
from baar_jax.train.checkpoint import Checkpoints
from baar_jax.train.dataset import balanced, load_profiles, load_references
from baar_jax.train.trainer import Batcher, Trainer, clipped_adamw, load_trained, warmup_cosine

SAVE_EVERY = 50  # updates


def imitation(logits_BxSxA, batch: Batch, share):
  """A micro-batch's share of the SFT loss, and its metrics; `share` is of the real decisions."""
  loss = share * losses.sft_loss(logits_BxSxA, batch.action_BxS, batch.mask_BxS)
  decisions = jnp.maximum(batch.mask_BxS.sum(), 1)
  right_BxS = (logits_BxSxA.argmax(-1) == batch.action_BxS) & batch.mask_BxS
  large_BxS = (logits_BxSxA.argmax(-1) > 0) & batch.mask_BxS
  metrics = {
    "loss": loss,
    "accuracy": share * right_BxS.sum() / decisions,
    "large_share": share * large_BxS.sum() / decisions,
  }
  return loss, metrics


def make_optimizer(config: SFTConfig) -> optax.GradientTransformation:
  """AdamW with warm-up, cosine decay and clipping (paper: appendix, experiment details)."""
  warmup = min(config.updates - 1, max(1, round(config.warmup_share * config.updates)))
  schedule = warmup_cosine(config.learning_rate, warmup, config.updates)
  return clipped_adamw(schedule, config.clip_norm, config.adam_eps, config.weight_decay)


def directory(run: Run) -> Path:
  """Of its checkpoints; of the ablations one alone changes what is imitated."""
  return run.checkpoints(f"sft-{UNSTRATIFIED}" if run.ablation == UNSTRATIFIED else "sft")


def load_sft(run: Run) -> Qwen2:
  """The trained SFT router. Raises ValueError if the stage has not been run to its end."""
  model = abstract_model(run.config.router, View(run.config.router, run.tokenizer).decision_ids)
  return load_trained(directory(run), run.config.sft.updates, model, run.mesh, "sft")


def main(run: Run) -> None:
  run.require("references")
  references = load_references(run.store, run.config)
  profiles = load_profiles(run.store, run.config)
  hard = [e for e in references.values() if profiles[e.task_id].difficulty == "hard"]
  rest = [e for e in references.values() if profiles[e.task_id].difficulty != "hard"]
  config = run.config.sft
  batches = balanced(hard, rest, config.batch_episodes, config.hard_share, run.config.seed)
  view = View(run.config.router, run.tokenizer)
  fit(run, "sft", directory(run), view, config, batches)


def fit(
  run: Run,
  stage: str,
  directory: Path,
  view: View,
  config: SFTConfig,
  batches: Iterator[list[Episode]],
  label: Callable[[Sequence[Episode], Batch], Batch] = lambda episodes, batch: batch,
) -> None:
  """Trains the initial router on decisions, or goes on from its newest checkpoint.

  Args:
    batches: episodes of each update; the same whenever it is called.
    label: turns a micro-batch of some episodes into one of other decisions, or of fewer.
  """
  checkpoints = Checkpoints(directory, run.config)
  done = checkpoints.update or 0
  if done == config.updates:
    checkpoints.close()
    return
  batcher = Batcher(run.config, view, {task.id: task for task in run.store.tasks("train")})
  trainer = Trainer(
    load_initial(run, view),
    imitation,
    make_optimizer(config),
    view.decision_ids,
    run.mesh,
    run.config.router.dtype,
  )
  if done:
    trainer.load(checkpoints.restore(trainer.state))
  with run.progress(total=config.updates, initial=done, desc=stage, unit="update") as bar:
    for update in range(1, config.updates + 1):
      episodes = next(batches)
      if update <= done:
        continue
      micro = [
        label([episodes[i] for i in indices], batch)
        for indices, batch in batcher.micro_batches(episodes)
      ]
      decisions = max(1, sum(batch.mask_BxS.sum() for batch in micro))
      metrics = trainer.step([(batch, batch.mask_BxS.sum() / decisions) for batch in micro])
      labels = {"update": update, "updates": config.updates, "compiled": trainer.compiled}
      run.log(stage=stage, **labels, **run.labels, **metrics)
      bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
      bar.update()
      if update % SAVE_EVERY == 0 or update == config.updates:
        checkpoints.save(update, trainer.state)
  checkpoints.close()
