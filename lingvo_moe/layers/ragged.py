"""A Routing carried out without empty slots: each expert is asked about the tokens that chose it, idle ones not at all."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.layers.gating import Routing
from lingvo_moe.layers.queues import sort
from lingvo_moe.shapes import sizes

Expert = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]  # (int32 scalar e, x_CM) -> y_CM


class _Index(NamedTuple):
  """Both directions of 'choice sits in slot', and which slots are whose: int32."""

  token_X: tf.Tensor  # each slot's flat token (g, s)
  slot_GSR: tf.Tensor  # each choice's slot; one behind the last where its weight is 0
  begin_E: tf.Tensor  # where the slots of expert e begin; as those of e - 1 end there, it has E + 1 entries
  busy_J: tf.Tensor  # the experts that have slots


@dataclasses.dataclass(frozen=True)
class RaggedDispatcher:
  """Sorts the choices by expert: X are the slots of all experts, each with as many as it was chosen, one after the other.

  Work is in proportion to the choices, however unevenly they fall on the experts. How many slots an expert has is known
  when it runs, not when it is traced: neither XLA nor a mesh can have it so.
  """

  routing: Routing

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    """x_XM: the token of each slot."""
    return tf.gather(tf.reshape(x_GSM, [-1, sizes(x_GSM)[-1]]), self._index.token_X)

  def visit(self, expert: Expert, x_XM: tf.Tensor) -> tf.Tensor:
    """y_XM: the answers of every expert that has slots, and a last row of zeros."""
    begin_E, busy_J = self._index.begin_E, self._index.busy_J
    num_busy = tf.size(busy_J)

    def ask(i, y_JCM):
      e = tf.gather(busy_J, i)
      x_CM = x_XM[tf.gather(begin_E, e) : tf.gather(begin_E, e + 1)]
      return i + 1, y_JCM.write(i, expert(e, x_CM))

    model_dim = x_XM.shape[-1]
    y_JCM = tf.TensorArray(x_XM.dtype, num_busy + 1, infer_shape=False, element_shape=[None, model_dim])
    y_JCM = y_JCM.write(num_busy, tf.zeros([1, model_dim], x_XM.dtype))
    # No expert waits for another: several are asked at once.
    _, y_JCM = tf.while_loop(lambda i, _: i < num_busy, ask, (0, y_JCM))
    return y_JCM.concat()

  def combine(self, y_XM: tf.Tensor) -> tf.Tensor:
    """y_GSM: each token's answers, summed with its weights; zeros where it has none."""
    slot_GSR, weight_GSR = self._index.slot_GSR, tf.cast(self.routing.weight_GSR, y_XM.dtype)
    # Choice by choice: for the few tokens of a decoding step an einsum over R takes four times as long.
    of = lambda rank: tf.gather(y_XM, slot_GSR[:, :, rank]) * weight_GSR[:, :, rank, tf.newaxis]
    return of(0) + of(1)

  @functools.cached_property
  def _index(self) -> _Index:
    r = self.routing
    groups, size, ranks = sizes(r.expert_GSR)
    # Choices of weight 0 are sorted behind the last expert, where they are cut off.
    expert_GSR = tf.where(r.weight_GSR > 0, r.expert_GSR, r.num_experts)
    by_expert = sort(tf.reshape(expert_GSR, [-1]), r.num_experts)
    begin_E = by_expert.begin
    num_slots = begin_E[-1]
    return _Index(
      token_X=by_expert.order[:num_slots] // ranks,
      slot_GSR=tf.minimum(tf.reshape(by_expert.place, [groups, size, ranks]), num_slots),
      begin_E=begin_E,
      busy_J=tf.cast(tf.where(begin_E[1:] > begin_E[:-1])[:, 0], tf.int32),
    )
