"""Continuations of prompts: samples, greedy ones, or those of beam search."""

import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core import prng
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.models.batches import zeros
from lingvo_moe.models.lm_model import LanguageModel
from lingvo_moe.search import beam_search, sampling
from lingvo_moe.search.continuations import Listeners, Request, by_row
from lingvo_moe.tasks import inference, task
from lingvo_moe.tasks.lm.lm_config import LanguageConfig
from lingvo_moe.tasks.plain_text_task import ROWS, TextGenerator
from lingvo_moe.text import translator
from lingvo_moe.vocab.plain_text_vocab import TextVocab
from lingvo_moe.vocab.sentencepiece_vocab import BOS, PAD

_ROUND = 16  # lengths of padded prompts are multiples of it, so that few shapes are compiled


def width_of(config: LanguageConfig, n_best: int) -> int:
  """W: continuations of a prompt that are computed side by side."""
  return config.beam_size if config.search == 'beam' else n_best


def prompt_arrays(
  prompts: Sequence[np.ndarray], config: LanguageConfig, width: int, rows: int = 0, first: int = 0
) -> dict[str, np.ndarray]:
  """Batch of prompts that begin with bos: all symbols but the last of each, padded, the last ones, and lengths.

  Args:
    prompts: ids.
    config: its max_new_tokens is the limit of each.
    width: W, from `width_of`; it divides the padded length, as static shapes need.
    rows: B; rows without a prompt get no continuation.
    first: number of the first prompt, for its random key.
  """
  rows = rows or len(prompts)
  length = _padded(max(len(p) - 1 for p in prompts), width)
  ids_BT = np.zeros([rows, length], np.int32)
  batch = {name: np.zeros([rows], np.int32) for name in ('last', 'lengths', 'limits', 'numbers')}
  for row, prompt in enumerate(prompts):
    ids_BT[row, : len(prompt) - 1] = prompt[:-1]
    batch['last'][row], batch['lengths'][row] = prompt[-1], len(prompt) - 1
    batch['limits'][row], batch['numbers'][row] = config.max_new_tokens, first + row
  return {'ids': ids_BT, **batch}


