"""Tokens queue for their experts: lines 5-11 and 21-22 of Algorithm 1, by counting and by sorting.

Counting adds up a mask of tokens and experts, which is how the paper has it and what a mesh can share out. Where sizes are
known only when it runs, neither XLA nor a mesh is near, and the choices are sorted: of many experts in a tenth of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.core.shapes import is_static
from lingvo_moe.core.shapes import sizes


class Queues(NamedTuple):
  position_GSR: tf.Tensor  # int32: how many stand before each choice; 0 where it is not taken
  length_GE: tf.Tensor  # int32: how many choices each expert has got


def queue(expert_GSR: tf.Tensor, taken_GSR: tf.Tensor, num_experts: int) -> Queues:
  """Lets choices queue for their experts, group by group: all first choices in the order of tokens, then all second ones.

  Args:
    expert_GSR: int32, the experts chosen.
    taken_GSR: whether each choice queues at all.
    num_experts: E.
  """
  if is_static(*sizes(expert_GSR)):
    return _by_counting(expert_GSR, taken_GSR, num_experts)
  return _by_sorting(expert_GSR, taken_GSR, num_experts)


def _by_counting(expert_GSR, taken_GSR, num_experts):
  position_R, length_G1E = [], 0.0
  for expert_GS in tf.unstack(tf.where(taken_GSR, expert_GSR, -1), axis=-1):
    mask_GSE = tf.one_hot(expert_GS, num_experts)  # zeros where not taken
    before_GSE = length_G1E + tf.cumsum(mask_GSE, axis=1, exclusive=True)
    position_R.append(tf.reduce_sum(before_GSE * mask_GSE, axis=-1))
    length_G1E += tf.reduce_sum(mask_GSE, axis=1, keepdims=True)
  return Queues(tf.cast(tf.stack(position_R, axis=-1), tf.int32), tf.cast(length_G1E[:, 0], tf.int32))


class Sorted(NamedTuple):
  """Items of a few kinds, kind by kind, those of a kind in the order they were in."""

  order: tf.Tensor  # which item stands at each place
  place: tf.Tensor  # at which place each item stands
  begin: tf.Tensor  # where each kind begins; one more than there are kinds, as a kind ends where the next begins


def sort(kind: tf.Tensor, num_kinds: int | tf.Tensor) -> Sorted:
  """Sorts a vector of int32 kinds, in [0, num_kinds); kinds beyond come last."""
  order = tf.argsort(kind, stable=True)
  begin = tf.searchsorted(tf.gather(kind, order), tf.range(num_kinds + 1))
  return Sorted(order, tf.math.invert_permutation(order), begin)


def _by_sorting(expert_GSR, taken_GSR, num_experts):
  groups, size, ranks = sizes(expert_GSR)
  num_queues = num_experts + 1  # of each group; choices that are not taken have one of their own
  queue_GRS = tf.einsum('GSR->GRS', tf.where(taken_GSR, expert_GSR, num_experts))
  queue_GRS += num_queues * tf.range(groups)[:, tf.newaxis, tf.newaxis]
  queue_X = tf.reshape(queue_GRS, [-1])
  by_queue = sort(queue_X, groups * num_queues)
  position_X = by_queue.place - tf.gather(by_queue.begin, queue_X)
  position_GSR = tf.einsum('GRS->GSR', tf.reshape(position_X, [groups, ranks, size]))
  length_GE = tf.reshape(by_queue.begin[1:] - by_queue.begin[:-1], [groups, num_queues])[:, :num_experts]
  return Queues(tf.where(taken_GSR, position_GSR, 0), length_GE)
