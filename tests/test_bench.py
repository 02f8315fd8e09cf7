"""The bench: its figures are all there and follow from each other; it changes nothing of a run."""

import dataclasses
import json
import math
import types

import numpy as np
import pytest
import tiny
import tokenizers

from baar_jax.config import BenchConfig, Config, RouterConfig, validate
from baar_jax.router.qwen2 import Qwen2Config
from baar_jax.router.weights import save_qwen2
from baar_jax.run import Run
from baar_jax.stages import bench, bench_router, bench_training
from baar_jax.stages.bench_figures import Figures
from baar_jax.stages.bench_subject import prepare

ROUTER = RouterConfig(
  vocab_size=400,
  hidden_size=24,
  intermediate_size=32,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=12,
  max_tokens=256,
  buckets=1,
  description_tokens=8,
  action_tokens=4,
  result_tokens=6,
)
STEPS, EPISODES = 5, 3
TEXTS = {"device", "jax_version", "router", "dtype", "environment"}
UNKNOWN = {"device_peak_memory_mb"}  # of a CPU
UNKNOWN |= {"child_memory_mb"}  # of the sandbox
NUMBERS = """
  cores parameters hidden_size layers episode_steps transcript_tokens paper_tokens
  cached_decisions_per_s cached_step_ms cached_many_decisions_per_s cached_many_step_ms many_live
  uncached_decisions_per_s uncached_step_ms paper_decisions_per_s paper_step_ms
  decision_compile_s decision_shapes
  transcript_scored_per_s transcript_score_ms paper_scored_per_s paper_score_ms
  sft_tokens_per_s sft_episodes_per_s sft_step_s bopo_tokens_per_s bopo_episodes_per_s bopo_step_s
  training_tokens gradient_compile_s gradient_shapes
  matmul_gflop_per_s sft_gflop_per_s forward_gflop_per_s layer_weights sft_step_gflop
  checkpoint_mb load_s load_mb_per_s first_load_s peak_memory_mb
  processes episodes steps steps_per_s episodes_per_s replay_steps_per_s loop_cpu_share
  cached_decisions_per_s_over_uncached_decisions_per_s
  cached_decisions_per_s_over_paper_decisions_per_s
  cached_many_decisions_per_s_over_cached_decisions_per_s
  transcript_scored_per_s_over_paper_scored_per_s
  bopo_tokens_per_s_over_sft_tokens_per_s
  sft_gflop_per_s_over_matmul_gflop_per_s
  forward_gflop_per_s_over_matmul_gflop_per_s
  steps_per_s_over_replay_steps_per_s
"""


def bench_config(runs):
  sizes = BenchConfig(ROUTER, STEPS, EPISODES, micro_episodes=2)
  return dataclasses.replace(tiny.config(runs), bench=sizes)


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
  directory = tmp_path_factory.mktemp("subject")
  return prepare(bench_config(directory), directory)


@pytest.fixture(scope="module")
def bench_run(subject, tmp_path_factory):
  """A run after a bench, and what that printed."""
  run = Run(bench_config(tmp_path_factory.mktemp("runs")))
  said = []
  run.say = said.append
  with tiny.compiled_once(), pytest.MonkeyPatch.context() as patch:
    patch.setattr(bench, "prepare", lambda config, directory: subject)  # made once for all tests
    patch.setattr(bench_training, "MATMUL_SIZES", (64,))
    bench.main(run)
  yield run, "\n".join(said)
  run.close()


@pytest.fixture(scope="module")
def figures(bench_run):
  return json.loads((bench_run[0].dir / "report" / "bench.json").read_text())


def check_numbers(found, names):
  for name in names:
    assert math.isfinite(found[name]) and found[name] > 0, name


def check_quotients(found):
  for name in found:
    if "_over_" in name:
      one, other = name.split("_over_")
      assert found[name] == pytest.approx(found[one] / found[other], rel=1e-9), name


def test_every_figure_is_there(figures):
  numbers = set(NUMBERS.split())
  assert set(figures) == numbers | TEXTS | UNKNOWN | {"load_average"}
  check_numbers(figures, numbers)
  assert all(isinstance(figures[name], str) and figures[name] for name in TEXTS)
  assert all(figures[name] is None for name in UNKNOWN)
  assert figures["dtype"] == "float32" and figures["router"] == "random weights"


