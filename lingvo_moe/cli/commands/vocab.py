"""lingvo-moe vocab --data_dir=DATA --pairs='*-en' --side=source --vocab_size=8000 --output=vocab/source

Trains a SentencePiece vocabulary (unigram, byte fallback; ids pad 0, bos 1, eos 2, unk 3) on the train split of one or
more corpora. Writes OUTPUT.model and OUTPUT.vocab. docs/own_text.md describes the layouts of DATA.

  lingvo-moe vocab --extend=RUN/vocab/source.model --languages=gsw --data_dir=DATA --output=vocab/more

adds languages to a vocabulary: their tags, and pieces of their text where a corpus is given. All pieces that are there
keep their ids. A run with --init_from=RUN and this vocabulary keeps their embeddings.
"""

import os
import tempfile
import time

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.tasks.sentencepiece_training import RULES
from lingvo_moe.text.language_tags import SIDES

_DATA_DIR = flags.DEFINE_list('data_dir', [], 'Folders of corpora, separated by commas.')
_PAIRS = flags.DEFINE_string('pairs', '', "Pairs and globs, e.g. 'deu-en,fra-en' or '*-en'; empty: every pair folder.")
_SPLIT = flags.DEFINE_list('split', ['train'], 'Split, or file prefix, to read; several for several corpora.')
_SIDE = flags.DEFINE_enum('side', 'shared', ['source', 'target', 'shared'], 'Side of the pairs to read; shared: both.')
_OUTPUT = flags.DEFINE_string('output', '', 'Path to write to, without .model.')
_VOCAB_SIZE = flags.DEFINE_integer(
  'vocab_size', 8000, 'Pieces, including bytes and special ids.', lower_bound=1, upper_bound=2**31 - 1
)
_TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Temperature of the sampling over pairs; 1: natural shares.')
_COVERAGE = flags.DEFINE_float('character_coverage', 0.9995, 'Share of all characters that get their own pieces.')
_MAX_SENTENCES = flags.DEFINE_integer('max_sentences', 1_000_000, 'Most lines of either side to use.', lower_bound=1)
_TAGS = flags.DEFINE_bool('tags', None, 'Add the symbols <2xx> of the target languages. Unset: if there are several.')
_TAG_SIDES = flags.DEFINE_enum('tag_sides', 'source', SIDES, 'As the field tag_sides: both has tags of sources too.')
_EXTEND = flags.DEFINE_string('extend', '', 'Vocabulary (.model) to which languages are added, under its rule.')
_LANGUAGES = flags.DEFINE_list('languages', [], 'With --extend: languages whose tags are added.')
_CORPUS_TAGS = flags.DEFINE_list('corpus_tags', [], 'Names of symbols for corpora, such as bt; see the field corpora.')
_NORMALIZATION = flags.DEFINE_enum(
  'normalization',
  None,
  RULES,
  "SentencePiece's rule. Unset: nmt_nfkc for --side=source, else identity, so that a model can write all text.",
)
_SEED = flags.DEFINE_integer('seed', 1, 'Seed of the choice of lines.')
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace existing files.')


@app.command(tensorflow=False, models=False)
def main():
  if not _OUTPUT.value:
    raise UserError('where to write must be said; saw no --output: give one, e.g. --output=vocab/source')
  if not os.path.basename(_OUTPUT.value):
    raise UserError(
      f'--output is a path without .model; saw the folder {_OUTPUT.value}: add a name, as in vocab/source'
    )
  if not _DATA_DIR.value and not (_EXTEND.value and _LANGUAGES.value):
    raise UserError('a corpus must be given; saw no --data_dir: give one, e.g. --data_dir=data')
  if not _TEMPERATURE.value > 0:
    raise UserError(f'temperature must be a positive number; saw {_TEMPERATURE.value}: 1 keeps the natural shares')
  if not 0.98 <= _COVERAGE.value <= 1:
    raise UserError(f'character_coverage must be from 0.98 to 1; saw {_COVERAGE.value}: use 0.9995')
  if _LANGUAGES.value and not _EXTEND.value:
    raise UserError('--languages are added to a vocabulary: name it by --extend, or leave them out')
  from lingvo_moe.corpora import parallel
  from lingvo_moe.tasks.mt import vocab_training
  from lingvo_moe.tasks.sentencepiece_vocab import Vocab

  base = Vocab(_EXTEND.value) if _EXTEND.value else None
  pairs = [
    pair
    for folder in dict.fromkeys(_DATA_DIR.value)
    for split in dict.fromkeys(_SPLIT.value)
    for pair in parallel.find_pairs(folder, _PAIRS.value, split)
  ]
  start = time.time()
  named = (_SIDE, _TEMPERATURE, _MAX_SENTENCES, _COVERAGE, _TAGS, _TAG_SIDES, _CORPUS_TAGS, _NORMALIZATION)
  options = {flag.name: flag.value for flag in (*named, _SEED, _OVERWRITE)}
  train = lambda output: vocab_training.train_vocab(pairs, output, _VOCAB_SIZE.value, **options)
  if base:
    options |= {'exact_size': False, 'normalization': base.normalization if base.normalization in RULES else None}
    with tempfile.TemporaryDirectory() as folder:
      more = Vocab(train(os.path.join(folder, 'more'))) if pairs else None
      path = vocab_training.extend_vocab(base, _OUTPUT.value, _LANGUAGES.value, more, _OVERWRITE.value)
  else:
    path = train(_OUTPUT.value)
  print(f'{path}: {os.path.getsize(path)} bytes, from {plural(len(pairs), "pair")}, in {time.time() - start:.0f} s')


if __name__ == '__main__':
  main()
