"""Inference that tasks share: beam search with an encoder-decoder model, and its hypotheses as ids and numbers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.models.batches import FIRST, SOURCE_KEYS
from lingvo_moe.models.encoder_decoder import EncoderDecoder
from lingvo_moe.search import beam_search, flat_sequence, sampling
from lingvo_moe.search.constraints import Constraints
from lingvo_moe.tasks import task
from lingvo_moe.text import translator
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS, PAD

if TYPE_CHECKING:
  from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
  from lingvo_moe.tasks.mt.mt_config import MtConfig

  AnswerConfig = MtConfig | DenoisingConfig

SYMBOLS = {'bos_id': BOS, 'eos_id': EOS, 'pad_id': PAD}  # of every search


class DecodedIds(NamedTuple):
  """A hypothesis before it is text."""

  ids: list[int]  # with the end symbol, if it has one
  score: float
  log_prob: float


def decoded(hypotheses: beam_search.Hypotheses, row: int) -> list[DecodedIds]:
  """Hypotheses of a row that have a probability above 0, best first; UserError if there is none."""
  return translator.of_finite_probability(DecodedIds, *(values[row] for values in hypotheses[:4]))


def with_constraints(batch: task.Batch, constraints: Constraints, room_B: np.ndarray) -> task.Batch:
  """A batch for `search` with constraints, and room_B symbols of room for them in each row."""
  return {**batch, **constraints._asdict(), 'room': room_B}


def search(
  model: EncoderDecoder, theta: Theta, batch: task.Batch, config: AnswerConfig, n_best: int = 1, min_length: int = 1
) -> beam_search.Hypotheses:
  """Beam search, or samples, for a batch, a pure function of weights and batch in which no token is dropped by experts.

  Args:
    model: model of the configuration.
    theta: nested weights.
    batch: src_ids, src_segments, src_positions, one source a row. A row without tokens gets no hypothesis. With
      tgt_first, which has the first symbol of each answer, its probability does not count. It may be one of
      `with_constraints`, or have the values of `continuations.by_row`,
      by which n_best samples are drawn.
    config: its beam_size, length_norm_*, early_stopping, begin_id, answer_lengths and longest_answer are used.
    n_best: number of hypotheses returned.
    min_length: least number of symbols of an answer with its end, if its length limit allows as many.
  """

  def limits_of(batch):
    limits_B = config.answer_lengths(batch['src_segments'])
    with_room_B = lambda: tf.minimum(limits_B + batch['room'], config.longest_answer)
    return tf.where(limits_B > 0, with_room_B(), 0) if 'room' in batch else limits_B

  max_steps = ops.loop_bound(limits_of(batch), config.longest_answer)
  width = config.beam_size if 'keys' not in batch else n_best
  of_all = {name: batch[name] for name in Constraints._fields[:2] if name in batch}  # which has no rows
  batch = {name: x for name, x in batch.items() if name not in of_all}

  def search_rows(batch):
    rows = sizes(batch['src_ids'])[0]
    memory_BUM, _ = model.encode(theta, batch)
    cache = model.init_cache(theta, memory_BUM, flat_sequence.first_room(max_steps, width))
    segments_BU = model.segments(batch, 'src')
    step = lambda ids_BW, now, cache: model.decode_step(theta, ids_BW, now, segments_BU, cache)
    shared = {
      'max_steps': max_steps,
      'max_lengths_B': limits_of(batch),
      'first_B': tf.fill([rows], config.begin_id),
      'forced_B': batch[FIRST][:, 0] if FIRST in batch else None,
      'keep': model.decoder.keep_positions,
      'repetition': config.repetition,
    }
    if 'keys' in batch:
      key_BW = tf.ensure_shape(batch['keys'], [None, width])
      return sampling.sample(step, cache, sampling.Sampler.of_rows(batch), key_BW=key_BW, **SYMBOLS, **shared)
    constraints = Constraints(**of_all, terms_BYT=batch['terms_BYT']) if of_all else None
    return beam(step, cache, model, config, rows, n_best, min_length=min_length, constraints=constraints, **shared)

  return ops.map_rows(search_rows, batch, beam_search.specs(n_best))


def score(model, theta, batch: task.Batch) -> tf.Tensor:
  """Scores of given targets, as model.score, of rows as the backend likes to divide them."""
  return ops.map_rows(lambda batch: model.score(theta, batch), batch, tf.TensorSpec([None]))


def beam(step, cache, model, config, rows, n_best: int, **arguments) -> beam_search.Hypotheses:
  """Beam search for `rows` rows with the values of a configuration; `arguments` are further ones of beam_search."""
  return beam_search.beam_search(
    step,
    cache,
    batch_size=rows,
    beam_size=config.beam_size,
    vocab_size=model.target_embedding.vocab_size,
    length_norm_alpha=config.length_norm_alpha,
    length_norm_k=config.length_norm_k,
    early_stopping=config.early_stopping,
    n_best=n_best,
    **SYMBOLS,
    **arguments,
  )


def programs(batch: task.Batch, dev_batch: task.Batch, config: AnswerConfig) -> dict[str, task.InferenceProgram]:
  """'eval': dev loss; 'score': log-probabilities of given targets; 'encode': the encoder; 'decode': beam search."""
  sources = {name: batch[name] for name in SOURCE_KEYS}
  return {
    'eval': task.InferenceProgram(lambda model, theta, batch: model.loss(theta, batch)[1], dev_batch),
    'score': task.InferenceProgram(lambda model, theta, batch: model.score(theta, batch), batch),
    'encode': task.InferenceProgram(lambda model, theta, batch: model.encode(theta, batch)[0], sources, by_rows=True),
    'decode': task.InferenceProgram(functools.partial(search, config=config), sources),
  }


def probe(batch: task.Batch, config: AnswerConfig) -> task.InferenceProgram:
  """Beam search for the first sources of a batch, with all hypotheses."""
  rows = config.num_groups  # a multiple of the parts into which any mesh splits rows
  sources = {name: batch[name][:rows] for name in SOURCE_KEYS}
  return task.InferenceProgram(functools.partial(search, config=config, n_best=config.beam_size), sources)
