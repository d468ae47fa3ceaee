"""What flat beam search pays in attention for never moving keys and values: beside the form that moves them.

In the flat form (GShard, appendix A.1) a hypothesis attends, under a mask, to the positions of all W hypotheses of its
beam: W times the keys. In the reordering form, that of most systems, every hypothesis has keys and values of its own,
which follow it from parent to child at every step: attention is W times smaller, and all that was written is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe import weights as weights_lib
from lingvo_moe.bench.clock import Clock
from lingvo_moe.bench.clock import Timing
from lingvo_moe.layers.attention import Attention
from lingvo_moe.shapes import sizes
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.weights import Theta

LENGTHS = (16, 64, 256)

Form = Callable[[Attention, Sequence[Theta], tf.Tensor, tf.Tensor], tf.Tensor]


def measure(config: MtConfig, clock: Clock, lengths: Sequence[int] = LENGTHS) -> list[Timing]:
  """Times the self-attention of all decoder layers over whole translations in both forms, which take turns.

  A batch has config.batch_tokens source tokens: the longer its sentences, the fewer. Parents are random. A result has,
  beside the Timing of the flat form, reordering_s, the other's median; flat_over_reordering, their ratio; length,
  sentences, beam_size, layers; and tokens_per_s, steps times sentences.
  """
  attention, thetas = decoder_attention(config)
  forms = {form.__name__: traced(form, attention, thetas, config) for form in (flat, reordering)}
  run = lambda form, beams: tf.reduce_sum(form(*beams)).numpy()
  results = []
  for length in lengths:
    rows = max(1, config.batch_tokens // length)
    beams = random_beams(length, rows, config.beam_size, config.model_dim)
    found = clock.time_in_turn({name: functools.partial(run, form, beams) for name, form in forms.items()})
    ratio = found['flat']['median_s'] / found['reordering']['median_s']
    results.append(
      {
        **found['flat'],
        'reordering_s': found['reordering']['median_s'],
        'flat_over_reordering': round(ratio, 3),
        'length': length,
        'sentences': rows,
        'beam_size': config.beam_size,
        'layers': len(thetas),
        'tokens_per_s': round(rows * length / found['flat']['median_s'], 1),
      }
    )
  return results


def decoder_attention(config: MtConfig) -> tuple[Attention, list[Theta]]:
  """The self-attention of a model's decoder, and initial weights of each layer's."""
  layers = config.task().decoder.layers
  attention = next(iter(layers.values())).attention
  return attention, [weights_lib.initialize({name: attention.weights()}, config.seed) for name in layers]


def random_beams(length: int, rows: int, beam_size: int, model_dim: int) -> tuple[tf.Tensor, tf.Tensor]:
  """What hypotheses ask with at every step, and which hypothesis of the step before each continues."""
  rng = np.random.default_rng(0)
  x_TBWM = rng.normal(size=[length, rows, beam_size, model_dim]).astype(np.float32)
  return tf.constant(x_TBWM), tf.constant(rng.integers(0, beam_size, [length, rows, beam_size]), tf.int32)


def flat(attention: Attention, thetas: Sequence[Theta], x_TBWM: tf.Tensor, parents_TBW: tf.Tensor) -> tf.Tensor:
  """What all steps answer, [T, B, W, M]: masks are gathered."""
  steps, rows, width, _ = sizes(x_TBWM)
  num_slots = steps * width
  caches = [attention.empty_cache(rows, num_slots) for _ in thetas]

  def step(time, mask_BWU, caches, y_TBWM):
    own_WU = tf.one_hot(time * width + tf.range(width), num_slots)
    mask_BWU = tf.gather(mask_BWU, parents_TBW[time], batch_dims=1) + own_WU
    x_BWM, caches = _layers(attention, thetas, x_TBWM[time], time, mask_BWU, caches)
    return time + 1, mask_BWU, caches, y_TBWM.write(time, x_BWM)

  return _loop(step, x_TBWM, tf.zeros([rows, width, num_slots]), caches)


def reordering(attention: Attention, thetas: Sequence[Theta], x_TBWM: tf.Tensor, parents_TBW: tf.Tensor) -> tf.Tensor:
  """The same, [T, B, W, M]: keys and values are gathered; a hypothesis is a row of its own, of a beam of one."""
  steps, rows, width, model_dim = sizes(x_TBWM)
  first_B1 = tf.range(rows)[:, tf.newaxis] * width
  caches = [attention.empty_cache(rows * width, steps) for _ in thetas]

  def step(time, mask_11U, caches, y_TBWM):
    parents = tf.reshape(first_B1 + parents_TBW[time], [-1])
    caches = tf.nest.map_structure(lambda cache_BNUK: tf.gather(cache_BNUK, parents), caches)
    mask_11U += tf.one_hot(time, steps)
    x_B1M = tf.reshape(x_TBWM[time], [rows * width, 1, model_dim])
    x_B1M, caches = _layers(attention, thetas, x_B1M, time, mask_11U, caches)
    return time + 1, mask_11U, caches, y_TBWM.write(time, tf.reshape(x_B1M, [rows, width, model_dim]))

  return _loop(step, x_TBWM, tf.zeros([1, 1, steps]), caches)


def _layers(attention, thetas, x_BWM, time, mask_BWU, caches):
  """A step of all layers, each on what those before it answered."""
  extended = []
  for number, (theta, cache) in enumerate(zip(thetas, caches, strict=True)):
    own = next(iter(weights_lib.unflatten(theta).values()))
    with tf.name_scope(weights_lib.layer_name(number)):
      y_BWM, cache = attention.extend(own, x_BWM, time, mask_BWU, cache)
    x_BWM += y_BWM
    extended.append(cache)
  return x_BWM, extended


def _loop(step, x_TBWM, mask, caches):
  answers = tf.TensorArray(x_TBWM.dtype, tf.shape(x_TBWM)[0], element_shape=x_TBWM.shape[1:])
  begin = tf.constant(0), mask, caches, answers
  return tf.while_loop(lambda time, *_: time < tf.shape(x_TBWM)[0], step, begin)[-1].stack()


def traced(form: Form, attention: Attention, thetas: Sequence[Theta], config: MtConfig) -> Callable:
  """A form as decoding runs in plain TensorFlow: steps and sentences are open, and attention sees what is written."""
  x_TBWM = tf.TensorSpec([None, None, config.beam_size, config.model_dim], tf.float32)
  parents_TBW = tf.TensorSpec([None, None, config.beam_size], tf.int32)
  function = lambda x, parents: form(attention, thetas, x, parents)
  return tf.function(function, input_signature=[x_TBWM, parents_TBW], autograph=False)
