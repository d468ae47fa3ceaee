"""Relative position bias of T5 (Raffel et al., arXiv 1910.10683, section 2.1): a learnt number by head and distance."""

from __future__ import annotations

import dataclasses
import math

import tensorflow as tf

from lingvo_moe.core.errors import UserError


@dataclasses.dataclass(frozen=True)
class RelativePositions:
  """Buckets of the offsets of keys from queries, to whose scores a learnt bias is added.

  Half of the buckets of a direction hold one distance each, 0, 1, ...; the others grow geometrically up to
  max_distance, and the last has all beyond it.

  Attributes:
    num_buckets: J, buckets of all offsets.
    max_distance: where the last bucket begins, at the latest.
    bidirectional: whether half of the buckets are those of later keys; otherwise these are in the bucket of offset 0.
  """

  num_buckets: int = 32
  max_distance: int = 128
  bidirectional: bool = True

  def __post_init__(self):
    if self.num_buckets < 4 or self.max_distance <= self._buckets // 2:
      raise UserError(
        'relative positions need 4 buckets, and a distance beyond those that have a bucket of their own; saw '
        f'num_buckets={self.num_buckets}, max_distance={self.max_distance}: use fewer buckets, or a larger distance'
      )

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

  def bias(self, table_JN: tf.Tensor, offsets_BTU: tf.Tensor) -> tf.Tensor:
    """Biases [B, N, T, U] of scores; a table [J, N, Q], of query heads that share keys, gives [B, N, Q, T, U]."""
    letters = 'NQ'[: table_JN.shape.rank - 1]
    # By one-hot, as the gradient of a gather would be sparse.
    hot_BTUJ = tf.one_hot(self.buckets(offsets_BTU), self.num_buckets, dtype=table_JN.dtype)
    return tf.einsum(f'BTUJ,J{letters}->B{letters}TU', hot_BTUJ, table_JN)


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
