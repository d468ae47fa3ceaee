"""Dense position-wise feed-forward layer, plain or gated."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.weights import Constant, Specs, Theta, WeightSpec, glorot_uniform
from lingvo_moe.ops.remat import keep
from lingvo_moe.xla_sharding import shard


class Activation(NamedTuple):
  """Nonlinearity of a feed-forward layer, and whether its result is multiplied by a linear gate."""

  function: Callable[[tf.Tensor], tf.Tensor]
  gated: bool


def _gelu(x: tf.Tensor) -> tf.Tensor:
  return tf.nn.gelu(x, approximate=True)


def _silu(x: tf.Tensor) -> tf.Tensor:
  return x * tf.sigmoid(x)  # tf.nn.silu has a gradient of its own, which TensorFlow's converters do not take


ACTIVATIONS = {
  'relu': Activation(ops.relu, gated=False),
  'gelu': Activation(_gelu, gated=False),
  'swish': Activation(_silu, gated=False),
  'swiglu': Activation(_silu, gated=True),
  'geglu': Activation(_gelu, gated=True),
}


@dataclasses.dataclass(frozen=True)
class FeedForward:
  """Feed-forward f(x wi + bi) wo + bo (Vaswani et al., 2017, equation 2), with dropout of the hidden layer.

  f is a ReLU, a GELU or a SiLU ('swish'). A gated one, (f(x wg) * (x wi + bi)) wo + bo, has f = SiLU ('swiglu') or
  GELU ('geglu'; Shazeer, arXiv 2002.05202).
  """

  model_dim: int  # M
  hidden_dim: int  # H
  dropout: float = 0.0  # dropout of the hidden layer
  activation: str = 'relu'  # a name of ACTIVATIONS
  bias: bool = True  # whether there are biases bi and bo

  def weights(self) -> Specs:
    m, h = self.model_dim, self.hidden_dim
    into = WeightSpec((m, h), 'MH', glorot_uniform(m, h), factored='MH')
    return {
      'wi': into,
      **({'bi': WeightSpec((h,), 'H', Constant(0.0))} if self.bias else {}),
      **({'wg': into} if ACTIVATIONS[self.activation].gated else {}),
      'wo': WeightSpec((h, m), 'HM', glorot_uniform(h, m), factored='HM'),
      **({'bo': WeightSpec((m,), 'M', Constant(0.0))} if self.bias else {}),
    }

  def __call__(self, theta: Theta, x_BTM: tf.Tensor, key: tf.Tensor | None = None) -> tf.Tensor:
    """Outputs [B, T, M]; key None means inference, without dropout."""
    if ACTIVATIONS[self.activation].gated:
      h_BTH = keep(ops.linear(x_BTM, theta['wi'], theta.get('bi')), 'BTH')
      h_BTH *= ops.linear(x_BTM, theta['wg'], activation=self._activate)
    else:
      h_BTH = ops.linear(x_BTM, theta['wi'], theta.get('bi'), self._activate)
    h_BTH = prng.dropout(h_BTH, self.dropout, key)
    return shard(ops.linear(h_BTH, theta['wo'], theta.get('bo')), 'BTM')

  def _activate(self, h_BTH: tf.Tensor) -> tf.Tensor:
    """Applies the activation, and keeps its input for the gradient: its output follows from that."""
    return ACTIVATIONS[self.activation].function(keep(h_BTH, 'BTH'))
