"""The mixture-of-experts layer: gate, dispatch, experts, combine (GShard, section 2.2)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe import prng
from lingvo_moe.layers import dispatch
from lingvo_moe.layers import gating
from lingvo_moe.weights import WeightSpec
from lingvo_moe.weights import fan_in_uniform


@dataclasses.dataclass(frozen=True)
class MoE:
  """E feed-forward experts of which each token visits two.

  In training a token competes for slots with the other tokens of its group: `num_groups` divides the rows of the
  batch, and a group is whole rows. At inference (no random key) nothing is dropped or skipped, so a token's answer
  depends on that token alone.

  Experts carry no biases, as in equations 2 and 3 of the paper.
  """

  model_dim: int
  hidden_dim: int
  num_experts: int
  num_groups: int = 1
  capacity_factor: float = 2.0
  dispatch: str = 'gather'

  def weights(self) -> dict:
    e, m, h = self.num_experts, self.model_dim, self.hidden_dim
    return {
      'gate': WeightSpec((m, e), 'ME', fan_in_uniform(m, e), factored='ME'),
      'wi': WeightSpec((e, m, h), 'EMH', fan_in_uniform(m, h), factored='MH'),
      'wo': WeightSpec((e, h, m), 'EHM', fan_in_uniform(h, m), factored='HM'),
    }

  def __call__(self, theta, x_BTM, paddings_BT, key=None) -> tuple[tf.Tensor, gating.RoutingStats]:
    """Returns ([B, T, M], what became of the choices); key None means inference."""
    rows, length = tf.shape(x_BTM)[0], tf.shape(x_BTM)[1]
    groups = self.num_groups if key is not None else 1
    regroup = lambda x: tf.reshape(x, [groups, rows // groups * length, *x.shape[2:]])
    x_GSM = regroup(x_BTM)
    logits_GSE = tf.einsum('GSM,ME->GSE', tf.cast(x_GSM, tf.float32), tf.cast(theta['gate'], tf.float32))
    if key is None:
      routing = gating.top2_gating(logits_GSE, regroup(paddings_BT))
      dispatcher = dispatch.GatherDispatcher(routing)
    else:
      capacity = gating.expert_capacity(rows // groups * length, self.num_experts, self.capacity_factor)
      noise_GS = regroup(prng.uniform(key, [rows, length]))
      routing = gating.top2_gating(logits_GSE, regroup(paddings_BT), capacity=capacity, noise_GS=noise_GS)
      dispatcher = dispatch.DISPATCHERS[self.dispatch](routing)
    x_EGCM = dispatcher.dispatch(x_GSM)
    h_EGCH = tf.nn.relu(tf.einsum('EGCM,EMH->EGCH', x_EGCM, theta['wi']))
    y_EGCM = tf.einsum('EGCH,EHM->EGCM', h_EGCH, theta['wo'])
    y_GSM = dispatcher.combine(y_EGCM)
    return tf.reshape(y_GSM, tf.shape(x_BTM)), routing.stats
