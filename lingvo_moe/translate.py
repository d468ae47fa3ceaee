"""Translates standard input, a sentence a line, to standard output, a translation a line:

  echo 'Guten Morgen.' | python -m lingvo_moe.translate --logdir=DIR

The checkpoint with the lowest dev loss is used, and named; --step=N and --checkpoint=last choose another.

Each line is answered at once; --batch_lines=1000 is much faster for a file. An empty line gives an empty line. With
--n_best=N every line gives up to N lines: its number, the score, the log-probability and the text, between tabs.

With a run of a language model each line is a prompt, and the answer its continuation, as --search says. With a run of
span corruption each line is answered by itself, with <extra_id_0>, <extra_id_1>, ... in it filled in. With both, a line
break within a line or its answer is written as a backslash and an n, and a backslash as two.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import os
import select
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from absl import flags

from lingvo_moe import app
from lingvo_moe import checkpoint_flags
from lingvo_moe import runtime_flags
from lingvo_moe.core.errors import UserError

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.run.loaded import LoadedRun

_WHILE_SECONDS = 60  # between two words of the process that reads; XLA gives up after 30 minutes


@dataclasses.dataclass(frozen=True)
class Options(checkpoint_flags.Options):
  """Values of the flags; see define_flags."""

  best_by_default = True

  target: str | None = None
  n_best: int = 1
  batch_lines: int = 1


def define_flags() -> None:
  """Not done by an import: the trainer and the decoder have flags of the same names."""
  checkpoint_flags.define(best_by_default=True)
  flags.DEFINE_string('target', None, 'Target language, for models of several.')
  flags.DEFINE_integer('n_best', 1, 'Translations of each line, at most --beam_size.', lower_bound=1)
  runtime_flags.define()
  flags.DEFINE_integer('batch_lines', 1, 'Lines that are read before they are translated together.', lower_bound=1)
  for shared in (checkpoint_flags, runtime_flags):
    flags.adopt_module_key_flags(shared)  # so that --help shows them


def main(argv) -> None:
  del argv
  options = Options.from_flags()
  if sys.stdin is None:
    raise UserError('what is to be translated comes from standard input, which is closed: give it a file or a pipe')
  app.claim_stdout()
  translate(options, sys.stdin.buffer, sys.stdout, runtime_flags.Choice.from_flags())


def translate(
  options: Options, source: BinaryIO, output: TextIO, choice: runtime_flags.Choice = runtime_flags.LOCAL
) -> None:
  """Translates until the source ends.

  Of several processes the leader reads and writes; all of them translate.
  """
  run = load(options, choice)
  target = choice.together(lambda: run.choose_target(options.target))
  choice.together(lambda: run.translator(options.n_best))  # refuses what it cannot do, before a line is read
  choice.say(f'using the checkpoint of {run.checkpoint}')
  lines_read = 0
  batches = _batches(source if choice.num_processes == 1 else _as_they_come(source), options.batch_lines)
  while (lines := choice.lead(lambda: next(batches, None))) is not None:
    if lines:
      translated = choice.together(functools.partial(run.answer, lines, target, options.n_best))
      choice.lead(functools.partial(write, output, translated, lines_read + 1, options, run.over_the_length))
      lines_read += len(lines)


def load(options: checkpoint_flags.Options, choice: runtime_flags.Choice) -> LoadedRun:
  """The run that the options choose, with its weights; UserError where its task does not translate."""
  from lingvo_moe.run.loaded import LoadedRun

  choice.set_threads(decoding=True)
  choice.connect()
  run = options.run
  config = choice.together(lambda: options.load_config(run))
  runtime = choice.make(config.program())
  step = choice.lead(lambda: options.choose_step(run))
  return choice.together(lambda: LoadedRun(run, config, runtime, step))


def write(output: TextIO, translated: Any, first: int, options: Options, over_the_length: str) -> None:
  """Writes the translations of some lines, of which `first` is the number of the first, and flushes them."""
  for i in translated.truncated:
    print(f'warning: line {first + i} is {over_the_length} and was translated in part', file=sys.stderr)
  for number, hypotheses in enumerate(translated.hypotheses, first):
    for h in hypotheses:
      output.write(f'{h.text}\n' if options.n_best == 1 else f'{number}\t{h.score:.4f}\t{h.log_prob:.4f}\t{h.text}\n')
  output.flush()


def _as_they_come(source: BinaryIO) -> Iterator[bytes | None]:
  """A file's lines, and None after a while without one, so that other processes need not wait without a limit."""
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
  """Groups of `size` lines without their ends, the last one smaller; an empty group where the source has None."""
  lines, number = [], 0
  for line in source:
    if line is None:
      yield []
      continue
    number += 1
    line = line.rstrip(b'\r\n').removeprefix(codecs.BOM_UTF8 if number == 1 else b'')
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


def command() -> None:
  """The command as typed."""
  define_flags()
  app.run(main)


if __name__ == '__main__':
  command()
