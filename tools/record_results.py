#!/usr/bin/env python
"""python tools/record_results.py RUN --out=docs/results/NAME.jsonl [--commit=C] [--steps_per_epoch=N]

Appends what a run has reached to a file of JSON lines, to be committed: a line for every evaluation on dev, and one for
every pair of every step that the decoder has translated, with BLEU, chrF2 and chrF++. What is there already is not
added again, so it may be run while training goes on, after every step that is decoded, and for several runs into one
file.

RUN is a log directory; an average of checkpoints counts as a run of its own. Translations are scored against the
references that the decoder wrote beside them, or those of --data_dir. --commit is that of the checkout that trained,
which a log directory does not know.
"""

import sys

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError, plural
from lingvo_moe.storage import log_directory

_OUT = flags.DEFINE_string('out', None, 'The file to append to.', required=True)
_SPLIT = flags.DEFINE_list('split', ['test'], 'Held-out sets, with commas between.')
_DATA_DIR = flags.DEFINE_string(
  'data_dir', None, 'The corpus that was decoded, for references; default: beside the translations.'
)
_COMMIT = flags.DEFINE_string('commit', None, 'The commit that trained.')
_STEPS_PER_EPOCH = flags.DEFINE_float(
  'steps_per_epoch', None, 'Updates in an epoch; without it no epochs are recorded.'
)


@app.command(tensorflow=False, arguments=True)
def main(argv):
  if len(argv) != 2:
    raise UserError(
      f'one run is recorded: tools/record_results.py RUN --out=FILE; saw {" ".join(argv[1:]) or "none"!r}'
    )
  if _STEPS_PER_EPOCH.value is not None and _STEPS_PER_EPOCH.value <= 0:
    raise UserError(f'--steps_per_epoch must be a positive number; saw {_STEPS_PER_EPOCH.value}')
  from lingvo_moe.storage.log_directory import LogDirectory
  from paper import recording

  known = recording.read(_OUT.value)
  options = (_SPLIT.value, _DATA_DIR.value, _COMMIT.value, _STEPS_PER_EPOCH.value)
  run = LogDirectory.read(argv[1])
  for split in _SPLIT.value if flags.FLAGS['split'].present else ():
    if not run.decoded_steps(split):
      raise UserError(
        f'--split names decoded sets; {run.path} has no translations of {split!r}: decode it, or leave it out'
      )
  found = recording.new_records(run, known, *options)
  added, there = recording.append(_OUT.value, found) if found else ([], len(known))
  count = lambda kind, noun: plural(sum(record['kind'] == kind for record in added), noun)
  evaluations, scores = count('eval', 'evaluation'), count('test', 'score')
  print(f'{_OUT.value}: {evaluations} and {scores} added to {plural(there, "line")}')
  if any(record['seconds'] is None for record in added):
    print(
      f'of some of them seconds and tokens are null: {run.of_training(log_directory.TRAIN_LOG)} does not have those',
      file=sys.stderr,
    )


if __name__ == '__main__':
  main()
