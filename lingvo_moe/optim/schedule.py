"""Learning-rate schedules: functions of the step."""

import dataclasses
import math
from collections.abc import Callable

import tensorflow as tf

# Learning rate (float32) of the next update, after `step` updates.
Schedule = Callable[[tf.Tensor], tf.Tensor]


@dataclasses.dataclass(frozen=True)
class ConstantRate:
  """Constant learning rate `rate`."""

  rate: float

  def __call__(self, step: tf.Tensor) -> tf.Tensor:
    return tf.constant(self.rate)


@dataclasses.dataclass(frozen=True)
class InverseSquareRoot:
  """Inverse square root decay: rate / sqrt(max(t, decay_after)), t counted from 1.

  Rate 1 and decay_after 10000 is our reading of GShard's 'learning rate 1.0 with square root decay after 10k
  steps': 0.01 until then.
  """

  rate: float = 1.0
  decay_after: int = 10_000

  def __call__(self, step: tf.Tensor) -> tf.Tensor:
    return self.rate * tf.math.rsqrt(tf.maximum(_count(step), float(self.decay_after)))


@dataclasses.dataclass(frozen=True)
class WarmupInverseSquareRoot:
  """Linear warmup to `peak` over `warmup` steps, then decay as 1 / sqrt(t) (Vaswani et al., 2017, section 5.3)."""

  peak: float
  warmup: int

  def __call__(self, step: tf.Tensor) -> tf.Tensor:
    t = _count(step)
    return self.peak * tf.minimum(t / self.warmup, tf.math.rsqrt(t / self.warmup))


@dataclasses.dataclass(frozen=True)
class WarmupLinear:
  """Linear warmup to `peak` over `warmup` steps, then linear decay that would reach 0 after the update `end`.

  Decay to zero ends with a model about as good as an average of checkpoints (Bergsma et al., 2025, arXiv 2502.15938).
  """

  peak: float
  warmup: int
  end: int

  def __call__(self, step: tf.Tensor) -> tf.Tensor:
    t = _count(step)
    left = (self.end + 1 - t) / max(self.end + 1 - self.warmup, 1)
    return self.peak * tf.clip_by_value(tf.minimum(t / self.warmup, left), 0.0, 1.0)


@dataclasses.dataclass(frozen=True)
class WarmupCosine:
  """Linear warmup to `peak` over `warmup` steps, then half a cosine to final * peak at step `end` (arXiv 1608.03983).

  optax.warmup_cosine_decay_schedule from 0, with t counted from 1.
  """

  peak: float
  warmup: int
  end: int
  final: float = 0.0

  def __call__(self, step: tf.Tensor) -> tf.Tensor:
    t = _count(step)
    past = tf.clip_by_value((t - self.warmup) / max(self.end - self.warmup, 1), 0.0, 1.0)
    decayed = self.final + (1.0 - self.final) * 0.5 * (1.0 + tf.cos(math.pi * past))
    return self.peak * tf.minimum(t / self.warmup, decayed)


@dataclasses.dataclass(frozen=True)
class WarmupStableDecay:
  """Linear warmup to `peak`, a level stretch, and linear decay to final * peak over the last `share` of `end` steps.

  WSD (Hu et al., 2024, arXiv 2404.06395): a run may be continued from before its decay. The decay begins after the
  warmup at the earliest.
  """

  peak: float
  warmup: int
  end: int
  final: float = 0.0
  share: float = 0.2

  def __call__(self, step: tf.Tensor) -> tf.Tensor:
    t = _count(step)
    begin = max(self.end - round(self.share * self.end), self.warmup)
    past = tf.clip_by_value((t - begin) / max(self.end - begin, 1), 0.0, 1.0)
    return self.peak * tf.minimum(t / self.warmup, 1.0 - (1.0 - self.final) * past)


def rate(schedule: Schedule, t: int) -> float:
  """Learning rate of an update, counted from 1."""
  return float(schedule(tf.constant(t - 1, tf.int64)))


def cut_short(schedule: Schedule) -> str:
  """What the warm-up leaves of a schedule with an end, in words; '' where it leaves all, or there is no end."""
  if not (end := getattr(schedule, 'end', 0)):
    return ''
  warmup, last = schedule.warmup, f'{rate(schedule, end):.3g} at step {end}, the last'
  if warmup >= end:
    share = rate(schedule, end) / schedule.peak
    return f'the warm-up of {warmup} steps leaves none to fall: the rate rises to {last}, {share:.2g} of its peak'
  begin = end - round(getattr(schedule, 'share', 1.0) * end)
  if 0 < begin < warmup:
    return f'the warm-up ends at step {warmup}, and the fall was to begin at {begin}: none is level, with {last}'
  return ''


def _count(step: tf.Tensor) -> tf.Tensor:
  """Number of the next update, counted from 1, after `step` updates."""
  return tf.cast(step, tf.float32) + 1.0
