"""Random numbers as a hash of (seed, step, name, position)."""

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core import prng


def _mix(x):
  """lowbias32 on a Python int."""
  x ^= x >> 16
  x = x * 0x7FEB352D & 0xFFFFFFFF
  x ^= x >> 15
  x = x * 0x846CA68B & 0xFFFFFFFF
  return x ^ x >> 16


def test_bits_follow_the_hash_written_in_python_ints():
  key = 123456789
  expected = np.zeros([2, 3], np.uint32)
  for i in range(2):
    row = _mix(key ^ (i * 0x9E3779B9 + 1) & 0xFFFFFFFF)
    for j in range(3):
      expected[i, j] = _mix(row ^ (j * 0x9E3779B9 + 2) & 0xFFFFFFFF)
  np.testing.assert_array_equal(prng.bits(tf.constant(key, tf.uint32), [2, 3]), expected)


def test_the_same_path_gives_the_same_numbers_whether_traced_or_not():
  draw = lambda: prng.uniform(prng.key(7, 'train', 3, 'encoder'), [4, 5])
  np.testing.assert_array_equal(draw(), draw())
  np.testing.assert_array_equal(draw(), tf.function(draw)())
  np.testing.assert_array_equal(draw(), tf.function(draw, jit_compile=True)())


def test_keys_differ_by_seed_step_name_and_layer():
  paths = [
    (seed, 'train', step, name, layer)
    for seed in range(3)
    for step in (0, 1, 2, 10_000)
    for name in ('encoder', 'decoder', 'gate')
    for layer in range(6)
  ]
  keys = [int(prng.key(*path)) for path in paths]
  assert len(set(keys)) == len(paths)


def test_seeds_of_more_than_32_bits_are_seeds_of_their_own():
  # 2^32 apart, and where the halves of one are another: 2^32 + 1 against 1, 0 and 2^32.
  seeds = [high * 2**32 + low for high in (0, 1, 2, 2**31, 2**32, 2**33) for low in (0, 1, 2, 3, 2**31, 2**32 - 1)]
  keys = [int(prng.key(seed)) for seed in dict.fromkeys(seeds)]
  assert len(set(keys)) == len(keys) == 36


def test_a_path_is_more_than_its_parts_in_any_order():
  assert int(prng.key(0, 'a', 'b')) != int(prng.key(0, 'b', 'a'))
  assert int(prng.key(0, 1, 2)) != int(prng.key(0, 2, 1))
  assert int(prng.key(0)) != int(prng.key(0, 0))


@pytest.mark.parametrize('number', [0, 1, 17, 2**31 - 1])
def test_a_layer_number_may_be_a_tensor(number):
  key = prng.key(5, 'decoder')
  by_int = int(prng.fold(key, number))
  assert int(prng.fold(key, tf.constant(number))) == by_int
  assert int(prng.fold(key, tf.constant(number, tf.int64))) == by_int


def test_a_loop_counter_makes_the_keys_of_an_unrolled_stack():
  key = prng.key(5, 'decoder')

  @tf.function
  def looped():
    keys = tf.TensorArray(tf.uint32, 4)
    for layer in tf.range(4):
      keys = keys.write(layer, prng.fold(key, layer))
    return keys.stack()

  np.testing.assert_array_equal(looped(), [int(prng.fold(key, layer)) for layer in range(4)])


def test_no_two_of_2048_experts_share_weights():
  # A flat 32-bit index over [2048, 1024, 8192] would give experts 0, 512, 1024 and 1536 the same numbers.
  key = prng.key(0, 'init', 'moe/wi')
  first = prng.bits(key, [2048, 1, 2]).numpy().reshape(2048, 2)
  assert len(np.unique(first, axis=0)) == 2048


def test_transposed_positions_are_unrelated():
  square = prng.bits(prng.key(0), [64, 64]).numpy()
  off_diagonal = ~np.eye(64, dtype=bool)
  assert not np.any((square == square.T) & off_diagonal)


def test_uniform_numbers_fill_64_bins_evenly():
  draws = prng.uniform(prng.key(3, 'uniform'), [64, 1024]).numpy()
  assert draws.min() >= 0 and draws.max() < 1
  expected = draws.size / 64
  counts = np.histogram(draws, bins=64, range=(0, 1))[0]
  chi_square = np.sum((counts - expected) ** 2 / expected)
  assert 30 < chi_square < 110  # 63 degrees of freedom: 63 +- 11, so 30 and 110 are 3 to 4 deviations away


def test_neighbours_along_either_axis_are_uncorrelated():
  draws = prng.uniform(prng.key(3), [256, 256]).numpy() - 0.5
  for other in (np.roll(draws, 1, 0), np.roll(draws, 1, 1)):
    assert abs(np.mean(draws * other) * 12) < 4 / 256  # correlation of 65536 pairs: deviation 1 / 256


def test_every_bit_is_set_half_the_time():
  draws = prng.bits(prng.key(9), [128, 128]).numpy().ravel()
  share = [np.mean(draws >> np.uint32(bit) & 1) for bit in range(32)]
  np.testing.assert_allclose(share, 0.5, atol=4 * 0.5 / 128)


def test_normal_numbers_have_the_moments_of_the_gaussian():
  draws = prng.normal(prng.key(2), [256, 512]).numpy().astype(np.float64)
  deviation = draws.size**-0.5
  assert abs(draws.mean()) < 4 * deviation
  assert abs(np.mean(draws**2) - 1) < 4 * 2**0.5 * deviation
  assert abs(np.mean(draws**3)) < 4 * 15**0.5 * deviation
  assert abs(np.mean(draws**4) - 3) < 4 * 96**0.5 * deviation
  assert abs(np.mean(np.abs(draws) < 1) - 0.6827) < 0.01


@pytest.mark.parametrize('bits', [0, 2**32 - 1])
def test_uniform_and_normal_numbers_stay_in_their_range_at_either_end_of_the_hash(bits, monkeypatch):
  monkeypatch.setattr(prng, 'bits', lambda key, shape: tf.fill(shape, tf.constant(bits, tf.uint32)))
  assert 0 <= float(prng.uniform(prng.key(0), [])) < 1
  assert abs(float(prng.normal(prng.key(0), []))) < 6  # log 0 would be infinite


def test_dropout_zeroes_its_rate_and_scales_the_rest():
  x = tf.fill([100, 200], 2.0)
  y = prng.dropout(x, 0.25, prng.key(4)).numpy()
  np.testing.assert_allclose(np.unique(y), [0, 2 / 0.75], rtol=1e-6)
  assert abs(np.mean(y == 0) - 0.25) < 4 * (0.25 * 0.75 / y.size) ** 0.5


def test_dropout_is_off_without_a_key_or_a_rate():
  x = tf.range(3.0)
  assert prng.dropout(x, 0.5, None) is x
  assert prng.dropout(x, 0.0, prng.key(0)) is x


def test_dropout_takes_shapes_unknown_at_trace_time():
  drop = tf.function(lambda x: prng.dropout(x, 0.5, prng.key(4)), input_signature=[tf.TensorSpec([None, 3])])
  np.testing.assert_array_equal(drop(tf.ones([5, 3])), prng.dropout(tf.ones([5, 3]), 0.5, prng.key(4)))


def test_dropout_of_the_first_rows_does_not_depend_on_how_many_follow():
  key = prng.key(4)
  np.testing.assert_array_equal(prng.dropout(tf.ones([2, 8]), 0.5, key), prng.dropout(tf.ones([6, 8]), 0.5, key)[:2])
