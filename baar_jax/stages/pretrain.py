"""Stage pretrain: a router from random weights learns what tends to come next (our choice).

Qwen2.5 brings what it has read; a small router that starts from nothing would have to find out from
sparse rewards alone which words foretell a difficult step. So at every decision of the episodes
that the profile and the references have paid for, it first predicts which tokens the coming action
and its result will hold. No reward, difficulty or reference enters.
"""

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from baar_jax.episode import Episode
from baar_jax.router.build import abstract_model, build_model, load_pretrained, start_alike
from baar_jax.router.qwen2 import Qwen2
from baar_jax.router.view import View
from baar_jax.run import Run
from baar_jax.train.batches import Batch
from baar_jax.train.checkpoint import Checkpoints
from baar_jax.train.dataset import paid_episodes
from baar_jax.train.trainer import Batcher, Trainer, clipped_adamw, load_trained, warmup_cosine

PADDING = -1
SAVE_EVERY = 50  # updates


def foresight(logits_BxSxV, batch: Batch, extra):
  """A micro-batch's share of the cross-entropy of the tokens that follow each decision.

  Args:
    extra: (token_BxSxM, share): the tokens of the coming action and result, `PADDING` where
      there are fewer than M, and the micro-batch's share of the real decisions.
  """
  token_BxSxM, share = extra
  real_BxSxM = token_BxSxM != PADDING
  logp_BxSxV = jax.nn.log_softmax(logits_BxSxV)
  logp_BxSxM = jnp.take_along_axis(logp_BxSxV, jnp.where(real_BxSxM, token_BxSxM, 0), axis=2)
  total_BxS = jnp.where(real_BxSxM, logp_BxSxM, 0.0).sum(axis=2)
  loss_BxS = -total_BxS / jnp.maximum(real_BxSxM.sum(axis=2), 1)
  known_BxS = batch.mask_BxS & real_BxSxM.any(axis=2)
  loss = share * jnp.where(known_BxS, loss_BxS, 0.0).sum() / jnp.maximum(known_BxS.sum(), 1)
  return loss, {"loss": loss}


def outcome_tokens(view: View, episodes: Sequence[Episode], batch: Batch) -> np.ndarray:
  """token_BxSxM, int32: what follows each decision; nothing is known behind the last."""
  c = view.config
  width = c.action_tokens + c.result_tokens + 2 * len(view.tokenizer.cut_mark)
  token_BxSxM = np.full((*batch.mask_BxS.shape, width), PADDING, np.int32)
  for b, episode in enumerate(episodes):
    for s, (step, after) in enumerate(zip(episode.steps, episode.steps[1:])):
      tokens = view.outcome(step, after.observation)
      token_BxSxM[b, s, : len(tokens)] = tokens
  return token_BxSxM


def load_initial(run: Run, view: View) -> Qwen2:
  """The router that SFT starts from: a checkpoint's, or a small one whose decisions start alike.

  Raises:
    ValueError: it is still to be pretrained, or the checkpoint cannot be loaded.
  """
  if run.config.router.weights:
    return load_pretrained(run.config.router, view, run.mesh)
  if run.config.pretrain.epochs > 0:
    updates = _updates(run, len(paid_episodes(run.store, run.config)))
    model = abstract_model(run.config.router, view.decision_ids)
    model = load_trained(run.checkpoints("pretrain"), updates, model, run.mesh, "pretrain")
  else:
    model = build_model(run.config.router, run.config.seed)
  start_alike(model, view.decision_ids)
  return model


def main(run: Run) -> None:
  config = run.config.pretrain
  if config.epochs == 0:
    return
  run.require("references")
  episodes = paid_episodes(run.store, run.config)
  if not episodes:
    raise ValueError(f"{run.dir} has no episodes to learn from: run --stage=profile first")
  view = View(run.config.router, run.tokenizer)
  batcher = Batcher(run.config, view, {task.id: task for task in run.store.tasks("train")})
  updates = _updates(run, len(episodes))
  model = build_model(run.config.router, run.config.seed)
  trainer = Trainer(
    model, foresight, _optimizer(run, updates), None, run.mesh, run.config.router.dtype
  )
  checkpoints = Checkpoints(run.checkpoints("pretrain"), run.config)
  done = checkpoints.update or 0
  if done:
    trainer.load(checkpoints.restore(trainer.state))
  draw = random.Random(run.config.seed)
  order: list[Episode] = []
  with run.progress(total=updates, initial=done, desc="pretrain", unit="update") as bar:
    for update in range(1, updates + 1):
      while len(order) < config.batch_episodes:
        order += draw.sample(episodes, len(episodes))
      chosen = [order.pop() for _ in range(config.batch_episodes)]
      if update <= done:
        continue
      metrics = trainer.step(_parts(batcher, view, chosen))
      run.log(stage="pretrain", update=update, compiled=trainer.compiled, **metrics)
      bar.set_postfix_str(f"loss {metrics['loss']:.3f}", refresh=False)
      bar.update()
      if update % SAVE_EVERY == 0 or update == updates:
        checkpoints.save(update, trainer.state)
  checkpoints.close()


def _updates(run: Run, episodes: int) -> int:
  return max(1, run.config.pretrain.epochs * episodes // run.config.pretrain.batch_episodes)


def _optimizer(run: Run, updates: int) -> optax.GradientTransformation:
  schedule = warmup_cosine(run.config.pretrain.learning_rate, min(10, updates - 1), updates)
  return clipped_adamw(schedule, clip_norm=1.0)


def _parts(batcher: Batcher, view: View, episodes: Sequence[Episode]):
  micro = batcher.micro_batches(episodes)
  decisions = sum(batch.mask_BxS.sum() for _, batch in micro)
  return [
    (
      batch,
      (
        outcome_tokens(view, [episodes[i] for i in indices], batch),
        np.float32(batch.mask_BxS.sum() / decisions),
      ),
    )
    for indices, batch in micro
  ]
