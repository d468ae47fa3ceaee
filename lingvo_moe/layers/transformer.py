"""Transformer layer of an encoder or decoder: pre-norm residual branches of attention and feed-forward, or experts."""

import dataclasses

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Attention, Cache, Now, of_layer
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.routing import Routing
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import NORMS, LayerNorm, RMSNorm
from lingvo_moe.layers.remat import keep, rematerialised

# Cache of a decoder layer, or of the equal layers of a scanned stack: 'self', and 'memory', which is constant.
LayerCache = dict[str, Cache]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branches:
  """Residual branches of a layer, and of the layers of a stack: x + dropout(f(norm(x))), as in Lingvo."""

  cross_attention: bool = False  # whether there is one of attention to an encoder
  residual_dropout: float = 0.0  # dropout of every branch
  norm_type: str = 'layer'  # a name of norm.NORMS
  post_norm: bool = False  # whether the output of f is normalised too, before the dropout, as in Grok-1
  # whether the input is; otherwise a branch is norm(x + dropout(f(x))), as in Vaswani et al. (2017).
  norm_first: bool = True
  norm_epsilon: float = 1e-6  # what is added to variances

  @property
  def norm(self) -> LayerNorm | RMSNorm:
    return NORMS[self.norm_type](self.attention.model_dim, self.norm_epsilon)


