"""Updates that XLA compiles for a CPU, against those of TensorFlow's kernels; and both ways to take a mean of squares."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import mean_square
from lingvo_moe.optimizer import Adafactor
from lingvo_moe.optimizer import Adam
from lingvo_moe.runtime import fused_updates
from lingvo_moe.runtime.fused_updates import FusedUpdates
from lingvo_moe.weights import Constant
from lingvo_moe.weights import WeightSpec


@pytest.mark.parametrize('way', [mean_square.plain, mean_square.for_xla_on_cpus])
@pytest.mark.parametrize('axes', [[0], [1], [2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize('shape', [(3, 16, 5), (2, 6, 4), (1, 1, 7)])
def test_means_of_squares(way, axes, shape):
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
  want = np.mean(np.square(x, dtype=np.float64), axis=tuple(axes), keepdims=True)
  for run in (way, tf.function(way, jit_compile=True)):
    got = run(tf.constant(x), axes)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize('optimizer', [Adafactor(), Adam()])
@pytest.mark.parametrize(
  'shape, dims, factored',
  [((3, 8, 6), 'EMH', 'MH'), ((4, 2, 5), 'MNK', 'MK'), ((9,), 'M', ''), ((2, 3, 4), 'LMH', 'MH')],
)
def test_a_fused_update_is_the_update(optimizer, shape, dims, factored, monkeypatch):
  monkeypatch.setattr(fused_updates, '_LARGE', 0)
  spec = WeightSpec(shape, dims, Constant(0.0), factored=factored)
  rng = np.random.default_rng(0)
  compiled = FusedUpdates(optimizer)
  assert compiled.slots(spec) == optimizer.slots(spec)
  plain = (
    tf.constant(rng.normal(size=shape), tf.float32),
    {n: tf.zeros(s.shape) for n, s in optimizer.slots(spec).items()},
  )
  weight, slots = tf.nest.map_structure(tf.Variable, plain)
  for step in range(3):
    grad = tf.constant(rng.normal(size=shape) * 10.0**step, tf.float32)
    of_step = spec, tf.constant(step, tf.int64), tf.constant(0.1)
    want = optimizer.update(grad, plain[1], plain[0], *of_step)
    plain = want.weight, want.slots
    before = weight.read_value()
    copy = before.numpy()
    got = compiled.update(grad, slots, weight, *of_step)
    assert got.weight is weight and all(got.slots[name] is slots[name] for name in slots)
    for a, b in zip(tf.nest.flatten(want), tf.nest.flatten(got), strict=True):
      np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)
    np.testing.assert_array_equal(before, copy)  # what has been read, by a saver perhaps, is not written to


def test_small_weights_are_left_to_tensorflow():
  spec = WeightSpec((4, 5), 'MH', Constant(0.0), factored='MH')
  optimizer = Adafactor()
  slots = {name: tf.Variable(tf.zeros(s.shape)) for name, s in optimizer.slots(spec).items()}
  weight = tf.Variable(tf.ones([4, 5]))

  @tf.function
  def update():
    return FusedUpdates(optimizer).update(tf.ones([4, 5]), slots, weight, spec, tf.constant(0), tf.constant(0.1))

  calls = [op for op in update.get_concrete_function().graph.get_operations() if 'PartitionedCall' in op.type]
  assert not calls
  assert np.all(update().weight < 1)
  np.testing.assert_array_equal(weight, np.ones([4, 5]))  # the new values are the caller's to assign
