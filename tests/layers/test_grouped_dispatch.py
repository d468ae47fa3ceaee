"""Grouped dispatch: choices sorted by expert, by hand and against a plain loop."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.layers.dispatch import GroupedDispatcher
from lingvo_moe.layers.gates import top2 as gating
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.ops import backend, cpu
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.cpu.grouped_ffn import Looped


def routing_of(expert_GSR, weight_GSR, num_experts):
  """Routing from arrays written by hand; its slots are not read."""
  return Routing(tf.constant(expert_GSR), None, tf.constant(weight_GSR, tf.float32), num_experts, None, stats=None)


# Token 0 goes to experts 2 and 0, token 1 to expert 2 alone, token 2 nowhere.
BY_HAND = routing_of([[[2, 0], [2, 1], [1, 0]]], [[[0.75, 0.25], [0.5, 0], [0, 0]]], 4)


def run(routing, w_EMM, x_GSM):
  """Experts that each multiply by a matrix of their own."""
  dispatcher = GroupedDispatcher(routing)
  x = dispatcher.dispatch(x_GSM)
  matmul = lambda w_MM, x_CM: [tf.matmul(x_CM, w_MM)]
  (y_XM,) = Looped(x.expert_offsets).each(matmul, [x_GSM.shape[-1]], [w_EMM], [x.x_XM])
  return dispatcher.combine(x._replace(x_XM=y_XM))


# Expert e multiplies by e + 1.
TIMES = tf.range(1.0, 5)[:, tf.newaxis, tf.newaxis]


def test_three_tokens_by_hand():
  dispatcher = GroupedDispatcher(BY_HAND)
  x = dispatcher.dispatch(tf.constant([[[1.0, 2], [3, 4], [5, 6]]]))
  # Token 0 in expert 0; tokens 0 and 1 in expert 2; and a row of no expert.
  np.testing.assert_array_equal(x.x_XM, [[1, 2], [1, 2], [3, 4], [1, 2]])
  np.testing.assert_array_equal(x.expert_offsets, [0, 1, 1, 3, 3])
  y_GSM = dispatcher.combine(x._replace(x_XM=tf.constant([[1.0, 2], [3, 6], [9, 12], [0, 0]])))
  np.testing.assert_array_equal(y_GSM, [[[0.75 * 3 + 0.25 * 1, 0.75 * 6 + 0.25 * 2], [0.5 * 9, 0.5 * 12], [0, 0]]])


def random_routing(seed, kind):
  """Random routing of 2 groups of 40 tokens over 16 experts, with padding."""
  rng = np.random.default_rng(seed)
  logits_GSE = rng.normal(size=[2, 40, 16])
  if kind == 'two experts':
    logits_GSE[:, :, [3, 11]] += 100
  elif kind == 'one token':
    logits_GSE = logits_GSE[:1, :1]
  paddings_GS = (rng.random(logits_GSE.shape[:2]) < 0.3) & (kind != 'one token')
  return gating.top2_gating(tf.constant(logits_GSE, tf.float32), paddings_GS)


BACKENDS = [backend.REFERENCE, Backend('cpu', cpu.OVERRIDES)]


@functools.cache
def values_and_gradients(name):
  """Traced once for each backend."""
  (in_force,) = [b for b in BACKENDS if b.name == name]
  index = tf.TensorSpec([None, None, 2], tf.int32)
  floats = [tf.TensorSpec(shape) for shape in ([None, None, 2], [None, None, 5], [16, 5, 5])]

  @tf.function(input_signature=[index, *floats])
  def traced(expert_GSR, weight_GSR, x_GSM, w_EMM):
    with backend.use(in_force), tf.GradientTape() as tape:
      inputs = [x_GSM, w_EMM, weight_GSR]
      tape.watch(inputs)
      y_GSM = run(Routing(expert_GSR, None, weight_GSR, 16, None, stats=None), w_EMM, x_GSM)
    return y_GSM, *tape.gradient(y_GSM, inputs)

  return traced


@pytest.mark.parametrize('kind', ['uneven', 'two experts', 'one token'])
@pytest.mark.parametrize('seed', range(3))
@pytest.mark.parametrize('in_force', BACKENDS, ids=lambda b: b.name)
def test_agrees_with_a_plain_loop_in_values_and_gradients(seed, kind, in_force):
  routing = random_routing(seed, kind)
  rng = np.random.default_rng(seed)
  x_GSM = rng.normal(size=[*routing.weight_GSR.shape[:2], 5]).astype(np.float32)
  w_EMM = rng.normal(size=[16, 5, 5]).astype(np.float32)
  y_GSM, dx_GSM = np.zeros_like(x_GSM), np.zeros_like(x_GSM)
  dw_EMM, dweight_GSR = np.zeros_like(w_EMM), np.zeros(routing.weight_GSR.shape)
  for g, s, r in np.ndindex(*routing.weight_GSR.shape):
    e, weight = int(routing.expert_GSR[g, s, r]), float(routing.weight_GSR[g, s, r])
    if weight > 0:
      y_GSM[g, s] += weight * x_GSM[g, s] @ w_EMM[e]
      dx_GSM[g, s] += weight * w_EMM[e].sum(axis=1)
      dw_EMM[e] += weight * x_GSM[g, s][:, np.newaxis]
      dweight_GSR[g, s, r] = (x_GSM[g, s] @ w_EMM[e]).sum()

  got = values_and_gradients(in_force.name)(routing.expert_GSR, routing.weight_GSR, x_GSM, w_EMM)
  for a, b in zip(got, [y_GSM, dx_GSM, dw_EMM, dweight_GSR], strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_a_choice_of_weight_zero_adds_nothing_even_where_answers_are_infinite():
  y_GSM = run(BY_HAND, TIMES / 0.0, tf.ones([1, 3, 1]))
  np.testing.assert_array_equal(y_GSM, [[[np.inf], [np.inf], [0]]])


def test_bfloat16_activations_keep_their_type():
  y_GSM = run(BY_HAND, tf.cast(TIMES, tf.bfloat16) * tf.eye(5, dtype=tf.bfloat16), tf.ones([1, 3, 5], tf.bfloat16))
  assert y_GSM.dtype == tf.bfloat16
  np.testing.assert_array_equal(tf.cast(y_GSM[0, :, 0], tf.float32), [0.75 * 3 + 0.25, 0.5 * 3, 0])