def test_figures_follow_from_each_other(figures):
  check_quotients(figures)
  f = {name: pytest.approx(value) for name, value in figures.items() if name not in TEXTS}
  assert 1000 / figures["cached_step_ms"] == f["cached_decisions_per_s"]
  assert 16 * 1000 / figures["cached_many_step_ms"] == f["cached_many_decisions_per_s"]
  assert STEPS * 1000 / figures["paper_score_ms"] == f["paper_scored_per_s"]
  assert EPISODES / figures["bopo_step_s"] == f["bopo_episodes_per_s"]
  assert figures["training_tokens"] / figures["sft_step_s"] == f["sft_tokens_per_s"]
  assert figures["sft_step_gflop"] / figures["sft_step_s"] == f["sft_gflop_per_s"]
  assert figures["checkpoint_mb"] / figures["load_s"] == f["load_mb_per_s"]


def test_real_tokens_are_counted(figures, subject):
  """By hand, with every text cut to its preview and marked as cut."""
  path = subject.directory / "tokenizer" / "tokenizer.json"
  tokenizer = tokenizers.Tokenizer.from_file(str(path))

  def count(text):
    return len(tokenizer.encode(text, add_special_tokens=False).ids)

  cut = count(" ...")
  head = count("task: ") + 8 + cut + count("\nstart: ") + 6 + cut
  asks = sum(count(f"\nstep {number} model:") for number in range(1, STEPS + 1))
  outcome = 1 + count(" action: ") + 4 + cut + count("\nresult: ") + 6 + cut  # 1 is the decision
  assert figures["transcript_tokens"] == head + asks + (STEPS - 1) * outcome
  assert figures["training_tokens"] == EPISODES * figures["transcript_tokens"]
  # Of two rows each, the second micro-batch has one without an episode, and both have padding.
  micro = subject.batcher(2).micro_batches(subject.episodes[:EPISODES])
  assert [batch.tokens_RxT.shape for _, batch in micro] == [(2, 256), (2, 256)]
  assert figures["training_tokens"] < 4 * 256
  prompts = [len(window.tokens) for window in subject.windows(subject.episodes[0], "paper")]
  assert len(prompts) == STEPS and figures["paper_tokens"] == sum(prompts)


def test_flop_by_hand():
  shape = Qwen2Config(
    vocab_size=99,
    hidden_size=4,
    intermediate_size=6,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=3,
  )
  # A layer: query and output 4 x 6 each, key and value 4 x 3 each, three of 4 x 6: 144.
  assert bench_training.layer_weights(shape) == 2 * 144
  # 5 tokens x 288 entries x 2 = 2,880. Tokens see 1 + 2 + 3 and 1 + 2, themselves included: 9
  # pairs x (3 + 3 products and as many sums) x 2 heads x 2 layers = 432.
  assert bench_training.model_flop(shape, [3, 2], gradient=False) == 2880 + 432
  assert bench_training.model_flop(shape, [3, 2], gradient=True) == 3 * (2880 + 432)


def test_work_is_that_of_the_real_tokens(figures, subject):
  lengths = [figures["transcript_tokens"]] * EPISODES
  flop = bench_training.model_flop(subject.model.config, lengths, gradient=True)
  assert figures["sft_step_gflop"] == pytest.approx(flop / 1e9)
  # q and o 24 x 24, k and v 24 x 12, three of 24 x 32, in 2 layers.
  assert figures["layer_weights"] == 2 * (2 * 576 + 2 * 288 + 3 * 768)


def test_nothing_of_the_run_changes(bench_run):
  run, _ = bench_run
  assert run.store.count() == 0
  assert {path.name for path in run.dir.iterdir()} <= {
    "config.json",
    "episodes.sqlite",
    "episodes.sqlite-shm",
    "episodes.sqlite-wal",
    "lock",
    "compiled",  # the environment's part compiles nothing, but JAX may make the directory
    "report",
  }
  assert [path.name for path in (run.dir / "report").iterdir()] == ["bench.json"]


