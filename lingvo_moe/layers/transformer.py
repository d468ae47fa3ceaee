"""Transformer layer of an encoder or decoder: residual branches of attention and of feed-forward, or experts."""

import dataclasses
from typing import NamedTuple

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Attention, Cache, Now
from lingvo_moe.layers.ffn import FeedForward
from lingvo_moe.layers.gates.routing import Routed
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.norm import NORMS, LayerNorm, RMSNorm
from lingvo_moe.ops.remat import keep, rematerialised

# Cache of a decoder layer, or of the equal layers of a scanned stack: 'self', and 'memory', which is constant.
LayerCache = dict[str, Cache]


class Rows(NamedTuple):
  """Masks, paddings and random keys of the positions of x: tensors that get no gradient. W stands for T in decoding."""

  mask_BTU: tf.Tensor  # where a position may attend to another of x, or of the cache
  paddings_BT: tf.Tensor  # 1.0 where x is padding
  memory_mask_BTU: tf.Tensor | None = None  # where a position may attend to the encoder output
  key: tf.Tensor | None = None  # random key, or one for each row, in training; None at inference
  now: Now | None = None  # a step's place in the cache, in decoding
  tasks_BT: tf.Tensor | None = None  # numbers of tasks, for a gate that reads them


class LayerOutput(NamedTuple):
  """Output of a layer, with its routing, cache and attention weights."""

  x_BTM: tf.Tensor
  routed: Routed | None  # statistics and decisions of the gate; None: no experts
  cache: LayerCache | None  # the cache with the keys and values of a step; None: none was given
  memory_weights_BnTU: tf.Tensor | None  # weights of the attention to the encoder output, if they were asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branches:
  """Residual branches of a layer, and of the layers of a stack: x + dropout(f(norm(x))), as in Lingvo.

  | norm_first | post_norm | branch |
  |---|---|---|
  | True | False | x + dropout(f(norm(x))) |
  | True | True | x + dropout(norm(f(norm(x)))), as in Grok-1 |
  | False | False | norm(x + dropout(f(x))), as in Vaswani et al. (2017) |
  """

  cross_attention: bool = False  # whether there is one of attention to an encoder
  residual_dropout: float = 0.0  # dropout of every branch
  norm_type: str = 'layer'  # a name of norm.NORMS
  post_norm: bool = False  # whether the output of f is normalised too, before the dropout
  norm_first: bool = True  # whether the input of f is normalised; otherwise the sum is
  norm_epsilon: float = 1e-6  # what is added to variances

  @property
  def norm(self) -> LayerNorm | RMSNorm:
    return NORMS[self.norm_type](self.attention.model_dim, self.norm_epsilon)

  def _input(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    """Input of a branch's function f."""
    return self.norm(theta['norm'], x_BTM) if self.norm_first else x_BTM

  def _add(self, x_BTM: tf.Tensor, theta: Theta, y_BTM: tf.Tensor, key: tf.Tensor | None, branch: str) -> tf.Tensor:
    """Sum of x and the output y of a branch's function f."""
    y_BTM = self.norm(theta['post_norm'], keep(y_BTM, 'BTM')) if self.post_norm else y_BTM
    x_BTM = x_BTM + prng.dropout(y_BTM, self.residual_dropout, prng.fold(key, f'{branch}/residual'))
    x_BTM = keep(x_BTM, 'BTM')
    return x_BTM if self.norm_first else self.norm(theta['norm'], x_BTM)


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
    memory_BUM: tf.Tensor | None,
    rows: Rows,
    cache: LayerCache | None = None,
    number: tf.Tensor | None = None,
    with_weights: bool = False,
  ) -> LayerOutput:
    """Runs the layer over whole rows, or with a cache for a step of decoding, at inference.

    Args:
      theta: the layer's weights, which are cast to the type of x unless their spec says float32.
      memory_BUM: encoder output, for layers with cross-attention; in decoding its keys and values are in the cache.
      rows: masks, paddings and random keys.
      cache: keys and values of earlier positions; None: those of x are used alone.
      number: number of this layer on axis L of a scanned stack's cache; None: the cache is of this layer alone.
      with_weights: whether the weights of the attention to the encoder output are returned.
    """
    theta, key = weights_lib.cast(theta, self.weights(), x_BTM.dtype), rows.key
    routed = weights_BnTU = None
    with tf.name_scope('attention'):
      branch_theta = theta['attention']
      h_BTM = self._input(branch_theta, x_BTM)
      if cache is None:
        y_BTM, _ = self._attend(self.attention, branch_theta, h_BTM, h_BTM, rows.mask_BTU, prng.fold(key, 'attention'))
      else:
        y_BTM, written = self.attention.extend(branch_theta, h_BTM, rows.now, cache['self'], number)
        cache = {**cache, 'self': written}
      x_BTM = self._add(x_BTM, branch_theta, y_BTM, key, 'attention')
    if self.cross_attention:
      with tf.name_scope('cross_attention'):
        branch_theta, attention = theta['cross_attention'], self.attention.of_memory
        memory = memory_BUM if cache is None else attention.of_layer(cache['memory'], number)
        h_BTM, branch_key = self._input(branch_theta, x_BTM), prng.fold(key, 'cross_attention')
        y_BTM, weights_BnTU = self._attend(
          attention, branch_theta, h_BTM, memory, rows.memory_mask_BTU, branch_key, with_weights
        )
        x_BTM = self._add(x_BTM, branch_theta, y_BTM, key, 'cross_attention')
    with tf.name_scope(name := 'moe' if self.is_moe else 'ffn'):
      branch_theta = theta[name]
      if self.is_moe:
        x_BTM = ops.beside_experts(x_BTM)
      h_BTM = self._input(branch_theta, x_BTM)
      if self.is_moe:
        y_BTM, routing = self.ffn(branch_theta, h_BTM, rows.paddings_BT, prng.fold(key, 'gate'), rows.tasks_BT)
        routed = routing.routed
      else:
        y_BTM = self.ffn(branch_theta, h_BTM, prng.fold(key, 'ffn'))
      x_BTM = self._add(x_BTM, branch_theta, y_BTM, key, name)
    return LayerOutput(x_BTM, routed, cache, weights_BnTU)

  def memory_cache(self, theta: Theta, memory_BUM: tf.Tensor) -> Cache:
    """Keys and values of the encoder output."""
    cross_theta = weights_lib.cast(theta['cross_attention'], self.weights()['cross_attention'], memory_BUM.dtype)
    return self.attention.of_memory.keys_values(cross_theta, memory_BUM)

  def _attend(self, attention, theta, x_BTM, memory, mask_BTU, key, with_weights=False):
    """Runs Attention.attend; with `remat_attention` it is computed again for the gradient."""
    if self.remat_attention and key is not None:
      constants = {'mask_BTU': mask_BTU, 'key': key, 'with_weights': with_weights}
      return rematerialised(attention.attend, theta, x_BTM, memory, **constants)
    return attention.attend(theta, x_BTM, memory, mask_BTU, key, with_weights=with_weights)
