"""What the graphs of all models for lingvo_moe/engine have: ranked symbols, and a refusal."""

from __future__ import annotations

import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import inferred, sizes
from lingvo_moe.tasks.transformer_config import ModelConfig


def require(config: ModelConfig) -> None:
  """Raises UserError where the engine cannot compute the model."""
  moe = config.moe()
  if moe is not None and moe.gate.least_experts is None:
    raise UserError(
      f'the engine computes gates that choose single experts by token; this model has gate={config.gate!r}: use '
      '--format=saved_model'
    )


def ranked(logits_BWV: tf.Tensor, count: int) -> dict[str, tf.Tensor]:
  """Logits, the logarithm of their sum of exp, and the `count` best with their symbols, as of tf.math.top_k.

  top_k is slow for many symbols. The best are in the `count` parts of the vocabulary with the largest maxima. `logits`
  have an axis of parts: a second reshape would copy them.
  """
  rows, width, num_symbols = sizes(logits_BWV)
  part = max(size for size in range(1, 65) if num_symbols % size == 0)
  num_parts = num_symbols // part
  logits_BWDP = tf.reshape(logits_BWV, inferred([rows, width, num_parts, part]))
  _, parts_BWJ = tf.math.top_k(tf.reduce_max(logits_BWDP, axis=-1), min(count, num_parts))
  parts_BWJ = -tf.math.top_k(-parts_BWJ, parts_BWJ.shape[2])[0]  # in order: of equal logits the first is the best
  symbols_BWJP = parts_BWJ[..., tf.newaxis] * part + tf.range(part)
  flat = lambda x_BWJP: tf.reshape(x_BWJP, inferred([rows, width, parts_BWJ.shape[2] * part]))
  best_BWJ, at_BWJ = tf.math.top_k(flat(tf.gather(logits_BWDP, parts_BWJ, batch_dims=2)), count)
  best_BW11 = best_BWJ[..., :1, tf.newaxis]
  log_z_BW11 = best_BW11 + tf.math.log(tf.reduce_sum(tf.exp(logits_BWDP - best_BW11), axis=[-2, -1], keepdims=True))
  return {
    'logits': logits_BWDP,
    'log_z': log_z_BW11[..., 0, 0],
    'best': best_BWJ,
    'symbols': tf.gather(flat(symbols_BWJP), at_BWJ, batch_dims=2),
  }
