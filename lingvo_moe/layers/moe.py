"""Mixture-of-experts layer: gate, dispatch, experts, combine (GShard, section 2.2)."""

from __future__ import annotations

import dataclasses
import functools

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.core.weights import Uniform
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.core.weights import glorot_uniform
from lingvo_moe.layers import dispatch
from lingvo_moe.layers.chunks import serve_in_chunks
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
  a token depends on that token alone, and groups and dispatchers change only the cost. Where shapes are static, a
  layer that drops nothing serves the queues of its experts in rounds of a fixed number of slots (ops.serve_all).

  Attributes:
    model_dim: M.
    hidden_dim: H of an expert.
    num_experts: E.
    num_groups: G.
    capacity_factor: C = capacity_factor * S / E in training; None: nothing is dropped in training either ('dropless',
      as in MegaBlocks, Gale et al., arXiv 2211.15841).
    capacity_chunks: parts of the slots that are dispatched, computed and combined independently in training (chunks.py).
    round_capacity_factor: slots of a round = round_capacity_factor * S / E.
    second_choice: in training, 'random' takes a second choice with probability 2 * gate, as the paper does; 'always'.
    gate_scale: factor of the gate's initial weights (Switch Transformers, section 2.4, has 0.1 for all its weights).
    expert_dropout: dropout of the experts' hidden layer.
    output_masking: share of tokens that get no output of experts in training, while the others get 1 / (1 - share)
      times theirs (expert output masking, NLLB Team, arXiv 2207.04672, section 6.2).
    dispatch: a name of dispatch.DISPATCHERS, or 'auto'.
  """

  model_dim: int
  hidden_dim: int
  num_experts: int
  num_groups: int = 1
  capacity_factor: float | None = 2.0
  dispatch: str = 'auto'
  round_capacity_factor: float = 2.0
  second_choice: str = 'random'
  gate_scale: float = 1.0
  expert_dropout: float = 0.0
  output_masking: float = 0.0
  capacity_chunks: int = 1

  @property
  def experts(self) -> Experts:
    return Experts(self.model_dim, self.hidden_dim, self.num_experts, self.expert_dropout)

  def weights(self) -> Specs:
    m, e = self.model_dim, self.num_experts
    # The gate's columns are candidates, axis J: every token needs all of them, so they are not split like the experts, E.
    init = Uniform(self.gate_scale * glorot_uniform(m, e).limit)
    return {'gate': WeightSpec((m, e), 'MJ', init, factored='MJ'), **self.experts.weights()}

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
      capacity = noise_GS = keys_GS = None
      if key is not None:
        capacity = self._capacity(x_GSM, self.capacity_factor)
        if self.second_choice == 'random':
          noise_GS = _grouped(prng.uniform(key, sizes(x_BTM)[:2]), groups)
        if self.expert_dropout:
          keys_GS = _grouped(prng.bits(prng.fold(key, 'experts'), sizes(x_BTM)[:2]), groups)
      paddings_GS = _grouped(paddings_BT, groups)
      routing = top2_gating(shard(logits_GSE, 'GSE'), paddings_GS, capacity=capacity, noise_GS=noise_GS)
    serve = functools.partial(self._serve, routing, keys_GS)
    inputs, choices = (x_GSM, _of_experts(theta)), (routing.weight_GSR, routing.slot_GSR, routing.capacity)
    if capacity is not None:
      y_GSM = serve_in_chunks(serve, inputs, *choices, self.capacity_chunks)
    else:
      y_GSM, rounds = ops.serve_all(serve, inputs, *choices, self._capacity(x_GSM, self.round_capacity_factor))
      routing = routing._replace(stats=routing.stats._replace(rounds=rounds))
    y_BTM = shard(tf.reshape(y_GSM, sizes(x_BTM)), 'BTM')
    return self._masked(y_BTM, key), routing

  def _serve(
    self,
    routing: Routing,
    keys_GS: tf.Tensor | None,
    inputs: tuple[tf.Tensor, Theta],
    weight_GSR: tf.Tensor,
    slot_GSR: tf.Tensor,
    capacity: Size,
  ) -> tf.Tensor:
    """Dispatch, experts, combine: outputs y_GSM for (x_GSM, weights of the experts); a choice of weight 0 adds nothing."""
    x_GSM, theta = inputs
    routing = routing._replace(weight_GSR=weight_GSR, slot_GSR=slot_GSR, capacity=capacity)
    dispatcher = dispatch.make(self.dispatch, routing)
    with tf.name_scope('dispatch'):
      tokens = dispatcher.dispatch(x_GSM)
      # With the keys of its tokens, an expert drops the same features whatever slots or rows they come in.
      keys = None if keys_GS is None else dispatcher.dispatch(prng.as_bytes(keys_GS))
    outputs = self.experts(theta, tokens, keys)
    with tf.name_scope('combine'):
      return shard(dispatcher.combine(outputs), 'GSM')

  def _masked(self, y_BTM: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
    """Expert output masking: zeros for a random share of the tokens."""
    if key is None or not self.output_masking:
      return y_BTM
    keep_BT = prng.dropout(tf.ones(sizes(y_BTM)[:2], y_BTM.dtype), self.output_masking, prng.fold(key, 'output'))
    return y_BTM * keep_BT[..., tf.newaxis]

  def _capacity(self, x_GSM: tf.Tensor, factor: float | None) -> Size | None:
    return None if factor is None else expert_capacity(sizes(x_GSM)[1], self.num_experts, factor)

  def _groups(self, rows: Size, training: bool) -> int:
    """Number of groups: num_groups; at inference 1, unless num_groups divides a static B (shards then stay in place)."""
    divides = isinstance(rows, int) and rows % self.num_groups == 0
    if training and isinstance(rows, int) and not divides:
      raise ValueError(
        f'num_groups={self.num_groups} must divide the rows of a batch, which has {rows}: '
        'batch a multiple of it, or lower num_groups'
      )
    return self.num_groups if training or divides else 1


def _of_experts(theta: Theta) -> Theta:
  return {name: weight for name, weight in theta.items() if name != 'gate'}


def _grouped(x_BT: tf.Tensor, groups: int) -> tf.Tensor:
  """Reshapes [B, T, ...] to [G, S, ...]; a group is whole rows."""
  rows, length = sizes(x_BT)[:2]
  return tf.reshape(x_BT, [groups, rows // groups * length, *x_BT.shape[2:]])
