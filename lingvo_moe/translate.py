"""Translates standard input, a sentence a line, to standard output, a translation a line:

  echo 'Guten Morgen.' | python -m lingvo_moe.translate --logdir=DIR

Each line is answered at once; --batch_lines=1000 is much faster for a file. An empty line gives an empty line. With
--n_best=N every line gives up to N lines: its number, the score, the log-probability and the text, between tabs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import select
import sys
from collections.abc import Iterable, Iterator
from typing import BinaryIO, TextIO

from absl import flags

from lingvo_moe import app
from lingvo_moe import runtime_flags
from lingvo_moe.core.errors import UserError

_WHILE_SECONDS = 60  # between two words of the process that reads; XLA gives up after 30 minutes


@dataclasses.dataclass(frozen=True)
class Options:
  """The flags; see define_flags."""

  logdir: str
  model: str | None = None
  step: int | None = None
  best: bool = False
  target: str | None = None
  beam_size: int | None = None
  length_norm_alpha: float | None = None
  n_best: int = 1
  batch_lines: int = 1


def define_flags() -> None:
  """Not done by an import: the trainer and the decoder have flags of the same names."""
  flags.DEFINE_string('logdir', None, 'The log directory of the run.', required=True)
  flags.DEFINE_string('model', None, "The run's model, if you want that checked; the log directory knows it.")
  flags.DEFINE_integer('step', None, 'The checkpoint of this step, and not the newest.')
  flags.DEFINE_bool('best', False, 'The checkpoint of the best dev loss, and not the newest.')
  flags.DEFINE_string('target', None, 'The target language, for models of several.')
  flags.DEFINE_integer('beam_size', None, "Hypotheses kept; in place of the run's configuration.")
  flags.DEFINE_float('length_norm_alpha', None, "GNMT's alpha; in place of the run's configuration.")
  flags.DEFINE_integer('n_best', 1, 'Translations of each line, at most --beam_size.', lower_bound=1)
  runtime_flags.define()
  flags.DEFINE_integer('batch_lines', 1, 'Lines that are read before they are translated together.', lower_bound=1)


def main(argv) -> None:
  del argv
  options = Options(**{field.name: flags.FLAGS[field.name].value for field in dataclasses.fields(Options)})
  app.claim_stdout()
  translate(options, sys.stdin.buffer, sys.stdout, runtime_flags.Choice.from_flags())


def translate(
  options: Options, source: BinaryIO, output: TextIO, choice: runtime_flags.Choice = runtime_flags.LOCAL
) -> None:
  """Translates until the source ends.

  Of several processes the one that leads reads and answers; all of them translate.
  """
  # TensorFlow takes seconds to import: flags are checked before.
  from lingvo_moe.ops.cpu import threads
  from lingvo_moe.run import inference
  from lingvo_moe.run.rundir import RunDir

  if options.step is not None and options.best:
    raise UserError('--step and --best each choose a checkpoint: give one of them')
  if choice.runtime == 'local':
    threads.set_policy(decoding=True)
  choice.connect()
  run = RunDir(options.logdir)
  config, vocabs, target = choice.together(lambda: _settings(run, options))
  runtime = choice.make(config.program())
  checkpoints = run.checkpoints()
  step = choice.lead(lambda: inference.choose_step(checkpoints, options.step, options.best))
  choice.together(lambda: inference.load_weights(runtime, checkpoints, step))
  translator = inference.translator(runtime, config, vocabs, n_best=options.n_best)

  def answer(first, translated):
    for i in translated.truncated:
      print(
        f'warning: line {first + i} is over max_length={config.max_length} tokens and was translated in part',
        file=sys.stderr,
      )
    for number, hypotheses in enumerate(translated.hypotheses, first):
      for h in hypotheses:
        output.write(f'{h.text}\n' if options.n_best == 1 else f'{number}\t{h.score:.4f}\t{h.log_prob:.4f}\t{h.text}\n')
    output.flush()

  batches = _batches(source if choice.num_processes == 1 else _as_they_come(source), options.batch_lines)
  first = 1
  while (lines := choice.lead(lambda: next(batches, None))) is not None:
    if lines:
      translated = choice.together(functools.partial(translator.translate, lines, target))
      choice.lead(functools.partial(answer, first, translated))
      first += len(lines)


def _settings(run, options: Options) -> tuple:
  """(configuration, vocabularies, target language or None) as the options say."""
  from lingvo_moe.run import inference
  from lingvo_moe.tasks.mt import decoding

  config = inference.load_config(
    run, options.model, beam_size=options.beam_size, length_norm_alpha=options.length_norm_alpha
  )
  if options.n_best > config.beam_size:
    raise UserError(
      f'a beam of {config.beam_size} has no {options.n_best} translations to choose from: '
      f'use --n_best={config.beam_size}, or a larger --beam_size'
    )
  vocabs = run.vocabs(config)
  return config, vocabs, decoding.choose_target(config, vocabs[0], options.target)


def _as_they_come(source: BinaryIO) -> Iterator[bytes | None]:
  """A file's lines, and None whenever there was none for a while: processes do not wait for each other for ever."""
  rest = b''
  while True:
    if not select.select([source], [], [], _WHILE_SECONDS)[0]:
      yield None
      continue
    read = os.read(source.fileno(), 1 << 16)
    if not read:
      break
    *lines, rest = (rest + read).split(b'\n')
    yield from lines
  if rest:
    yield rest


def _batches(source: Iterable[bytes | None], size: int) -> Iterator[list[str]]:
  """Lines without their ends, as soon as there are `size`, or no more; no lines where the source has None."""
  lines, number = [], 0
  for line in source:
    if line is None:
      yield []
      continue
    number += 1
    line = line.rstrip(b'\r\n')
    try:
      lines.append(line.decode('utf-8'))
    except UnicodeDecodeError as e:
      yield lines  # what came before is answered
      raise UserError(
        f'text must be UTF-8; line {number} of standard input is not (byte {e.start + 1}: '
        f'{line[e.start : e.start + 4]!r}): convert it, e.g. with iconv -f latin1 -t utf-8'
      ) from None
    if len(lines) == size:
      yield lines
      lines = []
  if lines:
    yield lines


if __name__ == '__main__':
  define_flags()
  app.run(main)
