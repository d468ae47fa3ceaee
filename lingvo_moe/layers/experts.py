"""Experts: E networks, each on the tokens dispatched to it (GShard, equations 2 and 3).

An expert may be any network. A subclass of Experts names its weights, whose first axis is E, and is a function of the
tokens in the slots of all experts, x_EGCM; docs/add_a_model.md writes one.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Constant, Specs, Theta, WeightSpec, glorot_uniform
from lingvo_moe.layers.dispatch import Dispatched, GroupedRows
from lingvo_moe.layers.ffn import ACTIVATIONS
from lingvo_moe.layers.remat import keep, unkept
from lingvo_moe.ops import backend
from lingvo_moe.xla_sharding import shard


class Experts(abc.ABC):
  """Experts of a MoE layer: a frozen dataclass of their sizes."""

  @abc.abstractmethod
  def weights(self) -> Specs:
    """Weights by name; the first axis of each is E."""

  @abc.abstractmethod
  def __call__(self, theta: Theta, x_EGCM: tf.Tensor, keys_EGC: tf.Tensor | None = None) -> tf.Tensor:
    """Outputs y_EGCM of every slot, full or not; each slot's depends on that slot alone.

    Args:
      theta: the weights. It may be called with those of some experts only, and their tokens.
      x_EGCM: tokens in the slots of each expert; zeros in empty slots.
      keys_EGC: random key of each slot, for dropout; None: no dropout.
    """

  def apply(self, theta: Theta, x: Dispatched, keys: Dispatched | None = None) -> Dispatched:
    """Outputs for the tokens of each expert, in the form of these: slots or grouped rows.

    `keys` are the random keys of the tokens as prng.as_bytes, dispatched as x is, so that an expert drops the same
    features of a token whatever slot or row it comes in; None: no dropout.
    """
    if isinstance(x, GroupedRows):
      # The rows of an expert are other ones in each block of a scanned stack, which cannot stack what they keep.
      rows = unkept(self.rows)
      if keys is None:
        return rows(theta, x)
      expert_X = tf.searchsorted(keys.expert_offsets[1:], tf.range(sizes(keys.x_XM)[0]), side='right')
      return rows(theta, x, prng.fold(prng.from_bytes(keys.x_XM), expert_X))
    if keys is None:
      return self(theta, x)
    expert_E11 = tf.range(sizes(x)[0])[:, tf.newaxis, tf.newaxis]
    return self(theta, x, prng.fold(prng.from_bytes(keys), expert_E11))

  def rows(self, theta: Theta, x: GroupedRows, keys_X: tf.Tensor | None = None) -> GroupedRows:
    """Outputs of grouped rows: here each expert is called by itself, its rows in slots of one group."""
    if not backend.current().open_shapes:
      raise UserError(
        "dispatch='grouped' compiled by XLA is for experts of kind relu without biases; others need to know the "
        "number of their rows: bind dispatch = 'auto', 'gather' or 'einsum'"
      )
    num_experts = x.expert_offsets.shape[0] - 1
    count_E = x.expert_offsets[1:] - x.expert_offsets[:-1]
    divided = lambda x_X: tf.split(x_X, tf.concat([count_E, [1]], axis=0), num=num_experts + 1)
    in_slots = lambda x_X: x_X[tf.newaxis, tf.newaxis]
    weights = {name: tf.split(weight, num_experts) for name, weight in theta.items()}
    keys = None if keys_X is None else divided(keys_X)
    y = []
    for e, x_CM in enumerate(divided(x.x_XM)[:-1]):
      own = {name: weight[e] for name, weight in weights.items()}
      y.append(self(own, in_slots(x_CM), None if keys is None else in_slots(keys[e]))[0, 0])
    return x._replace(x_XM=tf.concat([*y, tf.zeros([1, y[0].shape[-1]], y[0].dtype)], axis=0))


@dataclasses.dataclass(frozen=True)
class SizedExperts(Experts):
  """Experts of matrices between M features and hidden layers of size H."""

  model_dim: int  # M
  hidden_dim: int  # H
  num_experts: int  # E
  dropout: float = 0.0  # after the last activation, as in Switch Transformers (Fedus et al., 2021, section 2.4)

  def _matrix(self, dims: str) -> WeightSpec:
    """Matrix of every expert: E, the axis that is summed, and the axis of the results. J is a hidden layer too."""
    size = {'E': self.num_experts, 'M': self.model_dim, 'H': self.hidden_dim, 'J': self.hidden_dim}
    shape = tuple(size[letter] for letter in dims)
    return WeightSpec(shape, dims, glorot_uniform(*shape[1:]), factored=dims[1:])


@dataclasses.dataclass(frozen=True)
class FeedForwardExperts(SizedExperts):
  """Expert feed-forward act(x wi) wo, without biases; with ReLU that of the paper.

  A gated one, (act(x wg) * x wi) wo, is GEGLU with GELU, SwiGLU with SiLU (Shazeer, arXiv 2002.05202). `activation` is
  a name of ffn.ACTIVATIONS. With `bias` each of the two has a bias, as in NLLB-200.
  """

  activation: str = 'relu'
  bias: bool = False

  def weights(self) -> Specs:
    gate = {'wg': self._matrix('EMH')} if ACTIVATIONS[self.activation].gated else {}
    bias = lambda size, letter: WeightSpec((self.num_experts, size), f'E{letter}', Constant(0.0))
    biases = {'bi': bias(self.hidden_dim, 'H'), 'bo': bias(self.model_dim, 'M')} if self.bias else {}
    return {'wi': self._matrix('EMH'), **gate, 'wo': self._matrix('EHM'), **biases}

  def __call__(self, theta: Theta, x_EGCM: tf.Tensor, keys_EGC: tf.Tensor | None = None) -> tf.Tensor:
    activation = ACTIVATIONS[self.activation]
    inwards = lambda name: keep(ops.product('EGCM,EMH->EGCH', x_EGCM, theta[name]), 'EGCH')
    biased = lambda y, name: y + theta[name][:, tf.newaxis, tf.newaxis] if self.bias else y
    h_EGCH = biased(inwards('wi'), 'bi')
    h_EGCH = activation.function(inwards('wg')) * h_EGCH if activation.gated else activation.function(h_EGCH)
    h_EGCH = prng.dropout(h_EGCH, self.dropout, keys_EGC)
    return biased(shard(ops.product('EGCH,EHM->EGCM', h_EGCH, theta['wo']), 'EGCM'), 'bo')

  def rows(self, theta: Theta, x: GroupedRows, keys_X: tf.Tensor | None = None) -> GroupedRows:
    """Outputs of grouped rows: with ReLU by ops.grouped_ffn."""
    if self.activation != 'relu' or self.bias:
      return super().rows(theta, x, keys_X)
    ones = lambda: tf.ones([sizes(x.x_XM)[0], self.hidden_dim])
    keep_XH = None if keys_X is None else prng.dropout(ones(), self.dropout, keys_X)
    return x._replace(x_XM=ops.grouped_ffn(x.x_XM, x.expert_offsets, theta['wi'], theta['wo'], keep_XH))


@dataclasses.dataclass(frozen=True)
class DeepExperts(SizedExperts):
  """Expert of two hidden layers, relu(relu(x wi) wh) wo."""

  def weights(self) -> Specs:
    # Features of the first hidden layer are axis J, which is not split: only one axis of a weight can be.
    return {'wi': self._matrix('EMJ'), 'wh': self._matrix('EJH'), 'wo': self._matrix('EHM')}

  def __call__(self, theta: Theta, x_EGCM: tf.Tensor, keys_EGC: tf.Tensor | None = None) -> tf.Tensor:
    h_EGCJ = tf.nn.relu(keep(ops.product('EGCM,EMJ->EGCJ', x_EGCM, theta['wi']), 'EGCJ'))
    h_EGCH = tf.nn.relu(keep(ops.product('EGCJ,EJH->EGCH', h_EGCJ, theta['wh']), 'EGCH'))
    h_EGCH = prng.dropout(h_EGCH, self.dropout, keys_EGC)
    return shard(ops.product('EGCH,EHM->EGCM', h_EGCH, theta['wo']), 'EGCM')


@dataclasses.dataclass(frozen=True)
class LinearExperts(Experts):
  """Linear expert x w of each of several weights, side by side: outputs [E, G, C, the sum of their sizes]."""

  specs: Specs  # weights [E, M, J] by name

  def weights(self) -> Specs:
    return self.specs

  def __call__(self, theta: Theta, x_EGCM: tf.Tensor, keys_EGC: tf.Tensor | None = None) -> tf.Tensor:
    """Outputs y_EGCJ; see Experts."""
    linear = lambda name: shard(ops.product('EGCM,EMJ->EGCJ', x_EGCM, theta[name]), 'EGCJ')
    return shard(tf.concat([linear(name) for name in self.specs], axis=-1), 'EGCJ')


# Experts by name: functions of (M, H, E, dropout).
EXPERTS: dict[str, Callable[[int, int, int, float], Experts]] = {
  **{name: functools.partial(FeedForwardExperts, activation=name) for name in ACTIVATIONS},
  'deep': DeepExperts,
}
