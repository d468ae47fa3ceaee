"""Graphs of a language model for lingvo_moe/addons/engine: the reader of prompts, and one step of the decoder."""

import tensorflow as tf

from lingvo_moe.addons.export import engine_graphs
from lingvo_moe.addons.export.engine_graphs import Tensors
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Theta
from lingvo_moe.models.export_forms import EngineGraph
from lingvo_moe.tasks.lm.lm_config import LanguageConfig, LmConfig
from lingvo_moe.vocab.sentencepiece_vocab import PAD


def require(config: LanguageConfig) -> None:
  """Raises UserError where the engine cannot compute the model."""
  if not isinstance(config, LmConfig):
    raise UserError(f'the engine computes Transformers; {type(config).__name__} is recurrent: use its log directory')
  engine_graphs.require(config)


def make(config: LmConfig, width: int) -> dict[str, EngineGraph]:
  """The graphs by name, 'reader' and those of engine_graphs.decoders, for weights of config.program()."""
  model = config.program().model

  def read(theta: Theta, inputs: Tensors) -> Tensors:
    ids_BT = inputs['ids']
    lengths_B = tf.reduce_sum(tf.cast(tf.not_equal(ids_BT, PAD), tf.int32), axis=1)
    cache = model.read(theta, ids_BT, lengths_B, 0, 1)
    return engine_graphs.named('new', (of_layer['self'] for of_layer in cache.values()))

  lengths = tf.TensorSpec([None], tf.int32)  # of the prompts without their last symbols
  reader = EngineGraph(read, {'ids': tf.TensorSpec([None, None], tf.int32)}, experts='decoder')
  return {**engine_graphs.decoders(model, width, 'lengths', lengths), 'reader': reader}
