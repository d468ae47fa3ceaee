"""Experts: E feed-forward networks, each on the tokens dispatched to it (GShard, equations 2 and 3)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.core.weights import glorot_uniform
from lingvo_moe.layers.dispatch import Dispatched
from lingvo_moe.layers.dispatch import GroupedRows
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class Experts:
  """Expert feed-forward relu(x wi) wo, without biases, as in the paper.

  `dropout` after the ReLU is the expert dropout of Switch Transformers (Fedus et al., 2021, section 2.4).
  """

  model_dim: int
  hidden_dim: int
  num_experts: int
  dropout: float = 0.0

  def weights(self) -> Specs:
    e, m, h = self.num_experts, self.model_dim, self.hidden_dim
    return {
      'wi': WeightSpec((e, m, h), 'EMH', glorot_uniform(m, h), factored='MH'),
      'wo': WeightSpec((e, h, m), 'EHM', glorot_uniform(h, m), factored='HM'),
    }

  def __call__(self, theta: Theta, x: Dispatched, keys: Dispatched | None = None) -> Dispatched:
    """Outputs in the form of the input: every slot of every expert, full or not, or grouped rows.

    Args:
      theta: wi [E, M, H], wo [E, H, M].
      x: tokens of each expert.
      keys: random keys of the tokens as prng.as_bytes, dispatched as x is, for dropout; None: no dropout.
    """
    if isinstance(x, GroupedRows):
      keep_XH = None if keys is None else self._keep_rows(keys)
      return x._replace(x_XM=ops.grouped_ffn(x.x_XM, x.expert_offsets, theta['wi'], theta['wo'], keep_XH))
    h_EGCH = tf.nn.relu(shard(ops.product('EGCM,EMH->EGCH', x, theta['wi']), 'EGCH'))
    if keys is not None:
      expert_E11 = tf.range(self.num_experts)[:, tf.newaxis, tf.newaxis]
      h_EGCH = prng.dropout(h_EGCH, self.dropout, prng.fold(prng.from_bytes(keys), expert_E11))
    return shard(ops.product('EGCH,EHM->EGCM', h_EGCH, theta['wo']), 'EGCM')

  def _keep_rows(self, keys: GroupedRows) -> tf.Tensor:
    """Dropout masks of the hidden layer of grouped rows, scaled; those that the same tokens have in slots."""
    rows = tf.range(sizes(keys.x_XM)[0])
    expert_X = tf.searchsorted(keys.expert_offsets[1:], rows, side='right')
    key_X = prng.fold(prng.from_bytes(keys.x_XM), expert_X)
    return prng.dropout(tf.ones([sizes(rows)[0], self.hidden_dim]), self.dropout, key_X)
