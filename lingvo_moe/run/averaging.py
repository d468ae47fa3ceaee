"""Averages of a run's weights, in a log directory of their own: of several checkpoints, or the moving average of one.

The average is no checkpoint of the training run: it has no optimizer slots, so training could not go on from it, and
neither the newest nor the best checkpoint of the run, nor what is dropped of them, may change by it. Its directory,
which decoder and translate take like any other, has the run's configuration and vocabularies, one checkpoint, under the
last of the averaged steps and without a dev loss, finished.json, and averaged.json (docs/log_directory.md).
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import tensorflow as tf

from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.optim import moving_average
from lingvo_moe.run import checkpoint, imported_form
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.runtime import slices
from lingvo_moe.runtime.slices import Slice
from lingvo_moe.storage import files, json_files, log_directory, new_folder

_Terms = tuple[Sequence[checkpoint.Stored], float]  # a weight of an average: the sum of tensors over a divisor


def choose_steps(run: RunDir, last: int | None = None, steps: Sequence[int] = ()) -> list[int]:
  """Selected steps, oldest first: the `last` checkpoints, or `steps`, which must exist.

  All are above 0, the step of the weights that a run begins with, such as the base of adapters.
  """
  if not run.exists:
    run.load()  # says what is missing
  existing = run.checkpoints().steps()
  listed = ', '.join(map(str, existing)) or 'none'
  if missing := sorted(set(steps) - set(existing)):
    raise UserError(f'{run.path} has no checkpoint of step {", ".join(map(str, missing))}; there: {listed}')
  if len(set(steps)) < len(steps):
    raise UserError(f'every step counts once in an average; saw {", ".join(map(str, steps))}')
  if 0 in steps:
    raise UserError(
      f'an average is of trained weights; saw step 0, with which {run.path} begins: leave it out (there: {listed})'
    )
  trained = [step for step in existing if step]
  if last and last > len(trained):
    listed = ', '.join(map(str, trained)) or 'none'
    raise UserError(
      f'the last {last} checkpoints of {run.path} after step 0 are to be averaged, but it has {len(trained)} '
      f'({listed}): ask for fewer, or train with keep_checkpoints or keep_every for more'
    )
  return sorted(steps) or trained[-last:]


def average(run: RunDir, steps: Sequence[int], out: str) -> int:
  """Writes the mean of the weights of some checkpoints to the log directory `out`; returns the step they are under.

  Sums are float64 and rounded once, to each weight's own type. Memory holds one weight, as TensorFlow reads it, and a
  few times PART_BYTES beside it. The directory appears whole or not at all.

  Raises:
    UserError: `out` exists or cannot be written; a checkpoint is damaged, or not of the same model as the others.
  """
  prefixes = {step: run.checkpoints().path(step) for step in steps}
  shapes = _common_shapes(prefixes)
  stored = [checkpoint.load(prefix, shapes) for prefix in prefixes.values()]
  terms = {name: ([tensors[name] for tensors in stored], len(stored)) for name in shapes}
  _write_run(run, max(steps), terms, {'steps': sorted(steps)}, out)
  return max(steps)


def take_moving_average(run: RunDir, step: int, out: str) -> None:
  """Writes the exponential moving average that a checkpoint holds of its weights to the log directory `out`.

  A weight without an average, as one that was frozen, is taken as it is. See optim/moving_average.py.

  Raises:
    UserError: the run keeps none; else as `average` does.
  """
  _, config = run.load()
  optimizer = config.program().optimizer
  if not isinstance(optimizer, moving_average.WithMovingAverage):
    raise UserError(
      f'{run.path} keeps no moving average: --exponential is for runs trained with average_decay, such as '
      '--set average_decay=0.999; --last=4 averages the last checkpoints of any run'
    )
  prefix = run.checkpoints().path(step)
  weights, existing = _weight_shapes(prefix), checkpoint.shapes(prefix)
  slots = slices.named_slots({f'{name}/{moving_average.SLOT}': name for name in weights})
  stored = checkpoint.load(prefix, weights | {slot: weights[name] for slot, name in slots.items() if slot in existing})
  bias = moving_average.bias(optimizer.decay, step)
  averaged = lambda slot: slot in stored and bias
  terms = {name: ([stored[slot]], bias) if averaged(slot) else ([stored[name]], 1) for slot, name in slots.items()}
  _write_run(run, step, terms, {'steps': [step], 'average_decay': optimizer.decay}, out)


def _write_run(run: RunDir, step: int, terms: Mapping[str, _Terms], note: Mapping, out: str) -> None:
  """Writes an average as the one checkpoint of a log directory, which appears whole or not at all."""
  new_folder.check(out, 'an average')
  if run.exists:
    run.check_files()
  with new_folder.writing(out) as partial:
    shutil.copy(run.config_file, partial)
    if os.path.isdir(run.vocab_dir):
      shutil.copytree(run.vocab_dir, os.path.join(partial, os.path.basename(run.vocab_dir)), symlinks=True)
    written = RunDir(partial)
    imported_form.keep(written, run)
    prefix = written.checkpoints().path(step)
    os.makedirs(os.path.dirname(prefix))
    try:
      checkpoint.write_parts(prefix, _means(step, terms))
    except tf.errors.OpError as e:
      raise UserError(f'--out={out} could not be written ({errors.reason(e)}): make room there') from None
    written.finish(step, 'average')
    source = os.path.relpath(run.path, os.path.abspath(out))
    files.write(written.file(log_directory.AVERAGED), json_files.dump({**note, 'of': source}, indent=2))


def _common_shapes(prefixes: Mapping[int, str]) -> dict[str, tuple[int, ...]]:
  """Name -> shape of the weights, which are the same in every checkpoint."""
  (first, shapes), *others = ((step, _weight_shapes(prefix)) for step, prefix in prefixes.items())
  seen = lambda shape: 'is not there' if shape is None else f'has shape {shape}'
  for step, other in others:
    for name in sorted(shapes.keys() | other.keys()):
      if shapes.get(name) != other.get(name):
        raise UserError(
          f'checkpoints of one model are averaged; {name!r} {seen(shapes.get(name))} at step {first}, but '
          f'{seen(other.get(name))} at step {step}: leave out the steps of the other model'
        )
  return shapes


def _weight_shapes(prefix: str) -> dict[str, tuple[int, ...]]:
  return {
    name: shape for name, shape in checkpoint.shapes(prefix).items() if name != 'step' and not slices.is_slot(name)
  }


def _means(step: int, terms: Mapping[str, _Terms]) -> Iterator[Slice]:
  """The checkpoint, in slices of at most checkpoint.PART_BYTES."""
  yield Slice('step', (), (), np.asarray(step, np.int64))
  for name, (tensors, divisor) in sorted(terms.items()):
    shape, dtype = tensors[0].shape, tensors[0].dtype
    for index in checkpoint.blocks(shape, checkpoint.PART_BYTES // dtype.size):
      mean = sum(tensor[index].astype(np.float64) for tensor in tensors) / divisor
      yield Slice(name, shape, tuple(part.start for part in index), mean.astype(dtype.as_numpy_dtype))