@dataclasses.dataclass(frozen=True)
class Layer(Branches):
  """Layer of a stack: self-attention, then attention to the encoder (decoders), then feed-forward or experts.

  `remat_attention` rematerialises attention for its gradient.
  """

  attention: Attention
  ffn: FeedForward | MoE
  remat_attention: bool = False

  @property
  def is_moe(self) -> bool:
    return isinstance(self.ffn, MoE)

  def weights(self) -> Specs:
    norms = {name: self.norm.weights() for name in ('norm', 'post_norm')[: 1 + self.post_norm]}
    attention = {**norms, **self.attention.weights()}
    cross = {'cross_attention': {**norms, **self.attention.of_memory.weights()}} if self.cross_attention else {}
    ffn = {**norms, **self.ffn.weights()}
    return {'attention': attention, **cross, 'moe' if self.is_moe else 'ffn': ffn}

  def __call__(
    self,
    theta: Theta,
    x_BTM: tf.Tensor,
    mask_BTT: tf.Tensor,
    paddings_BT: tf.Tensor,
    memory_BUM: tf.Tensor | None = None,
    memory_mask_BTU: tf.Tensor | None = None,
    key: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, Routing | None]:
    """Runs the layer over whole rows: ([B, T, M], Routing of the experts or None).

    All but experts compute each row by itself, on a CPU in sub-batches.

    Args:
      theta: the layer's weights, which are cast to the type of x unless their spec says float32.
      mask_BTT: where a position may attend to another of x.
      paddings_BT: 1.0 where x is padding.
      memory_BUM: encoder output, for layers with cross-attention.
      memory_mask_BTU: where a position may attend to memory.
      key: random key, or one for each row, in training; None at inference.
    """
    theta = weights_lib.cast(theta, self.weights(), x_BTM.dtype)

    def rows(x_BTM, mask_BTT, memory_BUM, memory_mask_BTU, key):
      attend = lambda own, h_BTM, key: self._attend(self.attention, own, h_BTM, h_BTM, mask_BTT, key)
      x_BTM = self._branch('attention', theta, x_BTM, attend, key)
      if self.cross_attention:
        to_memory = self.attention.of_memory
        attend = lambda own, h_BTM, key: self._attend(to_memory, own, h_BTM, memory_BUM, memory_mask_BTU, key)
        x_BTM = self._branch('cross_attention', theta, x_BTM, attend, key)
      return x_BTM if self.is_moe else self._branch('ffn', theta, x_BTM, self.ffn, key)

    x_BTM = ops.map_sub_batches(rows, x_BTM, mask_BTT, memory_BUM, memory_mask_BTU, key)
    if not self.is_moe:
      return x_BTM, None
    with tf.name_scope('moe'):
      own, x_BTM = theta['moe'], ops.beside_experts(x_BTM)
      h_BTM = ops.map_sub_batches(lambda x_BTM: self._input(own, x_BTM), x_BTM)
      y_BTM, routing = self.ffn(own, h_BTM, paddings_BT, prng.fold(key, 'gate'))
      add = lambda x_BTM, y_BTM, key: self._add(x_BTM, own, y_BTM, key, 'moe')
      return ops.map_sub_batches(add, x_BTM, y_BTM, key), routing

  def memory_cache(self, theta: Theta, memory_BUM: tf.Tensor) -> Cache:
    """Keys and values of the encoder output."""
    own = weights_lib.cast(theta['cross_attention'], self.weights()['cross_attention'], memory_BUM.dtype)
    return self.attention.of_memory.keys_values(own, memory_BUM)

  def memory_weights(
    self, theta: Theta, x_BTM: tf.Tensor, mask_BTT: tf.Tensor, memory_BUM: tf.Tensor, memory_mask_BTU: tf.Tensor
  ) -> tf.Tensor:
    """Weights of the attention to the encoder output at inference; see Attention.weights_of."""
    theta = weights_lib.cast(theta, self.weights(), x_BTM.dtype)
    attend = lambda own, h_BTM, key: self.attention(own, h_BTM, h_BTM, mask_BTT)
    x_BTM, own = self._branch('attention', theta, x_BTM, attend), theta['cross_attention']
    to_memory = self.attention.of_memory
    keys_BNUK = to_memory.keys_values(own, memory_BUM)['keys']
    return to_memory.weights_of(own, self._input(own, x_BTM), keys_BNUK, memory_mask_BTU)

  def extend(
    self,
    theta: Theta,
    x_BWM: tf.Tensor,
    now: Now,
    memory_mask_B1U: tf.Tensor | None,
    paddings_BW: tf.Tensor,
    cache: LayerCache,
    number: tf.Tensor | None = None,
  ) -> tuple[tf.Tensor, LayerCache]:
    """Decoding step of W hypotheses a row, at inference: ([B, W, M], the cache with the step's keys and values).

    Arguments are those of `__call__` and of Stack.extend, for this layer. The layer has this number on axis L of a
    scanned stack's cache; None: the cache of this layer alone.
    """
    theta = weights_lib.cast(theta, self.weights(), x_BWM.dtype)
    cache = dict(cache)

    def attend_self(own, h_BWM, key):
      y_BWM, cache['self'] = self.attention.extend(own, h_BWM, now, cache['self'], number)
      return y_BWM

    x_BWM = self._branch('attention', theta, x_BWM, attend_self)
    if self.cross_attention:
      memory, to_memory = of_layer(cache['memory'], number), self.attention.of_memory
      attend = lambda own, h_BWM, key: to_memory.attend(own, h_BWM, memory, memory_mask_B1U)
      x_BWM = self._branch('cross_attention', theta, x_BWM, attend)
    if not self.is_moe:
      return self._branch('ffn', theta, x_BWM, self.ffn), cache
    x_BWM = ops.beside_experts(x_BWM)
    return self._branch('moe', theta, x_BWM, lambda own, h_BWM, key: self.ffn(own, h_BWM, paddings_BW)[0]), cache

  def _attend(self, attention, theta, x_BTM, memory_BUM, mask_BTU, key):
    attend = lambda theta, x, memory: attention(theta, x, memory, mask_BTU, key)
    if self.remat_attention and key is not None:
      return rematerialised(attend, theta, x_BTM, memory_BUM)
    return attend(theta, x_BTM, memory_BUM)

  def _branch(self, name, theta, x_BTM, function, key=None):
    """Residual branch x + dropout(f(norm(x))); f is a function of the weights of the branch, a tensor and a key."""
    own = theta[name]
    with tf.name_scope(name):
      y_BTM = function(own, self._input(own, x_BTM), prng.fold(key, name))
      return self._add(x_BTM, own, y_BTM, key, name)

  def _add(self, x_BTM: tf.Tensor, theta: Theta, y_BTM: tf.Tensor, key: tf.Tensor | None, branch: str) -> tf.Tensor:
    """Residual: x plus the output of a branch, which is normalised if there is a second norm, then dropped out."""
    y_BTM = self.norm(theta['post_norm'], keep(y_BTM, 'BTM')) if self.post_norm else y_BTM
    x_BTM = x_BTM + prng.dropout(y_BTM, self.residual_dropout, prng.fold(key, f'{branch}/residual'))
    x_BTM = keep(x_BTM, 'BTM')
    return x_BTM if self.norm_first else self.norm(theta['norm'], x_BTM)

  def _input(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    """Input of the function of a branch."""
    return self.norm(theta['norm'], x_BTM) if self.norm_first else x_BTM
