"""The mixture-of-experts layer: gate, dispatch, experts, combine (GShard, section 2.2)."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import is_static
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.core.weights import glorot_uniform
from lingvo_moe.layers import dispatch
from lingvo_moe.layers import experts
from lingvo_moe.layers import gating
from lingvo_moe.layers.linear import product
from lingvo_moe.layers.ragged import RaggedDispatcher
from lingvo_moe.ops import cores
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class MoE:
  """E feed-forward experts of which each token visits two.

  In training a token competes for slots with the other tokens of its group: `num_groups` divides the rows of the
  batch, and a group is whole rows. At inference (no random key) nothing is dropped or skipped, so a token's answer
  depends on that token alone, and how tokens are grouped and carried is a matter of cost.

  An expert computes all of its slots, full or not, where shapes are static, as XLA asks (at inference with C = S). Where
  they are not it computes those of its own tokens (see experts.py): always at inference; in training with 'gather' on a CPU.
  The answers are the same to rounding.

  Experts carry no biases, as in equations 2 and 3 of the paper.
  """

  model_dim: int
  hidden_dim: int
  num_experts: int
  num_groups: int = 1
  capacity_factor: float = 2.0
  dispatch: str = 'gather'

  def weights(self) -> Specs:
    e, m, h = self.num_experts, self.model_dim, self.hidden_dim
    return {
      # Its columns are candidates, J: every token asks them all, so no device may do with those of its own experts.
      'gate': WeightSpec((m, e), 'MJ', glorot_uniform(m, e), factored='MJ'),
      'wi': WeightSpec((e, m, h), 'EMH', glorot_uniform(m, h), factored='MH'),
      'wo': WeightSpec((e, h, m), 'EHM', glorot_uniform(h, m), factored='HM'),
    }

  def __call__(
    self, theta: Theta, x_BTM: tf.Tensor, paddings_BT: tf.Tensor, key: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, gating.Routing]:
    """Sends each token through two experts and sums their answers, weighted by the gate.

    Args:
      theta: gate [M, E], wi [E, M, H], wo [E, H, M].
      x_BTM: tokens. The gate sees them in float32.
      paddings_BT: 1.0 at padding, which visits no expert.
      key: random key, by which second choices are skipped in training; None at inference.

    Returns:
      ([B, T, M] of x's type, zeros where a token is padding or found no room; the Routing).

    Raises:
      ValueError: in training, B is static and num_groups does not divide it.
    """
    rows, length, _ = sizes(x_BTM)
    groups = self._groups(rows, length, key is not None)
    regroup = lambda x: tf.reshape(x, [groups, rows // groups * length, *x.shape[2:]])
    x_GSM = shard(regroup(x_BTM), 'GSM')
    with tf.name_scope('gating'):
      logits_GSE = product('GSM,ME->GSE', tf.cast(x_GSM, tf.float32), tf.cast(theta['gate'], tf.float32))
      capacity = noise_GS = None
      if key is not None:
        capacity = gating.expert_capacity(rows // groups * length, self.num_experts, self.capacity_factor)
        noise_GS = regroup(prng.uniform(key, [rows, length]))
      logits_GSE = shard(logits_GSE, 'GSE')
      routing = gating.top2_gating(logits_GSE, regroup(paddings_BT), capacity=capacity, noise_GS=noise_GS)
    training = key is not None
    if is_static(rows, length) or (training and not self._trains_in_rows):
      y_GSM = self._in_slots(theta, x_GSM, routing)
    else:
      y_GSM = self._in_rows(theta, x_GSM, routing, training)
    return shard(tf.reshape(y_GSM, sizes(x_BTM)), 'BTM'), routing

  def _in_slots(self, theta: Theta, x_GSM: tf.Tensor, routing: gating.Routing) -> tf.Tensor:
    """Every expert at once, on C slots of each group, full or not."""
    dispatcher = dispatch.DISPATCHERS[self.dispatch](routing)
    # Between a tensor split on G and the same split on E lies the paper's AllToAll.
    with tf.name_scope('dispatch'):
      x_EGCM = shard(dispatcher.dispatch(x_GSM), 'EGCM')
    h_EGCH = tf.nn.relu(shard(product('EGCM,EMH->EGCH', x_EGCM, theta['wi']), 'EGCH'))
    y_EGCM = shard(product('EGCH,EHM->EGCM', h_EGCH, theta['wo']), 'EGCM')
    with tf.name_scope('combine'):
      return shard(dispatcher.combine(y_EGCM), 'GSM')

  def _in_rows(self, theta: Theta, x_GSM: tf.Tensor, routing: gating.Routing, training: bool) -> tf.Tensor:
    """Each expert on the rows of its own tokens."""
    dispatcher = RaggedDispatcher(routing)
    with tf.name_scope('dispatch'):
      x_XM = dispatcher.dispatch(x_GSM)
    answers = experts.trained_answers if training else experts.answers
    y_XM = answers(x_XM, dispatcher.begin_E, theta['wi'], theta['wo'])
    with tf.name_scope('combine'):
      return dispatcher.combine(y_XM)

  @property
  def _trains_in_rows(self) -> bool:
    """Whether training in open shapes is by rows. On a GPU the host would have to be told how many there are."""
    return self.dispatch == 'gather' and cores.on_cpu()

  def _groups(self, rows: Size, length: Size, training: bool) -> int:
    """G. At inference any will do: num_groups, so that shards stay where they are, if it divides the rows."""
    divides = is_static(rows) and rows % self.num_groups == 0
    if not training:
      return self.num_groups if divides and is_static(length) else 1
    if is_static(rows) and not divides:
      raise ValueError(
        f'num_groups={self.num_groups} must divide the rows of a batch, which has {rows}: '
        'batch a multiple of it, or lower num_groups'
      )
    return self.num_groups
