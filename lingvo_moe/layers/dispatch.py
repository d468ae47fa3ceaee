"""Dispatchers carry out a Routing: tokens to their experts, and the experts' outputs back to the tokens.

A MoE layer calls only `dispatch` and `combine`. All dispatchers give equal results to rounding:
- EinsumDispatcher, 'einsum': the paper's Algorithm 2, one-hot masks and matrix products, which XLA partitions into
  AllToAlls;
- GatherDispatcher, 'gather': rows copied by index into the slots of the experts: no arithmetic is spent on masks;
- GroupedDispatcher, 'grouped': rows sorted by expert, with no empty slots.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops, xla_sharding
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.sorting import sort
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.ops import backend
from lingvo_moe.ops.remat import keep
from lingvo_moe.xla_sharding import reshard, shard


class GroupedRows(NamedTuple):
  """Rows sorted by expert, one for each choice of an expert."""

  x_XM: tf.Tensor  # one more row at the end belongs to no expert
  expert_offsets: tf.Tensor  # int32 [E + 1]: expert e has rows expert_offsets[e] up to expert_offsets[e + 1]


Dispatched = tf.Tensor | GroupedRows  # x_EGCM: slots of every expert; or rows grouped by expert


@dataclasses.dataclass(frozen=True)
class Dispatcher(abc.ABC):
  """Transport of tokens to their experts, and of the experts' outputs back."""

  routing: Routing

  @abc.abstractmethod
  def dispatch(self, x_GSM: tf.Tensor) -> Dispatched:
    """Tokens of each expert; empty slots hold zeros."""

  @abc.abstractmethod
  def combine(self, y: Dispatched) -> tf.Tensor:
    """Weighted sum y_GSM of the experts' outputs for each token; zeros where it was dropped."""

  def keys(self, keys_GS: tf.Tensor) -> tf.Tensor:
    """Random keys of slots, [E, G, C], or of rows: each depends on its token and expert alone."""
    x_EGC4 = self.dispatch(prng.as_bytes(keys_GS))
    return prng.fold(prng.from_bytes(x_EGC4), tf.range(sizes(x_EGC4)[0])[:, tf.newaxis, tf.newaxis])


def resolve(name: str) -> str:
  """Name of the dispatcher that `name` stands for: 'auto' is the one that the backend in force names.

  A stage of a pipeline dispatches by einsums, as manual regions and sorts cannot be vectorised over stages.
  """
  name = backend.current().dispatcher if name == 'auto' else name
  return 'einsum' if xla_sharding.in_stage() and name in DISPATCHERS else name


def make(name: str, routing: Routing) -> Dispatcher:
  """Dispatcher by name; see `resolve`."""
  return _OF_BACKENDS[resolve(name)](routing)


class EinsumDispatcher(Dispatcher):
  """Dispatch by one-hot masks and einsums: Algorithm 2 of GShard.

  The masks span the flat slot axis X = E * C, not [E, C]: TPUs pad a last axis to 128, and a capacity of 2 or 4
  would grow the masks 32 times or more.
  """

  def _mask_GSX(self, weight_GSR: tf.Tensor) -> tf.Tensor:
    """Weights of each token at its slots."""
    r = self.routing
    if r.every_expert:  # choice r has a slot of expert r
      slot_GSR = tf.where(r.weight_GSR > 0, r.slot_GSR, -1)
      mask_GSRC = tf.one_hot(slot_GSR, r.capacity) * weight_GSR[..., tf.newaxis]
      return shard(tf.reshape(mask_GSRC, [*sizes(slot_GSR)[:2], r.num_experts * r.capacity]), 'GSX')
    slot_GSR = tf.where(r.weight_GSR > 0, r.expert_GSR * r.capacity + r.slot_GSR, -1)  # -1: a row of zeros
    # One choice at a time: a mask of both choices before their sum, [G, S, R, X], would be twice as large.
    slots, ranks = r.num_experts * r.capacity, weight_GSR.shape[-1]
    masks = [tf.one_hot(slot_GSR[:, :, rank], slots) * weight_GSR[:, :, rank, tf.newaxis] for rank in range(ranks)]
    return shard(sum(masks[1:], masks[0]), 'GSX')

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    r = self.routing
    dispatch_GSX = tf.cast(self._mask_GSX(tf.ones_like(r.weight_GSR)), x_GSM.dtype)
    x_GXM = tf.einsum('GSX,GSM->GXM', dispatch_GSX, x_GSM)
    groups, _, model_dim = sizes(x_GSM)
    x_GECM = shard(tf.reshape(x_GXM, [groups, r.num_experts, r.capacity, model_dim]), 'GECM')
    # Between a tensor split on G and the same split on E lies the paper's AllToAll.
    return keep(reshard(tf.einsum('GECM->EGCM', x_GECM), 'EGCM', 'G', 'E'), 'EGCM', 'E')

  def combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    r = self.routing
    _, groups, _, model_dim = sizes(y_EGCM)
    y_GECM = keep(reshard(tf.einsum('EGCM->GECM', y_EGCM), 'GECM', 'E', 'G'), 'GECM', 'G')
    y_GXM = tf.reshape(y_GECM, [groups, r.num_experts * r.capacity, model_dim])
    return tf.einsum('GSX,GXM->GSM', tf.cast(self._mask_GSX(r.weight_GSR), y_EGCM.dtype), y_GXM)


