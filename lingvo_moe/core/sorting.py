"""Stable sort of integer keys, with the place of each item and the offset of each key."""

from typing import NamedTuple

import tensorflow as tf


class Sorted(NamedTuple):
  """Items sorted by key, equal keys in their old order: int32."""

  order: tf.Tensor  # the item at each place
  place: tf.Tensor  # the place of each item
  offsets: tf.Tensor  # where each key begins; one more than there are keys, as a key ends where the next begins


def sort(keys: tf.Tensor, num_keys: int | tf.Tensor) -> Sorted:
  """Sorts a vector of int32 keys in [0, num_keys); larger ones come last."""
  order = tf.argsort(keys, stable=True)
  offsets = tf.searchsorted(tf.gather(keys, order), tf.range(num_keys + 1))
  return Sorted(order, tf.math.invert_permutation(order), offsets)
