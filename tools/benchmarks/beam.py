"""Benchmark of self-attention in flat beam search against beam search that reorders keys and values.

In the flat form (GShard, appendix A.1; flat_sequence.py) a hypothesis attends, under a mask, to the positions of all W
hypotheses of its beam, up to W times as many keys; fewer, as positions that no hypothesis uses are dropped. In the
reordering form, that of most systems, every hypothesis has its own keys and values, which are copied from parent to
child at every step: attention covers the fewest keys, but the whole cache is copied.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from benchmarks.clock import Clock, Timing
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.layers.attention import Attention
from lingvo_moe.ops import backend, cpu
from lingvo_moe.search import flat_sequence
from lingvo_moe.tasks.mt.mt_config import MtConfig

LENGTHS = (16, 64, 256)

Form = Callable[[Attention, Sequence[Theta], tf.Tensor, tf.Tensor], tf.Tensor]


def measure(config: MtConfig, clock: Clock, lengths: Sequence[int] = LENGTHS) -> list[Timing]:
  """Times the self-attention of all decoder layers over whole translations, in both forms in turn.

  A batch has config.batch_tokens source tokens, so longer sentences are fewer. Parents are random.

  Returns:
    For each length, the Timing of the flat form with reordering_s, the median of the other form;
    flat_over_reordering, their ratio; length, sentences, beam_size, layers; and tokens_per_s, steps times sentences
    per second.
  """
  attention, thetas = decoder_attention(config)
  forms = {form.__name__: traced(form, attention, thetas, config) for form in (flat, reordering)}
  run = lambda form, beams: tf.reduce_sum(form(*beams)).numpy()
  results = []
  for length in lengths:
    rows = max(1, config.batch_tokens // length)
    beams = random_beams(length, rows, config.beam_size, config.model_dim)
    timings = clock.time_in_turn({name: functools.partial(run, form, beams) for name, form in forms.items()})
    ratio = timings['flat']['median_s'] / timings['reordering']['median_s']
    results.append(
      {
        **timings['flat'],
        'reordering_s': timings['reordering']['median_s'],
        'flat_over_reordering': round(ratio, 3),
        'length': length,
        'sentences': rows,
        'beam_size': config.beam_size,
        'layers': len(thetas),
        'tokens_per_s': round(rows * length / timings['flat']['median_s'], 1),
      }
    )
  return results


def decoder_attention(config: MtConfig) -> tuple[Attention, list[Theta]]:
  """Self-attention of a model's decoder, and initial weights of it for each layer."""
  layers = config.model().decoder.layers
  attention = next(iter(layers.values())).attention
  return attention, [weights_lib.initialize({name: attention.weights()}, config.seed) for name in layers]


def random_beams(length: int, rows: int, beam_size: int, model_dim: int) -> tuple[tf.Tensor, tf.Tensor]:
  """Random inputs x_TBWM of the hypotheses at every step, and the parent of each in the step before, parents_TBW."""
  rng = np.random.default_rng(0)
  x_TBWM = rng.normal(size=[length, rows, beam_size, model_dim]).astype(np.float32)
  return tf.constant(x_TBWM), tf.constant(rng.integers(0, beam_size, [length, rows, beam_size]), tf.int32)


def flat(attention: Attention, thetas: Sequence[Theta], x_TBWM: tf.Tensor, parents_TBW: tf.Tensor) -> tf.Tensor:
  """Output of all steps, [T, B, W, M], in the flat form: gathers masks, and sometimes the positions still in use."""
  continued_TBW = tf.roll(parents_TBW, -1, axis=0)

  def step(now, outputs, caches):
    x_BWM, caches = _layers(attention, thetas, x_TBWM[now.time], now, caches)
    return continued_TBW[now.time], [outputs[0].write(now.time, x_BWM)], caches

  return _loop(attention, thetas, step, x_TBWM)


def reordering(attention: Attention, thetas: Sequence[Theta], x_TBWM: tf.Tensor, parents_TBW: tf.Tensor) -> tf.Tensor:
  """Output of all steps, [T, B, W, M], in the reordering form: gathers keys and values.

  Every hypothesis is a row with a beam of one.
  """
  steps, rows, width, model_dim = sizes(x_TBWM)
  first_B1 = tf.range(rows)[:, tf.newaxis] * width
  parents_B1 = tf.zeros([rows * width, 1], tf.int32)

  def step(now, outputs, caches):
    parents = tf.reshape(first_B1 + parents_TBW[now.time], [-1])
    caches = tf.nest.map_structure(lambda cache_BNUK: tf.gather(cache_BNUK, parents), caches)
    x_B1M, caches = _layers(attention, thetas, x_TB1M[now.time], now, caches)
    return parents_B1, [outputs[0].write(now.time, x_B1M)], caches

  x_TB1M = tf.reshape(x_TBWM, [steps, rows * width, 1, model_dim])
  return tf.reshape(_loop(attention, thetas, step, x_TB1M), tf.shape(x_TBWM))


def _layers(attention, thetas, x_BWM, now, caches):
  """Runs one step of the self-attention of all layers, with residual connections."""
  extended = []
  for number, (theta, cache) in enumerate(zip(thetas, caches, strict=True)):
    own = next(iter(weights_lib.unflatten(theta).values()))
    with tf.name_scope(weights_lib.layer_name(number)):
      y_BWM, cache = attention.extend(own, x_BWM, now, cache)
    x_BWM += y_BWM
    extended.append(cache)
  return x_BWM, extended


def _loop(attention, thetas, step, x_TBWM):
  """Runs steps in the loop that decoding uses."""
  steps, rows, width, _ = sizes(x_TBWM)
  outputs = tf.TensorArray(x_TBWM.dtype, steps, element_shape=x_TBWM.shape[1:])
  _, (outputs,) = flat_sequence.loop(
    step,
    [outputs],
    [attention.empty_cache(rows, 1) for _ in thetas],
    alive=lambda outputs: tf.fill([rows, width], True),
    batch_size=rows,
    beam_size=width,
    max_steps=steps,
    keep=lambda caches, positions_BU: [attention.keep_positions(cache, positions_BU) for cache in caches],
  )
  return outputs.stack()


def traced(form: Form, attention: Attention, thetas: Sequence[Theta], config: MtConfig) -> Callable:
  """Traces a form as decoding is traced in plain TensorFlow: steps and sentences are dynamic, and the cache grows."""
  x_TBWM = tf.TensorSpec([None, None, config.beam_size, config.model_dim], tf.float32)
  parents_TBW = tf.TensorSpec([None, None, config.beam_size], tf.int32)

  def function(x_TBWM, parents_TBW):
    with backend.use(cpu.backend(training=False)):
      return form(attention, thetas, x_TBWM, parents_TBW)

  return tf.function(function, input_signature=[x_TBWM, parents_TBW], autograph=False)