class GatherDispatcher(Dispatcher):
  """Dispatch by gathers: copies rows by index into the slots of the experts, and back.

  There is an index of each choice's slot and one of each slot's choice, so the gradient of a gather by one is a gather
  by the other. On a mesh it works in manual regions (section 3.2 of GShard): each device copies the rows of its own
  groups, and only copied rows are communicated.
  """

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    x_EGCM = self._by_device(GatherDispatcher._dispatch, x_GSM, 'GSM', returns='EGCM')
    return keep(reshard(x_EGCM, 'EGCM', 'G', 'E'), 'EGCM', 'E')

  def combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    y_EGCM = keep(reshard(y_EGCM, 'EGCM', 'E', 'G'), 'EGCM', 'G')
    return self._by_device(GatherDispatcher._combine, y_EGCM, 'EGCM', returns='GSM')

  def _by_device(self, verb: Callable, x: tf.Tensor, dims: str, returns: str) -> tf.Tensor:
    """Runs _dispatch or _combine, on a mesh in a manual region: on each device for its own groups."""
    if xla_sharding.current() is None:
      return verb(self, x)
    decisions = [(x_GSR, 'GSR') for x_GSR in self.routing[:3]]
    of_groups = functools.partial(self._of_groups, verb)
    return xla_sharding.manually(of_groups, (x, dims), *decisions, returns=returns, first='G')

  def _of_groups(self, verb, x, expert_GSR, slot_GSR, weight_GSR):
    """Runs _dispatch or _combine by the decisions for one device's groups."""
    routing = Routing(expert_GSR, slot_GSR, weight_GSR, self.routing.num_experts, self.routing.capacity, stats=None)
    return verb(GatherDispatcher(routing), x)

  def _dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    r = self.routing
    groups, _, model_dim = sizes(x_GSM)
    return tf.reshape(ops.dispatch_rows(x_GSM, self._places), [r.num_experts, groups, r.capacity, model_dim])

  def _combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    y_XM = tf.reshape(y_EGCM, [-1, sizes(y_EGCM)[-1]])
    return ops.combine_rows(y_XM, tf.cast(self.routing.weight_GSR, y_XM.dtype), self._places)

  @functools.cached_property
  def _places(self) -> ops.Places:
    """Flat slot (e, g, c) of each choice, and flat choice (g, s, r) of each slot."""
    r = self.routing
    groups, size, ranks = sizes(r.slot_GSR)
    group_G11 = tf.range(groups)[:, tf.newaxis, tf.newaxis]
    kept_GSR = r.weight_GSR > 0
    row_GSR = tf.where(kept_GSR, (r.expert_GSR * groups + group_G11) * r.capacity + r.slot_GSR, 0)
    num_rows = r.num_experts * groups * r.capacity
    # Choices without a slot are scattered to an extra slot at the end, which is cut off. Choices are counted from 1, so
    # that empty slots read 0.
    address_GSR1 = tf.where(kept_GSR, row_GSR, num_rows)[..., tf.newaxis]
    choice_GSR = tf.reshape(tf.range(1, groups * size * ranks + 1), [groups, size, ranks])
    choice_X = tf.scatter_nd(address_GSR1, choice_GSR, [num_rows + 1])[:num_rows] - 1
    return ops.Places(row_GSR, tf.maximum(choice_X, 0), kept_GSR, choice_X >= 0)


