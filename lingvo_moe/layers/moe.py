"""Mixture-of-experts layer: gate, dispatch, experts, combine (GShard, section 2.2)."""

import contextlib
import dataclasses
import functools
from typing import Any

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import Size, sizes
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers import dispatch
from lingvo_moe.layers.dispatch import GroupedRows
from lingvo_moe.layers.experts import EXPERTS, Experts
from lingvo_moe.layers.ffn import ACTIVATIONS, FeedForward
from lingvo_moe.layers.gates.gate import Gate
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.ops import loops
from lingvo_moe.ops.remat import unkept
from lingvo_moe.xla_sharding import shard

_TOP2 = Top2()


@dataclasses.dataclass(frozen=True)
class MoE:
  """Mixture of E experts, of which a gate chooses some for each token.

  In training a token competes for slots with the other tokens of its group: `num_groups` divides the rows of the
  batch, and a group is whole rows. At inference (no random key) nothing is dropped or skipped, so the output for
  a token depends on that token alone, and groups and dispatchers change only the cost. Where shapes are static, a
  layer that drops nothing empties the queues of its experts in rounds of a fixed number of slots (ops.slots_per_round).
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
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    paddings_BT: tf.Tensor,
    key: tf.Tensor | None = None,
    tasks_BT: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, Routing]:
    """Sends each token to its experts and sums their outputs, weighted by the gate.

    Args:
      x_BTM: tokens.
      paddings_BT: 1.0 at padding, which is sent to no expert.
      key: random key in training, for the gate and for dropout; None at inference.
      tasks_BT: number of each token's task, for a gate by task; None: all have the first.

    Returns:
      ([B, T, M] of x's type; the Routing). Where a token is padding or found no room, there are zeros, or the output of
      shared experts alone.

    Raises:
      ValueError: in training, B is static and num_groups does not divide it.
    """
    rows, length, model_dim = sizes(x_BTM)
    groups = self._groups(rows, training=key is not None)
    shape_BT, shape_GS = [rows, length], [groups, rows // groups * length]
    x_GSM = shard(tf.reshape(x_BTM, [*shape_GS, model_dim]), 'GSM')
    with tf.name_scope('gating'):
      seen_GSM = x_GSM
      if self.gate.tasks:
        tasks_BT = tf.zeros(shape_BT, tf.int32) if tasks_BT is None else tasks_BT
        seen_GSM = shard(tf.one_hot(tf.reshape(tasks_BT, shape_GS), self.gate.tasks), 'GSP')
      routing = self._route(theta, seen_GSM, tf.reshape(paddings_BT, shape_GS), shape_BT, key)
    dropout_keys_GS = None
    if self.expert_dropout and key is not None:
      dropout_keys_GS = tf.reshape(prng.bits(prng.fold(key, 'experts'), shape_BT), shape_GS)
    weights = {name: theta[name] for name in self.experts.weights()}
    # Queues without a limit differ in length between the blocks of a scanned stack, which cannot stack what they keep.
    unlimited = self._is_dropless(key) and not routing.every_expert
    slots = self._slots_per_round(x_GSM) if unlimited else None
    if slots is not None:
      y_GSM, routing = self._in_rounds(weights, x_GSM, routing, dropout_keys_GS, slots)
    else:
      chunks = routing.chunks(1 if key is None else self.capacity_chunks)
      with unkept() if unlimited else contextlib.nullcontext():
        y_GSM = tf.add_n([self._outputs(weights, x_GSM, chunk, dropout_keys_GS) for chunk in chunks])

    y_BTM = shard(tf.reshape(y_GSM, sizes(x_BTM)), 'BTM')
    if key is not None and self.output_masking:
      keep_BT = prng.dropout(tf.ones(shape_BT, y_BTM.dtype), self.output_masking, prng.fold(key, 'output'))
      y_BTM *= keep_BT[..., tf.newaxis]
    if self.expert_output_scale != 1:
      y_BTM *= self.expert_output_scale
    if self.shared:
      y_BTM += self.shared(theta['shared'], x_BTM, prng.fold(key, 'shared'))
    return y_BTM, routing

  def _is_dropless(self, key: tf.Tensor | None) -> bool:
    return key is None or self.capacity_factor is None

  def _route(self, theta, x_GSM, paddings_GS, shape_BT, key) -> Routing:
    """Decision of the gate, with random keys of the tokens in training."""
    keys_GS, capacity = None, None
    if not self._is_dropless(key):
      capacity = self.gate.capacity(sizes(x_GSM)[1], self.num_experts, self.capacity_factor)
    seen_GSM = tf.cast(x_GSM, tf.float32)
    if key is not None:
      keys_GS = tf.reshape(prng.bits(key, shape_BT), sizes(x_GSM)[:2])
      if self.router_jitter:
        jitter_GS = tf.reshape(prng.bits(prng.fold(key, 'jitter'), shape_BT), sizes(x_GSM)[:2])
        seen_GSM *= 1 + self.router_jitter * (2 * prng.uniform(jitter_GS, sizes(x_GSM)) - 1)
    return self.gate(theta, tf.cast(seen_GSM, self.router_dtype), paddings_GS, keys_GS, capacity)

  def _slots_per_round(self, x_GSM: tf.Tensor) -> Size | None:
    """Slots of an expert and group in a round; None: experts take all their tokens at once."""
    if dispatch.resolve(self.dispatch) == 'grouped':
      return None
    return ops.slots_per_round(self.gate.capacity(sizes(x_GSM)[1], self.num_experts, self.round_capacity_factor))

  def _outputs(self, weights, x_GSM, routing, dropout_keys_GS) -> tf.Tensor:
    """Dispatches tokens to their experts, computes these, and combines the outputs [G, S, M]."""
    dispatcher = dispatch.make(self.dispatch, routing)
    with tf.name_scope('dispatch'):
      tokens = dispatcher.dispatch(x_GSM)
      keys = None if dropout_keys_GS is None else dispatcher.keys(dropout_keys_GS)
    experts = self.experts.rows if isinstance(tokens, GroupedRows) else self.experts
    outputs = experts(weights, tokens, keys)
    with tf.name_scope('combine'):
      return shard(dispatcher.combine(outputs), 'GSM')

  def _in_rounds(self, weights, x_GSM, routing, dropout_keys_GS, slots) -> tuple[tf.Tensor, Routing]:
    """Sum over rounds of `slots` choices of each queue, until none waits; the Routing counts the rounds."""
    rounds = (routing.capacity + slots - 1) // slots
    body = functools.partial(self._round, routing=routing, dropout_keys_GS=dropout_keys_GS, slots=slots)
    y_GSM = loops.summed(rounds, body, x_GSM, weights, routing.weight_GSR, scope='rounds')
    return y_GSM, routing._replace(stats=routing.stats._replace(rounds=tf.cast(rounds, tf.float32)))

  def _round(self, number, x_GSM, weights, weight_GSR, *, routing, dropout_keys_GS, slots) -> tf.Tensor:
    """Outputs of the choices of one round alone."""
    with unkept():
      part = routing._replace(weight_GSR=weight_GSR).round(number, slots)
      return self._outputs(weights, x_GSM, part, dropout_keys_GS)

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


def layers_of(model: Any) -> list[MoE]:
  """MoE layers within nested dataclasses, tuples, lists and dicts, such as a model."""
  if isinstance(model, MoE):
    return [model]
  parts = model if isinstance(model, (tuple, list)) else model.values() if isinstance(model, dict) else []
  if dataclasses.is_dataclass(model) and not isinstance(model, type):
    parts = [getattr(model, field.name) for field in dataclasses.fields(model)]
  return [layer for part in parts for layer in layers_of(part)]


def balances_batch(model: Any) -> bool:
  """Whether a balance loss of a model is of all groups of a batch together (balance_over='batch')."""
  return any(getattr(layer.gate, 'balance_over', 'group') == 'batch' for layer in layers_of(model))


def of_part(model: Any, parts: int | None) -> Any:
  """Model for one of `parts` parts of a batch: MoE layers have that many times fewer groups; None: one group."""
  if isinstance(model, MoE):
    return dataclasses.replace(model, num_groups=model.num_groups // parts if parts else 1)
  if not layers_of(model):
    return model
  if isinstance(model, (tuple, list)):
    values = [of_part(x, parts) for x in model]
    return model._make(values) if hasattr(model, '_make') else type(model)(values)
  if isinstance(model, dict):
    return {name: of_part(x, parts) for name, x in model.items()}
  values = {field.name: of_part(getattr(model, field.name), parts) for field in dataclasses.fields(model) if field.init}
  return dataclasses.replace(model, **values)
