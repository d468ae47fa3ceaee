"""Translates standard input, a sentence per line, to standard output, a translation per line:

  echo 'Guten Morgen.' | lingvo-moe translate RUN

RUN is a log directory (or --logdir=RUN). The checkpoint with the lowest dev loss is used, and printed; --step=N and
--checkpoint=last select another one. RUN may also be what lingvo-moe export --format=litert wrote, which needs no
TensorFlow.

Lines that have arrived are translated together, at most 1000: a line that comes alone is answered at once, and a file
is fast. --batch_lines=N waits for N lines, or for the end. A line of several sentences is
translated sentence by sentence, as --split_sentences says. An empty line gives an empty line. With --n_best=N, every
line gives up to N lines: its number, the score, the log-probability and the text, with tabs between. --alignments adds
the tokens of the line, those of the translation, and the numbers of those that belong together (0-0 1-2), with tabs.

A language model continues each line, by the search that --search names. A model of span corruption fills in
<extra_id_0>, <extra_id_1>, ... in each line. With both, a line break within a line or its answer is written as a
backslash and an n, and a backslash as two.
"""

from __future__ import annotations

import codecs
import dataclasses
import functools
import io
import os
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO, TextIO

from lingvo_moe.cli import app, checkpoint_flags, machine
from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core import quiet
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import text
from lingvo_moe.run import process_group
from lingvo_moe.search.request import TranslationRequest
from lingvo_moe.text import sentences
from lingvo_moe.text.text_model import Asked

# Modules that import TensorFlow, which takes seconds, are imported by the functions: flags are checked before.
if TYPE_CHECKING:
  from lingvo_moe.run.process_group import ProcessGroup
  from lingvo_moe.text.text_model import TextModel
  from lingvo_moe.text.translator import Answers

_MOST_LINES = 1000  # of those that have arrived
_WHILE_SECONDS = 60  # between two words of the process that reads; XLA gives up after 30 minutes


class Options(checkpoint_flags.RequestOptions, checkpoint_flags.TextOptions):
  """Options of the job."""

  target: str | None = flag(None, 'Target language, for models of several.')
  source: str | None = flag(None, 'Source language, for models that read it.')
  placeholders: bool = flag(
    True, 'Keep placeholders, such as {{name}} and %s, from the model, and put them back where their words went.'
  )
  n_best: int = flag(1, 'Translations of each line, at most --beam_size.', lower_bound=1)
  batch_lines: int | None = flag(
    None,
    f'Lines to wait for and translate together; default: those that have arrived, at most {_MOST_LINES}.',
    lower_bound=1,
  )

  @property
  def request(self) -> TranslationRequest:
    return dataclasses.replace(super().request, placeholders=self.placeholders)


@app.command(Options, RuntimeOptions, tensorflow=False, takes=('logdir',))
def main(options: Options, runtime_options: RuntimeOptions) -> None:
  if sys.stdin is None:
    raise UserError('what is to be translated comes from standard input, which is closed: give it a file or a pipe')
  app.claim_stdout()
  translate(options, sys.stdin.buffer, sys.stdout, runtime_options)


def translate(
  options: Options, source: BinaryIO, output: TextIO, runtime_options: RuntimeOptions = machine.LOCAL
) -> None:
  """Translates until the source ends.

  Of several processes the leader reads and writes; all of them translate.
  """
  run, group = load(options, runtime_options)
  languages = group.on_all(lambda: run.languages(options.target, options.source))
  # What it cannot do is refused before a line is read.
  group.on_all(lambda: run.translator_for(options.n_best, options.request))
  group.say(f'using the checkpoint of {run.checkpoint}')
  if run.training_lines == sentences.TrainingLines() and options.split_sentences == 'auto':
    group.say(
      'lines of several sentences are split, as nothing is known of those that the model was trained on; '
      '--split_sentences=never leaves them whole'
    )
  lines_read = 0
  batches = _batches(source, options.batch_lines, None if group.count == 1 else _WHILE_SECONDS)
  while (lines := group.on_leader(lambda: next(batches, None))) is not None:
    if lines:
      answer = functools.partial(run.answer, lines, Asked(languages, options.n_best, options.source, options.request))
      translated = group.on_all(answer)
      group.on_leader(functools.partial(write, output, translated, lines_read + 1, options, run.over_the_length))
      lines_read += len(lines)


def load(options: checkpoint_flags.TextOptions, runtime_options: RuntimeOptions) -> tuple[TextModel, ProcessGroup]:
  """The run or export that the options choose, and the processes; UserError where it does not translate."""
  if loaded := options.load_export(runtime_options):
    loaded.split_sentences = options.split_sentences
    return loaded, process_group.ALONE
  quiet.import_tensorflow()
  from lingvo_moe.run import ensemble_members
  from lingvo_moe.run.loaded import LoadedRun

  machine.set_threads(runtime_options, decoding=True)
  connected = machine.connect(runtime_options)
  run, group = options.run, connected.group
  members = group.on_all(lambda: [ensemble_members.Member.read(name, run) for name in options.ensemble])
  config = group.on_all(lambda: ensemble_members.joined(options.load_config(run), members))
  runtime = connected.make_runtime(config.program())
  step = group.on_leader(lambda: options.choose_step(run))
  loaded = group.on_all(lambda: LoadedRun(run, config, runtime, step, members))
  loaded.split_sentences = options.split_sentences
  return loaded, group


def write(output: TextIO, translated: Answers, first: int, options: Options, over_the_length: str) -> None:
  """Writes the translations of some lines, of which `first` is the number of the first, and flushes them."""
  for i, what in translated.notices(over_the_length):
    print(f'warning: line {first + i} {what}', file=sys.stderr)
  for number, hypotheses in enumerate(translated.hypotheses, first):
    for h in hypotheses:
      numbers = [] if options.n_best == 1 else [str(number), f'{h.score:.4f}', f'{h.log_prob:.4f}']
      output.write('\t'.join([*numbers, h.text, *(h.alignment.columns if h.alignment else ())]) + '\n')
  output.flush()


def _batches(source: BinaryIO, size: int | None, patience: float | None) -> Iterator[list[str]]:
  """Groups of `size` lines without their ends, the last one smaller; an empty group after `patience` seconds without.

  Other processes then need not wait without a limit. Without a size a group is of the lines that have arrived, so that
  whoever waits for the answer to a line gets it.
  """
  try:
    descriptor = source.fileno()
    read = lambda: os.read(descriptor, 1 << 16)
    ready = lambda seconds: bool(select.select([descriptor], [], [], seconds)[0])
  except io.UnsupportedOperation:  # it is in memory
    read, ready = source.read, lambda seconds: True
  lines, number, rest, ended = [], 0, b'', False
  while not ended:
    if not ready(patience):
      yield []
      continue
    block = read()
    ended = not block
    *came, rest = (rest + block).split(b'\n')
    for line in [rest] if ended and rest else came:
      number += 1
      line = line.rstrip(b'\r\n').removeprefix(codecs.BOM_UTF8 if number == 1 else b'')
      try:
        lines.append(line.decode('utf-8'))
      except UnicodeDecodeError:
        yield lines  # what came before is answered
        text.check(line, 'standard input', number - 1)
      if len(lines) == (size or _MOST_LINES):
        yield lines
        lines = []
    if lines and (ended or not (size or ready(0))):
      yield lines
      lines = []


if __name__ == '__main__':
  main()
