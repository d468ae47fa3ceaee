"""Attention against plain numpy: padded, causal, packed and incremental."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.attention import Attention, Now, causal_mask, segment_mask
from lingvo_moe.ops import backend, cpu, xla

LAYER = Attention(model_dim=6, num_heads=2, head_dim=4)
THETA = {name: tf.random.stateless_normal(spec.shape, [i, 5]) for i, (name, spec) in enumerate(LAYER.weights().items())}


def some_input(rows, length, seed=0):
  return tf.random.stateless_normal([rows, length, 6], [seed, 2])


def plain(x, memory, mask):
  """Attention by one row, head and position at a time."""
  w = {name: value.numpy().astype(np.float64) for name, value in THETA.items()}
  x, memory = np.asarray(x, np.float64), np.asarray(memory, np.float64)
  out = np.tile(w['bo'], [*x.shape[:2], 1])
  for b, t, n in np.ndindex(*x.shape[:2], 2):
    q = x[b, t] @ w['wq'][:, n] + w['bq'][n]
    allowed = [u for u in range(memory.shape[1]) if mask[b, t, u]]
    p = np.exp([q @ (memory[b, u] @ w['wk'][:, n]) / 4**0.5 for u in allowed])
    y = sum(p_u * (memory[b, u] @ w['wv'][:, n] + w['bv'][n]) for p_u, u in zip(p / p.sum(), allowed, strict=True))
    out[b, t] += y @ w['wo'][n]
  return out


GROUPED = Attention(6, num_heads=4, head_dim=4, num_kv_heads=2, rotary_base=100.0, logit_cap=5.0, bias=False)
GROUPED_THETA = {
  name: tf.random.stateless_normal(spec.shape, [i, 6]) for i, (name, spec) in enumerate(GROUPED.weights().items())
}


def plain_grouped(x, mask, positions):
  """Grouped-query self-attention with rotary positions and capped scores, by one row, head and position at a time."""
  w = {name: value.numpy().astype(np.float64) for name, value in GROUPED_THETA.items()}
  x = np.asarray(x, np.float64)

  def turned(v, position):
    pairs = (v[:2] + 1j * v[2:]) * np.exp(1j * position * 100.0 ** (-np.arange(2) / 2))
    return np.concatenate([pairs.real, pairs.imag])

  out = np.zeros(x.shape)
  for b, t, n, shared in np.ndindex(*x.shape[:2], 2, 2):
    q = turned(x[b, t] @ w['wq'][:, n, shared], positions[t])
    allowed = [u for u in range(x.shape[1]) if mask[b, t, u]]
    scores = [q @ turned(x[b, u] @ w['wk'][:, n], positions[u]) / 4**0.5 for u in allowed]
    p = np.exp(5.0 * np.tanh(np.array(scores) / 5.0))
    y = sum(p_u * (x[b, u] @ w['wv'][:, n]) for p_u, u in zip(p / p.sum(), allowed, strict=True))
    out[b, t] += y @ w['wo'][n, shared]
  return out


def test_keys_carry_no_bias():
  assert sorted(LAYER.weights()) == ['bo', 'bq', 'bv', 'wk', 'wo', 'wq', 'wv']


def test_masks_by_hand():
  segments = tf.constant([[1, 1, 2, 0]])
  np.testing.assert_array_equal(
    segment_mask(segments, segments)[0], [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]
  )
  np.testing.assert_array_equal(causal_mask(3)[0], [[1, 0, 0], [1, 1, 0], [1, 1, 1]])


def test_agrees_with_numpy():
  x, memory = some_input(2, 3), some_input(2, 5, seed=1)
  mask = np.random.default_rng(0).random([2, 3, 5]) < 0.6
  mask[:, :, 0] = True
  np.testing.assert_allclose(LAYER(THETA, x, memory, mask), plain(x, memory, mask), atol=1e-5)


def test_grouped_query_heads_share_keys_and_values():
  assert {name: spec.dims for name, spec in GROUPED.weights().items()} == {
    'wq': 'MNQK',
    'wk': 'MNK',
    'wv': 'MNK',
    'wo': 'NQKM',
  }
  x, mask = some_input(2, 5), np.tril(np.ones([2, 5, 5], bool))
  np.testing.assert_allclose(GROUPED(GROUPED_THETA, x, x, mask), plain_grouped(x, mask, range(5)), atol=1e-5)


def test_as_many_key_value_heads_as_query_heads_are_plain_attention():
  x = some_input(2, 4)
  same = dataclasses.replace(LAYER, num_kv_heads=2)
  np.testing.assert_array_equal(same(THETA, x, x, causal_mask(4)), LAYER(THETA, x, x, causal_mask(4)))


def test_one_key_value_head_is_plain_attention_with_that_head_repeated():
  one = dataclasses.replace(LAYER, num_kv_heads=1)
  theta = {name: THETA[name] for name in ('bo',)}
  theta |= {'wq': THETA['wq'][:, tf.newaxis], 'bq': THETA['bq'][tf.newaxis], 'wo': THETA['wo'][tf.newaxis]}
  theta |= {'wk': THETA['wk'][:, :1], 'wv': THETA['wv'][:, :1], 'bv': THETA['bv'][:1]}
  repeated = {**THETA, **{name: tf.repeat(theta[name], 2, axis=-2) for name in ('wk', 'wv', 'bv')}}
  x = some_input(2, 4)
  np.testing.assert_allclose(one(theta, x, x, causal_mask(4)), LAYER(repeated, x, x, causal_mask(4)), atol=1e-5)


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(num_kv_heads=3), 'num_kv_heads=3 for num_heads=4: use a divisor'),
    (dict(head_dim=3), 'head_dim=3: use an even one'),
  ],
)
def test_heads_that_do_not_divide_are_refused(values, message):
  with pytest.raises(UserError, match=message):
    dataclasses.replace(GROUPED, **values)


def test_a_mask_of_zeros_and_ones_is_a_mask_of_booleans():
  x, mask = some_input(1, 4), causal_mask(4)
  np.testing.assert_array_equal(LAYER(THETA, x, x, mask), LAYER(THETA, x, x, tf.cast(mask, tf.float32)))


def test_a_position_alone_attends_to_itself():
  x = some_input(1, 1)
  value = np.einsum('m,mnk->nk', x[0, 0], THETA['wv']) + THETA['bv']
  y = LAYER(THETA, x, x, causal_mask(1))
  np.testing.assert_allclose(y[0, 0], np.einsum('nk,nkm->m', value, THETA['wo']) + THETA['bo'], atol=1e-5)


def test_padding_changes_nothing_whatever_it_holds():
  x = some_input(1, 4)
  ones = tf.ones([1, 4], tf.int32)
  alone = LAYER(THETA, x, x, segment_mask(ones, ones))
  longer = tf.pad(x, [[0, 0], [0, 3], [0, 0]], constant_values=100.0)
  segments = tf.pad(ones, [[0, 0], [0, 3]])
  padded = LAYER(THETA, longer, longer, segment_mask(segments, segments))
  np.testing.assert_allclose(padded[:, :4], alone, atol=1e-6)


def test_no_position_sees_a_later_one():
  x = some_input(1, 5)
  changed = tf.concat([x[:, :3], -x[:, 3:]], axis=1)
  run = lambda x: LAYER(THETA, x, x, causal_mask(5))
  np.testing.assert_allclose(run(changed)[:, :3], run(x)[:, :3], atol=1e-6)
  assert np.all(np.abs(run(changed) - run(x))[:, 3:] > 0)


def test_packed_segments_equal_rows_of_their_own():
  x = some_input(1, 7)
  segments = tf.constant([[1, 1, 1, 2, 2, 0, 0]])
  packed = LAYER(THETA, x, x, segment_mask(segments, segments) & causal_mask(7))
  for start, end in ((0, 3), (3, 5)):
    own = x[:, start:end]
    alone = LAYER(THETA, own, own, causal_mask(end - start))
    np.testing.assert_allclose(packed[:, start:end], alone, atol=1e-6)


def test_a_row_with_nothing_to_attend_to_is_finite():
  x = some_input(1, 2)
  assert np.all(np.isfinite(LAYER(THETA, x, x, tf.zeros([1, 2, 2]))))


def test_scores_of_bfloat16_are_softmaxed_in_float32():
  # One head whose scores are 0, 1/8, ... 15/8, whose values are one-hot: the output is the attention weights.
  layer, half, score_U = Attention(16, 1, 16, bias=False), tf.bfloat16, np.arange(16) / 8
  along_first = lambda column: tf.cast(np.outer(column, np.eye(16)[0])[:, np.newaxis], half)
  eye = tf.eye(16, dtype=half)
  theta = {
    'wq': along_first(np.full(16, 4.0)),
    'wk': along_first(score_U),
    'wv': eye[:, tf.newaxis],
    'wo': eye[tf.newaxis],
  }
  y_BTM = layer(theta, eye[tf.newaxis], eye[tf.newaxis], tf.ones([1, 16, 16]))
  expected = tf.cast(np.exp(score_U) / np.exp(score_U).sum(), half)  # rounded once
  np.testing.assert_array_equal(tf.cast(y_BTM[0], tf.float32), tf.cast([expected] * 16, tf.float32))


def test_dropout_hits_the_attention_weights_and_needs_a_key():
  x = some_input(1, 6)
  layer = dataclasses.replace(LAYER, dropout=0.5)
  np.testing.assert_array_equal(layer(THETA, x, x, causal_mask(6)), LAYER(THETA, x, x, causal_mask(6)))
  dropped = layer(THETA, x, x, causal_mask(6), prng.key(1))
  assert np.any(np.abs(dropped - LAYER(THETA, x, x, causal_mask(6))) > 0.1)
  np.testing.assert_array_equal(dropped, layer(THETA, x, x, causal_mask(6), prng.key(1)))


def extend(x_BWM, start, mask_BWU, cache):
  return LAYER.extend(THETA, x_BWM, Now(start // 2, start, mask_BWU), cache)


def extend_grouped(x_BWM, start, mask_BWU, cache):
  return GROUPED.extend(GROUPED_THETA, x_BWM, Now(start // 2, start, mask_BWU), cache)


def under(in_force, extend):
  def run(*args):
    with backend.use(in_force):
      return extend(*args)

  return run


ANY_CACHE = {name: tf.TensorSpec([None, 2, None, 4]) for name in ('keys', 'values')}
EXTEND = lambda extend: {
  'reference': extend,
  'xla': tf.function(under(xla.BACKEND, extend), jit_compile=True),
  'cpu': tf.function(
    under(cpu.backend(training=False), extend),
    input_signature=[
      tf.TensorSpec([None, None, 6]),
      tf.TensorSpec([], tf.int32),
      tf.TensorSpec([None, None, None]),
      ANY_CACHE,
    ],
  ),
}


@pytest.mark.parametrize('shapes', ['reference', 'xla', 'cpu'])
@pytest.mark.parametrize('layer, theta, run', [(LAYER, THETA, extend), (GROUPED, GROUPED_THETA, extend_grouped)])
def test_one_step_at_a_time_over_a_flat_cache_equals_whole_rows(layer, theta, run, shapes):
  # Two hypotheses a row, which never part: hypothesis w owns positions w, 2 + w, 4 + w ...
  rows, width, steps = 3, 2, 4
  x_BWTM = tf.reshape(some_input(rows * width, steps), [rows, width, steps, 6])
  cache = layer.empty_cache(rows, (steps + 2) * width)
  assert cache['keys'].shape == [rows, 2, (steps + 2) * width, 4]
  run = EXTEND(run)[shapes]
  cache = {
    name: tf.fill(buffer.shape, 1e3) for name, buffer in cache.items()
  }  # positions that are not written must not be read
  mask_BWU = np.zeros([rows, width, (steps + 2) * width], np.float32)
  got = []
  for time in range(steps):
    for w in range(width):
      mask_BWU[:, w, time * width + w] = 1
    y, cache = run(x_BWTM[:, :, time], tf.constant(time * width), tf.constant(mask_BWU), cache)
    got.append(y)
  whole = tf.reshape(x_BWTM, [rows * width, steps, 6])
  expected = tf.reshape(layer(theta, whole, whole, causal_mask(steps)), [rows, width, steps, 6])
  np.testing.assert_allclose(tf.stack(got, axis=2), expected, rtol=1e-5, atol=1e-5)


def test_hypotheses_share_the_past_that_the_mask_gives_them():
  # Both hypotheses of step 1 continue hypothesis 1 of step 0.
  x = some_input(1, 4)
  mask = lambda *rows: tf.constant([rows], tf.float32)
  cache = LAYER.empty_cache(1, 4)
  _, cache = extend(x[:, :2], tf.constant(0), mask([1, 0, 0, 0], [0, 1, 0, 0]), cache)
  y, _ = extend(x[:, 2:], tf.constant(2), mask([0, 1, 1, 0], [0, 1, 0, 1]), cache)
  for w in range(2):
    row = tf.gather(x, [1, 2 + w], axis=1)
    np.testing.assert_allclose(y[:, w], LAYER(THETA, row, row, causal_mask(2))[:, 1], atol=1e-6)