class GroupedDispatcher(Dispatcher):
  """Dropless dispatch: choices sorted by expert, so that each expert gets as many rows as tokens chose it.

  The cost is proportional to the number of choices, however unevenly they are distributed. One more row belongs to no
  expert; its output is zeros, for choices of weight 0. The number of rows of an expert is known only when the program
  runs: under XLA a loop computes blocks of rows, and a mesh cannot have this dispatcher.
  """

  def dispatch(self, x_GSM: tf.Tensor) -> GroupedRows:
    places, expert_offsets = self._places
    return GroupedRows(ops.dispatch_rows(x_GSM, places), expert_offsets)

  def combine(self, y: GroupedRows) -> tf.Tensor:
    return ops.combine_rows(y.x_XM, tf.cast(self.routing.weight_GSR, y.x_XM.dtype), self._places[0])

  def keys(self, keys_GS: tf.Tensor) -> tf.Tensor:
    x_X4, expert_offsets = self.dispatch(prng.as_bytes(keys_GS))
    expert_X = tf.searchsorted(expert_offsets[1:], tf.range(sizes(x_X4)[0]), side='right')
    return prng.fold(prng.from_bytes(x_X4), expert_X)

  @functools.cached_property
  def _places(self) -> tuple[ops.Places, tf.Tensor]:
    """Row of each choice and choice of each row; and the expert offsets."""
    r = self.routing
    if not backend.current().open_shapes:
      return self._static_places()
    # Choices of weight 0 are sorted after the last expert, and cut off.
    expert_GSR = tf.where(r.weight_GSR > 0, r.expert_GSR, r.num_experts)
    by_expert = sort(tf.reshape(expert_GSR, [-1]), r.num_experts)
    num_rows = by_expert.offsets[-1]
    choice_X = tf.concat([by_expert.order[:num_rows], [0]], axis=0)
    row_GSR = tf.minimum(tf.reshape(by_expert.place, sizes(r.expert_GSR)), num_rows)
    return ops.Places(row_GSR, choice_X, None, None), by_expert.offsets

  def _static_places(self) -> tuple[ops.Places, tf.Tensor]:
    """As `_places`, with a row for every choice; those of weight 0 read the last row.

    Rows of an expert are in the order of its queue, group by group: XLA compiles a sort here for a minute.
    """
    r = self.routing
    groups, size, ranks = sizes(r.slot_GSR)
    num_rows, kept_GSR = groups * size * ranks, r.weight_GSR > 0
    slot_GSR, count_GE = ops.queue_positions(r.expert_GSR, kept_GSR, r.num_experts)  # a slot may have weight 0
    expert_offsets = tf.concat([[0], tf.cumsum(tf.reduce_sum(count_GE, axis=0))], axis=0)
    first_GE = expert_offsets[:-1] + tf.cumsum(count_GE, axis=0, exclusive=True)
    place_GSR = tf.gather(first_GE, r.expert_GSR, batch_dims=1) + slot_GSR
    row_GSR = tf.where(kept_GSR, place_GSR, num_rows)
    choice_GSR = tf.reshape(tf.range(num_rows), sizes(r.slot_GSR))
    choice_X = tf.scatter_nd(row_GSR[..., tf.newaxis], choice_GSR, [num_rows + 1])[:num_rows]
    return ops.Places(row_GSR, tf.concat([choice_X, [0]], axis=0), None, None), expert_offsets


class SingleDispatcher(Dispatcher):
  """Dispatch for exports, which compute each expert by a graph of its own: here one expert gets all tokens."""

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    return ops.to_experts(x_GSM, self.routing.expert_GSR, self.routing.weight_GSR)[tf.newaxis]

  def combine(self, y_EGCM: tf.Tensor) -> tf.Tensor:
    return ops.from_experts(y_EGCM[0])


DISPATCHERS = {'einsum': EinsumDispatcher, 'gather': GatherDispatcher, 'grouped': GroupedDispatcher}
_OF_BACKENDS = {**DISPATCHERS, 'single': SingleDispatcher}
