"""BoPO: rewards and advantages by hand, the order of tasks, and going on after a kill."""

import collections
import itertools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from baar_jax.config import BoPOConfig
from baar_jax.episode import Task
from baar_jax.run import Run
from baar_jax.stages import bopo, references, sft
from baar_jax.stages import profile as taxonomy
from baar_jax.stages.bopo import advantages, episode_reward, load_bopo, make_optimizer
from baar_jax.train.dataset import Profile, task_batches

HARD = Profile("hard", 2.0, 10.0, [], [])
INVERTED = Profile("easy", 2.0, 1.0, [], [])  # SMALL is the dearer one: C_min is LARGE's
PROFILES = {"h": HARD, "e": INVERTED, "alone": HARD}
LAM = 0.5


def tried(task_id, seed, score, usd, models="SL"):
  return tiny.episode(task_id, "bopo", seed, models, score, cost_usd=usd)


@pytest.mark.parametrize(
  "profile, score, usd, reward",
  [
    (HARD, 1, 2.0, 1.5),  # as cheap as SMALL
    (HARD, 1, 4.0, 1.375),  # 1 + 0.5 - 0.5 * 2/8
    (HARD, 1, 10.0, 1.0),
    (HARD, 1, 99.0, 1.0),  # clipped
    (HARD, 0, 2.0, 0.0),
    (HARD, 0.99, 6.0, -0.25),  # a partial score is a failure: no bonus, only the cost
    (INVERTED, 1, 1.5, 0.75),  # 1 - 0.5 * 0.5/1
    (INVERTED, 0, 3.0, -0.5),
    (INVERTED, 1, 0.5, 1.0),
  ],
)
def test_reward_of_an_episode(profile, score, usd, reward):
  found = episode_reward(tried("h", 0, score, usd), profile, LAM, BoPOConfig())
  assert found == pytest.approx(reward, abs=1e-6)


def test_reward_follows_the_config():
  config = BoPOConfig(r_success=2.0, r_hard=0.0)
  assert episode_reward(tried("h", 0, 1, 6.0), HARD, 1.0, config) == pytest.approx(1.5)


# Rewards of the hard task: 0 - 0, 1.5 - 0.125, 1.5 - 0.25, 0 - 0.5: mean 0.53125, and the squared
# distances 0.28223, 0.71191, 0.51660, 1.06348 have the mean 0.64355, so std 0.80222.
GROUP = [
  tried("h", 8, 0, 2.0),
  tried("h", 9, 1, 4.0),
  tried("h", 10, 1, 6.0, "LLLL"),
  tried("h", 11, 0, 10.0),
]
# Both fail as cheaply as can be: rewards 0 and 0, std 0.
FAILED = [tried("e", 8, 0, 1.0, "SSS"), tried("e", 9, 0, 1.0, "SSS")]
ALONE = [tried("alone", 8, 1, 2.0)]
REFERENCES = {
  "h": tried("h", 0, 1, 4.0),  # reward 1.375, above the mean
  "e": tried("e", 0, 1, 1.0),  # reward 1
  "alone": tried("alone", 0, 1, 4.0),
}
MIXED = [GROUP[0], FAILED[0], GROUP[1], *ALONE, GROUP[2], FAILED[1], GROUP[3]]


def by_key(kept, adv_B):
  return {(e.task_id, e.seed): adv for e, adv in zip(kept, adv_B, strict=True)}


def test_advantages_of_two_groups():
  kept, adv_B, metrics = advantages(MIXED, PROFILES, REFERENCES, LAM, BoPOConfig())
  assert by_key(kept, adv_B) == pytest.approx(
    {
      ("h", 8): -1.52402,  # (0 - 1.375) / (0.80222 + 0.1)
      ("h", 9): 0.0,
      ("h", 10): -0.13855,  # (1.25 - 1.375) / 0.90222
      ("h", 11): -2.07821,  # (-0.5 - 1.375) / 0.90222
      ("e", 8): -5.0,  # (0 - 1) / 0.1 = -10, clipped
      ("e", 9): -5.0,
    },
    abs=1e-4,
  )
  assert metrics["clipped"] == 1  # groups
  assert metrics["reward"] == pytest.approx(2.125 / 6)
  assert metrics["success"] == pytest.approx(2 / 6)
  assert metrics["cost_usd"] == pytest.approx((2 + 4 + 6 + 10 + 1 + 1) / 6)
  # LARGE calls: 1, 1, 4, 1 and none; steps: 2, 2, 4, 2 and 3, 3
  assert metrics["large_share"] == pytest.approx(7 / 16)


