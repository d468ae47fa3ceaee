"""lingvo-moe compare BASELINE RUN [--split=test] [--metric=BLEU,chrF2,chrF++] [--json=FILE]

Compares the translations that the decoder has written for two runs. Prints, for every pair that both have translated
and for the mean over pairs: BLEU, chrF2 and chrF++, the difference (RUN minus BASELINE), its 95% interval, and p by
paired bootstrap. Also prints how many pairs gain, for how many the interval excludes 0, and which fields differ.

BASELINE and RUN are log directories. Each is taken at its newest decoded step, or at STEP as runs/mine@STEP. Several
directories with commas between count as one system: runs/de_en,runs/fr_en against one run for all pairs.

p of a pair is sacreBLEU's. It counts resamples whose difference is far above its mean, not those far below, and is
often about half of a two-sided p: of equal systems more than 5% have p < 0.05. p of the mean over pairs is two-sided.

If pairs translate the same sentences, such as verses, these are not independent draws. The interval of the mean then
resamples sentences, each in all its languages; otherwise it resamples the lines of each pair by themselves. A line
states which.

References are those that the decoder wrote with its translations, or of --data_dir, which must have the same text.
--json appends a record for every pair and one for the mean, as JSON lines.

--metric_command='COMMAND' compares by another metric too: COMMAND reads lines of source, translation and reference with
tabs between, and prints a score for each. p is then two-sided. docs/own_text.md has an example.
"""

import json

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError

_METRICS = ('BLEU', 'chrF2', 'chrF++')

_SPLIT = flags.DEFINE_string('split', 'test', 'The held-out set: test, dev or any file prefix.')
_METRIC = flags.DEFINE_list('metric', list(_METRICS), 'Metrics to show.')
_SAMPLES = flags.DEFINE_integer('samples', 1000, 'Resamples of the lines.', lower_bound=40)
_SEED = flags.DEFINE_integer('seed', 12345, "Of the resamples; the default is sacreBLEU's.", lower_bound=1)
_DATA_DIR = flags.DEFINE_string(
  'data_dir', None, 'The corpus that was decoded, for references; default: beside the translations.'
)
_METRIC_COMMAND = flags.DEFINE_string('metric_command', None, 'See above.')
_JSON = flags.DEFINE_string('json', None, 'Where to append it all for machines.')


@app.command(tensorflow=False, arguments=True)
def main(argv):
  if len(argv) != 3:
    raise UserError(f'two runs are compared: lingvo-moe compare BASELINE RUN; saw {" ".join(argv[1:]) or "none"!r}')
  if not _METRIC.value:
    raise UserError(f'--metric must be of {", ".join(_METRICS)}; saw none')
  if wrong := [metric for metric in _METRIC.value if metric not in _METRICS]:
    raise UserError(f'--metric must be of {", ".join(_METRICS)}; saw {wrong[0]!r}')
  from lingvo_moe.addons.analysis import compare

  baseline, system = (compare.read_system(text, _SPLIT.value, _DATA_DIR.value) for text in argv[1:])
  comparison = compare.compare(baseline, system, _SAMPLES.value, _SEED.value)
  print(f'baseline: {baseline}\nsystem:   {system}\n{_SPLIT.value}, {_SAMPLES.value} resamples, seed {_SEED.value}\n')
  print(comparison.table(_METRIC.value))
  external = {}
  if command := _METRIC_COMMAND.value:
    print(f'\n{command}')
    external = compare.by_command(comparison, command, _SAMPLES.value, _SEED.value)
    for name, d in external.items():
      print(f'{name}: {d.baseline:.4f} {d.system:.4f} {d.difference:+.4f} [{d.low:+.4f}, {d.high:+.4f}] p={d.p:.4f}')
  for notice in comparison.notices():
    print(notice)
  if comparison.left_out:
    print(f'translated by one of them only, and left out: {", ".join(comparison.left_out)}')
  print('\nwhat differs in the configurations' if (rows := comparison.configured()) else '\nno value differs')
  for name, one, two in rows:
    print(f'  {name}: {one} | {two}')
  if _JSON.value:
    with open(_JSON.value, 'a', encoding='utf-8') as f:
      for record in comparison.records(_SPLIT.value, _METRIC.value):
        if record.get('pair') in external:
          record['scores'][_METRIC_COMMAND.value] = external[record['pair']].to_json()
        f.write(json.dumps(record, ensure_ascii=False) + '\n')


if __name__ == '__main__':
  main()
