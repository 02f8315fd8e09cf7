"""The same weights and texts in torch and transformers: what the router is compared with."""

import importlib

import jax.numpy as jnp
import numpy as np

from baar_jax.router.view import Window
from baar_jax.router.weights import save_qwen2
from baar_jax.stages import sft
from baar_jax.stages.bench_figures import Figures, in_turn, timed
from baar_jax.stages.bench_router import last_decision, score
from baar_jax.stages.bench_subject import Subject
from baar_jax.stages.bench_training import imitate, make_trainer

EXACT = 1e-3  # how far the probability of a decision may be from ours
ROUNDED = 5e-2  # the same where either side does not compute in plain float32


def open_libraries():
  """(torch, transformers). Raises ValueError where one is not installed."""
  try:
    return importlib.import_module("torch"), importlib.import_module("transformers")
  except ImportError as error:
    raise ValueError(
      f"--config.bench.peer=transformers needs {error.name or 'torch'}, which is not installed: "
      "pip install torch transformers"
    ) from None


class Peer:
  """The router as a transformers model, one sequence at a time and without padding."""

  def __init__(self, subject: Subject):
    """Takes the weights over through a Hugging Face directory, whose place is the subject's.

    Computes in the router's dtype on a GPU, and in float32 on a CPU.
    """
    self.torch, self.transformers = open_libraries()
    directory = subject.directory / "peer"
    tokenizer = subject.directory / "tokenizer" / "tokenizer.json"
    save_qwen2(subject.model, directory, tokenizer, jnp.float32)
    self.transformers.utils.logging.disable_progress_bar()
    gpu = self.torch.cuda.is_available()
    self.dtype = subject.config.router.dtype if gpu else "float32"
    self.device = "cuda" if gpu else "cpu"
    self.model = self.transformers.Qwen2ForCausalLM.from_pretrained(
      directory, dtype=getattr(self.torch, self.dtype), attn_implementation="sdpa"
    ).to(self.device)
    self.model.eval()
    self.ids = subject.views["transcript"].decision_ids
    c = subject.config.sft
    self.optimizer = self.torch.optim.AdamW(
      self.model.parameters(), c.learning_rate, weight_decay=c.weight_decay
    )

  def logits(self, window: Window):
    """logits_SxA, float32, of the window's decisions: the head sees nothing else."""
    tokens_1xT = self.torch.tensor([window.tokens], device=self.device)
    hidden_1xTxD = self.model.model(input_ids=tokens_1xT, use_cache=False).last_hidden_state
    head_AxD = self.model.lm_head.weight[self.ids]
    return (hidden_1xTxD[0, window.positions] @ head_AxD.T).float()

  def probabilities(self, windows: list[Window]) -> np.ndarray:
    """p_SxA of an episode's decisions."""
    with self.torch.inference_mode():
      parts = [self.logits(window).softmax(-1).cpu().numpy() for window in windows]
    return np.concatenate(parts)

  def train(self, windows: list[Window], actions: list[int]) -> None:
    """One step of AdamW on the cross-entropy of an episode's decisions, window by window."""
    actions_S = self.torch.tensor(actions, device=self.device)
    for window in windows:
      chosen = actions_S[window.first : window.first + len(window.positions)]
      loss = self.torch.nn.functional.cross_entropy(self.logits(window), chosen, reduction="sum")
      (loss / len(actions)).backward()
    self.optimizer.step()
    self.optimizer.zero_grad()
    if self.device == "cuda":
      self.torch.cuda.synchronize()


def compare(subject: Subject, figures: Figures) -> None:
  """Scores and learns one episode in both views, after `scoring`.

  Raises:
    ValueError: torch is missing, or its decisions are not ours.
  """
  peer, episode = Peer(subject), subject.episodes[0]
  transcript, prompts = subject.windows(episode), subject.windows(episode, "paper")
  steps, actions = len(episode.steps), [step.model for step in episode.steps]
  difference = _difference(subject, peer, transcript)

  scored = in_turn(lambda: score(subject, episode), lambda: peer.probabilities(transcript))
  paper = [_prompt_s(subject, peer, window) for window in prompts]
  trainer = make_trainer(subject, sft.imitation, sft.make_optimizer(subject.config.sft))
  trained = in_turn(
    lambda: imitate(subject, trainer, [episode], rows=1), lambda: peer.train(transcript, actions)
  )
  paper_step_s = timed(lambda: peer.train(prompts, actions))

  versions = f"torch {peer.torch.__version__}, transformers {peer.transformers.__version__}"
  figures.section(
    f"The same weights and texts in {versions}",
    f"{peer.dtype} on {peer.device}, {peer.torch.get_num_threads()} threads, sdpa attention, one "
    "sequence at a time without padding; both sides in turn; a training step is one episode, with "
    "AdamW",
  )
  rows = (
    ("own_transcript_scored", scored[0], "ours: scoring the transcript"),
    ("own_paper_scored", sum(own for own, _ in paper), "ours: the paper's prompts, 1 by 1"),
    ("own_transcript_trained", trained[0], "ours: a training step on the transcript"),
    ("peer_transcript_scored", scored[1], "scoring the transcript"),
    ("peer_paper_scored", sum(its for _, its in paper), "the paper's prompts, 1 by 1"),
    ("peer_transcript_trained", trained[1], "a training step on the transcript"),
    ("peer_paper_trained", paper_step_s, "a training step on the paper's prompts"),
  )
  for name, seconds, label in rows:
    figures.add(f"{name}_per_s", steps / seconds, label, "decisions/s")
  pairs = (
    ("own_transcript_scored", "peer_transcript_scored", "ours is {} x as fast"),
    ("own_paper_scored", "peer_paper_scored", "ours is {} x as fast"),
    ("own_transcript_scored", "peer_paper_scored", "ours with the transcript: {} x as fast"),
    ("own_transcript_trained", "peer_transcript_trained", "ours is {} x as fast"),
    ("own_transcript_trained", "peer_paper_trained", "ours with the transcript: {} x as fast"),
  )
  for ours, its, words in pairs:
    figures.ratio(f"{ours}_per_s", f"{its}_per_s", words, beside=f"{its}_per_s")
  figures.add("peer_probability_difference", difference, "largest difference of a probability")


def _prompt_s(subject: Subject, peer: Peer, window: Window) -> tuple[float, float]:
  """Seconds of a prompt's decision: ours, whose buckets `scoring` has compiled, and the peer's."""
  ours = timed(lambda: subject.scorer.logits(last_decision(window, subject.buckets)))
  return ours, timed(lambda: peer.probabilities([window]))


def _difference(subject: Subject, peer: Peer, transcript: list[Window]) -> float:
  """The largest difference between the peer's probability of a decision and ours."""
  logits_SxA = np.asarray(score(subject, subject.episodes[0]), np.float64)[0]
  weight_SxA = np.exp(logits_SxA - logits_SxA.max(axis=-1, keepdims=True))
  ours_SxA = weight_SxA / weight_SxA.sum(axis=-1, keepdims=True)
  difference = float(np.abs(ours_SxA - peer.probabilities(transcript)).max())
  exact = peer.device == "cpu" and subject.config.router.dtype == "float32"
  if difference > (EXACT if exact else ROUNDED):
    raise ValueError(
      f"transformers gives a decision a probability that is {difference:.2g} from ours, "
      f"more than {EXACT if exact else ROUNDED}: the two do not compute the same"
    )
  return difference
