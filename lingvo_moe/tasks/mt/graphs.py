"""Graphs of a translation model for lingvo_moe/engine: the encoder, and one step of the decoder. Sizes are open.

Keys and values of decoder layer i are named keys_i and values_i; they begin with `memory_` (of the source), `cache_`
(of earlier positions of the beam) or `new_` (of this step).
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.tasks import engine_graphs
from lingvo_moe.tasks.batches import SOURCE_KEYS
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.task import Graph
from lingvo_moe.tasks.vocab import PAD

Tensors = Mapping[str, tf.Tensor]


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
    return {**engine_graphs.ranked(logits_BWV, candidates), **new}

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
