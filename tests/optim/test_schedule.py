"""Learning-rate schedules at steps with values known by hand."""

import re

import pytest
import tensorflow as tf

from lingvo_moe.optim import schedule


def rate(f, step):
  return float(f(tf.constant(step, tf.int64)))


# `step` counts the updates made before: the first has step 0 and t = 1.
@pytest.mark.parametrize(
  'step, expected', [(0, 0.01), (5000, 0.01), (9999, 0.01), (10_000, 10_001**-0.5), (39_999, 0.005), (999_999, 0.001)]
)
def test_the_papers_rate_is_one_hundredth_for_10000_steps_then_falls_as_the_square_root(step, expected):
  assert rate(schedule.InverseSquareRoot(1.0, 10_000), step) == pytest.approx(expected, rel=1e-6)


def test_the_papers_rate_is_the_default():
  assert schedule.InverseSquareRoot() == schedule.InverseSquareRoot(1.0, 10_000)


@pytest.mark.parametrize('step, expected', [(0, 0.005), (1, 0.01), (99, 0.5), (399, 0.25), (899, 0.5 / 3)])
def test_warm_up_rises_linearly_to_the_peak_then_falls_as_the_square_root(step, expected):
  assert rate(schedule.WarmupInverseSquareRoot(peak=0.5, warmup=100), step) == pytest.approx(expected, rel=1e-6)


def test_a_constant_rate_is_constant():
  assert rate(schedule.ConstantRate(0.3), 0) == rate(schedule.ConstantRate(0.3), 10**6) == pytest.approx(0.3)


# 10 updates, the rate of the second is the peak: 9 rates fall to a ninth of it, and that of an eleventh would be 0.
@pytest.mark.parametrize('step, expected', [(0, 0.45), (1, 0.9), (2, 0.8), (8, 0.2), (9, 0.1), (10, 0.0), (99, 0.0)])
def test_a_linear_rate_rises_to_the_peak_then_falls_to_0_at_the_end(step, expected):
  assert rate(schedule.WarmupLinear(peak=0.9, warmup=2, end=10), step) == pytest.approx(expected, abs=1e-6)


def test_a_linear_rate_that_ends_within_its_warmup_stays_below_the_peak():
  rates = [rate(schedule.WarmupLinear(peak=1.0, warmup=100, end=4), step) for step in range(5)]
  assert rates == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.0])


def test_half_a_cosine_falls_from_the_peak_to_its_final_share():
  f = schedule.WarmupCosine(peak=2.0, warmup=10, end=110, final=0.1)
  got = [rate(f, t - 1) for t in (1, 10, 60, 85, 110, 200)]
  assert got == pytest.approx([0.2, 2.0, 1.1, 2 * (0.1 + 0.9 * (1 - 0.5**0.5) / 2), 0.2, 0.2], rel=1e-5)


def test_warmup_stable_decay_is_level_until_its_last_share():
  f = schedule.WarmupStableDecay(peak=2.0, warmup=10, end=100, final=0.25, share=0.2)
  got = [rate(f, t - 1) for t in (1, 10, 50, 80, 90, 100, 300)]
  assert got == pytest.approx([0.2, 2.0, 2.0, 2.0, 1.25, 0.5, 0.5], rel=1e-6)
  early = schedule.WarmupStableDecay(peak=1.0, warmup=10, end=20, share=1.0)  # no level stretch
  assert [rate(early, t - 1) for t in (5, 10, 15, 20)] == pytest.approx([0.5, 1.0, 0.5, 0.0], abs=1e-6)


def test_cosine_and_warmup_stable_decay_are_those_of_optax():
  optax = pytest.importorskip('optax')
  cosine = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 100, 2000, 3e-4)
  parts = optax.linear_schedule(0.0, 3e-3, 100), optax.constant_schedule(3e-3), optax.linear_schedule(3e-3, 0.0, 400)
  stable = optax.join_schedules(parts, [100, 1600])
  ours = schedule.WarmupCosine(3e-3, 100, 2000, 0.1), schedule.WarmupStableDecay(3e-3, 100, 2000)
  for t in (1, 50, 100, 101, 700, 1599, 1600, 1601, 1999, 2000, 2500):
    assert rate(ours[0], t - 1) == pytest.approx(float(cosine(t)), abs=1e-8)
    assert rate(ours[1], t - 1) == pytest.approx(float(stable(t)), abs=1e-8)


def test_cosine_is_that_of_pytorch():
  torch = pytest.importorskip('torch')
  optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-3)
  cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=1900, eta_min=3e-4)
  ours = schedule.WarmupCosine(3e-3, 100, 2000, 0.1)
  for t in range(100, 2000):
    assert rate(ours, t - 1) == pytest.approx(cosine.get_last_lr()[0], abs=1e-8)
    optimizer.step()
    cosine.step()


@pytest.mark.parametrize(
  ('f', 'said'),
  [
    (
      schedule.WarmupCosine(2.0, 300, 6),
      'the warm-up of 300 steps leaves none to fall: the rate rises to 0.04 at step 6, the last, 0.02 of its peak',
    ),
    (
      schedule.WarmupLinear(1.0, 8, 8),
      'the warm-up of 8 steps leaves none to fall: .* 1 at step 8, the last, 1 of its',
    ),
    (schedule.WarmupStableDecay(1.0, 300, 6), 'the warm-up of 300 steps leaves none to fall'),
    (
      schedule.WarmupStableDecay(1.0, 90, 100, 0.1),
      'ends at step 90, and the fall was to begin at 80: none is level, with 0.1 at step 100, the last',
    ),
    (schedule.WarmupStableDecay(1.0, 80, 100), ''),
    (schedule.WarmupStableDecay(1.0, 10, 20, share=1.0), ''),  # no level stretch was asked for
    (schedule.WarmupCosine(1.0, 5, 6), ''),
    (schedule.WarmupInverseSquareRoot(1.0, 300), ''),
    (schedule.ConstantRate(1.0), ''),
  ],
)
def test_a_warm_up_that_is_too_long_for_the_end_is_put_into_numbers(f, said):
  """The kind: a schedule whose end comes before its parts do, in silence."""
  assert bool(schedule.cut_short(f)) == bool(said) and re.search(said, schedule.cut_short(f))
