"""Random numbers as a hash of (seed, step, name, position).

The hash consists of elementwise integer operations on iotas, so a dropout mask or an initial weight is the same for
any number of devices, and each device computes only its own part. Positions are hashed axis by axis, never flattened:
the weights of 2048 experts have more elements (2^34) than a 32-bit index can address. (The state passed from axis to
axis has 32 bits too, so of the 2 million rows of such a weight a few hundred repeat another; no two experts are alike.)

A key is a uint32 scalar, or a vector with a key for each row of a batch or each layer of a scanned stack. `fold`
derives new keys. hash32.py has the mixing function.
"""

import math
import zlib
from collections.abc import Sequence

import tensorflow as tf

from lingvo_moe.core import hash32
from lingvo_moe.core.hash32 import GOLDEN, OFFSET
from lingvo_moe.core.shapes import Size, sizes


def _u32(value: int) -> tf.Tensor:
  return tf.constant(value & 0xFFFFFFFF, tf.uint32)


def _mix(x: tf.Tensor) -> tf.Tensor:
  """hash32.mix of a tensor."""
  shift = tf.bitwise.right_shift
  x = tf.bitwise.bitwise_xor(x, shift(x, _u32(16))) * _u32(0x7FEB352D)
  x = tf.bitwise.bitwise_xor(x, shift(x, _u32(15))) * _u32(0x846CA68B)
  return tf.bitwise.bitwise_xor(x, shift(x, _u32(16)))


def fold(key: int | tf.Tensor | None, data: str | int | tf.Tensor) -> int | tf.Tensor | None:
  """Derives a key from a key and a name, a Python int or an integer tensor (a step, a layer number); None from None."""
  if key is None:
    return None
  if isinstance(key, int) and isinstance(data, int | str):
    return hash32.fold(key, data)
  if isinstance(data, str):
    data = zlib.crc32(data.encode())
  if isinstance(data, int):
    if data >= 2**32:  # a long seed
      key = fold(fold(key, 'high bits'), data >> 32)
    word = _u32(data * GOLDEN + OFFSET)
  else:
    word = tf.cast(data, tf.uint32) * _u32(GOLDEN) + _u32(OFFSET)
  return _mix(tf.bitwise.bitwise_xor(_u32(key) if isinstance(key, int) else key, word))


def key(seed: int | tf.Tensor, *path: str | int | tf.Tensor) -> tf.Tensor:
  """Key for a seed and a path of names and numbers, such as key(seed, 'step', step)."""
  k = 0
  for part in (seed, *path):
    k = fold(k, part)
  return _u32(k) if isinstance(k, int) else k


def bits(key: tf.Tensor, shape: Sequence[Size]) -> tf.Tensor:
  """Hashes (uint32) of each position of `shape`, of Python ints or scalar tensors.

  The key is a scalar, or a tensor of keys for the leading axes of `shape`; only the remaining axes are then hashed.
  """
  x = key
  for axis, size in enumerate(shape[key.shape.rank :]):
    # Positions are multiplied out before the XOR with the key, so that neighbours differ in many bits.
    spread = tf.cast(tf.range(size, dtype=tf.int32), tf.uint32) * _u32(GOLDEN) + _u32(axis + 1)
    x = _mix(tf.bitwise.bitwise_xor(x[..., tf.newaxis], spread))
  return x


def uniform(key: tf.Tensor, shape: Sequence[Size]) -> tf.Tensor:
  """Uniform float32 in [0, 1), multiples of 2^-24; arguments as in `bits`."""
  top = tf.bitwise.right_shift(bits(key, shape), _u32(8))
  # int32 holds 24 bits, and its conversion to float is a single vector instruction; uint32's is not.
  return tf.cast(tf.bitcast(top, tf.int32), tf.float32) * 2.0**-24


def normal(key: tf.Tensor, shape: Sequence[Size]) -> tf.Tensor:
  """Standard normal float32, by the Box-Muller transform of two uniforms; arguments as in `bits`."""
  u = 1.0 - uniform(fold(key, 0), shape)  # (0, 1]
  v = uniform(fold(key, 1), shape)
  return tf.sqrt(-2.0 * tf.math.log(u)) * tf.cos((2.0 * math.pi) * v)


def as_bytes(key: tf.Tensor) -> tf.Tensor:
  """Keys [...] as float32 [..., 4] of 0 to 255, which one-hot matrix products carry without loss, even in bfloat16."""
  parts = [tf.bitwise.bitwise_and(tf.bitwise.right_shift(key, _u32(8 * i)), _u32(255)) for i in range(4)]
  return tf.cast(tf.stack(parts, axis=-1), tf.float32)


def from_bytes(parts: tf.Tensor) -> tf.Tensor:
  """Keys [...] of `as_bytes`."""
  parts = tf.cast(parts, tf.uint32)
  return tf.add_n([tf.bitwise.left_shift(parts[..., i], _u32(8 * i)) for i in range(4)])


def dropout(x: tf.Tensor, rate: float, key: tf.Tensor | None) -> tf.Tensor:
  """Dropout: zeroes each element with probability `rate` and scales the others by 1 / (1 - rate); none if key is None.

  The key is a scalar, or a tensor of keys for the leading axes of x.
  """
  if key is None or not rate:
    return x
  # The hash is compared as a signed integer: it is as uniform in that order, and TensorFlow's kernel is faster.
  threshold = round(rate * 2**32) - 2**31
  keep = tf.bitcast(bits(key, sizes(x)), tf.int32) >= threshold
  return x * tf.cast(keep, x.dtype) * (1.0 / (1.0 - rate))
