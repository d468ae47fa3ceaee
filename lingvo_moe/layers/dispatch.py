"""Two ways to carry out a Routing. A MoE layer knows only their verbs: dispatch tokens to slots, combine the answers.

Both give the same numbers to rounding:
- EinsumDispatcher is the paper's Algorithm 2: one-hot masks and matrix products, which XLA partitions into AllToAlls.
- GatherDispatcher copies rows by index, forward and backward: no arithmetic is spent on masks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.core.shapes import is_static
from lingvo_moe.core.shapes import sizes
from lingvo_moe.layers.gating import Routing
from lingvo_moe.layers.gradient import custom_gradient
from lingvo_moe.xla_sharding import shard


class Dispatcher(Protocol):
  """Carries tokens to the slots of their experts and the experts' answers back."""

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    """x_EGCM: each slot holds its token, or zeros."""

  def combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    """y_GSM: each token's answers, summed with its weights; zeros where it was dropped."""


@dataclasses.dataclass(frozen=True)
class EinsumDispatcher:
  """Algorithm 2 of GShard.

  The masks span the flat slot axis X = E * C, not [E, C]: TPUs pad a last axis to 128, and a capacity of 2 or 4
  would grow the masks 32 times or more.
  """

  routing: Routing

  def _mask_GSX(self, weight_GSR: tf.Tensor) -> tf.Tensor:
    """Each token's weights at its slots."""
    r = self.routing
    slot_GSR = tf.where(r.weight_GSR > 0, r.expert_GSR * r.capacity + r.slot_GSR, -1)  # -1: a row of zeros
    # Choice by choice: a mask of both choices before their sum, [G, S, R, X], would be twice the size of this one.
    at = lambda rank: tf.one_hot(slot_GSR[:, :, rank], r.num_experts * r.capacity) * weight_GSR[:, :, rank, tf.newaxis]
    return shard(at(0) + at(1), 'GSX')

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    r = self.routing
    dispatch_GSX = tf.cast(self._mask_GSX(tf.ones_like(r.weight_GSR)), x_GSM.dtype)
    x_GXM = tf.einsum('GSX,GSM->GXM', dispatch_GSX, x_GSM)
    groups, _, model_dim = sizes(x_GSM)
    x_GECM = shard(tf.reshape(x_GXM, [groups, r.num_experts, r.capacity, model_dim]), 'GECM')
    return tf.einsum('GECM->EGCM', x_GECM)

  def combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    r = self.routing
    _, groups, _, model_dim = sizes(y_EGCM)
    y_GECM = shard(tf.einsum('EGCM->GECM', y_EGCM), 'GECM')
    y_GXM = tf.reshape(y_GECM, [groups, r.num_experts * r.capacity, model_dim])
    return tf.einsum('GSX,GXM->GSM', tf.cast(self._mask_GSX(r.weight_GSR), y_EGCM.dtype), y_GXM)


