"""Mixture-of-experts layer: gate, dispatch, experts, combine (GShard, section 2.2)."""

import dataclasses
import functools

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers import dispatch
from lingvo_moe.layers.experts import EXPERTS, Experts
from lingvo_moe.layers.ffn import ACTIVATIONS, FeedForward
from lingvo_moe.layers.gates.gate import Gate
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.remat import unkept
from lingvo_moe.xla_sharding import shard

_TOP2 = Top2()


@dataclasses.dataclass(frozen=True)
class MoE:
  """Mixture of E experts, of which a gate chooses some for each token.

  In training a token competes for slots with the other tokens of its group: `num_groups` divides the rows of the
  batch, and a group is whole rows. At inference (no random key) nothing is dropped or skipped, so the output for
  a token depends on that token alone, and groups and dispatchers change only the cost. Where shapes are static, a
  layer that drops nothing empties the queues of its experts in rounds of a fixed number of slots (ops.sum_over_rounds).
  If experts choose tokens, a group at inference is one row.
  """

  model_dim: int  # M
  hidden_dim: int  # H of an expert
  num_experts: int  # E
  num_groups: int = 1  # G
  # C = capacity_factor * S / E in training; None: nothing is dropped in training either ('dropless', as in MegaBlocks,
  # Gale et al., arXiv 2211.15841)
  capacity_factor: float | None = 2.0
  dispatch: str = 'auto'  # or a name of dispatch.DISPATCHERS
  round_capacity_factor: float = 2.0  # slots of a round = round_capacity_factor * S / E
  gate: Gate = _TOP2  # chooses the experts of each token
  # kind of the experts, a name of experts.EXPERTS; or a function of (M, H, E, dropout) that returns Experts
  expert: str | functools.partial = 'relu'
  expert_dropout: float = 0.0  # dropout of the hidden layer of experts, shared ones too
  expert_bias: bool = False  # whether experts have biases
  expert_output_scale: float = 1.0  # factor of the output of chosen experts
  # share of tokens that get no output of chosen experts in training, while the others are scaled up to the same mean
  # (expert output masking, NLLB Team, arXiv 2207.04672, section 6.2). Shared experts are not.
  output_masking: float = 0.0
  # number of experts that every token visits beside the chosen ones, as one dense feed-forward of so many times H
  # (DeepSeekMoE, Dai et al., arXiv 2401.06066)
  shared_experts: int = 0
  capacity_chunks: int = 1  # parts of the slots that are dispatched, computed and combined independently in training
  # training multiplies each feature that the gate reads by a random factor, uniform from 1 - router_jitter to
  # 1 + router_jitter (Switch Transformers)
  router_jitter: float = 0.0
  router_dtype: str = 'float32'  # type of the gate's products

  def __post_init__(self):
    self.gate.check(self.num_experts)

  @property
  def experts(self) -> Experts:
    make = EXPERTS[self.expert] if isinstance(self.expert, str) else self.expert
    bias = {'bias': True} if self.expert_bias else {}
    return make(self.model_dim, self.hidden_dim, self.num_experts, self.expert_dropout, **bias)

  @property
  def shared(self) -> FeedForward | None:
    """Dense feed-forward of the shared experts."""
    if not self.shared_experts:
      return None
    activation = self.expert if self.expert in ACTIVATIONS else 'relu'
    return FeedForward(
      self.model_dim, self.shared_experts * self.hidden_dim, self.expert_dropout, activation=activation, bias=False
    )

  def weights(self) -> Specs:
    shared = {'shared': self.shared.weights()} if self.shared else {}
    return {**self.gate.weights(self.model_dim, self.num_experts), **self.experts.weights(), **shared}

  def __call__(
    self, theta: Theta, x_BTM: tf.Tensor, paddings_BT: tf.Tensor, key: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, Routing]:
    """Sends each token to its experts and sums their outputs, weighted by the gate.

    Args:
      x_BTM: tokens.
      paddings_BT: 1.0 at padding, which is sent to no expert.
      key: random key in training, for the gate and for dropout; None at inference.

    Returns:
      ([B, T, M] of x's type; the Routing). Where a token is padding or found no room, there are zeros, or the output of
      shared experts alone.

    Raises:
      ValueError: in training, B is static and num_groups does not divide it.
    """
    rows, length = sizes(x_BTM)[:2]
    groups = self._groups(rows, training=key is not None)
    grouped = lambda x_BT: tf.reshape(x_BT, [groups, rows // groups * length, *x_BT.shape[2:]])  # [G, S, ...]
    keys = lambda key: None if key is None else grouped(prng.bits(key, [rows, length]))
    x_GSM = shard(grouped(x_BTM), 'GSM')
    slots_for = lambda factor: self.gate.capacity(sizes(x_GSM)[1], self.num_experts, factor)
    dropless = key is None or self.capacity_factor is None
    with tf.name_scope('gating'):
      capacity = None if dropless else slots_for(self.capacity_factor)
      seen_GSM = tf.cast(x_GSM, tf.float32)
      if key is not None and self.router_jitter:
        jitter_GSM = 2 * prng.uniform(keys(prng.fold(key, 'jitter')), sizes(x_GSM)) - 1
        seen_GSM *= 1 + self.router_jitter * jitter_GSM
      routing = self.gate(theta, tf.cast(seen_GSM, self.router_dtype), grouped(paddings_BT), keys(key), capacity)
    keys_GS = keys(prng.fold(key, 'experts')) if self.expert_dropout else None

    def through_experts(x_GSM, theta, routing):
      dispatcher = dispatch.make(self.dispatch, routing)
      with tf.name_scope('dispatch'):
        tokens = dispatcher.dispatch(x_GSM)
        token_keys = None if keys_GS is None else dispatcher.dispatch(prng.as_bytes(keys_GS))
      outputs = self.experts.apply(theta, tokens, token_keys)
      with tf.name_scope('combine'):
        return shard(dispatcher.combine(outputs), 'GSM')

    experts = {name: theta[name] for name in self.experts.weights()}
    # Without slots nothing is dropped, and no rounds are needed.
    if dropless and not routing.every_expert and dispatch.resolve(self.dispatch) != 'grouped':
      slots = slots_for(self.round_capacity_factor)
      y_GSM, rounds = ops.sum_over_rounds(unkept(through_experts), x_GSM, experts, routing, slots)
      routing = routing._replace(stats=routing.stats._replace(rounds=rounds))
    else:
      chunks = routing.chunks(1 if key is None else self.capacity_chunks)
      y_GSM = tf.add_n([through_experts(x_GSM, experts, chunk) for chunk in chunks])
    y_BTM = shard(tf.reshape(y_GSM, sizes(x_BTM)), 'BTM')
    if key is not None and self.output_masking:
      keep_BT = prng.dropout(tf.ones(sizes(y_BTM)[:2], y_BTM.dtype), self.output_masking, prng.fold(key, 'output'))
      y_BTM *= keep_BT[..., tf.newaxis]
    if self.expert_output_scale != 1:
      y_BTM *= self.expert_output_scale
    if self.shared:
      y_BTM += self.shared(theta['shared'], x_BTM, prng.fold(key, 'shared'))
    return y_BTM, routing

  def _groups(self, rows: Size, training: bool) -> Size:
    """Number of groups: num_groups; at inference 1, unless num_groups divides a static B (shards then stay in place).

    Where experts choose tokens, B at inference: a row's output then does not depend on other rows.
    """
    if self.gate.experts_choose and not training:
      return rows
    divides = isinstance(rows, int) and rows % self.num_groups == 0
    if training and isinstance(rows, int) and not divides:
      raise ValueError(
        f'num_groups={self.num_groups} must divide the rows of a batch, which has {rows}: '
        'batch a multiple of it, or lower num_groups'
      )
    return self.num_groups if training or divides else 1