def test_without_the_reference_the_mean_is_the_baseline():
  config = BoPOConfig(reference_guided=False)
  kept, adv_B, metrics = advantages(MIXED, PROFILES, REFERENCES, LAM, config)
  assert by_key(kept, adv_B) == pytest.approx(
    {
      ("h", 8): -0.58882,  # (0 - 0.53125) / 0.90222
      ("h", 9): 0.93519,
      ("h", 10): 0.79664,
      ("h", 11): -1.14300,
      ("e", 8): 0.0,
      ("e", 9): 0.0,
    },
    abs=1e-4,
  )
  assert metrics["clipped"] == 0


def test_a_reference_below_the_mean_changes_nothing():
  low = REFERENCES | {"h": tried("h", 0, 0, 10.0)}  # reward -0.5
  kept, adv_B, _ = advantages(GROUP, PROFILES, low, LAM, BoPOConfig())
  assert by_key(kept, adv_B)["h", 9] == pytest.approx(0.93519, abs=1e-4)
  assert sum(adv_B) == pytest.approx(0.0)


def test_the_optimizer_keeps_the_sizes_of_gradients():
  # Bias-corrected, AdamW's first step on g is lr * g / (|g| + eps); its decay is 1e-4 * lr * value.
  config = BoPOConfig(learning_rate=0.6, adam_eps=0.1)
  for gradient in (0.5, 0.001):
    optimizer, params = make_optimizer(config), {"x": jnp.array(0.0)}
    update, _ = optimizer.update({"x": jnp.array(gradient)}, optimizer.init(params), params)
    assert float(update["x"]) == pytest.approx(-0.6 * gradient / (gradient + 0.1), rel=1e-5)


def tasks(count):
  return [Task(f"t{i}", "train", "do it", 9) for i in range(count)]


@pytest.mark.parametrize("count, size", [(6, 2), (5, 2), (7, 3), (4, 4), (3, 8)])
def test_every_task_is_gone_through_before_any_repeats(count, size):
  batches = list(itertools.islice(task_batches(tasks(count), size, seed=0), 20))
  assert all(len({t.id for t in batch}) == len(batch) == min(size, count) for batch in batches)
  seen = collections.Counter()
  for batch in batches:
    seen.update(task.id for task in batch)
    assert max(seen.values()) - min(seen[f"t{i}"] for i in range(count)) <= 1 + (count % size > 0)
  if count % size == 0:
    passes = [batches[i : i + count // size] for i in range(0, 20 - count // size, count // size)]
    for one_pass in passes:
      assert sorted(t.id for batch in one_pass for t in batch) == sorted(t.id for t in tasks(count))


def test_task_batches_follow_from_the_seed():
  first, again, other = (
    list(itertools.islice(task_batches(tasks(6), 2, seed), 9)) for seed in (0, 0, 1)
  )
  assert first == again != other
  assert first[:3] != first[3:6]  # in a new order


def small_config(runs):
  config = tiny.config(runs)
  config.bopo.updates = 4
  return config


@pytest.fixture(scope="module")
def imitated(tmp_path_factory):
  """A run that has its SFT router."""
  with tiny.compiled_once():
    run = Run(small_config(tmp_path_factory.mktemp("imitated")))
    for stage in (taxonomy, references, sft):
      stage.main(run)
    run.close()
    yield run


@pytest.fixture
def copied(imitated, tmp_path):
  """copied("a"): the run, opened in a place of its own or again where it was."""
  runs = []

  def opening(place):
    config = small_config(tmp_path / place)
    if not (tmp_path / place).exists():
      shutil.copytree(imitated.dir, tmp_path / place / config.name)
    runs.append(Run(config))
    return runs[-1]

  yield opening
  for run in runs:
    run.close()


def leaves(run):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.split(load_bopo(run, 0.1))[1])]


def logged(run):
  lines = map(json.loads, (run.dir / "metrics.jsonl").read_text().splitlines())
  return [line for line in lines if line["stage"] == "bopo"]


class Killed(Exception):
  pass


def kill_in_rollouts(run, monkeypatch, after):
  """The run ends when it has stored so many episodes more."""
  left, add = [after], run.store.add

  def adding(episode):
    if left[0] == 0:
      raise Killed
    left[0] -= 1
    add(episode)

  monkeypatch.setattr(run.store, "add", adding)


def note_added(run, monkeypatch, added):
  """Notes the policy of every episode that is stored."""
  add = run.store.add
  monkeypatch.setattr(run.store, "add", lambda e: (add(e), added.append(e.policy)))


