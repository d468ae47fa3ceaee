"""The run that a campaign damages, the commands that read it, and what each of them answers."""

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests import reversed_corpus

MODEL = 'mt.cldr.Tiny'
STEPS = 6
_SET = {
  'source_vocab_size': 282,
  'target_vocab_size': 280,
  'max_length': 32,
  'encoder_layers': 1,
  'decoder_layers': 1,
  'moe_every': 1,
  'batch_tokens': 512,
  'window': 64,
  'save_every': 1,
  'eval_every': 3,
}


@dataclasses.dataclass(frozen=True)
class Result:
  """One case: 'same', 'refused', or what was unclean about it, with what was said."""

  kind: str
  case: str
  outcome: str
  said: str = ''


@dataclasses.dataclass(frozen=True)
class World:
  """A corpus, and a run that was trained on it and decoded; cases work on copies.

  Attributes:
    root: folder for everything.
    seconds: that training took.
    expected: result of each command on an undamaged copy.
  """

  root: pathlib.Path
  seconds: float
  expected: dict[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def logdir(self) -> pathlib.Path:
    return self.root / 'log'

  @contextlib.contextmanager
  def copy(self):
    """A copy of the run and of the corpus to damage, always at the same place."""
    place = self.root / 'copy'
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(self.root / 'kept', place)
    yield place
    shutil.rmtree(place)


def trainer(logdir: pathlib.Path, corpus: pathlib.Path) -> list[str]:
  """Command that trains the run."""
  settings = [f'--set={name}={value}' for name, value in _SET.items()]
  flags = [f'--model={MODEL}', f'--logdir={logdir}', f'--data_dir={corpus}', f'--max_steps={STEPS}']
  return [sys.executable, '-m', 'lingvo_moe.trainer', *flags, *settings]


def make(root: pathlib.Path) -> World:
  """Trains and decodes the run, under the path that its copies will have."""
  from lingvo_moe import decoder

  place = root / 'copy'
  corpus = place / 'corpus'
  corpus.mkdir(parents=True)
  reversed_corpus.write(corpus, held_out=20)
  started = os.times().elapsed
  done = subprocess.run(trainer(place / 'log', corpus), capture_output=True, text=True)
  if done.returncode:
    raise SystemExit(f'the run to damage could not be trained:\n{done.stderr}')
  seconds = os.times().elapsed - started
  with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    decoder.decode(decoder.Options(str(place / 'log'), once=True))
  place.rename(root / 'kept')
  world = World(root, seconds)
  for name in COMMANDS:
    with world.copy() as copied:
      answer, found = run(name, copied)
      if answer != 'result':
        raise SystemExit(f'{name} of an undamaged run: {found}')
      world.expected[name] = found
  return world


def run(name: str, place: pathlib.Path) -> tuple[str, Any]:
  """('result', it), ('refused', the line), or ('trace', it), of a command in this process."""
  from lingvo_moe.core.errors import UserError

  said = io.StringIO()
  try:
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
      return 'result', COMMANDS[name](place)
  except (UserError, OSError) as e:  # what app.run prints as one line
    text = str(e)
    return ('refused' if len(text.splitlines()) == 1 else 'refused in several lines'), text
  except SystemExit as e:
    return 'exit', str(e)
  except BaseException:
    return 'trace', traceback.format_exc()


def _translate(place: pathlib.Path) -> Any:
  import lingvo_moe

  loaded = lingvo_moe.load(str(place / 'log'), set_threads=False)
  return loaded.translate(['eno owt', 'eerht'], scores=True), loaded.checkpoint


def _resume(place: pathlib.Path) -> Any:
  """What a trainer goes on with: its step, weights, log and next batches."""
  from lingvo_moe import trainer as job
  from lingvo_moe.cli import machine

  options = job.Options(logdir=str(place / 'log'), data_dir=str(place / 'corpus'), max_steps=STEPS + 1)
  training = job.set_up(options, machine.connect(machine.LOCAL))
  try:
    digest = hashlib.sha256()
    for piece in training.runtime.slices():
      digest.update(bytes(piece.value.numpy()))
    for number in range(STEPS, STEPS + 3):
      for name, ids in sorted(training.train_input.batch(number).items()):
        digest.update(name.encode() + ids.tobytes())
    totals = {name: value for name, value in training.log._totals.items() if name != 'seconds'}
    best = training.checkpoints.best()
    return (
      training.is_resumed,
      training.runtime.step,
      best and best[:2],
      digest.hexdigest(),
      totals,
      [b['pairs'].sum() for b in training.dev_input],
    )
  finally:
    training.log.close()
    training.lock.close()


def _report(place: pathlib.Path) -> Any:
  from lingvo_moe.addons.report import page, reading

  return page.page(reading.read([str(place / 'log')], 'test'))


def _decode(place: pathlib.Path) -> Any:
  from lingvo_moe import decoder

  output = io.StringIO()
  with contextlib.redirect_stdout(output):
    decoder.decode(decoder.Options(str(place / 'log'), once=True))
  return output.getvalue()


def _translations(place: pathlib.Path) -> Any:
  """What the command compare reads."""
  from lingvo_moe.addons.analysis import translations
  from lingvo_moe.storage.log_directory import LogDirectory

  found = translations.read(LogDirectory.read(str(place / 'log')), 'test', STEPS)
  return [(t.sources, t.references, t.lines, t.chrf) for t in found.values()]


COMMANDS: dict[str, Callable[[pathlib.Path], Any]] = {
  'translate': _translate,
  'resume': _resume,
  'report': _report,
  'decode': _decode,
  'translations': _translations,
}
