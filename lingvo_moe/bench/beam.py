"""What flat beam search pays in attention for never moving keys and values: beside the form that moves them.

In the flat form (GShard, appendix A.1; flat_sequence.py) a hypothesis attends, under a mask, to the positions of all W
hypotheses of its beam: to W times the keys, were it not that positions which nobody owns any more are dropped. In the
reordering form, that of most systems, every hypothesis has keys and values of its own, which follow it from parent to
child at every step: attention is to as few keys as can be, and all that was written is copied.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.bench.clock import Clock
from lingvo_moe.bench.clock import Timing
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Attention
from lingvo_moe.ops import backend
from lingvo_moe.ops import cpu
from lingvo_moe.search import flat_sequence
from lingvo_moe.tasks.mt.config import MtConfig

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
  """What all steps answer, [T, B, W, M]: masks are gathered, and now and then what is still owned."""
  continued_TBW = tf.roll(parents_TBW, -1, axis=0)

  def step(now, answers, caches):
    x_BWM, caches = _layers(attention, thetas, x_TBWM[now.time], now, caches)
    return continued_TBW[now.time], [answers[0].write(now.time, x_BWM)], caches

  return _loop(attention, thetas, step, x_TBWM)


def reordering(attention: Attention, thetas: Sequence[Theta], x_TBWM: tf.Tensor, parents_TBW: tf.Tensor) -> tf.Tensor:
  """The same, [T, B, W, M]: keys and values are gathered; a hypothesis is a row of its own, of a beam of one."""
  steps, rows, width, model_dim = sizes(x_TBWM)
  first_B1 = tf.range(rows)[:, tf.newaxis] * width
  itself_B1 = tf.zeros([rows * width, 1], tf.int32)

  def step(now, answers, caches):
    parents = tf.reshape(first_B1 + parents_TBW[now.time], [-1])
    caches = tf.nest.map_structure(lambda cache_BNUK: tf.gather(cache_BNUK, parents), caches)
    x_B1M, caches = _layers(attention, thetas, x_TB1M[now.time], now, caches)
    return itself_B1, [answers[0].write(now.time, x_B1M)], caches

  x_TB1M = tf.reshape(x_TBWM, [steps, rows * width, 1, model_dim])
  return tf.reshape(_loop(attention, thetas, step, x_TB1M), tf.shape(x_TBWM))


def _layers(attention, thetas, x_BWM, now, caches):
  """A step of all layers, each on what those before it answered."""
  extended = []
  for number, (theta, cache) in enumerate(zip(thetas, caches, strict=True)):
    own = next(iter(weights_lib.unflatten(theta).values()))
    with tf.name_scope(weights_lib.layer_name(number)):
      y_BWM, cache = attention.extend(own, x_BWM, now, cache)
    x_BWM += y_BWM
    extended.append(cache)
  return x_BWM, extended


def _loop(attention, thetas, step, x_TBWM):
  """Both forms run in the loop that decoding runs in."""
  steps, rows, width, _ = sizes(x_TBWM)
  answers = tf.TensorArray(x_TBWM.dtype, steps, element_shape=x_TBWM.shape[1:])
  _, (answers,) = flat_sequence.loop(
    step,
    [answers],
    [attention.empty_cache(rows, 1) for _ in thetas],
    alive=lambda answers: tf.fill([rows, width], True),
    batch_size=rows,
    beam_size=width,
    max_steps=steps,
    keep=lambda caches, positions_BU: [attention.keep_positions(cache, positions_BU) for cache in caches],
  )
  return answers.stack()


def traced(form: Form, attention: Attention, thetas: Sequence[Theta], config: MtConfig) -> Callable:
  """A form as decoding runs in plain TensorFlow: steps and sentences are open, and the cache grows."""
  x_TBWM = tf.TensorSpec([None, None, config.beam_size, config.model_dim], tf.float32)
  parents_TBW = tf.TensorSpec([None, None, config.beam_size], tf.int32)

  def function(x_TBWM, parents_TBW):
    with backend.use(cpu.backend(training=False)):
      return form(attention, thetas, x_TBWM, parents_TBW)

  return tf.function(function, input_signature=[x_TBWM, parents_TBW], autograph=False)