def test_a_killed_run_goes_on_to_the_same_parameters(copied, monkeypatch):
  monkeypatch.setattr(bopo, "SAVE_EVERY", 2)
  unbroken = copied("unbroken")
  before = unbroken.store.count()
  bopo.main(unbroken)
  assert unbroken.store.count() - before == 16  # 4 updates of 2 tasks, 2 episodes each
  whole = logged(unbroken)
  assert [line["update"] for line in whole] == [1, 2, 3, 4]

  # The first kill is in the third update's rollouts, the second just before its checkpoint.
  run = copied("broken")
  kill_in_rollouts(run, monkeypatch, 9)
  with pytest.raises(Killed):
    bopo.main(run)
  assert run.store.count() - before == 9

  run, added = copied("broken"), []
  note_added(run, monkeypatch, added)

  def stop(**values):
    raise Killed

  monkeypatch.setattr(run, "log", stop)
  with pytest.raises(Killed):
    bopo.main(run)
  with pytest.raises(ValueError, match=r"lam0\.1 has [02] of 4 updates: run --stage=bopo"):
    load_bopo(run, 0.1)

  run = copied("broken")
  note_added(run, monkeypatch, added)
  bopo.main(run)
  assert len(added) == 7  # what the first kill left to do; nothing was run twice
  assert run.store.count() - before == 16
  resumed = logged(run)
  assert [line["update"] for line in resumed] in ([1, 2, 3, 4], [1, 2, 1, 2, 3, 4])
  assert {line["update"]: line for line in resumed} == {line["update"]: line for line in whole}
  for policy in set(added):
    ours, theirs = (r.store.episodes(policy) for r in (run, unbroken))
    assert [(e.task_id, e.seed, [s.logp for s in e.steps]) for e in ours] == [
      (e.task_id, e.seed, [s.logp for s in e.steps]) for e in theirs
    ]
  for one, other in zip(leaves(run), leaves(unbroken), strict=True):
    np.testing.assert_allclose(one, other, atol=1e-6)

  bopo.main(run)  # finished: nothing more is done
  assert run.store.count() - before == 16
  assert len(logged(run)) == len(resumed)


def test_training_moves_the_router_and_every_update_has_seeds_of_its_own(copied):
  run = copied("once")
  bopo.main(run)
  anchor = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.split(sft.load_sft(run))[1])]
  assert any(not np.array_equal(a, b) for a, b in zip(anchor, leaves(run), strict=True))
  policies = [f"bopo(lam=0.1)/{update}" for update in (1, 2, 3, 4)]
  seeds = [{e.seed for e in run.store.episodes(policy)} for policy in policies]
  assert seeds == [{1002, 1003}, {1004, 1005}, {1006, 1007}, {1008, 1009}]
  sampled = [s.logp for policy in policies for e in run.store.episodes(policy) for s in e.steps]
  assert all(logp is not None and logp < 0 for logp in sampled)


@pytest.mark.parametrize("pools", [True, False])
def test_a_step_waits_until_as_many_groups_are_kept_as_are_sampled(copied, monkeypatch, pools):
  """Of each batch's two groups one is kept: with dynamic sampling two batches make one step."""

  def weigh(episodes, *others):
    del others
    kept = next(iter(bopo.by_task(episodes).values()))
    return kept, np.array([1.0, -1.0]), {"success": 0.5}

  learned, improve = [], bopo.improve

  def improving(trainer, reference, batcher, episodes, *others):
    learned.append([e.policy.rpartition("/")[2] for e in episodes])
    return improve(trainer, reference, batcher, episodes, *others)

  monkeypatch.setattr(bopo, "improve", improving)
  run = copied("pooled")
  bopo.train(run, 0.1, bopo.Method("bopo", bopo.improvement, weigh, pools=pools))
  each = [["1"] * 2, ["2"] * 2, ["3"] * 2, ["4"] * 2]
  assert learned == ([each[0] + each[1], each[2] + each[3]] if pools else each)
  assert ["loss" in line for line in logged(run)] == [not pools, True, not pools, True]


def test_a_batch_without_a_group_says_what_to_do():
  with pytest.raises(ValueError, match="none of the 2 tasks of this batch has 2 episodes"):
    advantages([tried("a", 0, 1, 1.0), tried("b", 0, 1, 1.0)], {}, {}, 0.1, BoPOConfig())


def test_without_an_sft_router_the_stage_is_named(tmp_path):
  run = Run(tiny.config(tmp_path))
  taxonomy.main(run)
  references.main(run)
  with pytest.raises(ValueError, match="run --stage=sft first"):
    bopo.main(run)
  run.close()
