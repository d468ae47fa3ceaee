"""Encoder and decoder stacks: where experts go, what a layer computes, and that rows keep to themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe import prng
from lingvo_moe import weights
from lingvo_moe.layers.attention import Attention
from lingvo_moe.layers.embedding import sinusoidal_positions
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import LayerNorm
from lingvo_moe.layers.transformer import Layer
from lingvo_moe.layers.transformer import Stack

ATTENTION, FFN = Attention(8, 2, 4), FeedForward(8, 12)
EXPERTS = MoE(8, 12, num_experts=4, num_groups=2)
ENCODER = Stack(2, ATTENTION, FFN, EXPERTS)
DECODER = dataclasses.replace(ENCODER, cross_attention=True)


def theta_of(part, seed=0):
  """Weights that leave nothing at 0 or 1, so that a forgotten bias shows."""
  flat = weights.flatten(part.weights())
  return weights.unflatten(
    {name: tf.random.stateless_normal(spec.shape, [seed, i]) * 0.5 for i, (name, spec) in enumerate(flat.items())}
  )


def some_input(rows, length, seed=0):
  return tf.random.stateless_normal([rows, length, 8], [seed, 77])


def norm(theta, x):
  x = x - x.mean(-1, keepdims=True)
  return x / np.sqrt(x.var(-1, keepdims=True) + 1e-6) * theta['scale'] + theta['bias']


@pytest.mark.parametrize(
  'every, layers',
  [(2, ['layer_01', 'layer_03']), (1, [f'layer_{i:02d}' for i in range(5)]), (3, ['layer_02']), (0, [])],
)
def test_experts_stand_in_every_kth_layer_the_last_of_each_k(every, layers):
  stack = Stack(5, ATTENTION, FFN, EXPERTS, moe_every=every)
  assert [name for name, layer in stack.layers.items() if layer.is_moe] == layers
  assert sorted({n.split('/')[0] for n in weights.flatten(stack.weights()) if '/moe/' in n}) == layers


def test_a_stack_without_experts_is_dense():
  assert not any(layer.is_moe for layer in Stack(4, ATTENTION, FFN, None).layers.values())


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
  y, routing = layer(theta, x, mask, tf.zeros([2, 3]), memory, memory_mask)
  assert routing is None
  own, cross, ffn = theta['attention'], theta['cross_attention'], theta['ffn']
  h = norm(own['norm'], x.numpy())
  expected = x + ATTENTION(own, h, h, mask)
  expected += ATTENTION(cross, norm(cross['norm'], expected.numpy()), memory, memory_mask)
  expected += FFN(ffn, norm(ffn['norm'], expected.numpy()))
  np.testing.assert_allclose(y, expected, atol=1e-4)


def test_routing_statistics_come_by_layer_name():
  _, routing = ENCODER(theta_of(ENCODER), some_input(2, 3), tf.ones([2, 3], tf.int32))
  assert list(routing) == ['layer_01']
  assert float(routing['layer_01'].stats.tokens) == 6


def test_packed_sentences_come_out_as_in_rows_of_their_own():
  theta, x = theta_of(ENCODER), some_input(1, 8)
  decoder_theta, y = theta_of(DECODER, seed=1), some_input(1, 6, seed=2)
  memory, _ = ENCODER(theta, x, tf.constant([[1, 1, 1, 2, 2, 2, 2, 0]]))
  out, _ = DECODER(decoder_theta, y, tf.constant([[1, 1, 2, 2, 2, 0]]), memory, tf.constant([[1, 1, 1, 2, 2, 2, 2, 0]]))
  for x_range, y_range in ((slice(0, 3), slice(0, 2)), (slice(3, 7), slice(2, 5))):
    ones = lambda part: tf.ones(part.shape[:2], tf.int32)
    own_x, own_y = x[:, x_range], y[:, y_range]
    own_memory, _ = ENCODER(theta, own_x, ones(own_x))
    own_out, _ = DECODER(decoder_theta, own_y, ones(own_y), own_memory, ones(own_x))
    np.testing.assert_allclose(memory[:, x_range], own_memory, atol=2e-5)
    np.testing.assert_allclose(out[:, y_range], own_out, atol=2e-5)


def test_residual_dropout_needs_a_key_and_differs_by_layer_and_branch():
  theta, x, ones = theta_of(ENCODER), some_input(2, 3), tf.ones([2, 3], tf.int32)
  stack = dataclasses.replace(ENCODER, residual_dropout=0.5)
  np.testing.assert_array_equal(stack(theta, x, ones)[0], ENCODER(theta, x, ones)[0])
  dropped = stack(theta, x, ones, key=prng.key(0))[0]
  assert np.any(np.abs(dropped - ENCODER(theta, x, ones)[0]) > 0.01)
  np.testing.assert_array_equal(dropped, stack(theta, x, ones, key=prng.key(0))[0])
  key = prng.key(0)
  masks = [
    stack.layers['layer_00']._dropout(tf.ones([8, 8]), prng.fold(key, number), branch).numpy()
    for number in range(2)
    for branch in ('attention', 'ffn')
  ]
  assert len({mask.tobytes() for mask in masks}) == 4


def test_positions_are_sines_and_cosines_of_falling_frequency():
  table = sinusoidal_positions(tf.constant([[0, 1, 7]]), 4)[0]
  expected = [[np.sin(p), np.sin(p * 1e-4), np.cos(p), np.cos(p * 1e-4)] for p in (0, 1, 7)]
  np.testing.assert_allclose(table, expected, atol=1e-6)
  assert sinusoidal_positions(tf.constant([[0, 1]]), 5).shape == [1, 2, 5]
