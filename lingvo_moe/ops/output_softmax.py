"""Output softmax: scores of every symbol as the next one, and the loss of the labels.

Scores [B, T, V] are the largest tensor of a step: 8 GB for 65,536 tokens and 32,000 symbols.
"""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.mesh import ACTIVATIONS
from lingvo_moe.core.shapes import collected, dealt, sizes
from lingvo_moe.ops import reference
from lingvo_moe.ops.backend import operation
from lingvo_moe.ops.custom_gradient import custom_gradient
from lingvo_moe.ops.loops import counted
from lingvo_moe.xla_sharding import shard

CHUNK_BYTES = 2**31  # most bytes of the scores of a chunk on a device

# Score of a masked symbol: its exp is 0 beside that of any other, and label smoothing's share of it stays small.
_MASKED = -100.0

_product = operation(reference.product)
_softmax_cross_entropy = operation(reference.softmax_cross_entropy)


def output_scores(
  x_BTM: tf.Tensor,
  table_VM: tf.Tensor,
  bias_V: tf.Tensor | None = None,
  scale: float = 1.0,
  masked_symbols: Sequence[int] = (),
) -> tf.Tensor:
  """Scores [B, T, V] of every symbol as the next one, float32 whatever type x has; masked symbols have the least."""
  logits_BTV = shard(_product('BTM,VM->BTV', x_BTM, table_VM), 'BTV')
  logits_BTV = logits_BTV * scale if scale != 1 else logits_BTV
  logits_BTV = logits_BTV if bias_V is None else logits_BTV + bias_V
  if not masked_symbols:
    return logits_BTV
  masked_V = np.isin(np.arange(table_VM.shape[0]), masked_symbols)  # of many symbols too, without [count, V]
  return tf.where(masked_V, _MASKED, logits_BTV)


def output_loss(
  x_BTM: tf.Tensor,
  table_VM: tf.Tensor,
  bias_V: tf.Tensor | None,
  label_BT: tf.Tensor,
  factor_BT: tf.Tensor,
  *,
  scale: float = 1.0,
  masked_symbols: Sequence[int] = (),
  smoothing: float = 0.0,
  z_weight: float = 0.0,
) -> tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropy of labels: (-log p of each, float32 [B, T], without a gradient; the sum of factor times the loss).

  Args:
    x_BTM: outputs of the last layer.
    table_VM: vector of each symbol.
    bias_V: bias of each symbol's score; None: none.
    label_BT: the next symbol.
    factor_BT: factor of the loss at each position, which gets no gradient.
    scale: of scores; see output_scores.
    masked_symbols: see output_scores.
    smoothing: see reference.softmax_cross_entropy.
    z_weight: see reference.softmax_cross_entropy.
  """
  logits_BTV = output_scores(x_BTM, table_VM, bias_V, scale, masked_symbols)
  return weighted_loss(logits_BTV, label_BT, factor_BT, smoothing, z_weight)


def weighted_loss(
  logits_BTV: tf.Tensor, label_BT: tf.Tensor, factor_BT: tf.Tensor, smoothing: float = 0.0, z_weight: float = 0.0
) -> tuple[tf.Tensor, tf.Tensor]:
  """Cross-entropy of labels, given the scores; see output_loss."""
  xent_BT, loss_BT = _softmax_cross_entropy(logits_BTV, label_BT, smoothing, z_weight)
  return xent_BT, tf.reduce_sum(loss_BT * factor_BT)


def output_loss_in_chunks(x_BTM, table_VM, bias_V, label_BT, factor_BT, **settings):
  """The loss, and its gradient with it, in a loop over chunks of rows of at most CHUNK_BYTES of scores on a device.

  No scores are kept for the gradient, and none computed twice, as in Hsu et al. (Liger Kernel, arXiv 2410.10989): the
  result is a sum, whose gradient is that of each chunk times one number. On a mesh, devices add up the gradient of the
  table once a chunk.
  """
  mesh, rows = xla_sharding.current(), sizes(x_BTM)[0]
  shards = mesh.size(mesh.spec('B', ACTIVATIONS)[0]) if mesh else 1
  count = _number_of_chunks(rows // shards, 4 * sizes(x_BTM)[1] * table_VM.shape[0])
  if count == 1:
    return output_loss(x_BTM, table_VM, bias_V, label_BT, factor_BT, **settings)
  chunks = lambda x: shard(dealt(x, shards * count, count), '1B' + 'TM'[: x.shape.rank - 1])
  label_OBT, factor_OBT = chunks(label_BT), chunks(factor_BT)

  @custom_gradient
  def run(x_BTM, *weights):
    x_OBTM = chunks(x_BTM)

    def add_chunk(i, total, xent_OBT, dx_OBTM, *dweights):
      chunk = [x_OBTM[i], *weights]
      with tf.GradientTape() as tape:
        tape.watch(chunk)
        table_and_bias = chunk[1], chunk[2] if bias_V is not None else None
        xent_BT, loss = output_loss(chunk[0], *table_and_bias, label_OBT[i], factor_OBT[i], **settings)
      dx_BTM, *more = tape.gradient(loss, chunk)
      update = lambda x, part: xla_sharding.update_slice(x, part[tf.newaxis], [i, *[0] * part.shape.rank])
      sums = [d + tf.cast(dw, d.dtype) for d, dw in zip(dweights, more, strict=True)]
      return total + loss, update(xent_OBT, xent_BT), update(dx_OBTM, dx_BTM), *sums

    zero = factor_OBT[0, 0, 0] * 0  # no constant, which TensorFlow would write out
    zeros = [tf.broadcast_to(tf.cast(zero, x.dtype), sizes(x)) for x in (factor_OBT, x_OBTM, *weights)]
    total, xent_OBT, dx_OBTM, *dweights = counted(count, add_chunk, zero, *zeros)
    whole = lambda x: shard(collected(x, shards * count), 'BTM'[: x.shape.rank - 1])

    def grad(_, dtotal):
      scaled = lambda d, x: tf.cast(tf.cast(d, tf.float32) * dtotal, x.dtype)
      return scaled(whole(dx_OBTM), x_BTM), *map(scaled, dweights, weights)

    return (whole(xent_OBT), total), grad

  xent_BT, total = run(x_BTM, table_VM, *([] if bias_V is None else [bias_V]))
  return tf.stop_gradient(xent_BT), total


def _number_of_chunks(rows: int, row_bytes: int) -> int:
  """Least divisor of the number of rows for which a chunk has at most CHUNK_BYTES, or the rows themselves."""
  divisors = [n for n in range(1, rows + 1) if rows % n == 0]
  return next((n for n in divisors if rows // n * row_bytes <= CHUNK_BYTES), max(rows, 1))
