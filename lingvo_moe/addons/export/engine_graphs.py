"""Graphs of all models for lingvo_moe/addons/engine: one step of a decoder, with ranked symbols, and a refusal.

Keys and values of decoder layer i are named keys_i and values_i; they begin with `memory_` (of the source), `cache_`
(of earlier positions of the beam) or `new_` (of this step). Sizes are open, but for the width of a step.
"""

from collections.abc import Iterable, Mapping

import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Cache, Now
from lingvo_moe.models.export_forms import EngineGraph
from lingvo_moe.search import beam
from lingvo_moe.search.beam_search import TENSORS
from lingvo_moe.tasks.model_config import ModelConfig
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS, PAD

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


def decoders(model, width: int, source: str, source_spec: tf.TensorSpec) -> dict[str, EngineGraph]:
  """Graphs of a step, 'decoder' of `width` hypotheses a row and 'single' of one, if that is another; see `_decoder`."""
  of_beam, of_one = (_decoder(model, w, source, source_spec) for w in (width, 1))
  return {'decoder': of_beam, **({'single': of_one._replace(experts='decoder')} if width > 1 else {})}


def _decoder(model, width: int, source: str, source_spec: tf.TensorSpec) -> EngineGraph:
  """One step of W = `width` hypotheses a row; `source` is the input that model.decode_step takes of a row's source."""
  stack, attention = model.decoder, model.decoder.attention
  parts = {'memory': 'memory', 'self': 'cache'} if stack.cross_attention else {'self': 'cache'}
  candidates = min(2 * width + 3, model.target_embedding.vocab_size)  # pad, bos and eos may be among the 2 W best

  def decode(theta: Theta, inputs: Tensors) -> Tensors:
    own_BW1 = tf.cast(inputs['live'] >= 0, tf.float32)[..., tf.newaxis]  # the new position comes last
    mask_BWU = tf.concat([inputs['mask'], own_BW1], axis=-1)
    offsets_B1U = tf.pad(inputs['offsets'], [[0, 0], [0, 1]])[:, tf.newaxis]
    now = Now(inputs['time'][0], tf.constant(0), mask_BWU, inputs['live'] > 0, offsets_BWU=offsets_B1U)
    inputs_of = lambda part, i: {kind: inputs[f'{part}_{kind}_{i}'] for kind in _KINDS}
    cache = {name: {key: inputs_of(part, i) for key, part in parts.items()} for i, name in enumerate(stack.layers)}
    logits_BWV, cache = model.decode_step(theta, inputs['ids'], now, inputs[source], cache)
    written = named('new', (of_layer['self'] for of_layer in cache.values()))
    new = {name: x.new_BNWK for name, x in written.items()}
    if width == 1:  # NumPy finds the best of one hypothesis in a tenth of the time
      logits_FV = _flat(logits_BWV)
      return {**new, 'logits': logits_FV, 'probs': tf.nn.softmax(logits_FV)}
    results = ranked(logits_BWV, candidates)
    return {**new, **results, **continued(results, inputs['log_probs'])}

  keys_values = tf.TensorSpec([None, attention.kv_heads, None, attention.head_dim])
  layers = [dict.fromkeys(_KINDS, keys_values)] * len(stack.layers)
  inputs = {
    'ids': tf.TensorSpec([None, width], tf.int32),
    'time': tf.TensorSpec([1], tf.int32),
    'mask': tf.TensorSpec([None, width, None]),
    'live': tf.TensorSpec([None, width], tf.int32),
    'offsets': tf.TensorSpec([None, None], tf.int32),  # of the symbols of cells from the last of their hypotheses
    source: source_spec,
  }
  if width > 1:
    inputs['log_probs'] = tf.TensorSpec([None, width])  # of the hypotheses; -inf where there is none
  for part in parts.values():
    inputs |= named(part, layers)
  return EngineGraph(decode, inputs)


def named(part: str, layers: Iterable[Cache]) -> dict[str, tf.Tensor]:
  """Keys and values of each layer by their names in a graph."""
  return {f'{part}_{kind}_{i}': cache[kind] for i, cache in enumerate(layers) for kind in _KINDS}


def _flat(x: tf.Tensor) -> tf.Tensor:
  """A tensor with all axes but its last in one; what it was made of by a reshape, if that is so, as each copies."""
  made_of = x.op.inputs[0] if tf.is_symbolic_tensor(x) and x.op.type == 'Reshape' else x
  return made_of if made_of.shape.rank == 2 else tf.reshape(x, [-1, x.shape[-1]])


def ranked(logits_BWV: tf.Tensor, count: int) -> dict[str, tf.Tensor]:
  """Logits, the logarithm of their sum of exp, and the `count` best with their symbols, as of tf.math.top_k.

  top_k is slow for many symbols. The best are in the `count` parts of the vocabulary with the largest maxima. Results
  have one axis F of all hypotheses: for logits of two shapes they would be copied.
  """
  num_symbols = logits_BWV.shape[2]
  part = max(size for size in range(1, 65) if num_symbols % size == 0)
  logits_FV = _flat(logits_BWV)
  logits_FDP = tf.reshape(logits_FV, [-1, num_symbols // part, part])
  _, parts_FJ = tf.math.top_k(tf.reduce_max(logits_FDP, axis=2), min(count, num_symbols // part))
  parts_FJ = -tf.math.top_k(-parts_FJ, parts_FJ.shape[1])[0]  # in order: of equal logits the first is the best
  candidates_FK = tf.reshape(tf.gather(logits_FDP, parts_FJ, batch_dims=1), [-1, parts_FJ.shape[1] * part])
  best_FJ, at_FJ = tf.math.top_k(candidates_FK, count)
  symbols_FJ = tf.gather(parts_FJ, at_FJ // part, batch_dims=1) * part + at_FJ % part
  # log Z = logit - log(prob) of the likeliest symbol; the softmax is one kernel.
  best_prob_F1 = tf.gather(tf.nn.softmax(logits_FV), symbols_FJ[:, :1], batch_dims=1)
  log_z_F = (best_FJ[:, :1] - tf.math.log(best_prob_F1))[:, 0]
  return {'logits': logits_FV, 'log_z': log_z_F, 'best': best_FJ, 'symbols': symbols_FJ}


def continued(results: Mapping[str, tf.Tensor], log_probs_BW: tf.Tensor) -> dict[str, tf.Tensor]:
  """The 2 W best continuations of each row, [B, 2 W], of hypotheses with these log-probabilities, from `ranked`.

  They are those of beam.continuations where every row may end and none must: NumPy would take a quarter of the time of
  a step of few rows for them.
  """
  width = log_probs_BW.shape[1]
  of_rows = lambda x: tf.reshape(x, [-1, width, x.shape[1]])
  live = beam.Live(None, None, log_probs_BW, None)  # the rest is not read
  logits_FV, log_z_F1 = results['logits'], results['log_z'][:, tf.newaxis]
  scores = results['best'], results['symbols'], logits_FV[:, EOS : EOS + 1], log_z_F1
  best = beam.continuations(TENSORS, live, *map(of_rows, scores), None, None, beam.Specials(PAD, BOS, EOS))
  return {'next_log_probs': best.log_probs_BJ, 'next_symbols': best.symbols_BJ, 'next_parents': best.parents_BJ}
