"""A Routing carried out without empty slots: each expert has those of the tokens that chose it, and no others."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.layers.gating import Routing
from lingvo_moe.layers.gradient import custom_gradient
from lingvo_moe.layers.queues import sort


class _Index(NamedTuple):
  """Both directions of 'choice sits in slot', and which slots are whose: int32."""

  choice_X: tf.Tensor  # each slot's flat choice (g, s, r)
  slot_GSR: tf.Tensor  # each choice's slot; the last where its weight is 0
  begin_E: tf.Tensor


@dataclasses.dataclass(frozen=True)
class RaggedDispatcher:
  """Sorts the choices by expert: X are the slots of all experts, each with as many as it was chosen, one after the other.

  One more slot is no expert's: its answer is zeros, for choices of weight 0. What experts answer costs in proportion to
  the choices, however unevenly they fall. How many slots an expert has is known when it runs, not when it is traced: neither XLA
  nor a mesh can have it so.
  """

  routing: Routing

  @property
  def begin_E(self) -> tf.Tensor:
    """int32: where the slots of expert e begin; as those of e - 1 end there, it has E + 1 entries."""
    return self._index.begin_E

  def dispatch(self, x_GSM: tf.Tensor) -> tf.Tensor:
    """x_XM: the token of each slot, and in the last one some token. The gradient of that one must be zeros."""
    token_X, slots = self._token_X, self._slots

    @custom_gradient
    def copy(x_GSM):
      def grad(dx_XM):
        return tf.add_n([tf.gather(dx_XM, slot_GS) for slot_GS in slots])

      return tf.gather(_rows(x_GSM), token_X), grad

    return copy(x_GSM)

  def combine(self, y_XM: tf.Tensor) -> tf.Tensor:
    """y_GSM: each token's answers, summed with its weights; zeros where it has none.

    The gradient for the last row of y_XM, which no expert answers, means nothing.
    """
    choice_X, token_X, slots = self._index.choice_X, self._token_X, self._slots

    # Choice by choice: for the few tokens of a decoding step an einsum over R takes four times as long.
    @custom_gradient
    def weigh(y_XM, weight_GSR):
      rows = [tf.gather(y_XM, slot_GS) for slot_GS in slots]

      def grad(dy_GSM):
        weight_X = tf.gather(tf.reshape(weight_GSR, [-1]), choice_X)
        dweights = [tf.reduce_sum(rows_GSM * dy_GSM, axis=-1) for rows_GSM in rows]
        return tf.gather(_rows(dy_GSM), token_X) * weight_X[:, tf.newaxis], tf.stack(dweights, axis=-1)

      weights = tf.unstack(weight_GSR, num=len(rows), axis=-1)
      return tf.add_n([rows_GSM * w_GS[..., tf.newaxis] for rows_GSM, w_GS in zip(rows, weights)]), grad

    return weigh(y_XM, tf.cast(self.routing.weight_GSR, y_XM.dtype))

  @functools.cached_property
  def _token_X(self):
    """Each slot's flat token (g, s)."""
    return self._index.choice_X // self.routing.expert_GSR.shape[-1]

  @functools.cached_property
  def _slots(self):
    """The slots of all tokens' first choices, second choices, ...: [G, S] each."""
    return tf.unstack(self._index.slot_GSR, num=self.routing.expert_GSR.shape[-1], axis=-1)

  @functools.cached_property
  def _index(self) -> _Index:
    r = self.routing
    # Choices of weight 0 are sorted behind the last expert, where they are cut off.
    expert_GSR = tf.where(r.weight_GSR > 0, r.expert_GSR, r.num_experts)
    by_expert = sort(tf.reshape(expert_GSR, [-1]), r.num_experts)
    taken = by_expert.begin[-1]
    return _Index(
      choice_X=tf.concat([by_expert.order[:taken], [0]], axis=0),
      slot_GSR=tf.minimum(tf.reshape(by_expert.place, sizes(r.expert_GSR)), taken),
      begin_E=by_expert.begin,
    )


def _rows(x_GSM):
  return tf.reshape(x_GSM, [-1, sizes(x_GSM)[-1]])
