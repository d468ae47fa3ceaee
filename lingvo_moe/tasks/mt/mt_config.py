"""Configuration of a translation model, its data, training and decoding: frozen dataclasses of values."""

import dataclasses
from typing import Self

import tensorflow as tf

from lingvo_moe.config import fields
from lingvo_moe.config.fields import ON, changeable, field
from lingvo_moe.core.quality import METRICS
from lingvo_moe.inputs.data_config import DataConfig
from lingvo_moe.models.encoder_decoder import EncoderDecoder
from lingvo_moe.models.task_tags import TaskTags
from lingvo_moe.search.request import GREEDY, SEARCHES
from lingvo_moe.tasks.encoder_decoder_config import EncoderDecoderConfig
from lingvo_moe.tasks.model_config import SamplingConfig
from lingvo_moe.vocab import language_tags
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

Sides = tuple[language_tags.Around, language_tags.Around]
_SAMPLING = ('nbest', 'dropout')
_TRAINS_VOCAB = {'source_vocab': ('',)}, {'target_vocab': ('',)}


@dataclasses.dataclass(frozen=True)
class MtConfig(EncoderDecoderConfig, DataConfig, SamplingConfig):
  """Translation: stacks, evaluation and decoding."""

  task_class = 'lingvo_moe.tasks.mt.mt_task.TranslationTask'

  best_by: str = changeable(
    'loss',
    'What ranks checkpoints and counts for patience: the dev loss, or BLEU or chrF of greedy translations of dev text.',
    choices=('loss', *METRICS),
  )
  best_by_sentences: int = changeable(
    500,
    'First dev sentences of a pair that are translated for best_by; 0: all.',
    at_least=0,
    when={'best_by': tuple(METRICS)},
  )
  eval_sentences: int = changeable(0, 'Dev sentences of a pair that are evaluated; 0: all.', at_least=0)
  decode_ratio: float = changeable(
    2.0, 'A translation has at most decode_ratio * source tokens + decode_extra symbols.', at_least=0, at_most=1000
  )
  decode_extra: int = changeable(10, 'See decode_ratio.', at_least=0)
  search: str = changeable(
    'beam',
    'Translations: of beam search; of greedy search, with a beam of 1; samples; or those of mbr_samples samples that '
    'agree most with the others by chrF (minimum Bayes risk).',
    choices=SEARCHES,
  )
  mbr_samples: int = changeable(32, 'Samples of a sentence among which mbr chooses.', at_least=1, at_most=4096)
  alignment_layer: int = changeable(
    0, 'Decoder layer, counted from 1, whose attention to the source aligns tokens; 0: the middle one.', at_least=0
  )
  guided_weight: float = field(0.1, 'Weight of the loss that guided_by adds.', at_least=0, when={'guided_by': ON})

  def _check_combinations(self) -> None:
    super()._check_combinations()
    if self.alignment_layer > self.decoder_layers:
      fields.refuse(self, 'alignment_layer', f'at most decoder_layers={self.decoder_layers}')

    tasks = self.moe_gate.tasks if self.num_experts and self.tag_target else 0
    if tasks and self.tags_both != (self.gate == 'by_pair'):
      way_out = "by_target reads the tags of tag_sides='source', by_pair those of 'both' and 'both_source_last'"
      fields.refuse(self, 'gate', f'another with tag_sides={self.tag_sides!r}', way_out)

  @property
  def task_tags(self) -> TaskTags | None:
    """Tags of the tasks of a gate by task; None: it has one task, or there is no such gate."""
    tags = tuple(of_task for _, of_task in self.gate_tasks)
    if not (self.num_experts and any(tags) and len(tags) > 1):
      return None
    return TaskTags(('src', 'tgt') if self.tags_both else ('src',), tags)

  def tag_ids(self, vocab: TaggedVocab) -> dict[str, int]:
    """Ids of tags by language, if sentences have tags: of those that a gate by task was trained with, if it is one."""
    ids = {language: vocab.tag_id(language) for language in vocab.tags()} if self.tag_target else {}
    trained = {i for _, tags in self.gate_tasks for i in tags}
    return {language: i for language, i in ids.items() if not trained or i in trained}

  @property
  def longest_answer(self) -> int:
    """Most symbols of a translation with its end."""
    return self.max_length

  def greedy(self) -> Self:
    """The values of greedy search."""
    return dataclasses.replace(self, **GREEDY)

  def answer_lengths(self, src_segments_BT: tf.Tensor) -> tf.Tensor:
    """Length limits of translations in symbols, with the end, int32 [B]; 0 in empty rows.

    They depend on the source alone, whose tokens are counted with its end and tag.
    """
    length_B = tf.reduce_sum(tf.cast(src_segments_BT > 0, tf.float32), axis=1)
    limit_B = tf.cast(tf.floor(self.decode_ratio * length_B), tf.int32) + self.decode_extra
    limit_B = tf.clip_by_value(limit_B, 1 + self.tags_both, self.max_length)
    return tf.where(length_B > 0, limit_B, 0)

  def model(self) -> EncoderDecoder:
    source = self.embedding(self.source_vocab_size)
    if self.shared_vocab:
      return self.encoder_decoder(None, source, given=int(self.tags_both), task_tags=self.task_tags)
    return self.encoder_decoder(source, self.embedding(self.target_vocab_size), task_tags=self.task_tags)
