"""lingvo-moe vocab --data_dir=DATA --pairs='*-en' --side=source --vocab_size=8000 --output=vocab/source

Trains a SentencePiece vocabulary (unigram, byte fallback; ids pad 0, bos 1, eos 2, unk 3) on the train split of one or
more corpora. Writes OUTPUT.model and OUTPUT.vocab. docs/own_text.md describes the layouts of DATA.
"""

import os
import time

from absl import flags

from lingvo_moe import app
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.tasks.sentencepiece_training import RULES

_DATA_DIR = flags.DEFINE_list('data_dir', [], 'Folders of corpora, separated by commas.')
_PAIRS = flags.DEFINE_string('pairs', '', "Pairs and globs, e.g. 'deu-en,fra-en' or '*-en'; empty: every pair folder.")
_SPLIT = flags.DEFINE_string('split', 'train', 'Split, or file prefix, to read.')
_SIDE = flags.DEFINE_enum('side', 'shared', ['source', 'target', 'shared'], 'Side of the pairs to read; shared: both.')
_OUTPUT = flags.DEFINE_string('output', '', 'Path to write to, without .model.')
_VOCAB_SIZE = flags.DEFINE_integer(
  'vocab_size', 8000, 'Pieces, including bytes and special ids.', lower_bound=1, upper_bound=2**31 - 1
)
_TEMPERATURE = flags.DEFINE_float('temperature', 1.0, 'Temperature of the sampling over pairs; 1: natural shares.')
_COVERAGE = flags.DEFINE_float('character_coverage', 0.9995, 'Share of all characters that get their own pieces.')
_MAX_SENTENCES = flags.DEFINE_integer('max_sentences', 1_000_000, 'Most lines of either side to use.', lower_bound=1)
_TAGS = flags.DEFINE_bool('tags', None, 'Add the symbols <2xx> of the target languages. Unset: if there are several.')
_NORMALIZATION = flags.DEFINE_enum(
  'normalization',
  None,
  RULES,
  "SentencePiece's rule. Unset: nmt_nfkc for --side=source, else identity, so that a model can write all text.",
)
_SEED = flags.DEFINE_integer('seed', 1, 'Seed of the choice of lines.')
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace existing files.')


@app.command(tensorflow=False)
def main():
  if not _OUTPUT.value:
    raise UserError('where to write must be said; saw no --output: give one, e.g. --output=vocab/source')
  if not os.path.basename(_OUTPUT.value):
    raise UserError(
      f'--output is a path without .model; saw the folder {_OUTPUT.value}: add a name, as in vocab/source'
    )
  if not _DATA_DIR.value:
    raise UserError('a corpus must be given; saw no --data_dir: give one, e.g. --data_dir=data')
  if not _TEMPERATURE.value > 0:
    raise UserError(f'temperature must be a positive number; saw {_TEMPERATURE.value}: 1 keeps the natural shares')
  if not 0.98 <= _COVERAGE.value <= 1:
    raise UserError(f'character_coverage must be from 0.98 to 1; saw {_COVERAGE.value}: use 0.9995')
  from lingvo_moe.corpora import parallel
  from lingvo_moe.tasks.mt import vocab_training

  pairs = [
    p for folder in dict.fromkeys(_DATA_DIR.value) for p in parallel.find_pairs(folder, _PAIRS.value, _SPLIT.value)
  ]
  start = time.time()
  named = (_SIDE, _TEMPERATURE, _MAX_SENTENCES, _COVERAGE, _TAGS, _NORMALIZATION, _SEED, _OVERWRITE)
  options = {flag.name: flag.value for flag in named}
  path = vocab_training.train_vocab(pairs, _OUTPUT.value, _VOCAB_SIZE.value, **options)
  print(f'{path}: {os.path.getsize(path)} bytes, from {plural(len(pairs), "pair")}, in {time.time() - start:.0f} s')


if __name__ == '__main__':
  main()
