"""Dispatch and combine into slots: by hand, against plain loops, and the dispatchers against each other."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.layers.dispatch import DISPATCHERS
from lingvo_moe.layers.gates import top2 as gating
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.ops import backend, cpu, xla
from lingvo_moe.ops.backend import Backend

WAYS = ['einsum', 'gather']  # into slots; see test_grouped_dispatch.py for grouped rows
CPU = Backend('cpu', cpu.OVERRIDES)


def routing_of(expert_GSR, slot_GSR, weight_GSR, num_experts, capacity):
  """Routing from arrays written by hand."""
  return Routing(
    tf.constant(expert_GSR),
    tf.constant(slot_GSR),
    tf.constant(weight_GSR, tf.float32),
    num_experts,
    capacity,
    stats=None,
  )


def random_routing(seed, groups=3, size=10, num_experts=4, capacity=3):
  """Random routing with padding, drops and random skips."""
  rng = np.random.default_rng(seed)
  logits = tf.constant(rng.normal(size=[groups, size, num_experts]), tf.float32)
  paddings = (rng.random([groups, size]) < 0.2).astype(np.float32)
  return gating.top2_gating(logits, paddings, capacity=capacity, noise_GS=rng.random([groups, size]).astype(np.float32))


BY_HAND = routing_of([[[0, 1], [1, 0], [0, 1]]], [[[0, 1], [0, 1], [2, 2]]], [[[0.75, 0.25], [0.5, 0], [0, 0]]], 2, 2)


@pytest.mark.parametrize('way', WAYS)
def test_three_tokens_by_hand(way):
  # Token 0 sits in slot 0 of expert 0 and slot 1 of expert 1; token 1 in slot 0 of expert 1; token 2 nowhere.
  dispatcher = DISPATCHERS[way](BY_HAND)
  x_EGCM = dispatcher.dispatch(tf.constant([[[1.0, 2], [3, 4], [5, 6]]]))
  np.testing.assert_array_equal(x_EGCM, [[[[1, 2], [0, 0]]], [[[3, 4], [1, 2]]]])
  y_GSM = dispatcher.combine(tf.constant([[[[10.0, 20], [99, 99]]], [[[30, 40], [50, 60]]]]))
  np.testing.assert_array_equal(y_GSM, [[[0.75 * 10 + 0.25 * 50, 0.75 * 20 + 0.25 * 60], [15, 20], [0, 0]]])


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('seed', range(3))
def test_agrees_with_a_plain_loop(way, seed):
  routing = random_routing(seed)
  (groups, size, _), capacity = routing.expert_GSR.shape, routing.capacity
  x_GSM, y_EGCM = np.random.normal(size=[groups, size, 5]), np.random.normal(size=[4, groups, capacity, 5])
  x_EGCM, y_GSM = np.zeros_like(y_EGCM), np.zeros_like(x_GSM)
  for g, s, r in np.ndindex(*routing.expert_GSR.shape):
    if routing.weight_GSR[g, s, r] > 0:
      e, c = int(routing.expert_GSR[g, s, r]), int(routing.slot_GSR[g, s, r])
      x_EGCM[e, g, c] = x_GSM[g, s]
      y_GSM[g, s] += float(routing.weight_GSR[g, s, r]) * y_EGCM[e, g, c]
  dispatcher = DISPATCHERS[way](routing)
  np.testing.assert_allclose(dispatcher.dispatch(tf.constant(x_GSM, tf.float32)), x_EGCM, rtol=1e-6)
  np.testing.assert_allclose(dispatcher.combine(tf.constant(y_EGCM, tf.float32)), y_GSM, atol=1e-6)


def _values_and_gradients(way, seed, in_force=backend.REFERENCE, **kwargs):
  """Results of dispatch and combine, their gradients for all inputs, and their static shapes."""
  routing = random_routing(seed)
  x_GSM, weight_GSR = tf.random.stateless_normal([3, 10, 5], [0, 1]), routing.weight_GSR
  y_EGCM = tf.random.stateless_normal([4, 3, 3, 5], [0, 2])
  pull_EGCM, pull_GSM = tf.random.stateless_normal([4, 3, 3, 5], [0, 3]), tf.random.stateless_normal([3, 10, 5], [0, 4])

  @tf.function(**kwargs)
  def run(x_GSM, y_EGCM, weight_GSR, expert_GSR, slot_GSR):
    with backend.use(in_force), tf.GradientTape() as tape:
      tape.watch([x_GSM, y_EGCM, weight_GSR])
      dispatcher = DISPATCHERS[way](routing._replace(expert_GSR=expert_GSR, slot_GSR=slot_GSR, weight_GSR=weight_GSR))
      x_EGCM, y_GSM = dispatcher.dispatch(x_GSM), dispatcher.combine(y_EGCM)
      value = tf.reduce_sum(x_EGCM * pull_EGCM) + tf.reduce_sum(y_GSM * pull_GSM)
    return x_EGCM, y_GSM, *tape.gradient(value, [x_GSM, y_EGCM, weight_GSR])

  return run(x_GSM, y_EGCM, weight_GSR, routing.expert_GSR, routing.slot_GSR)


def _of_any_size():
  floats, ids = (tf.TensorSpec([None, None, 2], dtype) for dtype in (tf.float32, tf.int32))
  return [tf.TensorSpec([None, None, 5]), tf.TensorSpec([4, None, None, 5]), floats, ids, ids]


@pytest.mark.parametrize('signature', [None, _of_any_size()], ids=['static', 'any size'])
@pytest.mark.parametrize('seed', range(3))
def test_both_ways_agree_forward_and_in_every_gradient(seed, signature):
  gathered = _values_and_gradients('gather', seed, CPU, input_signature=signature)
  for a, b in zip(_values_and_gradients('einsum', seed), gathered, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('way', WAYS)
def test_compiled_by_xla_gives_the_same(way):
  plain, compiled = _values_and_gradients(way, 0), _values_and_gradients(way, 0, xla.BACKEND, jit_compile=True)
  for a, b in zip(plain, compiled, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('way', WAYS)
def test_sizes_may_be_unknown_at_trace_time(way):
  spec = lambda *shape, dtype=tf.float32: tf.TensorSpec(shape, dtype)
  index = spec(None, None, 2, dtype=tf.int32)

  @tf.function(input_signature=[spec(None, None, 5), index, index, spec(None, None, 2), spec(dtype=tf.int32)])
  def there_and_back(x_GSM, expert_GSR, slot_GSR, weight_GSR, capacity):
    dispatcher = DISPATCHERS[way](Routing(expert_GSR, slot_GSR, weight_GSR, 4, capacity, None))
    return dispatcher.combine(dispatcher.dispatch(x_GSM))

  r = random_routing(1)
  x_GSM = tf.random.normal([3, 10, 5])
  y_GSM = there_and_back(x_GSM, r.expert_GSR, r.slot_GSR, r.weight_GSR, tf.constant(3))
  np.testing.assert_allclose(y_GSM, x_GSM * tf.reduce_sum(r.weight_GSR, axis=-1, keepdims=True), atol=1e-6)


@pytest.mark.parametrize('way', WAYS)
def test_empty_slots_are_zero_and_dropped_tokens_come_back_as_zero(way):
  routing = random_routing(2)
  dispatcher = DISPATCHERS[way](routing)
  x_EGCM = dispatcher.dispatch(tf.ones([3, 10, 5]))
  served = np.sum(routing.weight_GSR.numpy() > 0)
  assert np.sum(x_EGCM) == served * 5  # ones in the slots that are taken, zeros in all others
  lost_GS = np.all(routing.weight_GSR == 0, axis=-1)
  assert np.any(lost_GS)
  y_GSM = dispatcher.combine(tf.fill([4, 3, 3, 5], 7.0)).numpy()
  np.testing.assert_array_equal(y_GSM[lost_GS], 0)
  assert np.all(y_GSM[~lost_GS] > 0)


@pytest.mark.parametrize('way', WAYS)
def test_bfloat16_activations_keep_their_type_and_give_float32_gradients_of_the_weights(way):
  routing = random_routing(0)
  x_GSM, weight_GSR = tf.ones([3, 10, 5], tf.bfloat16), routing.weight_GSR
  with tf.GradientTape() as tape:
    tape.watch([x_GSM, weight_GSR])
    dispatcher = DISPATCHERS[way](routing._replace(weight_GSR=weight_GSR * 0.5))
    y_GSM = dispatcher.combine(dispatcher.dispatch(x_GSM))
  dx_GSM, dweight_GSR = tape.gradient(y_GSM, [x_GSM, weight_GSR])
  assert (y_GSM.dtype, dx_GSM.dtype, dweight_GSR.dtype) == (tf.bfloat16, tf.bfloat16, tf.float32)
