"""Transformer layer: its branches against attention and feed-forward."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe.core import prng, weights
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.embedding import Embedding, sinusoidal_positions
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import LayerNorm
from lingvo_moe.layers.stack import Stack
from lingvo_moe.layers.transformer import Layer, Rows

ATTENTION, FFN = Attention(8, 2, 4), FeedForward(8, 12)
EXPERTS = MoE(8, 12, num_experts=4, num_groups=2)
ENCODER = Stack(2, ATTENTION, FFN, EXPERTS)
DECODER = dataclasses.replace(ENCODER, cross_attention=True)


def some_input(rows, length, seed=0):
  return tf.random.stateless_normal([rows, length, 8], [seed, 77])


def norm(theta, x):
  x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * theta['scale'] + theta['bias']


def test_a_decoder_layer_owns_these_weights():
  names = set(weights.flatten(DECODER.layers['layer_01'].weights()))
  attention = ('norm/scale', 'norm/bias', 'wq', 'bq', 'wk', 'wv', 'bv', 'wo', 'bo')
  assert names == {f'{part}/{name}' for part in ('attention', 'cross_attention') for name in attention} | {
    'moe/norm/scale',
    'moe/norm/bias',
    'moe/gate',
    'moe/wi',
    'moe/wo',
  }


def test_layer_norm_agrees_with_numpy():
  layer, x = LayerNorm(8), some_input(2, 3) * 5 + 2
  theta = theta_of(layer)
  np.testing.assert_allclose(layer(theta, x), norm(theta, x.numpy()), atol=1e-5)


def test_feed_forward_agrees_with_numpy():
  theta, x = theta_of(FFN), some_input(2, 3)
  hidden = np.maximum(x.numpy() @ theta['wi'] + theta['bi'], 0)
  np.testing.assert_allclose(FFN(theta, x), hidden @ theta['wo'] + theta['bo'], atol=1e-5)


def test_a_layer_adds_each_branch_of_its_normalised_input():
  layer = Layer(ATTENTION, FFN, cross_attention=True)
  theta, x, memory = theta_of(layer), some_input(2, 3), some_input(2, 4, seed=1)
  mask, memory_mask = tf.ones([2, 3, 3]), tf.ones([2, 3, 4])
  y, routing, *_ = layer(theta, x, memory, Rows(mask, tf.zeros([2, 3]), memory_mask))
  assert routing is None
  own, cross, ffn = theta['attention'], theta['cross_attention'], theta['ffn']
  h = norm(own['norm'], x.numpy())
  expected = x + ATTENTION(own, h, h, mask)
  expected += ATTENTION(cross, norm(cross['norm'], expected.numpy()), memory, memory_mask)
  expected += FFN(ffn, norm(ffn['norm'], expected.numpy()))
  np.testing.assert_allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize('branch', ['attention', 'cross_attention', 'ffn'])
@pytest.mark.parametrize('rates', [(0.5, 0.0), (0.0, 0.5)], ids=['inner', 'residual'])
def test_every_dropout_is_on_in_training_and_off_at_inference(branch, rates):
  inner, residual = rates
  attention, ffn = dataclasses.replace(ATTENTION, dropout=inner), dataclasses.replace(FFN, dropout=inner)
  layer = Layer(attention, ffn, residual_dropout=residual, cross_attention=True)
  alone = {
    name: value if name == branch else {**value, 'wo': 0 * value['wo'], 'bo': 0 * value['bo']}
    for name, value in theta_of(layer).items()
  }  # the other branches add nothing
  x, memory, masks = (
    some_input(2, 3),
    some_input(2, 4, seed=1),
    (tf.ones([2, 3, 3]), tf.zeros([2, 3]), tf.ones([2, 3, 4])),
  )
  run = lambda layer, key: layer(alone, x, memory, Rows(*masks, key))[0]
  np.testing.assert_array_equal(run(layer, None), run(Layer(ATTENTION, FFN, cross_attention=True), None))
  changed = np.abs(run(layer, prng.key(0)) - run(layer, None))
  assert np.mean(changed > 1e-3) > 0.4 and np.mean(run(layer, prng.key(0)) != run(layer, prng.key(1))) > 0.2


def test_symbols_are_embedded_with_unit_variance_and_scored_by_their_rows():
  layer = Embedding(500, 64)
  theta = weights.initialize(layer.weights(), seed=1)
  x_BTM = layer.lookup(theta, tf.range(500)[tf.newaxis])
  np.testing.assert_allclose(np.std(x_BTM), 1, atol=0.03)
  np.testing.assert_allclose(x_BTM[0], 8 * theta['table'], rtol=1e-6)  # sqrt(64)
  np.testing.assert_allclose(layer.logits(theta, x_BTM)[0], x_BTM[0] @ tf.transpose(theta['table']), atol=1e-5)


def test_masked_symbols_are_left_out_of_the_softmax_without_a_row_of_symbols_for_each():
  layer = Embedding(400, 4, masked_symbols=(0, *range(200, 400)))
  theta = weights.initialize(layer.weights(), seed=1)
  with tf.Graph().as_default() as graph:
    layer.logits({name: tf.constant(value.numpy()) for name, value in theta.items()}, tf.ones([1, 1, 4]))
  assert max(x.shape.num_elements() for op in graph.get_operations() for x in op.outputs) <= 400 * 4
  softmax_V = tf.nn.softmax(layer.logits(theta, tf.ones([1, 1, 4])))[0, 0].numpy()
  assert np.all(softmax_V[[0, *range(200, 400)]] < 1e-30) and np.all(softmax_V[1:200] > 1e-6)


def test_positions_are_sines_and_cosines_of_falling_frequency():
  table = sinusoidal_positions(tf.constant([[0, 1, 7]]), 4)[0]
  expected = [[np.sin(p), np.sin(p * 1e-4), np.cos(p), np.cos(p * 1e-4)] for p in (0, 1, 7)]
  np.testing.assert_allclose(table, expected, atol=1e-6)
  assert sinusoidal_positions(tf.constant([[0, 1]]), 5).shape == [1, 2, 5]
