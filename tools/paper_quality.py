#!/usr/bin/env python
"""python tools/paper_quality.py RESULTS.jsonl --base=RUN --out=DIR [--data_dir=CORPUS] [--metric=chrF2]

Draws quality beside cost from the results that tools/record_results.py has recorded, as GShard's tables and figures do:
curves of the dev loss, target tokens until a loss is reached (Table 2), cost beside quality (Table 3 and Figure 1), and
differences from the run --base by language, the largest training sets first (Figure 6). It writes DIR/quality.md, which
is printed too, and DIR/*.png.

--data_dir is the corpus of the runs, whose training examples are counted for Figure 6; it must be given where another
run has translated a pair of the base's. --runs leaves out all others.
"""

import os

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError

_BASE = flags.DEFINE_string('base', None, 'The run that the others are compared with.', required=True)
_OUT = flags.DEFINE_string('out', None, 'Folder for the page and its plots.', required=True)
_RUNS = flags.DEFINE_list('runs', [], 'Runs that are shown beside it, in order; default: all.')
_SPLIT = flags.DEFINE_string('split', 'test', 'The held-out set that was translated.')
_METRIC = flags.DEFINE_string('metric', 'chrF2', 'The score: chrF2, chrF++ or BLEU.')
_DATA_DIR = flags.DEFINE_string('data_dir', None, 'The corpus, whose training examples are counted.')


@app.command(tensorflow=False, arguments=True)
def main(argv):
  if len(argv) != 2:
    raise UserError(
      f'results are in one file: tools/paper_quality.py RESULTS.jsonl --base=RUN; saw {" ".join(argv[1:]) or "none"!r}'
    )
  from paper import quality, recording

  if not os.path.exists(argv[1]):
    raise UserError(f'there is no file {argv[1]}: tools/record_results.py makes one')
  if _METRIC.value not in quality.METRICS:
    raise UserError(f'--metric is one of {", ".join(quality.METRICS)}; saw {_METRIC.value!r}')
  records = recording.read(argv[1])
  splits = sorted({record['split'] for record in records if record['kind'] == 'test'})
  if splits and _SPLIT.value not in splits:
    raise UserError(f'--split is a recorded set, {", ".join(splits)}; saw {_SPLIT.value!r}: give one of them')
  runs = quality.chosen(quality.by_run(records, _SPLIT.value), _BASE.value, _RUNS.value)
  pairs = sorted({pair for run in runs.values() for pair in run.scores[_METRIC.value]})
  sizes = _examples(_DATA_DIR.value, pairs) if _DATA_DIR.value and pairs else {}
  os.makedirs(_OUT.value, exist_ok=True)
  page = quality.Quality(runs, _BASE.value, _OUT.value, sizes, _METRIC.value).make()
  text = '\n\n'.join(['# Quality beside cost', *page]) + '\n'
  with open(os.path.join(_OUT.value, 'quality.md'), 'w', encoding='utf-8') as f:
    f.write(text)
  print(text, end='')


def _examples(data_dir: str, pairs: list[str]) -> dict[str, int]:
  """Lines of the training set of each pair."""
  from lingvo_moe.corpora import parallel

  found = parallel.find_pairs(data_dir, ','.join(pairs), 'train')
  return {pair.name: parallel.count_lines(pair) for pair in found}


if __name__ == '__main__':
  main()
