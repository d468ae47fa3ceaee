"""LiteRT backend: forms that TensorFlow's converter turns into operations that XNNPACK runs fast; inference alone.

Two threads of a Xeon, bench-S and Transformer Base: a step that copies its cache took 250 ms, one that returns the new
keys and values 39 ms. A product with a constant matrix is FULLY_CONNECTED, whose weights are packed once.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

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
    return _product_with_keys(equation, x, cache)
  new_BnWK = cache.new_BNWK if x.shape.rank == 4 else cache.new_BNWK[:, :, tf.newaxis]
  if equation.endswith('U'):
    own_BnW1 = tf.reduce_sum(x * new_BnWK, axis=-1, keepdims=True)
    return tf.concat([_product_with_keys(equation, x, cache.old_BNUK), own_BnW1], axis=-1)
  return _product_with_keys(equation, x[..., :-1], cache.old_BNUK) + x[..., -1:] * new_BnWK


def _product_with_keys(equation: str, x: tf.Tensor, keys_BNUK: tf.Tensor) -> tf.Tensor:
  """Einsum with keys or values; of one query in elements and a sum, as a product would pack all keys for it.

  32 rows of 4 heads of 64 features, 16 and 32 positions, on a core of a Xeon: 110 and 273 us, as products 168 and 351.
  """
  if x.shape.rank != 4 or x.shape[2] != 1:
    return tf.einsum(equation, x, keys_BNUK)
  if equation.endswith('U'):
    return tf.expand_dims(tf.reduce_sum(x * keys_BNUK, axis=-1), 2)
  return tf.reduce_sum(tf.einsum('BNTU->BNUT', x) * keys_BNUK, axis=2, keepdims=True)


def product(equation: str, x: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
  """Matmul of two matrices, where the weight is a matrix or that of one expert."""
  x_axes, weight_axes, _ = vjp.split_equation(equation)
  if len(weight_axes) == 3 and weight.shape[0] == 1 and weight_axes[0] == x_axes[0]:  # of one expert
    weight, weight_axes = weight[0], weight_axes[1:]
  if len(weight_axes) != 2 or weight_axes[0] == x_axes[0]:
    return tf.einsum(equation, x, weight)
  outwards = weight_axes[1] == x_axes[-1]  # the weight is [out, in]
  y = tf.matmul(tf.reshape(x, [-1, x.shape[-1]]), weight, transpose_b=outwards)
  return tf.reshape(y, inferred([*sizes(x)[:-1], weight.shape[0 if outwards else 1]]))


class ScaledTable(NamedTuple):
  """Embedding table of rows whose largest magnitude is 1, and their scales.

  The converter has one scale for all int8 rows that are looked up; for these rows it is as good as one for each.
  """

  rows_VM: tf.Tensor
  scale_V1: tf.Tensor


@dataclasses.dataclass
class ExpertsCall:
  """Tensors before and after the experts of a layer, where a graph is cut, as each expert is a graph of its own."""

  residual_BTM: tf.Tensor | None  # what the weighted sums are added to
  tokens_GSM: tf.Tensor
  expert_GSR: tf.Tensor  # the tokens' choices of experts
  weight_GSR: tf.Tensor  # and the weights of these, 0 for none
  rows_1SM: tf.Tensor  # placeholder of the tokens of one expert
  of_rows_1SM: tf.Tensor | None = None  # its outputs for these
  outputs_GSM: tf.Tensor | None = None  # placeholder of the weighted sums of outputs


# The engine's kernels are those of float32 and int8.
BACKEND = Backend(
  'litert',
  {'attention_product': attention_product, 'linear': linear.linear, 'product': product, 'write_cache': write_cache},
  dispatcher='single',
  bfloat16=False,
)


def without_experts(
  calls: list[ExpertsCall], step: bool = True, tables: Mapping[Any, ScaledTable] = MappingProxyType({})
) -> Backend:
  """LiteRT backend that cuts a graph before and after experts, and appends the cuts to `calls`.

  Weights of experts are those of one, with E = 1. With `step`, caches are inputs of the graph; without it the graph
  returns them, written by one call. `tables` are embedding tables, by reference, that are looked up as scaled ones.
  """

  def lookup(table_VM, ids_BT):
    if table_VM.ref() not in tables:
      return reference.lookup(table_VM, ids_BT)
    rows_VM, scale_V1 = tables[table_VM.ref()]
    return tf.gather(rows_VM, ids_BT) * tf.gather(scale_V1, ids_BT)

  residuals: list[tf.Tensor] = []

  def beside_experts(x_BTM):
    residuals.append(x_BTM)
    return x_BTM

  def to_experts(x_GSM, expert_GSR, weight_GSR):
    rows_1SM = tf.compat.v1.placeholder(x_GSM.dtype, [1, None, x_GSM.shape[-1]])
    calls.append(ExpertsCall(residuals[-1] if residuals else None, x_GSM, expert_GSR, weight_GSR, rows_1SM))
    return rows_1SM

  def from_experts(y_GSM):
    calls[-1].of_rows_1SM = y_GSM
    calls[-1].outputs_GSM = tf.compat.v1.placeholder(y_GSM.dtype, [None, None, y_GSM.shape[-1]])
    return calls[-1].outputs_GSM

  overrides = {'lookup': lookup, 'beside_experts': beside_experts, 'to_experts': to_experts}
  overrides = {**BACKEND.overrides, **overrides, 'from_experts': from_experts}
  if not step:
    overrides['write_cache'] = lambda buffer, x_BNWK, start, layer=None: x_BNWK
  return dataclasses.replace(BACKEND, overrides=overrides)
