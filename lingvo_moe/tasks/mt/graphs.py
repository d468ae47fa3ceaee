"""Graphs of a translation model for lingvo_moe/engine: the encoder, and one step of the decoder. Sizes are open.

Keys and values of decoder layer i are named keys_i and values_i; they begin with `memory_` (of the source), `cache_`
(of earlier positions of the beam) or `new_` (of this step).
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import inferred, sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.tasks.batches import SOURCE_KEYS
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.task import Graph
from lingvo_moe.tasks.vocab import PAD

Tensors = Mapping[str, tf.Tensor]


def require(config: MtConfig) -> None:
  """Raises UserError where the engine cannot compute the model."""
  moe = config.moe()
  if moe is not None and moe.gate.least_experts is None:
    raise UserError(
      f'the engine computes gates that choose single experts by token; this model has gate={config.gate!r}: use '
      '--format=saved_model'
    )


def make(config: MtConfig) -> dict[str, Graph]:
  """The graphs by name, 'encoder' and 'decoder', for weights of config.program()."""
  model = config.program().model
  layers = list(enumerate(model.decoder.layers))
  kinds = 'keys', 'values'
  width, heads, head_dim = config.beam_size, config.num_heads, config.head_dim
  candidates = min(2 * width + 3, model.target_embedding.vocab_size)  # pad, bos and eos may be among the 2 W best

  def encode(theta: Theta, inputs: Tensors) -> Tensors:
    ids_BT = inputs['ids']
    segments_BT = tf.cast(tf.not_equal(ids_BT, PAD), tf.int32)
    positions_BT = tf.range(sizes(ids_BT)[1]) * segments_BT
    source = dict(zip(SOURCE_KEYS, (ids_BT, segments_BT, positions_BT), strict=True))
    cache = model.init_cache(theta, model.encode(theta, source)[0], 1)
    return {f'memory_{kind}_{i}': cache[name]['memory'][kind] for i, name in layers for kind in kinds}

  def decode(theta: Theta, inputs: Tensors) -> Tensors:
    own_BW1 = tf.cast(inputs['live'] >= 0, tf.float32)[..., tf.newaxis]  # the new position comes last
    mask_BWU = tf.concat([inputs['mask'], own_BW1], axis=-1)
    now = Now(inputs['time'][0], tf.constant(0), mask_BWU, inputs['live'] > 0)
    of = lambda part, i: {kind: inputs[f'{part}_{kind}_{i}'] for kind in kinds}
    cache = {name: {'self': of('cache', i), 'memory': of('memory', i)} for i, name in layers}
    logits_BWV, cache = model.decode_step(theta, inputs['ids'], now, inputs['segments'], cache)
    new = {f'new_{kind}_{i}': cache[name]['self'][kind].new_BNWK for i, name in layers for kind in kinds}
    return {**ranked(logits_BWV, candidates), **new}

  keys_values = tf.TensorSpec([None, heads, None, head_dim])
  step = {
    'ids': tf.TensorSpec([None, width], tf.int32),
    'time': tf.TensorSpec([1], tf.int32),
    'mask': tf.TensorSpec([None, width, None]),
    'live': tf.TensorSpec([None, width], tf.int32),
    'segments': tf.TensorSpec([None, None], tf.int32),
    **{f'{part}_{kind}_{i}': keys_values for part in ('memory', 'cache') for i, _ in layers for kind in kinds},
  }
  return {'encoder': Graph(encode, {'ids': tf.TensorSpec([None, None], tf.int32)}), 'decoder': Graph(decode, step)}


def ranked(logits_BWV: tf.Tensor, count: int) -> Tensors:
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
