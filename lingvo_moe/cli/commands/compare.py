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
from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core.errors import UserError

_METRICS = ('BLEU', 'chrF2', 'chrF++')


class Options(OptionGroup):
  """Options of the command."""

  split: str = flag('test', 'The held-out set: test, dev or any file prefix.')
  metric: Sequence[str] = flag(_METRICS, 'Metrics to show.')
  samples: int = flag(1000, 'Resamples of the lines.', lower_bound=40)
  seed: int = flag(12345, "Of the resamples; the default is sacreBLEU's.", lower_bound=1)
  data_dir: str | None = flag(None, 'The corpus that was decoded, for references; default: beside the translations.')
  metric_command: str | None = flag(None, 'See above.')
  json: str | None = flag(None, 'Where to append it all for machines.')


@app.command(Options, tensorflow=False, arguments=True)
def main(argv: Sequence[str], options: Options) -> None:
  if len(argv) != 3:
    raise UserError(f'two runs are compared: lingvo-moe compare BASELINE RUN; saw {" ".join(argv[1:]) or "none"!r}')
  if not options.metric:
    raise UserError(f'--metric must be of {", ".join(_METRICS)}; saw none')
  if wrong := [metric for metric in options.metric if metric not in _METRICS]:
    raise UserError(f'--metric must be of {", ".join(_METRICS)}; saw {wrong[0]!r}')
  from lingvo_moe.addons.analysis import compare

  baseline, system = (compare.read_system(text, options.split, options.data_dir) for text in argv[1:])
  comparison = compare.compare(baseline, system, options.samples, options.seed)
  print(
    f'baseline: {baseline}\nsystem:   {system}\n{options.split}, {options.samples} resamples, seed {options.seed}\n'
  )
  print(comparison.table(options.metric))
  external = {}
  if command := options.metric_command:
    print(f'\n{command}')
    external = compare.by_command(comparison, command, options.samples, options.seed)
    for name, d in external.items():
      print(f'{name}: {d.baseline:.4f} {d.system:.4f} {d.difference:+.4f} [{d.low:+.4f}, {d.high:+.4f}] p={d.p:.4f}')
  for notice in comparison.notices():
    print(notice)
  if comparison.left_out:
    print(f'translated by one of them only, and left out: {", ".join(comparison.left_out)}')
  print('\nwhat differs in the configurations' if (rows := comparison.configured()) else '\nno value differs')
  for name, one, two in rows:
    print(f'  {name}: {one} | {two}')
  if options.json:
    with open(options.json, 'a', encoding='utf-8') as f:
      for record in comparison.records(options.split, options.metric):
        if record.get('pair') in external:
          record['scores'][options.metric_command] = external[record['pair']].to_json()
        f.write(json.dumps(record, ensure_ascii=False) + '\n')


if __name__ == '__main__':
  main()