def test_a_run_may_be_benched_with_other_sizes(bench_run):
  config = bench_run[0].config
  Run(dataclasses.replace(config, bench=BenchConfig(steps=9))).close()


def test_the_table_says_every_figure(bench_run, figures):
  _, table = bench_run
  for title in (
    "Decisions of live episodes",
    "Training",
    "Environment: sandbox",
  ):
    assert title in table
  over = figures["transcript_scored_per_s_over_paper_scored_per_s"]
  assert f"{over:.3g} x as fast as the paper's prompts" in table


def test_table():
  figures = Figures()
  figures.section("Speed", "once")
  figures.add("a_per_s", 12345.6, "one way", "things/s")
  figures.add("b_per_s", 0.04567, "another", "things/s")
  figures.add("memory_mb", None, "memory", "MB")
  figures.ratio("a_per_s", "b_per_s", "{} x as fast as another")
  lines = [" ".join(line.split()) for line in figures.table().splitlines()]
  assert lines == [
    "Speed",
    "once",
    "one way 12,346 things/s 270,322 x as fast as another",  # 12345.6 / 0.04567
    "another 0.0457 things/s",
    "memory not known",
  ]


def test_texts_are_cut_to_the_previews(subject):
  view = subject.views["transcript"]
  for episode in subject.episodes[:2]:
    for step in episode.steps:
      cut = (4 + len(view.tokenizer.cut_mark)) + (6 + len(view.tokenizer.cut_mark))
      assert len(view.outcome(step, step.observation)) == cut


def test_calls_that_compile_are_told_apart(subject):
  policy = bench_router._policy(subject, "transcript")
  steps, first = range(STEPS), subject.episodes[:1]
  for _ in range(2):
    bench_router.play(subject, policy, first, steps)
  steady_s, compiling_s = bench_router.play(subject, policy, first, steps)
  assert (len(steady_s), len(compiling_s)) == (STEPS, 0)


def test_one_decision_is_scored_as_in_the_whole(subject):
  episode = subject.episodes[0]
  whole_SxA = np.asarray(bench_router.score(subject, episode))[0]
  for s in (0, STEPS - 1):
    window = bench_router._text_so_far(subject, episode, s)
    batch = bench_router.last_decision(window, subject.buckets)
    logits_A = np.asarray(subject.scorer.logits(batch))[0, 0]
    np.testing.assert_allclose(logits_A, whole_SxA[s], rtol=0, atol=1e-5)


def test_a_checkpoint_is_measured_in_place_of_the_yardstick(subject, tmp_path):
  tokenizer = subject.directory / "tokenizer" / "tokenizer.json"
  save_qwen2(subject.model, tmp_path / "saved", tokenizer, np.float32)
  config = bench_config(tmp_path)
  # Previews and buckets of the run's router.
  router = dataclasses.replace(config.router, weights=str(tmp_path / "saved"), max_tokens=320)
  own = prepare(dataclasses.replace(config, router=router), tmp_path)
  assert own.model.config.hidden_size == 24 and own.buckets == [160, 320]
  np.testing.assert_array_equal(
    np.asarray(own.model.embedding_VxD[...]), np.asarray(subject.model.embedding_VxD[...])
  )


@pytest.mark.parametrize(
  "name, value",
  [
    ("steps", 3),
    ("episodes", -1),
    ("micro_episodes", -1),
    ("router.hidden_size", 0),
    ("router.head_dim", 7),
    ("router.max_tokens", 567),  # 2 x (96 + 20 + 2 x 44 + 80 of markup) = 568
  ],
)
def test_what_cannot_be_measured_is_refused(name, value):
  config = Config()
  validate(config)
  part = config.bench.router if "." in name else config.bench
  setattr(part, name.split(".")[-1], value)
  with pytest.raises(ValueError, match=f"--config.bench.{name} is {value!r}"):
    validate(config)


def test_api_models_are_not_paid_to_be_measured():
  run = types.SimpleNamespace(alone=lambda stage: None, pair=types.SimpleNamespace(kind="chat"))
  with pytest.raises(ValueError, match="set --config.models.kind=scripted"):
    bench.main(run)
