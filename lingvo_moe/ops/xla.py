"""XLA backend: all sizes are static, and a mesh may split every tensor."""

import functools
import math
from collections.abc import Callable

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.ops import output_softmax, reference, vjp
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.custom_gradient import custom_gradient
from lingvo_moe.ops.loops import counted, zeros_of

BLOCK = 128  # rows of a block of grouped_ffn
_TILE = 16  # columns that are added to a product in bfloat16: its units take 16 at a time


def grouped_ffn(x_XM, expert_offsets, wi_EMH, wo_EHM, keep_XH=None):
  """Grouped feed-forward in a loop over blocks of BLOCK rows of one expert; see reference.grouped_ffn.

  Blocks as those of MegaBlocks (Gale et al., arXiv 2211.15841): there are at most X / BLOCK + E, however the rows are
  distributed, and each is a product with the matrices of its expert. What a block writes beyond the last row of its
  expert is overwritten by the next one, so no row is copied to pad an expert.

  Raises:
    UserError: on a mesh, whose devices would not know which rows are theirs.
  """
  if xla_sharding.current() is not None:
    raise UserError(
      "dispatch='grouped' gives every expert the rows of its own tokens, whose number XLA cannot know while it "
      "compiles for a mesh: bind dispatch = 'auto', 'gather' or 'einsum'"
    )
  # Else XLA fuses the counts of choices into every use of the offsets, and compiles for a minute.
  (expert_offsets,) = xla_sharding.barrier([expert_offsets], compiled=True)
  rows_X1 = tf.range(x_XM.shape[0])[:, tf.newaxis] < expert_offsets[-1]  # those of an expert
  block = min(BLOCK, x_XM.shape[0])
  blocks_E = (expert_offsets[1:] - expert_offsets[:-1] + block - 1) // block
  ends_E = tf.cumsum(blocks_E)
  padded = lambda x: tf.pad(x, [[0, block], [0, 0]])  # a slice that would end later begins earlier
  unpadded = lambda y: tf.where(rows_X1, y[:-block], 0)

  def at(number):
    """(expert, its first row, 1.0 where a row is the expert's) of a block, and its slice of an array."""
    e = tf.reduce_sum(tf.cast(ends_E <= number, tf.int32))
    first = expert_offsets[e] + (number - ends_E[e] + blocks_E[e]) * block
    in_expert_X1 = (first + tf.range(block) < expert_offsets[e + 1])[:, tf.newaxis]
    return e, first, in_expert_X1, lambda x: tf.slice(x, [first, 0], [block, x.shape[1]])

  def hidden(x_XM, e, block_of, wi_EMH):
    h_XH = tf.nn.relu(tf.matmul(block_of(x_XM), wi_EMH[e]))
    return h_XH, 1 if keep_XH is None else tf.cast(block_of(padded(keep_XH)), h_XH.dtype)

  @custom_gradient
  def run(x_XM, wi_EMH, wo_EHM):
    x_XM = padded(x_XM)

    def forward(number, y_XM):
      e, first, _, block_of = at(number)
      h_XH, keep = hidden(x_XM, e, block_of, wi_EMH)
      return [xla_sharding.update_slice(y_XM, tf.matmul(h_XH * keep, wo_EHM[e]), [first, 0])]

    def grad(dy_XM):
      dy_XM = padded(dy_XM)

      def backward(number, dx_XM, dwi_EMH, dwo_EHM):
        e, first, in_expert_X1, block_of = at(number)
        h_XH, keep = hidden(x_XM, e, block_of, wi_EMH)
        dy = tf.where(in_expert_X1, block_of(dy_XM), 0)
        dh_XH = tf.where(h_XH > 0, tf.matmul(dy, wo_EHM[e], transpose_b=True) * keep, 0)
        add = lambda w, dw: xla_sharding.update_slice(w, (w[e] + dw)[tf.newaxis], [e, 0, 0])
        return (
          xla_sharding.update_slice(dx_XM, tf.matmul(dh_XH, wi_EMH[e], transpose_b=True), [first, 0]),
          add(dwi_EMH, tf.matmul(block_of(x_XM), dh_XH, transpose_a=True)),
          add(dwo_EHM, tf.matmul(h_XH * keep, dy, transpose_a=True)),
        )

      zeros = [zeros_of(a, a.dtype) for a in (x_XM, wi_EMH, wo_EHM)]
      dx_XM, *dw = counted(ends_E[-1], backward, *zeros)
      return [unpadded(dx_XM), *dw]

    return unpadded(counted(ends_E[-1], forward, zeros_of(x_XM, x_XM.dtype))[0]), grad

  return run(x_XM, wi_EMH, wo_EHM)


