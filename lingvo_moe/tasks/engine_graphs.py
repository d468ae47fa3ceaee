"""Graphs of all models for lingvo_moe/addons/engine: one step of a decoder, with ranked symbols, and a refusal.

Keys and values of decoder layer i are named keys_i and values_i; they begin with `memory_` (of the source), `cache_`
(of earlier positions of the beam) or `new_` (of this step). Sizes are open, but for the width of a step.
"""

from collections.abc import Iterable, Mapping

import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.shapes import inferred, sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Cache, Now
from lingvo_moe.tasks.model_config import ModelConfig
from lingvo_moe.tasks.task import EngineGraph

Tensors = Mapping[str, tf.Tensor]
_KINDS = 'keys', 'values'


def require(config: ModelConfig) -> None:
  """Raises UserError where the engine cannot compute the model."""
  moe = config.moe()
  if moe is not None and moe.gate.least_experts is None:
    raise UserError(
      f'the engine computes gates that choose single experts by token; this model has gate={config.gate!r}: use '
      '--format=saved_model'
    )


def decoder(model, width: int, source: str, source_spec: tf.TensorSpec) -> EngineGraph:
  """One step of W = `width` hypotheses a row; `source` is the input that model.decode_step takes of a row's source."""
  stack, attention = model.decoder, model.decoder.attention
  parts = {'memory': 'memory', 'self': 'cache'} if stack.cross_attention else {'self': 'cache'}
  candidates = min(2 * width + 3, model.target_embedding.vocab_size)  # pad, bos and eos may be among the 2 W best

  def decode(theta: Theta, inputs: Tensors) -> Tensors:
    own_BW1 = tf.cast(inputs['live'] >= 0, tf.float32)[..., tf.newaxis]  # the new position comes last
    mask_BWU = tf.concat([inputs['mask'], own_BW1], axis=-1)
    now = Now(inputs['time'][0], tf.constant(0), mask_BWU, inputs['live'] > 0)
    inputs_of = lambda part, i: {kind: inputs[f'{part}_{kind}_{i}'] for kind in _KINDS}
    cache = {name: {key: inputs_of(part, i) for key, part in parts.items()} for i, name in enumerate(stack.layers)}
    logits_BWV, cache = model.decode_step(theta, inputs['ids'], now, inputs[source], cache)
    written = named('new', (of_layer['self'] for of_layer in cache.values()))
    return {**ranked(logits_BWV, candidates), **{name: x.new_BNWK for name, x in written.items()}}

  keys_values = tf.TensorSpec([None, attention.kv_heads, None, attention.head_dim])
  layers = [dict.fromkeys(_KINDS, keys_values)] * len(stack.layers)
  inputs = {
    'ids': tf.TensorSpec([None, width], tf.int32),
    'time': tf.TensorSpec([1], tf.int32),
    'mask': tf.TensorSpec([None, width, None]),
    'live': tf.TensorSpec([None, width], tf.int32),
    source: source_spec,
  }
  for part in parts.values():
    inputs |= named(part, layers)
  return EngineGraph(decode, inputs)


def named(part: str, layers: Iterable[Cache]) -> dict[str, tf.Tensor]:
  """Keys and values of each layer by their names in a graph."""
  return {f'{part}_{kind}_{i}': cache[kind] for i, cache in enumerate(layers) for kind in _KINDS}


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
