"""Random numbers as a hash of (seed, step, name, position).

Made of elementwise integer operations on iotas, so a dropout mask or an initial weight is the same for every
number of devices, and a device only ever makes its own part. The position is hashed axis by axis, never
flattened: the weights of 2048 experts have more elements than a 32-bit index can tell apart. (Between axes the state
has 32 bits too, so of the 2 million rows of such a weight a few hundred repeat another; no two experts are alike.)

A key is a uint32 scalar, or a vector of keys, one for each row of a batch or each layer of a scanned stack; `fold` makes
keys from keys. The mixing function is the public-domain
'lowbias32' integer hash (Chris Wellons, https://nullprogram.com/blog/2018/07/31/), whose multipliers were
searched for low bias.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import sizes

_GOLDEN = 0x9E3779B9  # 2^32 / golden ratio: spreads consecutive numbers over the whole range


def _u32(value: int) -> tf.Tensor:
  return tf.constant(value & 0xFFFFFFFF, tf.uint32)


def _mix(x: tf.Tensor) -> tf.Tensor:
  """lowbias32: a bijection of uint32 in which every input bit flips every output bit half the time."""
  shift = tf.bitwise.right_shift
  x = tf.bitwise.bitwise_xor(x, shift(x, _u32(16))) * _u32(0x7FEB352D)
  x = tf.bitwise.bitwise_xor(x, shift(x, _u32(15))) * _u32(0x846CA68B)
  return tf.bitwise.bitwise_xor(x, shift(x, _u32(16)))


def fold(key: tf.Tensor, data: str | int | tf.Tensor) -> tf.Tensor:
  """A new key from a key and a name, a Python int or an integer tensor (a step, a layer number)."""
  if isinstance(data, str):
    data = _u32(zlib.crc32(data.encode()))
  elif isinstance(data, int):
    data = _u32(data ^ (data >> 32))
  else:
    data = tf.cast(data, tf.uint32)
  return _mix(tf.bitwise.bitwise_xor(key, data * _u32(_GOLDEN) + _u32(0x85EBCA6B)))


def key(seed: int | tf.Tensor, *path: str | int | tf.Tensor) -> tf.Tensor:
  """The key of a seed and a path of names and numbers, e.g. key(seed, 'step', step)."""
  k = fold(_u32(0), seed)
  for part in path:
    k = fold(k, part)
  return k


def bits(key: tf.Tensor, shape: Sequence[Size], offsets: Sequence[Size] | None = None) -> tf.Tensor:
  """uint32 hashes of each position of `shape`.

  Args:
    key: uint32 scalar, or a key for each place on the first axes of `shape`: positions are then counted on the others.
    shape: sizes; Python ints or scalar tensors.
    offsets: the position of element [0, ..., 0] in the whole (a slice's values equal the whole's there).
  """
  x = key
  keyed = key.shape.rank
  for axis, size in enumerate(shape[keyed:]):
    position = tf.range(size, dtype=tf.int32)
    if offsets is not None:
      position += offsets[keyed + axis]
    # Positions are spread before they meet the key, so that neighbours differ in many bits.
    spread = tf.cast(position, tf.uint32) * _u32(_GOLDEN) + _u32(axis + 1)
    x = _mix(tf.bitwise.bitwise_xor(x[..., tf.newaxis], spread))
  return x


def uniform(key: tf.Tensor, shape: Sequence[Size], offsets: Sequence[Size] | None = None) -> tf.Tensor:
  """float32 in [0, 1), a multiple of 2^-24."""
  top = tf.bitwise.right_shift(bits(key, shape, offsets), _u32(8))
  # int32 holds 24 bits, and its conversion to float is a single vector instruction; uint32's is not.
  return tf.cast(tf.bitcast(top, tf.int32), tf.float32) * 2.0**-24


def normal(key: tf.Tensor, shape: Sequence[Size], offsets: Sequence[Size] | None = None) -> tf.Tensor:
  """Standard Gaussian float32, by Box and Muller's transform of two uniforms."""
  u = 1.0 - uniform(fold(key, 0), shape, offsets)  # (0, 1]
  v = uniform(fold(key, 1), shape, offsets)
  return tf.sqrt(-2.0 * tf.math.log(u)) * tf.cos((2.0 * math.pi) * v)


def dropout(x: tf.Tensor, rate: float, key: tf.Tensor | None) -> tf.Tensor:
  """Zeroes each element with probability `rate` and scales the rest by 1 / (1 - rate); key None keeps all."""
  if key is None or not rate:
    return x
  # The hash is compared as a signed integer: its order is as uniform, and TensorFlow's kernel is faster.
  threshold = round(rate * 2**32) - 2**31
  keep = tf.bitcast(bits(key, sizes(x)), tf.int32) >= threshold
  return x * tf.cast(keep, x.dtype) * (1.0 / (1.0 - rate))