def write_cache(buffer: tf.Tensor, x_BNWK: tf.Tensor, start: tf.Tensor, layer: tf.Tensor | None = None) -> tf.Tensor:
  """Elementwise select by position, which XLA fuses and partitions. U and start must be multiples of W.

  Of one layer of several, a dynamic-update-slice of the new positions alone, which XLA makes in place inside a loop.
  """
  if layer is not None:
    return xla_sharding.update_slice(buffer, x_BNWK[tf.newaxis], [layer, 0, 0, start, 0])
  rows, num_heads, num_positions, head_dim = sizes(buffer)
  width = x_BNWK.shape[2]
  buffer_BNTWK = tf.reshape(buffer, [rows, num_heads, num_positions // width, width, head_dim])
  at_T11 = (tf.range(0, num_positions, width) == start)[:, tf.newaxis, tf.newaxis]
  return tf.reshape(tf.where(at_T11, x_BNWK[:, :, tf.newaxis], buffer_BNTWK), sizes(buffer))


def loop_bound(limit_B: tf.Tensor, most: int) -> Size:
  """Largest possible bound, as the buffers of a loop need a static size; the loop may end earlier."""
  return most


def slots_per_round(slots: Size) -> Size:
  """Slots of a round: all of `slots`, as XLA needs static sizes, and the longest queue is known only at run time.

  Room for the longest queue that is possible would be S slots for every expert and group, E / 2 times as many as there
  are choices. In rounds, memory is that of one round, and the cost is proportional to the longest queue on any device:
  to the imbalance.
  """
  return slots


def linear(x, weight, bias=None, activation=tf.identity, inputs=1):
  """Linear map; in bfloat16 on one device the product [x, 1] [W; b], if an activation follows or x is of heads.

  XLA's GPU compiler computes a ReLU in the kernel of a product, but not where a rounded bias stands between; and the
  gradient of the bias is then a row of that of W, for which no gradient is read again. Features of heads are transposed
  before, and written with the ones.
  """
  plain = activation is tf.identity and inputs == 1
  if plain or bias is None or bias.shape.rank > 1 or x.dtype != tf.bfloat16 or not _alone():
    return reference.linear(x, weight, bias, activation, inputs)
  shape, features = sizes(x)[: x.shape.rank - inputs], math.prod(weight.shape[:inputs])
  x = tf.concat([tf.reshape(x, [*shape, features]), tf.ones([*shape, _TILE], x.dtype)], axis=-1)
  rows = tf.pad(bias[tf.newaxis], [[0, _TILE - 1], [0, 0]])
  return activation(reference.linear(x, tf.concat([tf.reshape(weight, [features, -1]), rows], axis=0)))


def _alone() -> bool:
  """Whether one device computes all, so that tensors may be joined along axes that a mesh would split."""
  mesh = xla_sharding.current()
  return mesh is None or mesh.num_devices == 1


def rounded(x: tf.Tensor) -> tf.Tensor:
  """The tensor behind a barrier, if it has 16 bits; else XLA keeps the float32 values that it was made of for norms."""
  return _computed(x) if x.dtype.size == 2 else x


@custom_gradient
def _computed(x):
  return xla_sharding.barrier([x], compiled=True)[0], tf.identity


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Einsum; of bfloat16 activations and a float32 weight, such as output scores, one of bfloat16 summed in float32.

  A product of float32 takes twice the time on a GPU, and its gradient four times the memory traffic.
  """
  x_axes, weight_axes, y_axes = vjp.split_equation(equation)
  in_all = {*x_axes} & {*weight_axes} & {*y_axes}  # E of experts
  if x.dtype != tf.bfloat16 or weight.dtype != tf.float32 or in_all:
    return vjp.product(equation, x, weight)

  @custom_gradient
  def run(x, weight):
    narrow = tf.cast(weight, x.dtype)

    def grad(dy):
      dy = tf.cast(dy, x.dtype)
      dx = xla_sharding.dot(f'{y_axes},{weight_axes}->{x_axes}', dy, narrow, tf.float32)
      return tf.cast(dx, x.dtype), xla_sharding.dot(f'{y_axes},{x_axes}->{weight_axes}', dy, x, weight.dtype)

    return xla_sharding.dot(equation, x, narrow, weight.dtype), grad

  return run(x, weight)


def relu(x: tf.Tensor) -> tf.Tensor:
  """ReLU whose gradient reads its output, so that it can be fused with the product that computes x.

  XLA replaces max(x, 0) > 0 by x > 0, and x would be kept too; the bits of the output, as an integer, it leaves alone.
  """
  integer = {2: tf.int16, 4: tf.int32, 8: tf.int64}[x.dtype.size]

  @custom_gradient
  def run(x):
    y = tf.nn.relu(x)
    return y, lambda dy: tf.where(tf.bitcast(y, integer) > 0, dy, 0)

  return run(x)


def mean_and_variance(x_BTM):
  """Statistics of layer norm; of x in bfloat16 in one pass over it, as mean x^2 - (mean x)^2.

  Float32 is exact enough for that difference: where the mean is more than 2^8 deviations, bfloat16 has rounded x
  by about a deviation already.
  """
  if x_BTM.dtype != tf.bfloat16:
    return vjp.mean_and_variance(x_BTM)
  x_BTM = tf.cast(x_BTM, tf.float32)
  mean_BT1, square_BT1 = (tf.reduce_mean(x, axis=-1, keepdims=True) for x in (x_BTM, tf.square(x_BTM)))
  return mean_BT1, tf.maximum(square_BT1 - tf.square(mean_BT1), 0.0)


def masked_scores(scores_BnTU, mask_BnTU):
  """Scores by a choice, so that one device keeps the mask as bytes; TPUs' programs for a mesh are smaller without."""
  if not _alone():
    return reference.masked_scores(scores_BnTU, mask_BnTU)
  return tf.where(tf.cast(mask_BnTU, tf.bool), scores_BnTU, scores_BnTU + reference.MASKED)


OVERRIDES: dict[str, Callable] = {
  **vjp.OVERRIDES,
  'combine_rows': functools.partial(vjp.combine_rows, einsum=True),
  'dispatch_rows': functools.partial(vjp.dispatch_rows, einsum=True),
  'grouped_ffn': grouped_ffn,
  # Else XLA for GPUs writes and reads dy * unit and dy * scale in float32.
  'layer_norm': functools.partial(vjp.layer_norm, statistics=mean_and_variance, once=xla_sharding.barrier),
  'linear': linear,
  'loop_bound': loop_bound,
  'masked_scores': masked_scores,
  'output_loss': output_softmax.output_loss_in_chunks,
  'product': product,
  'relu': relu,
  'rounded': rounded,
  'slots_per_round': slots_per_round,
  'write_cache': write_cache,
}

# A kernel of XLA for GPUs has at most 96 arguments.
BACKEND = Backend('xla', OVERRIDES, dispatcher='gather', open_shapes=False, updates_at_once=94)
