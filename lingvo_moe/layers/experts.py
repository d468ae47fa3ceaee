"""Experts: E feed-forward networks, each on the tokens dispatched to it (GShard, equations 2 and 3)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.core.weights import glorot_uniform
from lingvo_moe.layers.dispatch import Dispatched
from lingvo_moe.layers.dispatch import GroupedRows
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class Experts:
  """Expert feed-forward relu(x wi) wo, without biases, as in the paper."""

  model_dim: int
  hidden_dim: int
  num_experts: int

  def weights(self) -> Specs:
    e, m, h = self.num_experts, self.model_dim, self.hidden_dim
    return {
      'wi': WeightSpec((e, m, h), 'EMH', glorot_uniform(m, h), factored='MH'),
      'wo': WeightSpec((e, h, m), 'EHM', glorot_uniform(h, m), factored='HM'),
    }

  def __call__(self, theta: Theta, x: Dispatched) -> Dispatched:
    """Outputs in the form of the input: every slot of every expert, full or not, or grouped rows."""
    if isinstance(x, GroupedRows):
      return x._replace(x_XM=ops.grouped_ffn(x.x_XM, x.expert_offsets, theta['wi'], theta['wo']))
    h_EGCH = tf.nn.relu(shard(ops.product('EGCM,EMH->EGCH', x, theta['wi']), 'EGCH'))
    return shard(ops.product('EGCH,EHM->EGCM', h_EGCH, theta['wo']), 'EGCM')
