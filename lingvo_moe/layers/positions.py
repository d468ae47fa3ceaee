"""Positions in attention: rotary embedding (RoPE), relative position bias (T5), and the kinds of positions by name."""

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import tensorflow as tf

from lingvo_moe.core.errors import UserError


def rotate(x_BNTK: tf.Tensor, positions_BT: tf.Tensor, base: float = 10_000.0) -> tf.Tensor:
  """Rotary position embedding (RoPE; Su et al., arXiv 2104.09864): pairs of features turn by angles that grow.

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


class PositionBias(abc.ABC):
  """Bias of the scores of self-attention, by head and by the offset of a key from its query."""

  @property
  def table_rows(self) -> int:
    """J, rows of a learnt table of numbers by head; 0: nothing is learnt."""
    return 0

  @abc.abstractmethod
  def bias(self, table_JN: tf.Tensor | None, offsets_BTU: tf.Tensor, heads: tuple[int, ...]) -> tf.Tensor:
    """Biases [B, N, T, U] of scores; of query heads that share keys, [B, N, Q, T, U].

    Args:
      table_JN: the learnt table, [J, N] or [J, N, Q]; None where nothing is learnt.
      offsets_BTU: int32; position of the key less that of the query. B may be of length one.
      heads: sizes (N,), or (N, Q).
    """


@dataclasses.dataclass(frozen=True)
class RelativePositions(PositionBias):
  """Relative position bias of T5 (Raffel et al., arXiv 1910.10683, section 2.1): a learnt number by head and bucket.

  Buckets are those of offsets of keys from queries. Half of the buckets of a direction hold one distance each, 0, 1,
  ...; the others grow geometrically up to max_distance, and the last has all beyond it.
  """

  num_buckets: int = 32  # J, buckets of all offsets
  max_distance: int = 128  # where the last bucket begins, at the latest
  # whether half of the buckets are those of later keys; otherwise these are in the bucket of offset 0
  bidirectional: bool = True

  def __post_init__(self):
    if self.num_buckets < 4 or self.max_distance <= self._buckets // 2:
      raise UserError(
        'relative positions need 4 buckets, and a distance beyond those that have a bucket of their own; saw '
        f'num_buckets={self.num_buckets}, max_distance={self.max_distance}: use fewer buckets, or a larger distance'
      )

  @classmethod
  def of(cls, config: Any, is_decoder: bool) -> Self:
    """Of an encoder, or of a decoder, whose queries see no later keys."""
    return cls(config.relative_buckets, config.relative_distance, bidirectional=not is_decoder)

  @property
  def table_rows(self) -> int:
    return self.num_buckets

  @property
  def _buckets(self) -> int:
    """Buckets of a direction."""
    return self.num_buckets // 2 if self.bidirectional else self.num_buckets

  def buckets(self, offsets: tf.Tensor) -> tf.Tensor:
    """Bucket (int32) of each offset, the position of a key less that of the query."""
    offsets = tf.cast(offsets, tf.int32)
    exact = self._buckets // 2
    distance = tf.abs(offsets) if self.bidirectional else tf.maximum(-offsets, 0)
    ratio = tf.math.log(tf.cast(tf.maximum(distance, 1), tf.float32) / exact) / math.log(self.max_distance / exact)
    far = exact + tf.cast(ratio * (self._buckets - exact), tf.int32)
    bucket = tf.where(distance < exact, distance, tf.minimum(far, self._buckets - 1))
    return bucket + tf.where(offsets > 0, self._buckets, 0) if self.bidirectional else bucket

  def bias(self, table_JN, offsets_BTU, heads):
    letters = 'NQ'[: len(heads)]
    # By one-hot, as the gradient of a gather would be sparse.
    hot_BTUJ = tf.one_hot(self.buckets(offsets_BTU), self.num_buckets, dtype=table_JN.dtype)
    return tf.einsum(f'BTUJ,J{letters}->B{letters}TU', hot_BTUJ, table_JN)


# Kinds of positions of an encoder-decoder by name: the bias of a configuration's stack, which is the decoder or not.
# Sinusoids are added to embeddings, and bias nothing.
POSITIONS: dict[str, Callable[[Any, bool], PositionBias | None]] = {
  'sinusoidal': lambda config, is_decoder: None,
  'relative': RelativePositions.of,
}


def offsets_of_rows(length: int | tf.Tensor) -> tf.Tensor:
  """Offsets [1, T, T] of positions 0, 1, ... from each other."""
  position_T = tf.range(length)
  return (position_T[tf.newaxis, :] - position_T[:, tf.newaxis])[tf.newaxis]


def offsets_of_owned(mask_BWU: tf.Tensor) -> tf.Tensor:
  """Offsets [B, W, U] of the flat positions of each hypothesis from its last; see search/flat_sequence.py.

  A hypothesis' flat positions are in the order of its symbols, so the k-th of them is symbol k. Others mean nothing.
  """
  owned_BWU = tf.cast(mask_BWU, tf.int32)
  return tf.cumsum(owned_BWU, axis=-1) - tf.reduce_sum(owned_BWU, axis=-1, keepdims=True)
