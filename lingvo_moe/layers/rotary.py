"""Rotary position embedding (RoPE; Su et al., arXiv 2104.09864)."""

from __future__ import annotations

import tensorflow as tf


def rotate(x_BNTK: tf.Tensor, positions_BT: tf.Tensor, base: float = 10_000.0) -> tf.Tensor:
  """Rotates feature pairs of queries or keys by angles that grow with their positions.

  The product of a query at position t and a key at position u then depends on t - u and not on t: at position t, pair i
  of K / 2 is turned by t * base^(-2 i / K) (equation 15). Pair i is features i and i + K / 2, as in GPT-NeoX and
  Grok-1; the paper pairs 2 i and 2 i + 1, which is the same up to the order of features.

  Args:
    x_BNTK: queries or keys of an even K; any number of axes may stand between B and T.
    positions_BT: position of each in its sequence; an axis of length one broadcasts.
    base: wavelengths are 2 pi to 2 pi * base.

  Returns:
    As x_BNTK, in its type; the rotation is computed in float32.
  """
  half = x_BNTK.shape[-1] // 2
  rates_K = base ** (-tf.range(half, dtype=tf.float32) / half)
  angles_BTK = tf.cast(positions_BT, tf.float32)[..., tf.newaxis] * rates_K
  for _ in range(x_BNTK.shape.rank - 3):  # [B, 1, T, K / 2]
    angles_BTK = angles_BTK[:, tf.newaxis]
  cos, sin = tf.cos(angles_BTK), tf.sin(angles_BTK)
  first, second = tf.split(tf.cast(x_BNTK, tf.float32), 2, axis=-1)
  return tf.cast(tf.concat([first * cos - second * sin, second * cos + first * sin], axis=-1), x_BNTK.dtype)
