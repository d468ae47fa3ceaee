"""lingvo-moe prepare --source=a.de --target=a.en --out=DATA [--dev=N] [--test=N]

Prepares your own text for training. Drops pairs of lines that a model cannot learn from, counts them by reason, and
splits the rest into train, dev and test that share no sentence on either side. Writes the folder DATA/de-en with
train.de, train.en, dev.de and so on, and prints the next command to type. Run it once for each pair of languages, with
the same --out.

Line i of --source is translated by line i of --target. Instead, --pairs_file=FILE names one file with both sides: TMX,
JSON lines, CSV, TSV or a zip of two files of lines as OPUS has it, by the ending of its name (.tmx, .jsonl, .csv, .tsv,
.zip). --tsv=FILE takes a TSV file of any name.
Files may be packed by gzip, xz or bzip2, or be pipes. The languages are the ends of the files' names (a.de, a.pt-BR.gz,
de-en.tmx), or --pair=de-en.

The same text gives the same splits, in whatever order its lines come. Sentences that differ only in spaces, Unicode
composition or invisible characters count as the same. Memory is some 50 bytes per line.
"""

import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core import progress
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import packed, parallel, preparation
from lingvo_moe.corpora.pair_files import SEPARATORS, Texts
from lingvo_moe.tasks import run_length


class Options(OptionGroup):
  """Options of the command."""

  source: str = flag('', 'File of source lines, such as a.de or a.de.gz.')
  target: str = flag('', 'File of their translations, such as a.en.')
  tsv: str = flag('', 'File of pairs, tabs between the columns; in place of the two.')
  pairs_file: str = flag('', 'File of pairs: .tmx, .jsonl, .csv with quotes, .tsv, or Moses .zip; in place of the two.')
  columns: Sequence[str] = flag(
    (),
    'Columns with source and target: numbers from 1, or names, of the first row or of keys in JSON; default: the names '
    "of the languages or 'source,target' where they exist, else the only two with text.",
  )
  separator: str = flag(
    '', 'Between the cells of CSV; default: the one that gives all rows as many.', one_of=['', *SEPARATORS]
  )
  pair: str = flag('', "Languages, such as de-en; default: the ends of the files' names.")
  out: str = flag(None, "Folder of the corpus, the trainer's --data_dir.", required=True)
  dev: int | None = flag(
    None, 'Pairs held out for the dev loss; default: 1000, or a tenth of all if that is less.', lower_bound=0
  )
  test: int | None = flag(None, 'Pairs held out for the final score; default: as --dev.', lower_bound=0)
  max_chars: int = flag(1000, 'Characters of a line, at most.', lower_bound=1)
  max_ratio: float = flag(
    3.0, "How many times a side may be longer than the other and the corpus's mean make expect, at most."
  )
  language_id: bool | None = flag(
    None,
    'Drop lines that are almost certainly in another language, by py3langid. Unset: if it is installed and files have '
    'at most 100 MB.',
  )
  near_duplicates: float = flag(
    0.0,
    'Drop most pairs that resemble an earlier one so much (MinHash of character 5-grams), e.g. 0.9; 0: none. It takes '
    '64 more bytes per line.',
    lower_bound=0,
    upper_bound=0.99,
  )
  max_partners: int | None = flag(
    None,
    'Other sides that a sentence of over 20 characters may go with; beyond, it is boilerplate. Unset: 20, or one for '
    '100,000 lines if that is more.',
    lower_bound=1,
  )
  seed: int = flag(1, 'Seed of the choice of dev and test.', lower_bound=0)
  corpus: str = flag(
    'train',
    'Prefix of the files of train. Another one, such as bt, adds a corpus to a folder, without dev and test; pairs '
    'that share a sentence with those of the folder are dropped.',
  )
  overwrite: bool = flag(False, 'Replace what this command wrote before.')

  def rules(self) -> preparation.Rules:
    return preparation.Rules(
      **{field.name: getattr(self, field.name) for field in dataclasses.fields(preparation.Rules)}
    )


@app.command(Options, tensorflow=False, arguments=True, models=False)
def main(argv: Sequence[str], options: Options) -> None:
  if argv[1:]:
    raise UserError(f'files are named by --source and --target, or by --pairs_file; saw {argv[1]!r}')
  if options.max_ratio <= 1:
    raise UserError(f'--max_ratio must be above 1; saw {options.max_ratio}: 3 is usual')
  texts = Texts(
    options.source, options.target, options.tsv, options.pairs_file, options.columns, options.pair, options.separator
  )
  name = '-'.join(texts.sides)
  if 0 < options.near_duplicates < 0.5:
    raise UserError(f'--near_duplicates must be 0, or from 0.5 on; saw {options.near_duplicates}: 0.9 is usual')
  rules = options.rules()
  if not re.fullmatch(r'\w[\w-]*', rules.corpus) or rules.corpus in ('dev', 'test'):
    raise UserError(f'--corpus is letters, digits, - and _, and neither dev nor test; saw {rules.corpus}: e.g. bt')
  folder = preparation.check_folder(options.out, texts, options.overwrite, rules)
  with progress.bar(2 * texts.bytes(), 'preparing', 'B') as bar:
    try:
      decisions = preparation.examine(texts, rules, bar.update, folder)
    except preparation.TooFewError as e:
      bar.close()
      print(preparation.table(e.decisions, rules), flush=True)
      raise
    preparation.write(texts, decisions.outcomes, folder, bar.update, rules)
  print(preparation.table(decisions, rules), flush=True)
  few = run_length.too_few(decisions.count(preparation.LineOutcome.TRAIN)) if rules.corpus == 'train' else ''
  for warning in filter(None, (preparation.warning(decisions), few and f'warning: {few}', texts.note)):
    print(warning, file=sys.stderr)
  print(f'\nwritten to {folder}; next:\n')
  corpora = ''
  if rules.corpus != 'train':
    prefixes = parallel.prefixes(stem for stem, ending, _ in packed.named(folder) if ending == texts.sides[0])
    if not {*prefixes} & {'dev', 'test'}:
      print('warning: the folder has no dev or test yet, so nothing was kept apart from them', file=sys.stderr)
    known = sorted({*prefixes} - {'dev', 'test'}, key=lambda prefix: (prefix != 'train', prefix))
    corpora = f' --set "corpora={"; ".join(f"{prefix} 1" for prefix in known)}"'
  run = name if len(parallel.pair_folders(options.out)) == 1 else 'all'
  print(
    f'  lingvo-moe train --model=mt.starter.MoE8E --data_dir={shlex.quote(options.out)} --logdir=runs/{run}{corpora}'
  )


if __name__ == '__main__':
  main()
