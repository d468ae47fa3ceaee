"""Embedding of symbols, output softmax, and sinusoidal positions."""

import dataclasses
import math

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.weights import Constant, Glorot, Normal, Specs, Theta, WeightSpec
from lingvo_moe.layers.gates.gate import gate_logits, gate_weight
from lingvo_moe.ops import backend
from lingvo_moe.ops.output_softmax import output_scores, weighted_loss
from lingvo_moe.xla_sharding import shard


@dataclasses.dataclass(frozen=True)
class Embedding:
  """Embedding table with a vector per symbol, shared with the output softmax (Press and Wolf, 2017)."""

  vocab_size: int  # V
  model_dim: int  # M
  embedding_scale: float = 0.0  # factor of the vectors that are looked up; 0: sqrt(M)
  logit_scale: float = 1.0  # factor of the output scores
  logit_bias: bool = False  # whether every symbol has a bias of its output score
  masked_symbols: tuple[int, ...] = ()  # ids that the output softmax leaves out

  def weights(self) -> Specs:
    shape = (self.vocab_size, self.model_dim)
    table = WeightSpec(shape, 'VM', Normal(self.model_dim**-0.5), factored='VM', float32=True)
    bias = {'bias': WeightSpec(shape[:1], 'V', Constant(0.0), float32=True)} if self.logit_bias else {}
    return {'table': table, **bias}

  def lookup(self, theta: Theta, ids_BT: tf.Tensor) -> tf.Tensor:
    """Embedding vectors [B, T, M], scaled by sqrt(M) to unit variance (Vaswani et al., 2017, section 3.4)."""
    return shard(ops.lookup(theta['table'], ids_BT), 'BTM') * (self.embedding_scale or math.sqrt(self.model_dim))

  def logits(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    """Scores [B, T, V] of every symbol as the next one, float32 whatever type x has."""
    with tf.name_scope('softmax'):
      return output_scores(x_BTM, theta['table'], theta.get('bias'), self.logit_scale, self.masked_symbols)

  def loss(
    self, theta: Theta, x_BTM: tf.Tensor, label_BT: tf.Tensor, factor_BT: tf.Tensor, **settings: float
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Cross-entropy of labels [B, T], and the sum of factor times the loss to minimise; settings: ops.output_loss."""
    scores = {'scale': self.logit_scale, 'masked_symbols': self.masked_symbols}
    with tf.name_scope('softmax'):
      return ops.output_loss(x_BTM, theta['table'], theta.get('bias'), label_BT, factor_BT, **scores, **settings)


@dataclasses.dataclass(frozen=True)
class CompetingOutputs:
  """Output softmax of linear experts that compete: p = sum_i p_i P_i, P_i = softmax(x w_i table), p_i a gate's.

  Its cross-entropy, -log sum_i p_i P_i(symbol), is the competitive loss of Jacobs et al. (1991, equation 1.3) for
  symbols: where a target is a vector d, their P_i is exp(-1/2 ||d - o_i||^2).
  """

  embedding: Embedding
  num_experts: int

  def weights(self) -> Specs:
    m = self.embedding.model_dim
    experts = WeightSpec((self.num_experts, m, m), 'JMH', Glorot(m, m), factored='MH')
    return {**self.embedding.weights(), 'gate': gate_weight(m, self.num_experts), 'experts': experts}

  def logits(self, theta: Theta, x_BTM: tf.Tensor) -> tf.Tensor:
    """Log probabilities [B, T, V] of every symbol as the next one."""
    gates_BTJ = tf.nn.log_softmax(gate_logits(theta['gate'], tf.cast(x_BTM, tf.float32)))
    scores = []
    for i in range(self.num_experts):
      logits_BTV = self.embedding.logits(theta, ops.linear(x_BTM, theta['experts'][i]))
      scores.append(tf.nn.log_softmax(logits_BTV) + gates_BTJ[..., i, tf.newaxis])
    return tf.reduce_logsumexp(tf.stack(scores), axis=0)

  def loss(
    self, theta: Theta, x_BTM: tf.Tensor, label_BT: tf.Tensor, factor_BT: tf.Tensor, **settings: float
  ) -> tuple[tf.Tensor, tf.Tensor]:
    """Cross-entropy of labels, and the sum of factor times the loss to minimise; see Embedding.loss."""
    logits_BTV = self.logits(theta, x_BTM)
    with tf.name_scope('softmax'):
      return weighted_loss(logits_BTV, label_BT, factor_BT, **settings)


@dataclasses.dataclass(frozen=True)
class Sinusoids:
  """Sinusoidal positions that are added to embeddings; see `sinusoidal_positions`."""

  offset: int = 0  # the first position
  endpoint: bool = True  # whether the longest wavelength is 20000 pi

  def __call__(self, positions_BT: tf.Tensor, model_dim: int) -> tf.Tensor:
    return sinusoidal_positions(positions_BT + self.offset if self.offset else positions_BT, model_dim, self.endpoint)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputSettings:
  """Settings of a model's embedded inputs. Weights and scores are float32 whatever `activation_dtype` is."""

  input_dropout: float = 0.0
  activation_dtype: str = 'float32'
  sinusoids: Sinusoids = Sinusoids()


def embed(
  settings: InputSettings,
  embedding: Embedding,
  theta: Theta,
  ids_BT: tf.Tensor,
  positions_BT: tf.Tensor | None = None,
  key: tf.Tensor | None = None,
) -> tf.Tensor:
  """Embedded input [B, T, M] of a stack, with sinusoidal positions where positions are given, and dropout."""
  x_BTM = embedding.lookup(theta, ids_BT)
  if positions_BT is not None:
    x_BTM += settings.sinusoids(positions_BT, embedding.model_dim)
  x_BTM = ops.rounded(tf.cast(x_BTM, settings.activation_dtype if backend.current().bfloat16 else tf.float32))
  return prng.dropout(x_BTM, settings.input_dropout, prng.fold(key, 'input'))


def sinusoidal_positions(positions_BT: tf.Tensor, model_dim: int, endpoint: bool = True) -> tf.Tensor:
  """Sinusoidal positions, float32 [B, T, M]: sines at geometric wavelengths 2 pi .. 20000 pi, then cosines.

  Vaswani et al. (2017), section 3.5, with sines and cosines in two halves instead of interleaved. With `endpoint` the
  longest wavelength is 20000 pi, as in tensor2tensor; without, that of one more timescale would be, as in the paper.
  """
  num_timescales = (model_dim + 1) // 2
  log_step = math.log(10_000.0) / max(1, num_timescales - endpoint)
  rates = tf.exp(tf.range(num_timescales, dtype=tf.float32) * -log_step)
  angles = tf.expand_dims(tf.cast(positions_BT, tf.float32), -1) * rates
  return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)[..., :model_dim]
