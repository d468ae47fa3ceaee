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

import re
import shlex
import sys

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core import progress
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import packed, parallel, preparation
from lingvo_moe.corpora.pair_files import SEPARATORS, Texts

_SOURCE = flags.DEFINE_string('source', '', 'File of source lines, such as a.de or a.de.gz.')
_TARGET = flags.DEFINE_string('target', '', 'File of their translations, such as a.en.')
_TSV = flags.DEFINE_string('tsv', '', 'File of pairs, tabs between the columns; in place of the two.')
_PAIRS_FILE = flags.DEFINE_string(
  'pairs_file', '', 'File of pairs: .tmx, .jsonl, .csv with quotes, .tsv, or Moses .zip; in place of the two.'
)
_COLUMNS = flags.DEFINE_list(
  'columns',
  [],
  'Columns with source and target: numbers from 1, or names, of the first row or of keys in JSON; default: the names '
  "of the languages or 'source,target' where they exist, else 1,2.",
)
_SEPARATOR = flags.DEFINE_enum(
  'separator', '', ['', *SEPARATORS], 'Between the cells of CSV; default: the one that gives all rows as many.'
)
_PAIR = flags.DEFINE_string('pair', '', "Languages, such as de-en; default: the ends of the files' names.")
_OUT = flags.DEFINE_string('out', None, "Folder of the corpus, the trainer's --data_dir.", required=True)
_DEV = flags.DEFINE_integer(
  'dev', None, 'Pairs held out for the dev loss; default: 1000, or a tenth of all if that is less.', lower_bound=0
)
_TEST = flags.DEFINE_integer('test', None, 'Pairs held out for the final score; default: as --dev.', lower_bound=0)
_MAX_CHARS = flags.DEFINE_integer('max_chars', 1000, 'Characters of a line, at most.', lower_bound=1)
_MAX_RATIO = flags.DEFINE_float(
  'max_ratio', 3.0, "How many times a side may be longer than the other and the corpus's mean make expect, at most."
)
_LANGUAGE_ID = flags.DEFINE_bool(
  'language_id',
  None,
  'Drop lines that are surely in another language, by py3langid. Unset: if it is installed and files have at most '
  '100 MB.',
)
_NEAR_DUPLICATES = flags.DEFINE_float(
  'near_duplicates',
  0.0,
  'Drop most pairs that resemble an earlier one so much (MinHash of character 5-grams), e.g. 0.9; 0: none. It takes '
  '64 more bytes per line.',
  lower_bound=0,
  upper_bound=0.99,
)
_MAX_PARTNERS = flags.DEFINE_integer(
  'max_partners',
  None,
  'Other sides that a sentence of over 20 characters may go with; beyond, it is boilerplate. Unset: 20, or one for '
  '100,000 lines if that is more.',
  lower_bound=1,
)
_SEED = flags.DEFINE_integer('seed', 1, 'Seed of the choice of dev and test.', lower_bound=0)
_CORPUS = flags.DEFINE_string(
  'corpus',
  'train',
  'Prefix of the files of train. Another one, such as bt, adds a corpus to a folder, without dev and test; pairs that '
  'share a sentence with those of the folder are dropped.',
)
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace what this command wrote before.')


@app.command(tensorflow=False, arguments=True, models=False)
def main(argv):
  if argv[1:]:
    raise UserError(f'files are named by --source and --target, or by --pairs_file; saw {argv[1]!r}')
  if _MAX_RATIO.value <= 1:
    raise UserError(f'--max_ratio must be above 1; saw {_MAX_RATIO.value}: 3 is usual')
  texts = Texts(
    _SOURCE.value, _TARGET.value, _TSV.value, _PAIRS_FILE.value, _COLUMNS.value, _PAIR.value, _SEPARATOR.value
  )
  name = '-'.join(texts.sides)
  if 0 < _NEAR_DUPLICATES.value < 0.5:
    raise UserError(f'--near_duplicates must be 0, or from 0.5 on; saw {_NEAR_DUPLICATES.value}: 0.9 is usual')
  of_rules = (_DEV, _TEST, _MAX_CHARS, _MAX_RATIO, _LANGUAGE_ID, _NEAR_DUPLICATES, _MAX_PARTNERS, _SEED, _CORPUS)
  rules = preparation.Rules(**{flag.name: flag.value for flag in of_rules})
  if not re.fullmatch(r'\w[\w-]*', rules.corpus) or rules.corpus in ('dev', 'test'):
    raise UserError(f'--corpus is letters, digits, - and _, and neither dev nor test; saw {rules.corpus}: e.g. bt')
  folder = preparation.check_folder(_OUT.value, texts, _OVERWRITE.value, rules)
  with progress.bar(2 * texts.bytes(), 'preparing', 'B') as bar:
    try:
      decisions = preparation.examine(texts, rules, bar.update, folder)
    except preparation.TooFewError as e:
      bar.close()
      print(preparation.table(e.decisions, rules), flush=True)
      raise
    preparation.write(texts, decisions.outcomes, folder, bar.update, rules)
  print(preparation.table(decisions, rules), flush=True)
  if warning := preparation.warning(decisions):
    print(warning, file=sys.stderr)
  print(f'\nwritten to {folder}; next:\n')
  dev = '--set eval_sentences=0'
  if rules.corpus != 'train':
    prefixes = parallel.prefixes(stem for stem, ending, _ in packed.named(folder) if ending == texts.sides[0])
    if not {*prefixes} & {'dev', 'test'}:
      print('warning: the folder has no dev or test yet, so nothing was kept apart from them', file=sys.stderr)
    corpora = sorted({*prefixes} - {'dev', 'test'}, key=lambda prefix: (prefix != 'train', prefix))
    dev += f' --set "corpora={"; ".join(f"{prefix} 1" for prefix in corpora)}"'
  elif not decisions.count(preparation.Outcome.DEV):
    dev += f' --set dev_lines={max(1, min(1000, decisions.count(preparation.Outcome.TRAIN) // 20))}'
  print(
    f'  lingvo-moe train --model=mt.m4mini.MoE8E --set pairs={name} {dev} --data_dir={shlex.quote(_OUT.value)} '
    f'--logdir=runs/{name}'
  )


if __name__ == '__main__':
  main()
