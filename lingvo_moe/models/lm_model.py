"""Language model: a causal stack of layers, its loss, and one step of decoding."""

import dataclasses
from typing import Any

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Specs, Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.layers.embedding import CompetingOutputs, Embedding, InputSettings, embed
from lingvo_moe.layers.recurrent_stack import RecurrentStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.models import losses
from lingvo_moe.models.losses import Batch, LossSettings, Routings, Totals
from lingvo_moe.models.output import HasOutput
from lingvo_moe.search import flat_sequence

# Layers of a language model: these, or others with their `moe`, `weights`, `__call__`, `read`, `extend` and
# `keep_positions`, in which no position depends on a later one.
CausalStack = Stack | RecurrentStack


@dataclasses.dataclass(frozen=True)
class LanguageModel(HasOutput, InputSettings, LossSettings):
  """Decoder without an encoder: the symbols so far in, a distribution over the next one out.

  The output softmax shares the embedding, unless `output_embedding` is given. Positions are those of the stack's
  attention. `window` is the number of positions that a symbol may attend to in text longer than a training row.
  """

  decoder: CausalStack
  target_embedding: Embedding
  window: int
  output_embedding: Embedding | CompetingOutputs | None = None

  def weights(self) -> Specs:
    """Specs of the weights of every part that the model has."""
    output = {'output_embedding': self.output_embedding.weights()} if self.output_embedding else {}
    return {'target_embedding': self.target_embedding.weights(), 'decoder': self.decoder.weights(), **output}

  def totals(self, batch: Batch) -> dict[str, tf.Tensor]:
    """Denominators of the losses of a batch; they add up over parts of a batch."""
    stack = losses.stack_totals('decoder', self.decoder.moe, batch['segments'])
    return {**stack, 'target_tokens': losses.count_tokens(_loss_mask(batch))}

  def choices(self, theta: Theta, batch: Batch, key: tf.Tensor) -> dict[str, tf.Tensor]:
    """Totals of a batch that a run of the model alone tells; see losses.choices."""
    return losses.choices(self._run(theta, batch, key)[1])

  def loss(
    self, theta: Theta, batch: Batch, key: tf.Tensor | None = None, totals: Totals | None = None
  ) -> tuple[tf.Tensor, dict[str, Any]]:
    """Objective of a batch of 'inputs', 'labels' and 'segments'; see losses.token_loss and EncoderDecoder.loss."""
    x_BTM, routing = self._run(theta, batch, key)
    scored = *self.output(theta), x_BTM, batch['labels'], _real(batch)
    return losses.token_loss(self, *scored, routing, batch, totals, training=key is not None)

  def logits(self, theta: Theta, batch: Batch, key: tf.Tensor | None = None) -> tuple[tf.Tensor, Routings]:
    """Logits of every next symbol given those before it: (float32 [B, T, V], Routed by layer)."""
    x_BTM, routing = self._run(theta, batch, key)
    return self.scores(theta, x_BTM), routing

  def _run(self, theta: Theta, batch: Batch, key: tf.Tensor | None) -> tuple[tf.Tensor, Routings]:
    """Runs the decoder: (input of the output softmax, Routed by layer)."""
    key = prng.fold(key, 'decoder')
    with tf.name_scope('decoder'):
      x_BTM = embed(self, self.target_embedding, theta['target_embedding'], batch['inputs'], key=key)
      x_BTM, routed, *_ = self.decoder(theta['decoder'], x_BTM, batch['segments'], key=key)
    return x_BTM, {f'decoder/{name}': of_layer for name, of_layer in routed.items()}

  def token_scores(self, theta: Theta, batch: Batch) -> tf.Tensor:
    """Scores: log p of each token given those before it, float32 [B, T]; 0 where none counts."""
    return losses.token_scores(self.logits(theta, batch)[0], batch['labels'], _real(batch))

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
      x_BTM = embed(self, self.target_embedding, theta['target_embedding'], ids_BT)
      cache = self.decoder.read(theta['decoder'], x_BTM, real_BT, self.window)
    room = flat_sequence.first_room(max_steps, width, length) - length
    padded = [tf.pad(x, [[0, 0]] * (x.shape.rank - 2) + [[0, room], [0, 0]]) for x in tf.nest.flatten(cache)]
    return tf.nest.pack_sequence_as(cache, padded)

  def decode_step(
    self, theta: Theta, ids_BW: tf.Tensor, now: Now, lengths_B: tf.Tensor, cache: Any
  ) -> tuple[tf.Tensor, Any]:
    """Decoding step of W hypotheses per row after lengths_B symbols: (logits [B, W, V], cache); see beam_search."""
    if now.offsets_BWU is None:  # a hypothesis has written its positions in order, so those at the end are its last
      last_BWU = tf.cumsum(now.mask_BWU, axis=2, reverse=True) <= self.window
    else:
      last_BWU = now.offsets_BWU > -self.window
    positions_BW = tf.broadcast_to(lengths_B[:, tf.newaxis] + now.time, sizes(ids_BW))
    now = now._replace(mask_BWU=tf.where(last_BWU, now.mask_BWU, 0.0), position_BW=positions_BW)
    with tf.name_scope('decoder'):
      x_BWM = embed(self, self.target_embedding, theta['target_embedding'], ids_BW)
      x_BWM, cache = self.decoder.extend(theta['decoder'], x_BWM, now, None, cache)
    return self.scores(theta, x_BWM), cache


def _real(batch: Batch) -> tf.Tensor:
  """1.0 where a token counts."""
  return tf.cast(_loss_mask(batch) > 0, tf.float32)


def _loss_mask(batch: Batch) -> tf.Tensor:
  """Above 0 where a token counts: 'loss_mask' in evaluation, otherwise every token."""
  return batch.get('loss_mask', batch['segments'])
