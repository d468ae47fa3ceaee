"""Graphs of a translation model for lingvo_moe/addons/engine: the encoder, and one step of the decoder."""

import tensorflow as tf

from lingvo_moe.addons.export import engine_graphs
from lingvo_moe.addons.export.engine_graphs import Tensors
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.models.batches import SOURCE_KEYS
from lingvo_moe.models.export_forms import EngineGraph
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.vocab.sentencepiece_vocab import PAD


def make(config: MtConfig) -> dict[str, EngineGraph]:
  """The graphs by name, 'encoder' and those of engine_graphs.decoders, for weights of config.program()."""
  model = config.program().model
  if model.task_tags and config.tags_both:
    raise UserError(
      'the encoder of the engine does not see the language of a target, which gate=by_pair needs: use '
      '--format=saved_model, or export one pair by --keep_languages'
    )

  def encode(theta: Theta, inputs: Tensors) -> Tensors:
    ids_BT = inputs['ids']
    segments_BT = tf.cast(tf.not_equal(ids_BT, PAD), tf.int32)
    positions_BT = tf.range(sizes(ids_BT)[1]) * segments_BT
    source = dict(zip(SOURCE_KEYS, (ids_BT, segments_BT, positions_BT), strict=True))
    cache = model.init_cache(theta, model.encode(theta, source)[0], 1)
    segments = {'segments': model.segments(source, 'src')} if model.task_tags else {}  # with the numbers of tasks
    return engine_graphs.named('memory', (of_layer['memory'] for of_layer in cache.values())) | segments

  rows = tf.TensorSpec([None, None], tf.int32)
  return {
    'encoder': EngineGraph(encode, {'ids': rows}),
    **engine_graphs.decoders(model, config.beam_size, 'segments', rows),
  }
