"""Translation of text in the graph, for a SavedModel: tokenisation, batches by length, search, detokenisation."""

import hashlib
from collections.abc import Mapping

import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import text
from lingvo_moe.models.batches import FIRST, SOURCE_KEYS
from lingvo_moe.tasks import inference
from lingvo_moe.tasks.mt import decoding
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.vocab.sentencepiece_vocab import BOS, EOS, PAD, TaggedVocab

# Text that input.TextInput leaves out, in the syntax of RE2.
_UNSEEN = rf'^(\x{{feff}}|[\s\pZ\x0b\x1c-\x1f\x{{85}}{text.INVISIBLE}]*$)'


class TextSearch:
  """Function of lines of text that returns their translations, as Translator gives them; see export_forms.TextFunction.

  Lines are searched in batches of similar length, of as many source tokens as a Translator's.

  Args:
    config: configuration of the run, with the values for decoding.
    vocabs: (source vocabulary, target vocabulary).
  """

  name = 'translate'

  def __init__(self, config: MtConfig, vocabs: tuple[TaggedVocab, TaggedVocab]) -> None:
    if config.search != 'beam':
      raise UserError(f'a SavedModel translates by beam search; saw search={config.search}: leave it out')
    self._config = config.for_inference()
    self._batch_tokens = decoding.default_batch_tokens(config)
    self._program = self._config.program()
    source, target = vocabs
    self._target_size = target.size
    # A process that loads a SavedModel shares tokenisers of one name, also between models.
    name = lambda vocab: 'v' + hashlib.sha256(vocab.model_bytes).hexdigest()
    self.resources = [vocab.new_tokenizer(name(vocab)) for vocab in vocabs]
    self._tags = config.tag_ids(source)
    self.inputs = {'lines': tf.TensorSpec([None], tf.string)}
    self.about = {
      'inputs': {'lines': 'source lines, one sentence each'},
      'outputs': {
        'text': 'translation of each line',
        'score': 'log_prob over the length penalty, by which beam search ranks; 0 for an empty line',
        'log_prob': 'natural logarithm of the probability, summed over the symbols and the end; 0 for an empty line',
        'truncated': f'whether the line is over max_length={config.max_length} tokens and was translated in part',
      },
    }
    for side in ('target', 'source') if config.tags_both else ('target',):
      if len(self._tags) > 1:
        self.inputs[side] = tf.TensorSpec(None, tf.string)
        self.about['inputs'][side] = f'{side} language, of each line or of all: {", ".join(self._tags)}'

  def __call__(
    self,
    weights: Mapping[str, tf.Tensor],
    lines: tf.Tensor,
    target: tf.Tensor | None = None,
    source: tf.Tensor | None = None,
  ) -> dict[str, tf.Tensor]:
    """Translates lines [B]: {'text', 'score', 'log_prob', 'truncated'}, [B] each."""
    rows = tf.size(lines)
    tag_B = self._tag_ids(rows, target, 'target') if self._tags else None
    first_B = tag_B if self._config.tags_both else tf.zeros([rows], tf.int32)
    if self._config.tags_both:
      tag_B = self._tag_ids(rows, source, 'source')
      if self._config.gate_tasks:
        of_pairs = tf.constant([tags for _, tags in self._config.gate_tasks])
        is_pair_BJ = tf.reduce_all(tf.stack([tag_B, first_B], axis=1)[:, tf.newaxis] == of_pairs, axis=2)
        names = ', '.join(name for name, _ in self._config.gate_tasks)
        known = tf.reduce_all(tf.reduce_any(is_pair_BJ, axis=1))
        with tf.control_dependencies([tf.debugging.Assert(known, [f'pairs must be of {names}; saw', source, target])]):
          tag_B = tf.identity(tag_B)
    ids_BT, lengths_B, truncated_B = self._tokenize(lines, tag_B)
    order_B = tf.argsort(lengths_B, direction='DESCENDING', stable=True)
    results = self._search_in_batches(weights, *(tf.gather(x, order_B) for x in (ids_BT, first_B, lengths_B)))
    back_B = tf.argsort(order_B)
    text, score, log_prob = (tf.gather(x, back_B) for x in results)
    return {'text': text, 'score': score, 'log_prob': log_prob, 'truncated': truncated_B}

  def _tokenize(self, lines: tf.Tensor, tag_B: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """(ids [B, T] with tag and end, their numbers [B], which lines were cut [B]); 0 ids for a line without tokens."""
    tokens = self.resources[0].tokenize(tf.strings.regex_replace(lines, _UNSEEN, ''))
    most = self._config.max_length - 1 - (tag_B is not None)
    counts_B = tf.cast(tokens.row_lengths(), tf.int32)
    parts = [tokens[:, :most], tf.fill([tf.size(lines), 1], EOS)]
    if tag_B is not None:
      parts.insert(len(parts) if self._config.tag_sides == 'both_source_last' else 0, tag_B[:, tf.newaxis])
    rows = tf.concat(parts, axis=1)
    lengths_B = tf.where(counts_B > 0, tf.cast(rows.row_lengths(), tf.int32), 0)
    return rows.to_tensor(PAD), lengths_B, counts_B > most

  def _tag_ids(self, rows: tf.Tensor, language: tf.Tensor | None, side: str) -> tf.Tensor:
    """Id of the tag of each line's language of a side, int32 [B]; refuses a language without one."""
    languages, ids = list(self._tags), tf.constant(list(self._tags.values()), tf.int32)
    if language is None:
      return tf.fill([rows], ids[0])
    language_B = tf.broadcast_to(language, [rows])
    matches_BJ = language_B[:, tf.newaxis] == tf.constant(languages)
    known = tf.reduce_all(tf.reduce_any(matches_BJ, axis=1))
    message = f'{side} must be one of the languages {", ".join(languages)}; saw'
    with tf.control_dependencies([tf.debugging.Assert(known, [message, language_B])]):
      return tf.gather(ids, tf.argmax(matches_BJ, axis=1))

  def _search_in_batches(
    self, weights: Mapping[str, tf.Tensor], ids_BT: tf.Tensor, first_B: tf.Tensor, lengths_B: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """(texts, scores, log-probabilities), [B] each, of rows of descending length; of rows without ids, '' and 0."""
    nonempty = tf.math.count_nonzero(lengths_B, dtype=tf.int32)

    def search_batch(start, *results):
      length = lengths_B[start]
      rows = tf.maximum(self._batch_tokens // length, 1)
      batch_rows = slice(start, tf.minimum(start + rows, nonempty))
      new = self._search(weights, ids_BT[batch_rows, :length], first_B[batch_rows], lengths_B[batch_rows])
      return start + rows, *(tf.concat(pair, axis=0) for pair in zip(results, new, strict=True))

    initial = tf.constant(0), tf.zeros([0], tf.string), tf.zeros([0]), tf.zeros([0])
    shapes = tf.TensorShape([]), *([tf.TensorShape([None])] * 3)
    _, *of_rows = tf.while_loop(
      lambda start, *_: start < nonempty, search_batch, initial, shapes, parallel_iterations=1
    )
    return tuple(tf.concat([x, tf.zeros([tf.size(lengths_B) - nonempty], x.dtype)], axis=0) for x in of_rows)

  def _search(
    self, weights: Mapping[str, tf.Tensor], ids_BT: tf.Tensor, first_B: tf.Tensor, lengths_B: tf.Tensor
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """(texts, scores, log-probabilities) of the best hypotheses of some rows."""
    segments_BT = tf.sequence_mask(lengths_B, tf.shape(ids_BT)[1], tf.int32)
    positions_BT = tf.range(tf.shape(ids_BT)[1]) * segments_BT
    batch = dict(zip(SOURCE_KEYS, (ids_BT, segments_BT, positions_BT), strict=True))
    if self._config.tags_both:
      batch[FIRST] = first_B[:, tf.newaxis]
    hypotheses = inference.search(self._program.model, self._program.theta(weights), batch, self._config)
    ids_BT = hypotheses.ids_BWT[:, 0]
    is_text_BT = (ids_BT != PAD) & (ids_BT != BOS) & (ids_BT != EOS) & (ids_BT < self._target_size)
    texts_B = self.resources[1].detokenize(tf.ragged.boolean_mask(ids_BT, is_text_BT))
    # Byte pieces can form a line break.
    return tf.strings.regex_replace(texts_B, '[\n\r]', ' '), hypotheses.scores_BW[:, 0], hypotheses.log_probs_BW[:, 0]
