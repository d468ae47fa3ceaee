"""Language model: a causal stack of layers, its loss, and one step of decoding."""

import dataclasses
from typing import Any

import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.layers.embedding import CompetingOutputs, Embedding
from lingvo_moe.layers.recurrent_stack import RecurrentStack
from lingvo_moe.layers.stack import Stack
from lingvo_moe.search import flat_sequence
from lingvo_moe.tasks import losses
from lingvo_moe.tasks.losses import Batch, Routings

# Layers of a language model: these, or others with their `moe`, `weights`, `__call__`, `read`, `extend` and
# `keep_positions`, in which no position depends on a later one.
CausalStack = Stack | RecurrentStack


@dataclasses.dataclass(frozen=True)
class LanguageModel(losses.TokenModel):
  """Decoder without an encoder: the symbols so far in, a distribution over the next one out.

  The output softmax shares the embedding, unless `output_embedding` is given. Positions are those of the stack's
  attention. `window` is the number of positions that a symbol may attend to in text longer than a training row.
  """

  decoder: CausalStack
  target_embedding: Embedding
  window: int
  output_embedding: Embedding | CompetingOutputs | None = None

  def _run(self, theta: Theta, batch: Batch, key: tf.Tensor | None) -> tuple[tf.Tensor, Routings]:
    key = prng.fold(key, 'decoder')
    with tf.name_scope('decoder'):
      x_BTM = self._embed(theta, batch['inputs'], key)
      x_BTM, routing = self.decoder(theta['decoder'], x_BTM, batch['segments'], key=key)
    return x_BTM, {f'decoder/{name}': r for name, r in routing.items()}

  def totals(self, batch: Batch) -> dict[str, tf.Tensor]:
    """Denominators of the losses of a batch; they add up over parts of a batch."""
    stack = losses.stack_totals('decoder', self.decoder.moe, batch['segments'])
    return {**stack, 'target_tokens': losses.count_tokens(_loss_mask(batch))}

  def _labels(self, batch: Batch) -> tuple[tf.Tensor, tf.Tensor]:
    return batch['labels'], tf.cast(_loss_mask(batch) > 0, tf.float32)

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
      cache = self.decoder.read(theta['decoder'], self._embed(theta, ids_BT), real_BT, self.window)
    room = flat_sequence.first_room(max_steps, width, length) - length
    at_positions = lambda buffer: [[0, 0]] * (buffer.shape.rank - 2) + [[0, room], [0, 0]]
    return tf.nest.map_structure(lambda buffer: tf.pad(buffer, at_positions(buffer)), cache)

  def decode_step(
    self, theta: Theta, ids_BW: tf.Tensor, now: Now, lengths_B: tf.Tensor, cache: Any
  ) -> tuple[tf.Tensor, Any]:
    """Decoding step of W hypotheses per row after lengths_B symbols: (logits [B, W, V], cache); see beam_search."""
    # A hypothesis has written its positions in order, so those from the end on are its last ones.
    last_BWU = tf.cumsum(now.mask_BWU, axis=2, reverse=True) <= self.window
    positions_BW = tf.broadcast_to(lengths_B[:, tf.newaxis] + now.time, sizes(ids_BW))
    now = now._replace(mask_BWU=tf.where(last_BWU, now.mask_BWU, 0.0), position_BW=positions_BW)
    with tf.name_scope('decoder'):
      x_BWM = self._embed(theta, ids_BW)
      x_BWM, cache = self.decoder.extend(theta['decoder'], x_BWM, now, None, cache)
    return self._output(theta)(x_BWM), cache


def _loss_mask(batch: Batch) -> tf.Tensor:
  """Above 0 where a token counts: 'loss_mask' in evaluation, otherwise every token."""
  return batch.get('loss_mask', batch['segments'])
