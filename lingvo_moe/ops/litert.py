"""LiteRT backend: forms that TensorFlow's converter turns into operations that XNNPACK runs fast; inference alone.

Two threads of a Xeon, bench-S and Transformer Base: a step that copies its cache took 250 ms, one that returns the new
keys and values 39 ms. A product with a constant matrix is FULLY_CONNECTED, whose weights are packed once.
"""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.core.shapes import inferred, sizes
from lingvo_moe.ops import reference, vjp
from lingvo_moe.ops.backend import Backend
from lingvo_moe.ops.cpu import linear


class WrittenCache(NamedTuple):
  """Keys or values of earlier positions, and of the W new ones, which follow them. The caller stores the new ones."""

  old_BNUK: tf.Tensor
  new_BNWK: tf.Tensor


def write_cache(
  buffer: tf.Tensor, x_BNWK: tf.Tensor, start: tf.Tensor, layer: tf.Tensor | None = None
) -> tf.Tensor | WrittenCache:
  """Cache and new positions side by side, so that nothing is copied. The new positions come last, whatever start is."""
  return WrittenCache(buffer, x_BNWK) if layer is None else reference.write_cache(buffer, x_BNWK, start, layer)


def attention_product(equation: str, x: tf.Tensor, cache: tf.Tensor | WrittenCache) -> tf.Tensor:
  """Einsum with keys or values; after those of a cache, one more position: the new one of the hypothesis itself.

  A product with the new positions of all hypotheses would be padded to 32 of them, and packed.
  """
  if not isinstance(cache, WrittenCache):
    return tf.einsum(equation, x, cache)
  new_BnWK = cache.new_BNWK if x.shape.rank == 4 else cache.new_BNWK[:, :, tf.newaxis]
  if equation.endswith('U'):
    own_BnW1 = tf.reduce_sum(x * new_BnWK, axis=-1, keepdims=True)
    return tf.concat([tf.einsum(equation, x, cache.old_BNUK), own_BnW1], axis=-1)
  return tf.einsum(equation, x[..., :-1], cache.old_BNUK) + x[..., -1:] * new_BnWK


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Matmul of two matrices, where the weight is a matrix."""
  x_axes, weight_axes, _ = vjp.split_equation(equation)
  if len(weight_axes) != 2 or weight_axes[0] == x_axes[0]:
    return tf.einsum(equation, x, weight)
  outwards = weight_axes[1] == x_axes[-1]  # the weight is [out, in]
  y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), weight, transpose_b=outwards)
  return tf.reshape(y, inferred([*sizes(x)[:-1], weight.shape[0 if outwards else 1]]))


def sum_over_experts(function, x_GSM, theta, routing, slots, width=None):
  """Sum over all experts, each computed for all tokens, with weight 0 where it was not chosen.

  See reference.sum_over_rounds. A step has few tokens, so that an expert's time is that of reading its weights.
  """
  del slots, width
  chosen_GSRE = tf.one_hot(routing.expert_GSR, routing.num_experts)
  weight_GSE = tf.reduce_sum(routing.weight_GSR[..., tf.newaxis] * chosen_GSRE, axis=2)
  return function(x_GSM, theta, routing._replace(weight_GSR=weight_GSE)), tf.ones([])


BACKEND = Backend(
  'litert',
  {
    'attention_product': attention_product,
    'linear': linear.linear,
    'product': product,
    'sum_over_rounds': sum_over_experts,
    'write_cache': write_cache,
  },
  dispatcher='whole',
  bfloat16=False,  # the engine's kernels are those of float32 and int8
)
