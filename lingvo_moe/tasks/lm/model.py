"""Language model: a causal stack of layers, its loss, and one step of decoding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.embedding import Embedding
from lingvo_moe.layers.incremental import Now
from lingvo_moe.layers.moe import MoE
from lingvo_moe.layers.stack import Routed
from lingvo_moe.search import flat_sequence
from lingvo_moe.tasks import losses

Batch = Mapping[str, tf.Tensor]  # int32 [B, T] by the names of input.py
Totals = dict[str, tf.Tensor]


class CausalStack(Protocol):
  """Layers of a language model: a Stack of Transformer layers, or a RecurrentStack.

  Attributes:
    moe: its layers of experts; None: it has none.
  """

  moe: MoE | None

  def weights(self) -> Specs:
    """Nested WeightSpecs."""

  def __call__(
    self, theta: Theta, x_BTM: tf.Tensor, segments_BT: tf.Tensor, *, key: tf.Tensor | None = None
  ) -> tuple[tf.Tensor, dict[str, Routed]]:
    """Runs over whole rows, no position after another of its segment: ([B, T, M], Routed by layer); 0 is padding."""

  def read(self, theta: Theta, x_BTM: tf.Tensor, real_BT: tf.Tensor, window: int) -> Any:
    """Cache after the first symbols of each row, a nest of tensors [..., T positions, features]; see Stack.read."""

  def extend(
    self, theta: Theta, x_BWM: tf.Tensor, now: Now, memory_segments_BU: None, cache: Any
  ) -> tuple[tf.Tensor, Any]:
    """Decoding step of W hypotheses a row: ([B, W, M], the cache with what it wrote at positions now.start ...)."""

  def keep_positions(self, cache: Any, positions_BU: tf.Tensor) -> Any:
    """Cache gathered at these flat positions; see flat_sequence.loop."""


@dataclasses.dataclass(frozen=True)
class LanguageModel:
  """Decoder without an encoder: the symbols so far in, a distribution over the next one out.

  The output softmax shares the embedding, unless `output_embedding` is given. Positions are those of the stack's
  attention. `window` is the number of positions that a symbol may attend to when a text goes on beyond the length of a
  training row. `report_decisions` is as in EncoderDecoder.
  """

  decoder: CausalStack
  target_embedding: Embedding
  window: int
  input_dropout: float = 0.0
  label_smoothing: float = 0.0
  aux_loss_weight: float = 0.01
  router_z_loss_weight: float = 0.0
  z_loss_weight: float = 0.0
  activation_dtype: str = 'float32'
  report_decisions: bool = False
  output_embedding: Embedding | None = None

  def weights(self) -> Specs:
    output = {'output_embedding': self.output_embedding.weights()} if self.output_embedding else {}
    return {'target_embedding': self.target_embedding.weights(), 'decoder': self.decoder.weights(), **output}

  def logits(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, dict[str, Routed]]:
    """Logits of every next symbol: (float32 [B, T, V], Routed by layer)."""
    x_BTM, routing = self._run(theta, batch, key)
    return self._output(theta)(x_BTM), routing

  def _run(self, theta: Theta, batch: Batch, key: tf.Tensor | None) -> tuple[tf.Tensor, dict[str, Routed]]:
    """Runs the stack, without the output softmax: ([B, T, M], Routed by layer)."""
    key = None if key is None else prng.fold(key, 'decoder')
    with tf.name_scope('decoder'):
      x_BTM = self._embed(theta, batch['inputs'], key)
      x_BTM, routing = self.decoder(theta['decoder'], x_BTM, batch['segments'], key=key)
    return x_BTM, {f'decoder/{name}': r for name, r in routing.items()}

  def totals(self, batch: Batch) -> Totals:
    """Denominators of the losses of a batch; they add up over parts of a batch."""
    groups = self.decoder.moe.num_groups if self.decoder.moe else 1
    return {
      'target_tokens': losses.count_tokens(_counted(batch)),
      'tokens': losses.count_tokens(batch['segments']),
      'groups': losses.groups_with_tokens(batch['segments'], groups),
    }

  def loss(
    self, theta: Theta, batch: Batch, key: tf.Tensor | None = None, totals: Totals | None = None
  ) -> tuple[tf.Tensor, dict[str, Any]]:
    """Training loss of a batch, or of a part of one; it and all metrics add up over parts.

    Args:
      theta: nested weights.
      batch: arrays by input.BATCH_KEYS; with 'counted', only tokens where it is 1 count; with 'files' [B, P], 1 at the
        file of a row, losses are also given by file.
      key: random key, or one for each row, in training; None at inference: no dropout, no token dropped by experts.
      totals: totals of the whole batch, if this is a part of it.

    Returns:
      (the scalar to minimise, metrics), as EncoderDecoder.loss: 'xent' is the sum over tokens of -log p (not smoothed).
    """
    x_BTM, routing = self._run(theta, batch, key)
    real_BT = tf.cast(_counted(batch) > 0, tf.float32)
    target_tokens = tf.reduce_sum(real_BT)
    count = lambda name, of_this: tf.maximum(totals[name] if totals else of_this, 1.0)
    smoothing = self.label_smoothing if key is not None else 0.0

    xent_BT, loss_BT = losses.of_tokens(self._output(theta), x_BTM, batch['labels'], smoothing, self.z_loss_weight)
    aux_loss, z_loss = losses.of_gates(
      routing,
      groups=lambda name, stats: count('groups', stats.groups),
      tokens=lambda name, stats: count('tokens', stats.tokens),
    )
    loss = tf.reduce_sum(loss_BT * real_BT) / count('target_tokens', target_tokens) + self.aux_loss_weight * aux_loss
    if self.router_z_loss_weight:
      loss += self.router_z_loss_weight * z_loss
    metrics = {
      'loss': loss,
      'xent': tf.reduce_sum(xent_BT * real_BT),
      'target_tokens': target_tokens,
      'aux_loss': aux_loss,
      'routing': {name: r.stats for name, r in routing.items()},
    }
    if 'files' in batch:
      metrics |= losses.by_subset('file', xent_BT, real_BT, batch['files'])
      metrics |= losses.choices_by_subset('file', routing, batch['files'])
    if self.report_decisions:
      metrics['decisions'] = {name: r.decisions for name, r in routing.items()}
    return loss, metrics

  def token_scores(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Scores: log p of each token given those before it in its row, float32 [B, T]; 0 where none counts."""
    x_BTM, _ = self._run(theta, batch, None)
    xent_BT, _ = losses.of_tokens(self._output(theta), x_BTM, batch['labels'])
    return -xent_BT * tf.cast(_counted(batch) > 0, tf.float32)

  def read(self, theta: Theta, ids_BT: tf.Tensor, lengths_B: tf.Tensor, max_steps: Any, width: int) -> Any:
    """Cache after the first lengths_B symbols of each row, with room for max_steps steps of `width` hypotheses.

    Args:
      theta: nested weights.
      ids_BT: symbols, padded; under static shapes T is a multiple of `width`.
      lengths_B: number of symbols of each row, 0 or more.
      max_steps: steps that follow.
      width: W.
    """
    length = sizes(ids_BT)[1]
    real_BT = tf.range(length)[tf.newaxis] < lengths_B[:, tf.newaxis]
    with tf.name_scope('decoder'):
      cache = self.decoder.read(theta['decoder'], self._embed(theta, ids_BT, None), real_BT, self.window)
    room = flat_sequence.first_room(max_steps, width, length) - length
    at_positions = lambda buffer: [[0, 0]] * (buffer.shape.rank - 2) + [[0, room], [0, 0]]
    return tf.nest.map_structure(lambda buffer: tf.pad(buffer, at_positions(buffer)), cache)

  def keep_positions(self, cache: Any, positions_BU: tf.Tensor) -> Any:
    """Cache gathered at these flat positions; see flat_sequence.loop."""
    return self.decoder.keep_positions(cache, positions_BU)

  def decode_step(
    self, theta: Theta, ids_BW: tf.Tensor, now: Now, lengths_B: tf.Tensor, cache: Any
  ) -> tuple[tf.Tensor, Any]:
    """Decoding step of W hypotheses a row after lengths_B symbols: (float32 logits [B, W, V], cache); see beam_search."""
    # A hypothesis has written its positions in order, so those from the end on are its last ones.
    last_BWU = tf.cumsum(now.mask_BWU, axis=2, reverse=True) <= self.window
    positions_BW = tf.broadcast_to(lengths_B[:, tf.newaxis] + now.time, sizes(ids_BW))
    now = now._replace(mask_BWU=tf.where(last_BWU, now.mask_BWU, 0.0), position_BW=positions_BW)
    with tf.name_scope('decoder'):
      x_BWM = self._embed(theta, ids_BW, None)
      x_BWM, cache = self.decoder.extend(theta['decoder'], x_BWM, now, None, cache)
    return self._output(theta)(x_BWM), cache

  def _output(self, theta: Theta) -> Callable[[tf.Tensor], tf.Tensor]:
    """Output softmax: function of x_BTM that returns float32 logits [B, T, V]."""
    if self.output_embedding:
      return functools.partial(self.output_embedding.logits, theta['output_embedding'])
    return functools.partial(self.target_embedding.logits, theta['target_embedding'])

  def _embed(self, theta: Theta, ids_BT: tf.Tensor, key: tf.Tensor | None) -> tf.Tensor:
    def embed(ids_BT, key):
      x_BTM = tf.cast(self.target_embedding.lookup(theta['target_embedding'], ids_BT), self.activation_dtype)
      return prng.dropout(x_BTM, self.input_dropout, None if key is None else prng.fold(key, 'input'))

    return ops.map_sub_batches(embed, ids_BT, key)


def _counted(batch: Batch) -> tf.Tensor:
  """Above 0 where a token counts."""
  return batch.get('counted', batch['segments'])
