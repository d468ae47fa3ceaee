"""Learning-rate schedules at steps with values known by hand."""

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
