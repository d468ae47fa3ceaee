"""Routing: decision of a gate, for each token and choice, whole or in parts: rounds and chunks."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import tensorflow as tf

from lingvo_moe.core.shapes import Size
from lingvo_moe.xla_sharding import shard


class RoutingStats(NamedTuple):
  """Statistics of routing: float32 sums over all groups, scalars unless axes are given; they add up over batches."""

  # The gate's balance loss of each group, summed; for top-2 1.0 a group at perfect balance. [2 E] if it is made from
  # sums over a batch; see gate.balance_loss.
  aux_loss: tf.Tensor
  groups: tf.Tensor  # groups that hold a token
  tokens: tf.Tensor  # tokens that are not padding
  # Choices of each rank without room; [1] where choices have no rank: tokens that visit no expert.
  dropped_R: tf.Tensor
  skipped: tf.Tensor  # choices skipped at random
  tokens_E: tf.Tensor  # choices with a slot, of each expert
  entropy: tf.Tensor  # of the softmax of the gate, summed over tokens, in nats; log(E) a token if uniform
  z_loss: tf.Tensor  # router z-loss: square of log sum exp of the logits, summed over tokens
  # Passes over the experts, summed over micro-batches: 1, or under XLA the rounds that it takes to drop no choice.
  rounds: tf.Tensor

  @classmethod
  def joined(cls, parts: Sequence[Self]) -> Self:
    """Statistics of a batch from those of parts of its groups, which are computed at once."""
    sums = cls(*map(tf.add_n, zip(*parts)))
    return sums._replace(rounds=tf.reduce_max([part.rounds for part in parts]))


class Decisions(NamedTuple):
  """Decisions for each token and their margins; axes and values as in Routing."""

  expert_GSR: tf.Tensor
  weight_GSR: tf.Tensor
  margin_GS: tf.Tensor

  @classmethod
  def joined(cls, parts: Sequence[Self]) -> Self:
    """Decisions for a batch from those for parts of its groups, in order."""
    return cls(*(tf.concat(x, axis=0) for x in zip(*parts)))


class Routed(NamedTuple):
  """Statistics and decisions of the gate of one layer."""

  stats: RoutingStats
  decisions: Decisions

  def of_parts(self) -> Self:
    """Routed of layers [L, ...], joined from parts of their groups [L, D, ...]; it is not split over stages."""
    stats = RoutingStats(*(tf.reduce_sum(x, axis=1) for x in self.stats))
    stats = stats._replace(rounds=tf.reduce_max(self.stats.rounds, axis=1))
    merged = (tf.reshape(x, [x.shape[0], -1, *x.shape[3:]]) for x in self.decisions)
    return Routed(
      RoutingStats(*(shard(x, 'LJ'[: x.shape.rank]) for x in stats)),
      Decisions(*(shard(x, 'LGSR'[: x.shape.rank]) for x in merged)),
    )


class Routing(NamedTuple):
  """Decision of a gate: expert, slot and weight of each token's choices."""

  expert_GSR: tf.Tensor  # int32
  slot_GSR: tf.Tensor  # int32; valid where weight_GSR > 0
  weight_GSR: tf.Tensor  # float32; 0 where the token is padding, was skipped or found no room
  num_experts: int
  capacity: Size  # C, slots of an expert for each group
  stats: RoutingStats | None  # None: not counted
  margin_GS: tf.Tensor | None = None  # float32; difference in probability of the token's closest decision, in its level
  every_expert: bool = False  # whether R = E and choice r is of expert r

  @property
  def routed(self) -> Routed:
    """Statistics and decisions, which leave the layer."""
    return Routed(self.stats, Decisions(self.expert_GSR, self.weight_GSR, self.margin_GS))

  def round(self, number: int | tf.Tensor, slots: Size) -> Self:
    """Routing of the choices at slots number * slots up to (number + 1) * slots alone, which get slots from 0 on."""
    within_GSR = tf.cast(self.slot_GSR // slots == number, self.weight_GSR.dtype)
    return self._replace(weight_GSR=self.weight_GSR * within_GSR, slot_GSR=self.slot_GSR % slots, capacity=slots)

  def chunks(self, count: int) -> list[Self]:
    """Rounds of equal parts of the capacity, which is rounded up to a multiple of `count`.

    Outputs of chunks do not depend on each other, so while experts compute one, the network can carry the AllToAlls of
    others (Tutel, Hwang et al., arXiv 2206.03382: adaptive pipelining). Whether it does is the compiler's choice.
    """
    if count == 1:
      return [self]
    slots = (self.capacity + count - 1) // count
    return [self.round(number, slots) for number in range(count)]
