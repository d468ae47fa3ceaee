"""Sentences in, translations out: the encoder, flat beam search over the decoder, and the text on either side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe import ops
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import closest
from lingvo_moe.core.shapes import sizes
from lingvo_moe.core.weights import Theta
from lingvo_moe.search import beam_search
from lingvo_moe.search import flat_sequence
from lingvo_moe.tasks.mt.config import MtConfig
from lingvo_moe.tasks.mt.input import TextInput
from lingvo_moe.tasks.mt.model import TranslationModel
from lingvo_moe.tasks.mt.vocab import BOS
from lingvo_moe.tasks.mt.vocab import EOS
from lingvo_moe.tasks.mt.vocab import PAD
from lingvo_moe.tasks.mt.vocab import Vocab

_BATCH_TOKENS = 2048  # source tokens of a batch, where neither caller nor configuration asks for fewer

Progress = Callable[[int], object]  # called with the sentences done since the last call


class Translation(NamedTuple):
  """One hypothesis for a sentence."""

  text: str
  log_prob: float  # natural log, summed over its symbols, the end included
  score: float  # log_prob over the length penalty: what hypotheses are ranked by
  ids: tuple[int, ...] = ()  # with the end symbol


class Translated(NamedTuple):
  """Translations of some sentences."""

  hypotheses: list[list[Translation]]  # of each sentence in the order given, best first
  truncated: list[int]  # the sentences over the length limit, of which only the beginning was translated


class Scored(NamedTuple):
  """Log-probabilities of given translations."""

  log_probs: np.ndarray  # float64, of each sentence in the order given
  target_tokens: np.ndarray  # int64, symbols of each target, the end included; 0 where the source is empty
  truncated: list[int]  # the sentences of which either side is over the length limit and was cut


def search(
  model: TranslationModel,
  theta: Theta,
  batch: Mapping[str, tf.Tensor],
  config: MtConfig,
  n_best: int = 1,
  min_length: int = 1,
) -> beam_search.Hypotheses:
  """Translates a batch: a pure function of the weights and the batch, at inference, where nothing is dropped.

  Args:
    model: of the configuration.
    theta: nested weights.
    batch: src_ids, src_segments, src_positions, one sentence a row. A row without any gets no hypothesis.
    config: its beam_size, length_norm_alpha, max_length, decode_ratio and decode_extra are used.
    n_best: hypotheses returned.
    min_length: the fewest symbols of a translation, its end included, where its source allows as many.

  Returns:
    beam_search.Hypotheses.
  """
  max_lengths_B = max_lengths(batch['src_segments'], config)
  max_steps = ops.loop_bound(max_lengths_B, config.max_length)

  def search_rows(batch):
    rows = sizes(batch['src_ids'])[0]
    memory_BUM, _ = model.encode(theta, batch)
    cache = model.init_cache(theta, memory_BUM, flat_sequence.first_room(max_steps, config.beam_size))
    return beam_search.beam_search(
      lambda ids_BW, now, cache: model.decode_step(theta, ids_BW, now, batch['src_segments'], cache),
      cache,
      batch_size=rows,
      beam_size=config.beam_size,
      max_steps=max_steps,
      max_lengths_B=max_lengths(batch['src_segments'], config),
      bos_id=BOS,
      eos_id=EOS,
      pad_id=PAD,
      vocab_size=model.target_embedding.vocab_size,
      length_norm_alpha=config.length_norm_alpha,
      n_best=n_best,
      min_length=min_length,
      keep=model.keep_positions,
    )

  specs = beam_search.Hypotheses(
    ids_BWT=tf.TensorSpec([None, n_best, None], tf.int32),
    lengths_BW=tf.TensorSpec([None, n_best], tf.int32),
    log_probs_BW=tf.TensorSpec([None, n_best]),
    scores_BW=tf.TensorSpec([None, n_best]),
    steps=tf.TensorSpec([], tf.int32),
  )
  return ops.map_rows(search_rows, batch, specs)


def max_lengths(src_segments_BT: tf.Tensor, config: MtConfig) -> tf.Tensor:
  """The most symbols each translation may have, its end included: of the source alone, int32 [B]; 0 in empty rows.

  The source's tokens are counted with its end and tag.
  """
  length_B = tf.reduce_sum(tf.cast(src_segments_BT > 0, tf.float32), axis=1)
  limit_B = tf.cast(tf.floor(config.decode_ratio * length_B), tf.int32) + config.decode_extra
  limit_B = tf.clip_by_value(limit_B, 1, config.max_length)
  return tf.where(length_B > 0, limit_B, 0)


class Translator:
  """Translates and scores sentences with the weights that a runtime holds at the time.

  Args:
    config: of the run, with the values of decoding as wanted.
    vocabs: (source, target).
    make: of a runtime: makes a function of weights and a batch one of the batch; see Runtime.function.
    row_multiple: what the rows of a batch must be a multiple of.
    n_best: hypotheses of each sentence.
    batch_tokens: source tokens of a batch; 0: 2048, or the configuration's if that is less.
  """

  def __init__(
    self,
    config: MtConfig,
    vocabs: tuple[Vocab, Vocab],
    make: Callable[[Callable], Callable],
    *,
    row_multiple: int = 1,
    n_best: int = 1,
    batch_tokens: int = 0,
  ) -> None:
    batch_tokens = batch_tokens or min(config.eval_batch_tokens or config.batch_tokens, _BATCH_TOKENS)
    # At inference any number of groups will do: as many as the devices that share a batch's rows.
    tokens = max(batch_tokens, config.max_length * row_multiple)
    self._config = dataclasses.replace(config, num_groups=row_multiple, eval_batch_tokens=tokens)
    self._vocabs = vocabs
    program = self._config.program()
    model = program.task
    self._search = make(lambda weights, batch: search(model, program.theta(weights), batch, self._config, n_best))
    self._score = make(lambda weights, batch: model.score(program.theta(weights), batch))

  def translate(
    self, sources: Sequence[str], target_language: str | None = None, progress: Progress | None = None
  ) -> Translated:
    """Translates sentences; one without a token, such as an empty line, is translated to an empty line.

    Args:
      sources: any number of them; they are batched by length.
      target_language: whose tag goes before each; None: no tag.
      progress: see Progress.
    """
    batches = TextInput(self._config, self._vocabs[0], sources, target_language=target_language)
    found = [[Translation('', 0.0, 0.0)] for _ in sources]
    _tell(progress, len(batches.empty))
    for index_B, batch in batches:
      hypotheses = self._search(batch)
      for row, sentence in enumerate(index_B):
        if sentence >= 0:
          found[sentence] = self._read(hypotheses, row)
      _tell(progress, int(np.sum(index_B >= 0)))
    return Translated(found, batches.truncated)

  def score(
    self,
    sources: Sequence[str],
    targets: Sequence[str],
    target_language: str | None = None,
    progress: Progress | None = None,
  ) -> Scored:
    """log p(target | source) of each pair, over all symbols of the target and its end.

    An empty source is always translated to an empty line: log p is 0 where the target is empty too, else -inf.
    """
    batches = TextInput(
      self._config,
      self._vocabs[0],
      sources,
      target_language=target_language,
      targets=targets,
      target_vocab=self._vocabs[1],
    )
    log_probs, tokens = np.zeros(len(sources)), np.zeros(len(sources), np.int64)
    for i in batches.empty:
      log_probs[i] = -np.inf if targets[i].strip() else 0.0
    _tell(progress, len(batches.empty))
    for index_B, batch in batches:
      real_B = index_B >= 0
      log_probs[index_B[real_B]] = self._score(batch)[real_B]
      tokens[index_B[real_B]] = np.sum(batch['tgt_segments'] > 0, axis=1)[real_B]
      _tell(progress, int(np.sum(real_B)))
    return Scored(log_probs, tokens, batches.truncated)

  def _read(self, hypotheses: beam_search.Hypotheses, row: int) -> list[Translation]:
    """The hypotheses of a row, of which there is one at least: every sentence may have the end symbol."""
    lengths_W = hypotheses.lengths_BW[row]
    if not lengths_W[0]:
      raise UserError(
        'a sentence has no translation of finite probability: weights must be finite; decode an earlier checkpoint'
      )
    ids = [hypotheses.ids_BWT[row, w, :n].tolist() for w, n in enumerate(lengths_W) if n]
    texts = self._vocabs[1].detokenize(ids)
    log_probs, scores = hypotheses.log_probs_BW[row], hypotheses.scores_BW[row]
    return [Translation(text, float(log_probs[w]), float(scores[w]), tuple(ids[w])) for w, text in enumerate(texts)]


def choose_target(config: MtConfig, source_vocab: Vocab, asked: str | None) -> str | None:
  """The language whose tag a sentence gets, given which one was asked for; None: no tag.

  Raises:
    UserError: a model of several languages needs to be told which; others take none.
  """
  if not config.tag_target:
    if asked:
      raise UserError(f'this model has one target language and takes no tag; saw --target={asked}: leave it out')
    return None
  languages = source_vocab.tags()
  if not asked and len(languages) == 1:
    return languages[0]
  if not asked:
    raise UserError(
      f'this model translates into several languages and must be told which: --target=, one of {", ".join(languages)}'
    )
  if asked not in languages:
    raise UserError(f'this model does not translate into {asked!r}; {closest(asked, languages)}')
  return asked


def _tell(progress: Progress | None, count: int) -> None:
  if progress is not None and count:
    progress(count)
