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
from lingvo_moe.layers.dispatch import GroupedRows
from lingvo_moe.layers.ffn import ACTIVATIONS
from lingvo_moe.ops import backend
from lingvo_moe.ops.remat import keep, unkept
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

  def rows(self, theta: Theta, x: GroupedRows, keys_X: tf.Tensor | None = None) -> GroupedRows:
    """Outputs of grouped rows: here each expert is called by itself, its rows in slots of one group."""
    if not backend.current().open_shapes:
      raise UserError(
        "dispatch='grouped' compiled by XLA is for experts of kind relu without biases; others need to know the "
        "number of their rows: bind dispatch = 'auto', 'gather' or 'einsum'"
      )
    num_experts = x.expert_offsets.shape[0] - 1
    count_E = x.expert_offsets[1:] - x.expert_offsets[:-1]
    count_E = tf.concat([count_E, [1]], axis=0)
    weights = {name: tf.split(weight, num_experts) for name, weight in theta.items()}
    keys = None if keys_X is None else tf.split(keys_X, count_E, num=num_experts + 1)
    y = []
    for e, x_CM in enumerate(tf.split(x.x_XM, count_E, num=num_experts + 1)[:-1]):
      keys_11C = None if keys is None else keys[e][tf.newaxis, tf.newaxis]
      expert_weights = {name: weight[e] for name, weight in weights.items()}
      # The rows of an expert are other ones in each block of a scanned stack, which cannot stack what they keep.
      with unkept():
        y.append(self(expert_weights, x_CM[tf.newaxis, tf.newaxis], keys_11C)[0, 0])
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
    biases = {}
    if self.bias:
      biases['bi'] = WeightSpec((self.num_experts, self.hidden_dim), 'EH', Constant(0.0))
      biases['bo'] = WeightSpec((self.num_experts, self.model_dim), 'EM', Constant(0.0))
    return {'wi': self._matrix('EMH'), **gate, 'wo': self._matrix('EHM'), **biases}

  def __call__(self, theta: Theta, x_EGCM: tf.Tensor, keys_EGC: tf.Tensor | None = None) -> tf.Tensor:
    activation = ACTIVATIONS[self.activation]
    h_EGCH = keep(ops.product('EGCM,EMH->EGCH', x_EGCM, theta['wi']), 'EGCH')
    if self.bias:
      h_EGCH += theta['bi'][:, tf.newaxis, tf.newaxis]
    if activation.gated:
      h_EGCH *= activation.function(keep(ops.product('EGCM,EMH->EGCH', x_EGCM, theta['wg']), 'EGCH'))
    else:
      h_EGCH = activation.function(h_EGCH)
    h_EGCH = prng.dropout(h_EGCH, self.dropout, keys_EGC)
    y_EGCM = shard(ops.product('EGCH,EHM->EGCM', h_EGCH, theta['wo']), 'EGCM')
    return y_EGCM + theta['bo'][:, tf.newaxis, tf.newaxis] if self.bias else y_EGCM

  def rows(self, theta: Theta, x: GroupedRows, keys_X: tf.Tensor | None = None) -> GroupedRows:
    """Outputs of grouped rows: with ReLU by ops.grouped_ffn."""
    if self.activation != 'relu' or self.bias:
      return super().rows(theta, x, keys_X)
    keep_XH = None
    if keys_X is not None:
      keep_XH = prng.dropout(tf.ones([sizes(x.x_XM)[0], self.hidden_dim]), self.dropout, keys_X)
    return x._replace(x_XM=ops.grouped_ffn(x.x_XM, x.expert_offsets, theta['wi'], theta['wo'], keep_XH))


@dataclasses.dataclass(frozen=True)
class DeepExperts(SizedExperts):
  """Expert of two hidden layers, relu(relu(x wi) wh) wo."""

  def weights(self) -> Specs:
    # Features of the first hidden layer are axis J, which is not split: only one axis of a weight can be.
    return {'wi': self._matrix('EMJ'), 'wh': self._matrix('EJH'), 'wo': self._matrix('EHM')}

  def __call__(self, theta: Theta, x_EGCM: tf.Tensor, keys_EGC: tf.Tensor | None = None) -> tf.Tensor:
    h_EGCJ = ops.relu(keep(ops.product('EGCM,EMJ->EGCJ', x_EGCM, theta['wi']), 'EGCJ'))
    h_EGCH = ops.relu(keep(ops.product('EGCJ,EJH->EGCH', h_EGCJ, theta['wh']), 'EGCH'))
    h_EGCH = prng.dropout(h_EGCH, self.dropout, keys_EGC)
    return shard(ops.product('EGCH,EHM->EGCM', h_EGCH, theta['wo']), 'EGCM')


@dataclasses.dataclass(frozen=True)
class LinearExperts(Experts):
  """Linear experts x w with several weights, whose results are concatenated: outputs [E, G, C, sum of sizes]."""

  specs: Specs  # weights [E, M, J] by name

  def weights(self) -> Specs:
    return self.specs

  def __call__(self, theta: Theta, x_EGCM: tf.Tensor, keys_EGC: tf.Tensor | None = None) -> tf.Tensor:
    """Outputs y_EGCJ; see Experts."""
    y = [shard(ops.product('EGCM,EMJ->EGCJ', x_EGCM, theta[name]), 'EGCJ') for name in self.specs]
    return shard(tf.concat(y, axis=-1), 'EGCJ')


# Experts by name: functions of (M, H, E, dropout).
EXPERTS: dict[str, Callable[[int, int, int, float], Experts]] = {
  **{name: functools.partial(FeedForwardExperts, activation=name) for name in ACTIVATIONS},
  'deep': DeepExperts,
}
