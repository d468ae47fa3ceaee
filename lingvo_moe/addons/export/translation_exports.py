"""Forms in which a translation model is exported, and what each needs besides weights."""

import dataclasses

import numpy as np
import tensorflow as tf

from lingvo_moe.addons.export import engine_graphs, mt_graphs
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Now
from lingvo_moe.layers.stack import StackCache
from lingvo_moe.models.batches import SOURCE_KEYS, Batch
from lingvo_moe.models.export_forms import DecodingSteps, EngineParts, Exports, TextFunction
from lingvo_moe.search.repetition import FIELDS
from lingvo_moe.search.request import SEARCH
from lingvo_moe.tasks.mt import decoding


class TranslationExports(Exports):
  """Forms of a translation model, from a mt_task.TranslationTask."""

  is_of_text = True

  def text_function(self) -> TextFunction:
    from lingvo_moe.addons.export.text_search import TextSearch  # slow to import: sacreBLEU and tensorflow_text

    return TextSearch(self.task.config, self.task.vocabs)

  def decoding_steps(self, rows: int) -> DecodingSteps:
    """For beam_size hypotheses of each line, and max_length steps."""
    config = self.task.config.for_inference()
    program = config.program()
    model = program.model
    if model.task_tags and self.task.config.tags_both:
      raise UserError('--stablehlo_rows is not for gate=by_pair, which reads the tag of the target: leave it out')
    width, steps = config.beam_size, config.max_length

    def encode(weights: Theta, source: Batch) -> StackCache:
      theta = program.theta(weights)
      return model.init_cache(theta, model.encode(theta, source)[0], steps * width)

    def decode_step(weights: Theta, inputs: Batch, cache: StackCache) -> tuple[tf.Tensor, StackCache]:
      time = inputs['time']
      now = Now(time, time * width, inputs['mask'])
      return model.decode_step(program.theta(weights), inputs['ids'], now, model.segments(inputs, 'src'), cache)

    tokens = np.zeros([rows, steps], np.int32)
    inputs = {
      'ids': np.zeros([rows, width], np.int32),
      'time': np.zeros([], np.int32),
      'mask': np.zeros([rows, width, steps * width], np.float32),
      'src_segments': tokens,
      **({'src_ids': tokens} if model.task_tags else {}),
    }
    return DecodingSteps(encode, decode_step, dict.fromkeys(SOURCE_KEYS, tokens), inputs)

  def engine_parts(self) -> EngineParts:
    config = dataclasses.replace(self.task.config.for_inference(), dispatch='auto', scan_layers=False)
    engine_graphs.require(config)
    source, target = self.task.vocabs
    names = 'beam_size', 'length_norm_alpha', 'length_norm_k', 'max_length', 'decode_ratio', 'decode_extra'
    names += 'early_stopping', 'num_experts', 'several_sentences', 'long_line', *SEARCH, *FIELDS
    settings = {name: getattr(config, name) for name in names}
    settings |= {'task': 'translation', 'layers': config.decoder_layers}
    settings['batch_tokens'] = decoding.default_batch_tokens(self.task.config)
    settings |= {'tags': config.tag_ids(source), 'tagged': bool(config.tag_target), 'pairs': self.task.pairs_of(())}
    settings |= {'gate_pairs': self.task.gate_pairs}
    settings |= {'tag_sides': config.tag_sides, 'begin': config.begin_id}
    files = {'source.model': source.model_bytes, 'target.model': target.model_bytes}
    return EngineParts(mt_graphs.make(config), files, settings)
