"""Tasks of a gate by task, a target language or a language pair, as the tags of a batch tell them."""

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from lingvo_moe.models.batches import FIRST


@dataclasses.dataclass(frozen=True)
class TaskTags:
  """Tags of each task: ids of symbols, one on each of `sides` ('src', 'tgt') of a sentence."""

  sides: tuple[str, ...]
  tags: tuple[tuple[int, ...], ...]

  def numbers(self, batch: Mapping[str, tf.Tensor], segments_BT: tf.Tensor) -> tf.Tensor:
    """Number of the task of each segment's sentence, int32 [B, T]; 0 where it has no tags."""
    is_task_BTJ = tf.constant([[[True]]])
    for side, tags in zip(self.sides, zip(*self.tags, strict=True), strict=True):
      tag_BT = _tag(batch, side, sorted(set(tags)), segments_BT)
      is_task_BTJ &= tf.expand_dims(tag_BT, 2) == tf.constant(tags)
    return tf.argmax(tf.cast(is_task_BTJ, tf.int32), axis=-1, output_type=tf.int32)


def _tag(batch, side: str, tags: list[int], segments_BT: tf.Tensor) -> tf.Tensor:
  """The one of these symbols that a side of each segment has; 0: none."""
  if side == 'src' or 'tgt_labels' in batch:
    ids_BU, own_BU = batch['src_ids' if side == 'src' else 'tgt_labels'], batch[f'{side}_segments']
  else:  # a search, of one sentence a row
    own_BU = tf.reduce_max(batch['src_segments'], axis=1, keepdims=True)
    ids_BU = batch.get(FIRST, tf.zeros_like(own_BU))
  is_tag_BU = tf.reduce_any(tf.expand_dims(ids_BU, 2) == tf.constant(tags), axis=2)
  tag_B1U = tf.expand_dims(tf.where(is_tag_BU, ids_BU, 0), 1)
  in_segment_BTU = tf.expand_dims(segments_BT, 2) == tf.expand_dims(own_BU, 1)
  return tf.reduce_max(tf.where(in_segment_BTU, tag_B1U, 0), axis=2)