@dataclasses.dataclass(frozen=True)
class GatherDispatcher:
  """Copies rows by index.

  A token knows its slots and a slot its token, so the gradient of either gather is the other gather: nothing is
  scattered but the small index that turns the one relation into the other. On a mesh it works in manual regions
  (section 3.2 of GShard): every device copies the rows of its own groups, and only what is copied travels.
  """

  routing: Routing

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    return self._in_parts(GatherDispatcher._dispatch, (x_GSM, 'GSM'), returns='EGCM')

  def combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    return self._in_parts(GatherDispatcher._combine, (y_EGCM, 'EGCM'), returns='GSM')

  def _in_parts(self, verb: Callable, argument: tuple[tf.Tensor, str], returns: str) -> tf.Tensor:
    if xla_sharding.current() is None:
      return verb(self, argument[0])
    fields = ('expert_GSR', 'slot_GSR', 'weight_GSR')
    of_part = lambda x, *values: verb(GatherDispatcher(self.routing._replace(**dict(zip(fields, values)))), x)
    choices = [(getattr(self.routing, field), 'GSR') for field in fields]
    return xla_sharding.manually(of_part, argument, *choices, returns=returns, first='G')

  def _dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    slot_GSR, token_X, _ = self._index
    kept_GSR = tf.cast(self.routing.weight_GSR > 0, x_GSM.dtype)
    full_X1 = tf.cast(token_X >= 0, x_GSM.dtype)[:, tf.newaxis]
    groups, size, model_dim = sizes(x_GSM)

    @custom_gradient
    def copy(x_GSM):
      def grad(dx_EGCM):
        rows_GSRM = tf.gather(tf.reshape(dx_EGCM, [-1, model_dim]), slot_GSR)
        return _weighted_sum(rows_GSRM, kept_GSR)

      rows_XM = tf.gather(tf.reshape(x_GSM, [groups * size, model_dim]), tf.maximum(token_X, 0)) * full_X1
      return tf.reshape(rows_XM, [self.routing.num_experts, groups, self.routing.capacity, model_dim]), grad

    return copy(x_GSM)

  def _combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    slot_GSR, token_X, weight_X = self._index
    model_dim = sizes(y_EGCM)[-1]

    @custom_gradient
    def weigh(y_EGCM, weight_GSR):
      rows_GSRM = tf.gather(tf.reshape(y_EGCM, [-1, model_dim]), slot_GSR)

      def grad(dy_GSM):
        dy_XM = tf.gather(tf.reshape(dy_GSM, [-1, model_dim]), tf.maximum(token_X, 0))
        dy_XM *= tf.cast(weight_X, dy_XM.dtype)[:, tf.newaxis]
        dweight_GSR = _products(rows_GSRM, dy_GSM) * kept_GSR
        return tf.reshape(dy_XM, sizes(y_EGCM)), tf.cast(dweight_GSR, weight_GSR.dtype)

      return _weighted_sum(rows_GSRM, tf.cast(weight_GSR, y_EGCM.dtype)), grad

    kept_GSR = tf.cast(self.routing.weight_GSR > 0, y_EGCM.dtype)
    return weigh(y_EGCM, self.routing.weight_GSR)

  @functools.cached_property
  def _index(self) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Both directions of 'token sits in slot', over flat tokens (g, s) and flat slots (e, g, c) of all groups.

    Returns:
      slot_GSR: each choice's flat slot, 0 where it has none (its weight is 0).
      token_X: each slot's flat token, -1 where it is empty.
      weight_X: each slot's combine weight, 0 where it is empty.
    """
    r = self.routing
    groups, size, ranks = sizes(r.slot_GSR)
    group_G11 = tf.range(groups)[:, tf.newaxis, tf.newaxis]
    kept_GSR = r.weight_GSR > 0
    slot_GSR = tf.where(kept_GSR, (r.expert_GSR * groups + group_G11) * r.capacity + r.slot_GSR, 0)
    token_GS1 = tf.reshape(tf.range(groups * size), [groups, size, 1])
    num_slots = r.num_experts * groups * r.capacity
    # Choices without a slot are scattered to one behind the last, which is cut off. Tokens are counted from 1 so that
    # slots nobody wrote to read 0.
    address_GSR1 = tf.where(kept_GSR, slot_GSR, num_slots)[..., tf.newaxis]
    token_GSR = tf.broadcast_to(token_GS1 + 1, [groups, size, ranks])
    token_X = tf.scatter_nd(address_GSR1, token_GSR, [num_slots + 1])[:num_slots] - 1
    weight_X = tf.scatter_nd(address_GSR1, tf.stop_gradient(r.weight_GSR), [num_slots + 1])[:num_slots]
    return slot_GSR, token_X, weight_X


# Pairs of a row and a number are no work for matrix products: einsums take 5 times as long on a CPU. But in a manual region
# XLA's partitioner (jaxlib's for CPUs) aborts at a sum over an axis, so static shapes, which are XLA's, have them.


def _weighted_sum(rows_GSRM: tf.Tensor, weight_GSR: tf.Tensor) -> tf.Tensor:
  """Each token's rows, summed with weights: [G, S, M]."""
  if is_static(*sizes(rows_GSRM)):
    return tf.einsum('GSRM,GSR->GSM', rows_GSRM, weight_GSR)
  return tf.reduce_sum(rows_GSRM * weight_GSR[..., tf.newaxis], axis=2)


def _products(rows_GSRM: tf.Tensor, y_GSM: tf.Tensor) -> tf.Tensor:
  """Each of a token's rows times the token's: [G, S, R]."""
  if is_static(*sizes(rows_GSRM)):
    return tf.einsum('GSRM,GSM->GSR', rows_GSRM, y_GSM)
  return tf.reduce_sum(rows_GSRM * y_GSM[:, :, tf.newaxis], axis=-1)


DISPATCHERS = {'einsum': EinsumDispatcher, 'gather': GatherDispatcher}