def _padded(length: int, width: int) -> int:
  unit = math.lcm(_ROUND, width)
  return max(1, -(-length // unit)) * unit


def prompt_shapes(config: LanguageConfig, width: int) -> dict[str, np.ndarray]:
  """Batch with the shapes of one of prompts as long as a window, to be continued `width` times each."""
  ids_BT = zeros(config.rows_of_batch(training=False), _padded(config.window, width))
  return {'ids': ids_BT, **dict.fromkeys(('last', 'lengths', 'limits', 'numbers'), ids_BT[:, 0])}


def generate(
  model: LanguageModel,
  theta: Theta,
  batch: Mapping[str, tf.Tensor],
  config: LanguageConfig,
  n_best: int,
  watch: Callable[[np.ndarray, np.ndarray], np.ndarray] | None = None,
) -> beam_search.Hypotheses:
  """Continues prompts as config.search says: a pure function of weights and batch, unless it is watched.

  Args:
    model: model of the configuration.
    theta: nested weights.
    batch: from `prompt_arrays`; with `continuations.by_row`, samples are drawn by its values, not by config's.
    config: its fields from `search` on, beam_size, length_norm_* and early_stopping.
    n_best: continuations of each prompt: independent samples, or the best of a beam; 1 if greedy.
    watch: called while samples are drawn, with numbers of rows, batch['rows'], and their symbols; see Listeners.
  """
  max_steps = ops.loop_bound(batch['limits'], config.max_new_tokens)
  width = width_of(config, n_best)

  def search_rows(batch):
    lengths_B = batch['lengths']
    cache = model.read(theta, batch['ids'], lengths_B, max_steps, width)
    step = lambda ids_BW, now, cache: model.decode_step(theta, ids_BW, now, lengths_B, cache)
    watched = lambda *drawn: tf.ensure_shape(tf.numpy_function(watch, drawn, tf.bool), [None])
    watch_rows = lambda symbols_BW: watched(batch['rows'], symbols_BW)
    rows, length = sizes(batch['ids'])
    shared = {
      'first_B': batch['last'],
      'max_steps': max_steps,
      'max_lengths_B': batch['limits'],
      'keep': model.decoder.keep_positions,
      'repetition': config.repetition,
      'before_BP': _symbols_before(batch) if config.repetition else None,
      'prefix_BU': tf.cast(tf.range(length)[tf.newaxis] < lengths_B[:, tf.newaxis], tf.float32),
    }
    if config.search == 'beam':
      return inference.beam(step, cache, model, config, rows, n_best, **shared)
    if 'keys' in batch:
      sampler = sampling.Sampler.of_rows(batch)
      key_BW = tf.ensure_shape(batch['keys'], [None, width])
    else:
      temperature = 0.0 if config.search == 'greedy' else config.sample_temperature
      sampler = sampling.Sampler(temperature, config.top_k, config.top_p)
      key_B = prng.fold(prng.key(config.sample_seed, 'sample'), batch['numbers'])
      key_BW = prng.fold(key_B[:, tf.newaxis], tf.range(width)[tf.newaxis])
    shared |= inference.SYMBOLS
    return sampling.sample(step, cache, sampler, key_BW=key_BW, watch=watch and watch_rows, **shared)

  return ops.map_rows(search_rows, batch, beam_search.specs(n_best))


def _symbols_before(batch: Mapping[str, tf.Tensor]) -> tf.Tensor:
  """Symbols of each prompt, after pad."""
  place_BP = tf.range(sizes(batch['ids'])[1]) - (sizes(batch['ids'])[1] - batch['lengths'][:, tf.newaxis])
  ids_BP = tf.where(place_BP < 0, PAD, tf.gather(batch['ids'], tf.maximum(place_BP, 0), batch_dims=1))
  return tf.concat([ids_BP, batch['last'][:, tf.newaxis]], axis=1)


class Continuer(TextGenerator):
  """Continues prompts with the current weights of a runtime.

  A continuation depends on its prompt, on the number of the prompt and on the seed. Prompts are numbered in each call;
  lines from one call to the next.
  """

  def __init__(self, config: LanguageConfig, vocab: TextVocab, runner: task.Runner, n_best: int = 1):
    translator.check_continuations(n_best, config.search, config.beam_size)
    super().__init__(config, vocab, runner, functools.partial(generate, n_best=n_best))
    self._width = width_of(config, n_best)
    watch = lambda *drawn: self._listeners(*drawn)
    self._complete = self._function(functools.partial(generate, n_best=n_best, watch=watch))
    self._one_at_a_time = threading.Lock()

  def _batch(self, texts: Sequence[np.ndarray], rows: int, first: int) -> task.Batch:
    return prompt_arrays(texts, self._config, self._width, rows, first)

  def translate(self, texts: Sequence[str], target: str | None = None, first: int = 0) -> task.Answers:
    """Continuations of each prompt; an empty prompt gives a text from its beginning.

    `first` is the number of the first prompt, on which samples depend.
    """
    return task.Answers(
      [self._as_text(decoded) for decoded in self.decode([self._ids(text) for text in texts], first)], []
    )

  def complete(self, requests: Sequence[Request]) -> list[list[task.Hypothesis]]:
    answers = []
    for begin in range(0, len(requests), ROWS):
      part = requests[begin : begin + ROWS]
      arrays = prompt_arrays([self._ids(request.prompt) for request in part], self._config, self._width)
      arrays |= {**by_row(part, self._width), 'rows': np.arange(len(part), dtype=np.int32)}
      with self._one_at_a_time:
        self._listeners = Listeners(part, self._vocab.decode)
        hypotheses = self._complete(arrays)
        hypotheses_of_rows = [self._as_text(inference.decoded(hypotheses, row)) for row in range(len(part))]
        self._listeners.finish([best.text for best, *_ in hypotheses_of_rows])
      answers += hypotheses_of_rows
    return answers

  def _ids(self, text: str) -> np.ndarray:
    return np.array([BOS, *self._vocab.encode(text)], np.int32)

  def _as_text(self, decoded: Sequence[inference.DecodedIds]) -> list[task.Hypothesis]:
    return [task.Hypothesis(self._vocab.decode(h.ids), h.score, h.log_prob) for h in decoded]
