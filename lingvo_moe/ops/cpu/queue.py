"""Queue positions on CPUs, by sorting."""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.sorting import sort
from lingvo_moe.ops.reference import QueuePositions


def queue_positions(expert_GSR: tf.Tensor, taken_GSR: tf.Tensor, num_experts: int) -> QueuePositions:
  """Queue positions by a stable sort by expert: with 512 experts a tenth of the time of a mask."""
  groups, size, ranks = sizes(expert_GSR)
  num_queues = num_experts + 1  # of each group; choices that are not taken have one of their own
  queue_GRS = tf.einsum('GSR->GRS', tf.where(taken_GSR, expert_GSR, num_experts))
  queue_GRS += num_queues * tf.range(groups)[:, tf.newaxis, tf.newaxis]
  queue_F = tf.reshape(queue_GRS, [-1])
  by_queue = sort(queue_F, groups * num_queues)
  position_F = by_queue.place - tf.gather(by_queue.offsets, queue_F)
  position_GSR = tf.einsum('GRS->GSR', tf.reshape(position_F, [groups, ranks, size]))
  length_GE = tf.reshape(by_queue.offsets[1:] - by_queue.offsets[:-1], [groups, num_queues])[:, :num_experts]
  return QueuePositions(tf.where(taken_GSR, position_GSR, 0), length_GE)
