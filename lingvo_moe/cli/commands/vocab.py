"""lingvo-moe vocab --data_dir=DATA --pairs='*-en' --side=source --vocab_size=8000 --output=vocab/source

Trains a SentencePiece vocabulary (unigram, byte fallback; ids pad 0, bos 1, eos 2, unk 3) on the train split of one or
more corpora. Writes OUTPUT.model and OUTPUT.vocab. docs/corpora.md describes the layouts of DATA.

  lingvo-moe vocab --extend=RUN/vocab/source.model --languages=gsw --data_dir=DATA --output=vocab/more

adds languages to a vocabulary: their tags, and pieces of their text where a corpus is given. All pieces that are there
keep their ids. A run with --init_from=RUN and this vocabulary keeps their embeddings.
"""

import os
import tempfile
import time
from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.vocab.language_tags import SIDES
from lingvo_moe.vocab.sentencepiece_training import RULES

# Options that train_vocab takes by the same names.
_OF_TRAINING = (
  'side temperature max_sentences character_coverage tags tag_sides corpus_tags normalization seed overwrite'
)


class Options(OptionGroup):
  """Options of the command."""

  data_dir: Sequence[str] = flag((), 'Folders of corpora, separated by commas.')
  pairs: str = flag('', "Pairs and globs, e.g. 'deu-en,fra-en' or '*-en'; empty: every pair folder.")
  split: Sequence[str] = flag(('train',), 'Split, or file prefix, to read; several for several corpora.')
  side: str = flag('shared', 'Side of the pairs to read; shared: both.', one_of=['source', 'target', 'shared'])
  output: str = flag('', 'Path to write to, without .model.')
  vocab_size: int = flag(8000, 'Pieces, including bytes and special ids.', lower_bound=1, upper_bound=2**31 - 1)
  temperature: float = flag(1.0, 'Temperature of the sampling over pairs; 1: natural shares.')
  character_coverage: float = flag(0.9995, 'Share of all characters that get their own pieces.')
  max_sentences: int = flag(1_000_000, 'Most lines of either side to use.', lower_bound=1)
  tags: bool | None = flag(None, 'Add the symbols <2xx> of the target languages. Unset: if there are several.')
  tag_sides: str = flag('source', 'As the field tag_sides: both has tags of sources too.', one_of=SIDES)
  extend: str = flag('', 'Vocabulary (.model) to which languages are added, under its rule.')
  languages: Sequence[str] = flag((), 'With --extend: languages whose tags are added.')
  corpus_tags: Sequence[str] = flag((), 'Names of symbols for corpora, such as bt; see the field corpora.')
  normalization: str | None = flag(
    None,
    "SentencePiece's rule. Unset: nmt_nfkc for --side=source, else identity, so that a model can write all text.",
    one_of=RULES,
  )
  seed: int = flag(1, 'Seed of the choice of lines.')
  overwrite: bool = flag(False, 'Replace existing files.')

  def __post_init__(self):
    if not self.output:
      raise UserError('where to write must be said; saw no --output: give one, e.g. --output=vocab/source')
    if not os.path.basename(self.output):
      raise UserError(
        f'--output is a path without .model; saw the folder {self.output}: add a name, as in vocab/source'
      )
    if not self.data_dir and not (self.extend and self.languages):
      raise UserError('a corpus must be given; saw no --data_dir: give one, e.g. --data_dir=data')
    if not self.temperature > 0:
      raise UserError(f'temperature must be a positive number; saw {self.temperature}: 1 keeps the natural shares')
    if not 0.98 <= self.character_coverage <= 1:
      raise UserError(f'character_coverage must be from 0.98 to 1; saw {self.character_coverage}: use 0.9995')
    if self.languages and not self.extend:
      raise UserError('--languages are added to a vocabulary: name it by --extend, or leave them out')


@app.command(Options, tensorflow=False, models=False)
def main(options: Options) -> None:
  from lingvo_moe.corpora import parallel
  from lingvo_moe.tasks.mt import unwritten_text
  from lingvo_moe.vocab import vocab_training
  from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

  base = TaggedVocab(options.extend) if options.extend else None
  pairs = [
    pair
    for folder in dict.fromkeys(options.data_dir)
    for split in dict.fromkeys(options.split)
    for pair in parallel.find_pairs(folder, options.pairs, split)
  ]
  start = time.time()
  values = {name: getattr(options, name) for name in _OF_TRAINING.split()}

  def train(output: str) -> str:
    path = vocab_training.train_vocab(pairs, output, options.vocab_size, **values)
    if options.side != 'source':
      unwritten_text.warn(TaggedVocab(path), pairs)
    return path

  if base:
    values |= {'exact_size': False, 'normalization': base.normalization if base.normalization in RULES else None}
    with tempfile.TemporaryDirectory() as folder:
      more = TaggedVocab(train(os.path.join(folder, 'more'))) if pairs else None
      path = vocab_training.extend_vocab(base, options.output, options.languages, more, options.overwrite)
  else:
    path = train(options.output)
  print(f'{path}: {os.path.getsize(path)} bytes, from {plural(len(pairs), "pair")}, in {time.time() - start:.0f} s')


if __name__ == '__main__':
  main()
