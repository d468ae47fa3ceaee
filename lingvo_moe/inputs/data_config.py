"""Configuration of the data of a translation model: corpus, vocabularies and batches."""

import dataclasses
import functools
from collections.abc import Sequence

from lingvo_moe.config import fields
from lingvo_moe.config.fields import ON, changeable, field
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.inputs import batching, mixture
from lingvo_moe.inputs.batch_config import BatchConfig
from lingvo_moe.inputs.noise import KINDS
from lingvo_moe.layers.gates import table as gates
from lingvo_moe.vocab import language_tags
from lingvo_moe.vocab.sentencepiece_training import RULES
from lingvo_moe.vocab.sentencepiece_vocab import EOS, SPECIAL, TaggedVocab

Sides = tuple[language_tags.Around, language_tags.Around]
_SAMPLING = ('nbest', 'dropout')
_TRAINS_VOCAB = {'source_vocab': ('',)}, {'target_vocab': ('',)}


@dataclasses.dataclass(frozen=True)
class DataConfig(BatchConfig):
  """Translation: corpus, vocabularies and batches."""

  pairs: str = field('', "Names and globs of language pairs, 'deu-en,fra-en' or '*-en'; empty: every pair folder.")
  split_files: tuple[tuple[str, str], ...] = field(
    (), 'File prefixes of the splits that are not named after themselves.', way_out="e.g. (('dev', 'val'),)"
  )
  dev_lines: int | None = field(
    0,
    'Lines of a pair without dev files that are taken from train for dev, and are not trained on; None: a twentieth of '
    'train, 1000 at most.',
    at_least=0,
  )
  source_vocab: str = changeable('', "SentencePiece .model of the source side; empty: trained into the run's folder.")
  target_vocab: str = changeable('', 'SentencePiece .model of the target side, likewise.')
  source_vocab_size: int = field(8000, 'Pieces of the source vocabulary.', at_least=1)
  target_vocab_size: int = field(8000, 'Pieces of the target vocabulary.', at_least=1, when={'shared_vocab': (False,)})
  vocab_by_corpus: bool = field(
    False,
    'Whether a vocabulary that is made for a run has only as many pieces as suit its corpus: 25 * sqrt(lines) besides '
    'bytes and characters.',
    when=_TRAINS_VOCAB,
  )
  shared_vocab: bool = field(False, 'One vocabulary of source_vocab_size pieces for both sides.')
  character_coverage: float = field(
    0.9995,
    'Share of all characters that get pieces of their own; the others are spelt in bytes.',
    at_least=0.98,
    at_most=1,
    way_out='0.9995 suits many scripts, 1 keeps every character',
    when=_TRAINS_VOCAB,
  )
  source_normalization: str | None = field(
    None,
    "SentencePiece's rule for the text of a source vocabulary; None: nmt_nfkc, or that of the vocabulary given.",
    choices=RULES,
    settled=True,
    when={'shared_vocab': (False,)},
  )
  target_normalization: str | None = field(
    None,
    'Rule of the target vocabulary, or of the shared one, which bounds what a model can write; None: identity, which '
    'writes text as it is, or that of the vocabulary given.',
    choices=RULES,
    settled=True,
  )
  vocab_sentences: int = field(
    1_000_000, 'Most lines of a side that train a vocabulary.', at_least=1, when=_TRAINS_VOCAB
  )
  several_sentences: float | None = changeable(
    None,
    'Share of source lines of training with several sentences, by which paragraphs are split for translation; None: '
    'measured when a run begins.',
    at_least=0,
    at_most=1,
  )
  long_line: float | None = changeable(
    None, 'Characters of a source line of training, the 99th percentile; likewise.', at_least=0
  )
  tag_target: bool | None = field(
    None,
    'Whether a <2xx> symbol before the source names the target language; None: if there are several.',
    settled=True,
  )
  tag_sides: str = field(
    'source',
    "Where tags are: that of the target language before the source; both, each language's before its own side, where "
    "that of the target is given; or both with the source's behind its end.",
    choices=language_tags.SIDES,
  )
  gate_tasks: tuple[tuple[str, tuple[int, ...]], ...] = field(
    (),
    'Languages of the gate by_target, or pairs of by_pair, with the ids of their tags: those of the corpus when a run '
    'begins.',
    when={'num_experts': ON, 'gate': gates.ThatHave('gate_tasks')},
  )
  begin: str = field('bos', 'Symbol with which the decoder begins.', choices=('bos', 'eos'))
  corpora: str = field(
    '',
    'Corpora of each pair, by the prefix of their files, or the path of a file that lists them: '
    "'train 1; bt 2 20000:0.5 tag loss=0.5' reads two examples of bt.* where it reads one of train.*, half of one from "
    "step 20000 on, with a symbol before bt's sources and half the loss. Empty: train alone.",
  )
  temperature: float = field(
    1.0,
    'Temperature of the sampling of pairs; 5 is usual for many languages.',
    above=0,
    way_out='1 keeps the natural shares, larger ones level them',
  )
  weights: tuple[tuple[str, float], ...] = field(
    (),
    "Factors of pairs' shares in training, after the temperature, such as {'de-en': 3}; 1 for the others.",
    way_out="e.g. {'de-en': 3}",
  )
  max_length: int = field(
    128,
    'Longest sentence, with eos and tag; longer pairs are left out of training, and counted.',
    at_least=3,
    way_out='a tag, a word and eos',
  )
  packing: bool = field(
    False, 'Several pairs in rows of max_length, in place of one pair in a row of about its length.'
  )
  source_sampling: tuple[tuple[str, float], ...] = field(
    (),
    "Subword sampling of training sources: {'nbest': share of those that get one of the sampling_nbest best "
    "segmentations, 'dropout': probability with which a piece is split again}.",
    way_out="e.g. {'nbest': 1} or {'dropout': 0.1}",
  )
  target_sampling: tuple[tuple[str, float], ...] = field(
    (), 'Subword sampling of training targets, likewise.', way_out="e.g. {'dropout': 0.1}"
  )
  sampling_nbest: int = field(
    16, 'Segmentations that nbest draws from.', at_least=2, at_most=1000, when={'samples_nbest': ON}
  )
  sampling_alpha: float = field(
    0.2, 'Exponent of their probabilities; 0: all alike.', at_least=0, when={'samples_nbest': ON}
  )
  noise: tuple[tuple[str, float], ...] = field(
    (),
    f'Shares of training examples with noise in the source, of {", ".join(KINDS)}; the last two are on both sides.',
    way_out="e.g. {'typos': 0.05, 'case': 0.05}",
  )
  guided_by: str = changeable(
    '',
    'Folder of alignments of training text, such as de-en.train.align, to which the attention of alignment_layer is '
    "drawn: for each line '0-0 1-2', numbers of a source and a target piece. Empty: none.",
  )
  boundaries: tuple[int, ...] = field(
    (), 'Row lengths, ascending; empty: 8, 12, 16, 20, 24, 28, 32, 40, ... up to max_length.', way_out='e.g. (32, 64)'
  )
  window: int = field(
    0,
    'Examples that are shuffled and batched together; 0: at least 16384, more for large batches.',
    at_least=0,
    at_most=2**25,
  )
  shuffle_lines: int = field(
    1,
    'Consecutive lines that stay together when the lines of a corpus are shuffled; 256 suits a corpus whose cache is '
    'in a bucket or larger than memory.',
    at_least=1,
    at_most=2**20,
  )

  def _check_combinations(self) -> None:
    super()._check_combinations()
    if self.boundaries and (
      self.boundaries[0] < 1
      or list(self.boundaries) != sorted(set(self.boundaries))
      or self.boundaries[-1] != self.max_length
    ):
      fields.refuse(self, 'boundaries', f'ascending integers that end with max_length={self.max_length}')
    object.__setattr__(self, 'corpora', mixture.read(self.corpora))
    _ = self.mixture  # refuses what is none
    if not all(weight > 0 for _, weight in self.weights):
      fields.refuse(self, 'weights', 'finite numbers above 0', 'a pair that is not wanted is left out of pairs')
    if len(dict(self.weights)) < len(self.weights):
      fields.refuse(self, 'weights', 'one number for each pair')
    for name, kinds in (('noise', KINDS), ('source_sampling', _SAMPLING), ('target_sampling', _SAMPLING)):
      shares = getattr(self, name)
      if len(dict(shares)) < len(shares) or not all(kind in kinds and 0 < share <= 1 for kind, share in shares):
        fields.refuse(
          self, name, f'numbers above 0 and up to 1 of {", ".join(kinds)}', fields.specs(type(self))[name].way_out
        )
    if self.tags_both and not (self.tag_target and self.shared_vocab):
      fields.refuse(self, 'tag_sides', 'source without tag_target and shared_vocab', 'both sides share their tags')
    if self.guided_by and (self.source_sampling or self.target_sampling or self.noise):
      way_out = 'alignments are of the pieces that a sentence always has'
      fields.refuse(self, 'guided_by', 'left out with source_sampling, target_sampling or noise', way_out)
    self._check_rows_fit(self.max_length, 'max_length')

  def batcher(self, *, training: bool = True) -> batching.BatchPlanner:
    """Batcher of windows; evaluation never packs."""
    tokens = self.batch_tokens if training else self.eval_batch_tokens or self.batch_tokens
    boundaries = self.boundaries or batching.default_boundaries(self.max_length)
    return batching.BatchPlanner(tokens, boundaries, self.num_groups, self.packing and training)

  @property
  def samples_nbest(self) -> bool:
    """Whether source_sampling or target_sampling has nbest."""
    return 'nbest' in dict(self.source_sampling + self.target_sampling)

  @property
  def window_size(self) -> int:
    """Examples in a window: enough for many batches, as each window ends with a partial one."""
    return self.window or max(16384, 2 * self.batch_tokens)

  @functools.cached_property
  def mixture(self) -> tuple[mixture.Corpus, ...]:
    return mixture.parse(self.corpora)

  def weights_of(self, pairs: Sequence[str]) -> list[float]:
    """The weight of each pair of the training corpus; empty if none is given. UserError for a weight of another."""
    if unknown := sorted(set(dict(self.weights)) - set(pairs)):
      raise UserError(
        f'weights are of pairs that are trained on; saw {unknown[0]!r}; {closest(unknown[0], pairs)}: rename it, or '
        'leave it out'
      )
    return [dict(self.weights).get(pair, 1.0) for pair in pairs] if self.weights else []

  def normalization(self, side: str) -> str | None:
    """The rule that is asked for the vocabulary of a side: 'source', 'target' or 'shared'."""
    return self.source_normalization if side == 'source' else self.target_normalization

  def has_task(self, source: str, target: str) -> bool:
    """Whether a gate by task was trained with a pair; True without such a gate."""
    return not self.gate_tasks or not {target, f'{source}-{target}'}.isdisjoint(dict(self.gate_tasks))

  @property
  def tags_both(self) -> bool:
    """Whether both sides have tags; that of the target is then the first symbol of a translation."""
    return self.tag_sides != 'source'

  @property
  def begin_id(self) -> int:
    """Id of the symbol with which the decoder begins."""
    return SPECIAL[self.begin]

  def tags_around(self, vocab: TaggedVocab, languages: language_tags.Languages) -> Sides:
    """Symbols around (sources, targets), given the vocabulary with tags; UserError where it lacks one."""
    return language_tags.around(self.tag_sides, vocab.tag_id, EOS, languages)

  def tags(self, targets: set[str]) -> bool:
    """Whether sources have tags, given the target languages."""
    return len(targets) > 1 if self.tag_target is None else self.tag_target
