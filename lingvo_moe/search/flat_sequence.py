"""Flat key/value cache of a beam: hypotheses write interleaved positions, and a mask says which belong to each.

GShard (arXiv:2006.16668), appendix A.1. An ordinary beam search reorders the keys and values of its hypotheses at every
step. Here the symbols of all hypotheses of a beam interleave in one sequence, which is never reordered: at every step
each of the W hypotheses writes one of W new positions, and only the rows of a 0/1 mask over the positions, one row per
hypothesis, move from parent to child.

As live hypotheses share most of their past, most positions soon belong to none of them. Where shapes need not be
static, these positions are dropped every few steps, by one gather of the positions that are kept, with room added for
the steps that follow: attention then covers few unused positions, and memory grows only as needed.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.layers.attention import Now
from lingvo_moe.ops import backend

# The least number of steps that there is room for after positions were dropped. The number of positions is a multiple
# of ROOM * W, because kernels are set up anew for every new size.
ROOM = 8


State = Sequence[Any]
Step = Callable[[Now, State, Any], tuple[tf.Tensor, State, Any]]  # (now, state, cache) -> (parents_BW, state, cache)
Keep = Callable[[Any, tf.Tensor], Any]  # (cache, positions_BU) -> a cache of the values at these positions


def first_room(max_steps: Size, beam_size: int, prefix: Size = 0) -> Size:
  """Positions of the cache when a loop begins: where it grows as needed those of a prefix, at least one; else all.

  `prefix` is the number of positions that are taken before, P; under static shapes a multiple of W. See `loop`.
  """
  if backend.current().open_shapes:
    return tf.maximum(prefix, 1) if tf.is_tensor(prefix) else max(prefix, 1)
  return prefix + max_steps * beam_size


def loop(
  step: Step,
  state: State,
  cache: Any,
  *,
  alive: Callable[..., tf.Tensor],
  batch_size: Size,
  beam_size: int,
  max_steps: Size,
  keep: Keep | None = None,
  prefix_BU: tf.Tensor | None = None,
) -> tuple[tf.Tensor, State]:
  """Runs decoding steps until no hypothesis is live, max_steps at most.

  Args:
    step: writes the cache at the new positions, and returns in parents_BW, for each hypothesis of the next step, the
      hypothesis of this step that it continues.
    state: any nest of tensors, whose shapes `step` keeps.
    cache: any nest of tensors, with or without an axis of flat positions. It has room for `first_room` positions,
      or for max_steps * W if `keep` is None.
    alive: function of the state that returns booleans [B, W]: True where a hypothesis is live.
    keep: gathers positions of a cache. A position may be gathered twice; the copy is unused until it is written again.
      None, or a backend without open shapes: no position is ever dropped and all shapes stay the same.
    prefix_BU: 1.0 where one of the cache's first P positions belongs to every hypothesis of a row, as a prompt's do;
      else 0. The steps write after them. None: P = 0.

  Returns:
    (number of steps run, state after them).
  """

  def unfinished(time, start, mask_BWU, state, cache):
    return tf.logical_and(time < max_steps, tf.reduce_any(alive(*state)))

  def make_step(time, start, mask_BWU, state, cache):
    mask_BWU += tf.one_hot(start + tf.range(beam_size), tf.shape(mask_BWU)[2])
    parents_BW, state, cache = step(Now(time, start, mask_BWU, alive(*state)), state, cache)
    return time + 1, start + beam_size, tf.gather(mask_BWU, parents_BW, batch_dims=1), state, cache

  if not backend.current().open_shapes:
    keep = None
  taken = 0 if prefix_BU is None else sizes(prefix_BU)[1]
  num_positions = taken + max_steps * beam_size if keep is None else first_room(max_steps, beam_size, taken)
  mask_BWU = tf.zeros([batch_size, beam_size, num_positions])
  if prefix_BU is not None:
    prefix_BWU = tf.repeat(tf.cast(prefix_BU, tf.float32)[:, tf.newaxis], beam_size, axis=1)
    mask_BWU += tf.pad(prefix_BWU, [[0, 0], [0, 0], [0, num_positions - taken]])
  begin = tf.constant(0), tf.convert_to_tensor(taken), mask_BWU, tuple(state), cache
  if keep is None:
    steps, _, _, state, _ = tf.while_loop(unfinished, make_step, begin)
    return steps, state

  def has_room(time, start, mask_BWU, state, cache):
    room = start + beam_size <= tf.shape(mask_BWU)[2]
    return tf.logical_and(room, unfinished(time, start, mask_BWU, state, cache))

  def make_steps(time, start, mask_BWU, state, cache):
    mask_BWU = tf.where(alive(*state)[:, :, tf.newaxis], mask_BWU, 0.0)
    start, positions_BU, mask_BWU = _used(mask_BWU, ROOM * beam_size)
    return tf.while_loop(has_room, make_step, (time, start, mask_BWU, state, keep(cache, positions_BU)))

  # Shape invariants: sizes that depend on the number of positions are None, all others static. Those are found by
  # comparing the cache with one of another number of positions.
  time, start, mask_BWU, state, _ = tf.nest.map_structure(lambda _: None, begin)
  mask_BWU = tf.TensorSpec([*begin[2].shape[:2], None])
  longer = keep(cache, tf.zeros([batch_size, num_positions + 1], tf.int32))
  common = lambda x, y: tf.TensorSpec([n if n == m else None for n, m in zip(x.shape, y.shape, strict=True)], x.dtype)
  specs = time, start, mask_BWU, state, tf.nest.map_structure(common, cache, longer)
  steps, _, _, state, _ = tf.while_loop(unfinished, make_steps, begin, shape_invariants=specs)
  return steps, state


def _used(mask_BWU: tf.Tensor, block: int) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
  """Positions that a hypothesis uses, in order, followed by room for at least `block` new ones.

  Returns:
    (start, positions_BU, mask_BWU): where the room begins, the positions to keep, a multiple of `block`, and their
    mask.
  """
  used_BU = tf.reduce_max(mask_BWU, axis=1)
  most = tf.cast(tf.reduce_max(tf.reduce_sum(used_BU, axis=1)), tf.int32)
  room = (tf.math.floordiv(most + block - 1, block) + 1) * block - most
  _, positions_BU = tf.math.top_k(used_BU, most)  # ties go to the earlier one
  mask_BWU = tf.gather(mask_BWU, positions_BU, axis=2, batch_dims=1)
  return most, tf.pad(positions_BU, [[0, 0], [0, room]]), tf.pad(mask_BWU, [[0, 0], [0, 0], [0, room]])
