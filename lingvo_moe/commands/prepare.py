"""lingvo-moe prepare --source=a.de --target=a.en --out=DATA [--dev=1000] [--test=1000]

Prepares your own text for training: pairs of lines that a model cannot learn from are dropped and counted by reason,
and the rest is split into train, dev and test that share no sentence on either side. Writes the folder DATA/de-en with
train.de, train.en, dev.de and so on, as the trainer reads them, and prints the line to type next.

Line i of --source is translated by line i of --target. In place of the two, --tsv=FILE has a pair in each line, with tabs
between columns. Files may be gzipped. The languages are the ends of the files' names, or --pair=de-en. The same text
gives the same splits, in whatever order its lines come; memory is some 50 bytes a line.

Run it once for each pair of languages, with the same --out.
"""

from __future__ import annotations

import shlex
import sys

import tqdm
from absl import flags

from lingvo_moe import app
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.mt import preparation

_SOURCE = flags.DEFINE_string('source', '', 'File of source lines, such as a.de or a.de.gz.')
_TARGET = flags.DEFINE_string('target', '', 'File of their translations, such as a.en.')
_TSV = flags.DEFINE_string('tsv', '', 'File of pairs, tabs between the columns; in place of the two.')
_COLUMNS = flags.DEFINE_list('columns', ['1', '2'], 'Columns of --tsv with source and target, from 1.')
_PAIR = flags.DEFINE_string('pair', '', "Languages, such as de-en; default: the ends of the files' names.")
_OUT = flags.DEFINE_string('out', None, "Folder of the corpus, the trainer's --data_dir.", required=True)
_DEV = flags.DEFINE_integer('dev', 1000, 'Pairs held out for the dev loss.', lower_bound=0)
_TEST = flags.DEFINE_integer('test', 1000, 'Pairs held out for the final score.', lower_bound=0)
_MAX_CHARS = flags.DEFINE_integer('max_chars', 1000, 'Characters of a line, at most.', lower_bound=1)
_MAX_RATIO = flags.DEFINE_float(
  'max_ratio', 3.0, "How many times a side may be longer than the other and the corpus's mean make expect, at most."
)
_SEED = flags.DEFINE_integer('seed', 1, 'Seed of the choice of dev and test.', lower_bound=0)
_OVERWRITE = flags.DEFINE_bool('overwrite', False, 'Replace what this command wrote before.')


def main(argv):
  if argv[1:]:
    raise UserError(f'files are named by --source and --target, or by --tsv; saw {argv[1]!r}')
  if _MAX_RATIO.value <= 1:
    raise UserError(f'--max_ratio must be above 1; saw {_MAX_RATIO.value}: 3 is usual')
  if len(_COLUMNS.value) != 2 or not all(c.isdecimal() and len(c) < 10 for c in _COLUMNS.value):
    raise UserError(f'--columns are two numbers with a comma between; saw {",".join(_COLUMNS.value)}: e.g. 1,2')
  columns = tuple(map(int, _COLUMNS.value))
  texts = preparation.Texts(_SOURCE.value, _TARGET.value, _TSV.value, columns)
  sides = preparation.languages(texts, _PAIR.value)
  name = '-'.join(sides)
  rules = preparation.Rules(_DEV.value, _TEST.value, _MAX_CHARS.value, _MAX_RATIO.value, _SEED.value)
  folder = preparation.check_folder(_OUT.value, name, texts, sides, _OVERWRITE.value)
  with tqdm.tqdm(total=2 * texts.bytes(), unit='B', unit_scale=True, disable=None, file=sys.stderr, leave=False) as bar:
    found = preparation.examine(texts, rules, bar.update)
    preparation.write(texts, found.fates, folder, sides, bar.update)
  print(preparation.table(found, rules))
  print(f'\nwritten to {folder}; next:\n')
  dev = '--set eval_sentences=0'
  if not _DEV.value:
    dev += f' --set dev_lines={max(1, min(1000, found.count(preparation.Fate.TRAIN) // 20))}'
  print(
    f'  lingvo-moe train --model=mt.m4mini.MoE8E --set pairs={name} {dev} --data_dir={shlex.quote(_OUT.value)} '
    f'--logdir=runs/{name}'
  )


def command() -> None:
  """The command as typed."""
  app.run(main, tensorflow=False, arguments=True)


if __name__ == '__main__':
  command()
