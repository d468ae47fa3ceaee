"""Mixture-of-experts layer: gate, dispatch, experts, combine (GShard, section 2.2)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.core.weights import glorot_uniform
from lingvo_moe.layers import dispatch
from lingvo_moe.layers.experts import Experts
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.gates.top2 import expert_capacity
from lingvo_moe.layers.gates.top2 import top2_gating
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class MoE:
  """Mixture of E feed-forward experts, of which each token is sent to two.

  In training a token competes for slots with the other tokens of its group: `num_groups` divides the rows of the
  batch, and a group is whole rows. At inference (no random key) nothing is dropped or skipped, so the output for
  a token depends on that token alone, and groups and dispatchers change only the cost.

  Attributes:
    model_dim: M.
    hidden_dim: H of an expert.
    num_experts: E.
    num_groups: G.
    capacity_factor: C = capacity_factor * S / E in training.
    dispatch: a name of dispatch.DISPATCHERS, or 'auto'.
  """

  model_dim: int
  hidden_dim: int
  num_experts: int
  num_groups: int = 1
  capacity_factor: float = 2.0
  dispatch: str = 'auto'

  @property
  def experts(self) -> Experts:
    return Experts(self.model_dim, self.hidden_dim, self.num_experts)

  def weights(self) -> Specs:
    m, e = self.model_dim, self.num_experts
    # The gate's columns are candidates, axis J: every token needs all of them, so they are not split like the experts, E.
    return {'gate': WeightSpec((m, e), 'MJ', glorot_uniform(m, e), factored='MJ'), **self.experts.weights()}

  def __call__(
    self, theta: Theta, x_BTM: tf.Tensor, paddings_BT: tf.Tensor, key: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, Routing]:
    """Sends each token to two experts and sums their outputs, weighted by the gate.

    Args:
      theta: gate [M, E], wi [E, M, H], wo [E, H, M].
      x_BTM: tokens. The gate is computed in float32.
      paddings_BT: 1.0 at padding, which is sent to no expert.
      key: random key in training, for skipping second choices; None at inference.

    Returns:
      ([B, T, M] of x's type, zeros where a token is padding or found no room; the Routing).

    Raises:
      ValueError: in training, B is static and num_groups does not divide it.
    """
    groups = self._groups(sizes(x_BTM)[0], training=key is not None)
    x_GSM = shard(_grouped(x_BTM, groups), 'GSM')
    with tf.name_scope('gating'):
      logits_GSE = ops.product('GSM,ME->GSE', tf.cast(x_GSM, tf.float32), tf.cast(theta['gate'], tf.float32))
      capacity = noise_GS = None
      if key is not None:
        capacity = expert_capacity(sizes(x_GSM)[1], self.num_experts, self.capacity_factor)
        noise_GS = _grouped(prng.uniform(key, sizes(x_BTM)[:2]), groups)
      paddings_GS = _grouped(paddings_BT, groups)
      routing = top2_gating(shard(logits_GSE, 'GSE'), paddings_GS, capacity=capacity, noise_GS=noise_GS)
    dispatcher = dispatch.make(self.dispatch, routing)
    with tf.name_scope('dispatch'):
      tokens = dispatcher.dispatch(x_GSM)
    outputs = self.experts(theta, tokens)
    with tf.name_scope('combine'):
      y_GSM = shard(dispatcher.combine(outputs), 'GSM')
    return shard(tf.reshape(y_GSM, sizes(x_BTM)), 'BTM'), routing

  def _groups(self, rows: Size, training: bool) -> int:
    """Number of groups: num_groups; at inference 1, unless num_groups divides a static B (shards then stay in place)."""
    divides = isinstance(rows, int) and rows % self.num_groups == 0
    if training and isinstance(rows, int) and not divides:
      raise ValueError(
        f'num_groups={self.num_groups} must divide the rows of a batch, which has {rows}: '
        'batch a multiple of it, or lower num_groups'
      )
    return self.num_groups if training or divides else 1


def _grouped(x_BT: tf.Tensor, groups: int) -> tf.Tensor:
  """Reshapes [B, T, ...] to [G, S, ...]; a group is whole rows."""
  rows, length = sizes(x_BT)[:2]
  return tf.reshape(x_BT, [groups, rows // groups * length, *x_BT.shape[2:]])
