"""LiteRT backend: its forms give the values of the reference."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops import backend, litert, reference

rng = np.random.default_rng(0)
normal = lambda *shape: tf.constant(rng.normal(size=shape), tf.float32)


@pytest.mark.parametrize(
  'equation, shape', [('BTM,VM->BTV', [7, 4]), ('GSM,ME->GSE', [4, 7]), ('EGC,ECM->EGM', [2, 4, 3])]
)
def test_a_product_is_that_of_the_reference(equation, shape):
  x, weight = normal(2, 3, 4), normal(*shape)
  np.testing.assert_allclose(
    litert.product(equation, x, weight), reference.product(equation, x, weight), rtol=1e-5, atol=1e-6
  )


def test_a_scaled_table_gives_the_rows_of_the_table():
  table, rows, scale, ids = normal(7, 4), normal(7, 4), normal(7, 1), tf.constant([[6, 0, 6]])

  @tf.function
  def looked_up(table, rows, scale):
    with backend.use(litert.without_experts([], tables={table.ref(): litert.ScaledTable(rows, scale)})):
      return ops.lookup(table, ids), ops.lookup(rows, ids)

  found, other = looked_up(table, rows, scale)
  np.testing.assert_allclose(found, reference.lookup(rows * scale, ids), rtol=1e-6)
  np.testing.assert_array_equal(other, reference.lookup(rows, ids))


@pytest.mark.parametrize('width', [1, 2])
def test_attention_over_a_written_cache_is_to_its_positions_and_each_hypothesis_to_its_own_new_one(width):
  q, buffer, new = normal(2, 3, width, 5), normal(2, 3, 4, 5), normal(2, 3, width, 5)
  with backend.use(litert.BACKEND):
    cache = ops.write_cache(buffer, new, tf.constant(0))
    scores = ops.attention_product('BNTK,BNUK->BNTU', q, cache)
    values = ops.attention_product('BNTU,BNUK->BNTK', scores, cache)
  for w in range(width):
    own = slice(w, w + 1)
    whole = tf.concat([buffer, new[:, :, own]], axis=2)
    expected = reference.attention_product('BNTK,BNUK->BNTU', q[:, :, own], whole)
    np.testing.assert_allclose(scores[:, :, own], expected, rtol=1e-5, atol=1e-5)
    expected = reference.attention_product('BNTU,BNUK->BNTK', expected, whole)
    np.testing.assert_allclose(values[:, :, own], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('expert', ['relu', 'swiglu', 'deep'])
def test_experts_that_compute_apart_give_the_output_of_the_layer(expert):
  layer = MoE(4, 6, 5, gate=Top2(), expert=expert)
  theta = {name: normal(*spec.shape) for name, spec in layer.weights().items()}
  x_BTM, paddings_BT = normal(3, 4, 4), tf.constant([[0.0] * 4, [0, 0, 1, 1], [1] * 4])
  expected, _ = layer(theta, x_BTM, paddings_BT)

  calls, of_one = [], {}

  def apart():
    of_one.update({n: tf.compat.v1.placeholder(tf.float32, [1, *theta[n].shape[1:]]) for n in layer.experts.weights()})
    with backend.use(litert.without_experts(calls)):
      layer(theta | of_one, x_BTM, paddings_BT)

  graph = tf.compat.v1.wrap_function(apart, [])
  (call,) = calls
  expert = graph.prune([call.rows_1SM, *of_one.values()], call.of_rows_1SM)
  tokens_GSM, expert_GSR, weight_GSR = graph.prune([], [call.tokens_GSM, call.expert_GSR, call.weight_GSR])()
  y_EGSM = tf.stack([expert(tokens_GSM, *(theta[name][e : e + 1] for name in of_one)) for e in range(5)])
  weight_GSRE = tf.one_hot(expert_GSR, 5) * weight_GSR[..., tf.newaxis]
  found = tf.reshape(tf.einsum('GSRE,EGSM->GSM', weight_GSRE, y_EGSM), x_BTM.shape)
  np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
  assert not np.any(found[2])
