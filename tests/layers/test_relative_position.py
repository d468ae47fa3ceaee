"""Relative positions: T5's buckets by hand, and a decoder that sees the same distances step by step."""

import math

import numpy as np
import pytest
import tensorflow as tf
from random_theta import theta_of

from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.attention import Attention, Now, causal_mask
from lingvo_moe.layers.positions import POSITIONS, PositionBias, RelativePositions, offsets_of_owned
from lingvo_moe.layers.transformer import Layer


def test_buckets_of_t5_by_hand():
  causal = RelativePositions(num_buckets=8, max_distance=32, bidirectional=False)
  # 0 to 3 alone; then 4 + floor(4 log(d / 4) / log 8): 7 - 4 = 1.07, 12: 2.11, 19: 2.99, 20: 3.09.
  distances = [0, 1, 2, 3, 4, 6, 7, 11, 12, 19, 20, 31, 32, 1000]
  assert causal.buckets(-np.array(distances)).numpy().tolist() == [0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 7, 7, 7, 7]
  assert causal.buckets(np.array([1, 5])).numpy().tolist() == [0, 0]
  both = RelativePositions(num_buckets=8, max_distance=16, bidirectional=True)
  # Of 4 buckets a direction: 0 and 1 alone, 2 + floor(2 log(d / 2) / log 8), from 6 on the last; those of later keys 4
  # up.
  offsets = [-100, -6, -5, -2, -1, 0, 1, 2, 5, 6, 100]
  assert both.buckets(np.array(offsets)).numpy().tolist() == [3, 3, 2, 2, 1, 0, 5, 6, 6, 7, 7]


def test_t5s_own_sizes():
  bidirectional = RelativePositions().buckets(np.arange(-200, 201)).numpy()
  assert len(set(bidirectional.tolist())) == 31  # bucket 16 would be a later key at distance 0
  assert bidirectional[0] == 15 and bidirectional[200] == 0 and bidirectional[-1] == 31
  assert RelativePositions(bidirectional=False).buckets(-np.arange(200)).numpy()[15:18].tolist() == [15, 16, 16]


def test_the_bias_is_the_entry_of_the_offsets_bucket():
  table_JN = tf.reshape(tf.range(8.0), [4, 2])
  offsets_BTU = tf.constant([[[0, 1], [-1, 0]]])
  bias = RelativePositions(4, 8, bidirectional=False).bias(table_JN, offsets_BTU, (2,))
  assert bias.numpy().tolist() == [[[[0, 0], [2, 0]], [[1, 1], [3, 1]]]]


def test_flat_positions_of_a_hypothesis_count_back_from_its_last():
  mask = tf.constant([[[1.0, 0, 0, 1, 0, 1, 0], [0, 1, 1, 0, 0, 0, 1]]])
  owned = offsets_of_owned(mask).numpy()[mask.numpy() > 0]
  assert owned.tolist() == [-2, -1, 0, -2, -1, 0]


def test_the_bias_is_added_to_the_scores():
  attention = Attention(8, 4, 2, relative=RelativePositions(6, 8))
  theta = theta_of(attention)
  theta['relative'] = tf.one_hot(
    [0] * 4, 6, 50.0, axis=0
  )  # on the bucket of distance 0: each position sees itself alone
  x_BTM = tf.random.normal([2, 7, 8])
  alone = attention(theta, x_BTM, x_BTM, tf.eye(7, batch_shape=[2]))
  np.testing.assert_allclose(attention(theta, x_BTM, x_BTM, tf.ones([2, 7, 7])), alone, atol=1e-5)


class Distance(PositionBias):
  """Bias of a user's own that learns nothing: the distance by a rate of each head."""

  def bias(self, table_JN, offsets_BTU, heads):
    assert table_JN is None
    rates_N = tf.reshape(tf.range(1.0, 1.0 + math.prod(heads)), heads)
    letters = 'NQ'[: len(heads)]
    return -tf.einsum(f'BTU,{letters}->B{letters}TU', tf.cast(tf.abs(offsets_BTU), tf.float32), rates_N)


@pytest.mark.parametrize('kv_heads', [4, 2])
@pytest.mark.parametrize('relative', [RelativePositions(6, 8, bidirectional=False), Distance()])
def test_decoding_step_by_step_attends_as_the_whole_row_does(kv_heads, relative):
  attention = Attention(8, 4, 2, num_kv_heads=kv_heads, relative=relative)
  assert ('relative' in attention.weights()) == (relative.table_rows > 0)
  theta = theta_of(attention, seed=1, scale=1.0)
  x_BTM = tf.random.normal([2, 7, 8])
  whole = attention(theta, x_BTM, x_BTM, causal_mask(7))
  plain = Attention(8, 4, 2, num_kv_heads=kv_heads)
  assert np.abs(whole - plain(theta, x_BTM, x_BTM, causal_mask(7))).max() > 1e-2
  # Two hypotheses of a row at flat positions 0, 2, 4, ... and 1, 3, 5, ...
  cache = attention.empty_cache(1, 14)
  for t in range(7):
    mask = np.zeros([1, 2, 14], np.float32)
    for w in range(2):
      mask[0, w, w : 2 * t + 2 : 2] = 1
    now = Now(tf.constant(t), tf.constant(2 * t), tf.constant(mask))
    y_1WM, cache = attention.extend(theta, x_BTM[tf.newaxis, :, t], now, cache)
    np.testing.assert_allclose(y_1WM[0], whole[:, t], atol=1e-5)


def test_self_attention_has_the_biases_and_cross_attention_none():
  attention = Attention(8, 4, 2, bias=False, relative=RelativePositions(6, 8))
  specs = Layer(attention, attention, cross_attention=True).weights()
  assert specs['attention']['relative'].shape == (6, 4)
  assert 'relative' not in specs['cross_attention'] and 'wq' in specs['cross_attention']


def test_a_distance_within_the_first_buckets_is_refused():
  with pytest.raises(UserError, match='saw num_buckets=3, max_distance=128'):
    RelativePositions(3)


def test_positions_of_ones_own_are_those_of_both_stacks(monkeypatch):
  made = []
  monkeypatch.setitem(POSITIONS, 'own', lambda config, is_decoder: made.append(is_decoder) or Distance())
  model = registry.get('mt.cldr.Tiny')(positions='own').model()
  assert {*made} == {False, True} and not model.sinusoidal
  for stack in model.encoder, model.decoder:
    assert isinstance(stack.attention.relative, Distance)
  monkeypatch.undo()
  with pytest.raises(UserError, match='positions must be one of sinusoidal, relative; saw .own.'):
    registry.get('mt.cldr.Tiny')(positions='own')
