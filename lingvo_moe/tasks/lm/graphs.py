"""Graphs of a language model for lingvo_moe/engine: the reader of prompts, and one step of the decoder.

Names of keys and values are those of tasks/mt/graphs.py. Sizes are open, but for the width of a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.tasks import engine_graphs
from lingvo_moe.tasks.lm.config import LanguageConfig, LmConfig
from lingvo_moe.tasks.task import Graph
from lingvo_moe.tasks.vocab import PAD

Tensors = Mapping[str, tf.Tensor]


def require(config: LanguageConfig) -> None:
  """Raises UserError where the engine cannot compute the model."""
  if not isinstance(config, LmConfig):
    raise UserError(f'the engine computes Transformers; {type(config).__name__} is recurrent: use its log directory')
  engine_graphs.require(config)


def make(config: LmConfig, width: int) -> dict[str, Graph]:
  """The graphs by name, 'reader' and 'decoder', of W = `width` hypotheses, for weights of config.program()."""
  model = config.program().model
  attention = model.decoder.attention
  layers = list(enumerate(model.decoder.layers))
  kinds = 'keys', 'values'
  candidates = min(2 * width + 3, model.target_embedding.vocab_size)  # as of translation

  def read(theta: Theta, inputs: Tensors) -> Tensors:
    ids_BT = inputs['ids']
    lengths_B = tf.reduce_sum(tf.cast(tf.not_equal(ids_BT, PAD), tf.int32), axis=1)
    cache = model.read(theta, ids_BT, lengths_B, 0, 1)
    return {f'new_{kind}_{i}': cache[name]['self'][kind] for i, name in layers for kind in kinds}

  def decode(theta: Theta, inputs: Tensors) -> Tensors:
    own_BW1 = tf.cast(inputs['live'] >= 0, tf.float32)[..., tf.newaxis]  # the new position comes last
    mask_BWU = tf.concat([inputs['mask'], own_BW1], axis=-1)
    now = Now(inputs['time'][0], tf.constant(0), mask_BWU, inputs['live'] > 0)
    cache = {name: {'self': {kind: inputs[f'cache_{kind}_{i}'] for kind in kinds}} for i, name in layers}
    logits_BWV, cache = model.decode_step(theta, inputs['ids'], now, inputs['lengths'], cache)
    new = {f'new_{kind}_{i}': cache[name]['self'][kind].new_BNWK for i, name in layers for kind in kinds}
    return {**engine_graphs.ranked(logits_BWV, candidates), **new}

  step = {
    'ids': tf.TensorSpec([None, width], tf.int32),
    'time': tf.TensorSpec([1], tf.int32),
    'lengths': tf.TensorSpec([None], tf.int32),  # of the prompts without their last symbols
    'mask': tf.TensorSpec([None, width, None]),
    'live': tf.TensorSpec([None, width], tf.int32),
    **{
      f'cache_{kind}_{i}': tf.TensorSpec([None, attention.kv_heads, None, attention.head_dim])
      for i, _ in layers
      for kind in kinds
    },
  }
  reader = Graph(read, {'ids': tf.TensorSpec([None, None], tf.int32)}, experts='decoder')
  return {'decoder': Graph(decode, step), 'reader': reader}
