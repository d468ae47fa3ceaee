"""A decoder without an encoder: causal, with rotary positions, shared key/value heads, RMSNorm and gated layers."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe.layers.attention import Attention, Now
from lingvo_moe.layers.ffn import ACTIVATIONS, FeedForward
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.scanned_stack import ScannedStack
from lingvo_moe.layers.stack import Stack

STACK = Stack(
  2,
  Attention(8, 4, 4, num_kv_heads=2, rotary_base=100.0, bias=False),
  FeedForward(8, 12, activation='geglu', bias=False),
  MoE(8, 12, num_experts=4),
  causal=True,
  norm_type='rms',
  post_norm=True,
)
ONES = tf.ones([2, 6], tf.int32)


def some_input(rows=2, length=6):
  return tf.random.stateless_normal([rows, length, 8], [0, 77])


def test_no_position_sees_a_later_one():
  theta, x = theta_of(STACK), some_input()
  changed = tf.concat([x[:, :3], -x[:, 3:]], axis=1)
  run = lambda x: STACK(theta, x, ONES)[0]
  np.testing.assert_allclose(run(changed)[:, :3], run(x)[:, :3], atol=1e-5)
  assert np.all(np.max(np.abs(run(changed) - run(x))[:, 3:], axis=-1) > 1e-3)
  seeing = dataclasses.replace(STACK, causal=False)
  assert np.max(np.abs(seeing(theta, changed, ONES)[0] - seeing(theta, x, ONES)[0])[:, :3]) > 1e-3


def test_weights_are_those_of_two_norms_a_branch_and_no_bias():
  names = {f'{branch}/{name}' for branch, of in STACK.weights()['layer_00'].items() for name in of}
  branches = {'attention': ('wq', 'wk', 'wv', 'wo'), 'ffn': ('wi', 'wg', 'wo')}
  assert names == {f'{b}/{n}' for b, own in branches.items() for n in (*own, 'norm', 'post_norm')}


@pytest.mark.parametrize('kind', [Stack, ScannedStack])
@pytest.mark.parametrize('prefix', [0, 2, 4])
def test_a_prefix_at_once_and_then_step_by_step_gives_what_whole_rows_do(prefix, kind):
  # Rows of 6 and of 5 symbols; the prefix of the second is one shorter, and padded.
  stack = kind(**{**vars(STACK), 'moe_every': 1 if kind is ScannedStack else 2})
  theta, x = theta_of(stack), some_input()
  whole, *_ = stack(theta, x, ONES)
  lengths = np.array([prefix, max(prefix - 1, 0)])
  room = prefix + 6
  cache = stack.empty_cache(2, room)
  if prefix:
    real_BT = np.arange(prefix) < lengths[:, np.newaxis]
    mask_BTU = np.zeros([2, prefix, room], np.float32)
    mask_BTU[:, :, :prefix] = np.tril(np.ones([prefix, prefix])) * real_BT[:, np.newaxis]
    position_BT = tf.range(prefix)[tf.newaxis]
    now = Now(tf.constant(0), tf.constant(0), tf.constant(mask_BTU), tf.constant(real_BT), position_BT)
    y, cache = stack.extend(theta, x[:, :prefix], now, None, cache)
    for row, length in enumerate(lengths):
      np.testing.assert_allclose(y[row, :length], whole[row, :length], rtol=1e-4, atol=1e-4)
  mask_BWU = np.zeros([2, 1, room], np.float32)
  for row, length in enumerate(lengths):
    mask_BWU[row, 0, :length] = 1
  for time in range(6 - prefix):
    mask_BWU[:, 0, prefix + time] = 1
    positions = tf.constant(lengths[:, np.newaxis] + time)
    step = tf.gather(x, positions, batch_dims=1)
    now = Now(tf.constant(time), tf.constant(prefix + time), tf.constant(mask_BWU), None, positions)
    y, cache = stack.extend(theta, step, now, None, cache)
    np.testing.assert_allclose(y, tf.gather(whole, positions, batch_dims=1), rtol=1e-4, atol=1e-4)


def test_gated_feed_forward_by_hand():
  theta = {'wg': tf.constant([[2.0]]), 'wi': tf.constant([[3.0]]), 'wo': tf.constant([[5.0]])}
  y = FeedForward(1, 1, activation='swiglu', bias=False)(theta, tf.constant([[[1.0]]]))
  np.testing.assert_allclose(y, [[[2 / (1 + np.exp(-2.0)) * 3 * 5]]], rtol=1e-6)
  y = FeedForward(1, 1, activation='geglu', bias=False)(theta, tf.constant([[[1.0]]]))
  np.testing.assert_allclose(y, [[[2 * 0.97725 * 3 * 5]]], rtol=1e-3)  # 2 times the normal distribution function of 2


@pytest.mark.parametrize('activation', ACTIVATIONS)
def test_a_gate_is_the_one_weight_more(activation):
  gated = 'wg' in FeedForward(4, 6, activation=activation).weights()
  assert gated == activation.endswith('glu')


def test_rotary_positions_are_refused_between_two_sequences():
  with pytest.raises(ValueError, match='choose one'):
    dataclasses.replace(STACK, cross_attention=True)
