"""Checkpoints: TensorFlow's TensorBundle, one logical tensor per weight, committed whole or not at all.

`<directory>/step_00001000/state.{index,data-*}` holds 'step', every weight under its name ('decoder/layer_03/moe/wi')
and every optimiser slot under 'slots/<name>/<slot>'. `tf.train.load_checkpoint` reads it on any machine. A checkpoint
is written beside its place and renamed into it, so a crash at any point leaves the one before. Beside it lies
`dev_loss.json`, where the step was evaluated.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from lingvo_moe.errors import UserError

_STEP = re.compile(r'step_(\d+)$')
_DEV_LOSS = 'dev_loss.json'
# What TensorFlow's reader raises on a bad file; a file cut short is an IndexError.
_READ_ERRORS = (tf.errors.OpError, RuntimeError, ValueError, IndexError)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """The checkpoints of a run.

  Attributes:
    directory: where they are.
    keep: how many of the newest to keep beside the best.
  """

  directory: str
  keep: int = 3

  def path(self, step: int) -> str:
    """The prefix that tf.train.load_checkpoint takes."""
    return os.path.join(self.directory, f'step_{step:08d}', 'state')

  def steps(self) -> list[int]:
    """Steps with a committed checkpoint, oldest first."""
    if not os.path.isdir(self.directory):
      return []
    return sorted(int(m[1]) for m in map(_STEP.match, os.listdir(self.directory)) if m)

  def latest(self) -> int | None:
    return max(self.steps(), default=None)

  def best(self) -> tuple[int, float] | None:
    """(step, dev loss) of the checkpoint with the lowest dev loss, the earliest of equals."""
    losses = {step: loss for step in self.steps() if (loss := self.dev_loss(step)) is not None}
    return min(losses.items(), key=lambda item: (item[1], item[0]), default=None)

  def save(self, state: Mapping, *, dev_loss: float | None = None) -> str:
    """Writes a state (see program.py), then drops what is no longer kept. Returns the checkpoint's prefix.

    Args:
      state: {'step', 'weights', 'slots'} of tensors.
      dev_loss: dev cross-entropy at this step, where it is known; the lowest marks the best checkpoint.
    """
    step = int(state['step'])
    final = os.path.dirname(self.path(step))
    if not os.path.isdir(final):
      partial = os.path.join(self.directory, f'.partial_{step:08d}')
      self._sweep()
      os.makedirs(partial)
      tensors = {'step': state['step'], **state['weights'], **{f'slots/{n}': v for n, v in state['slots'].items()}}
      try:
        tf.raw_ops.SaveV2(
          prefix=os.path.join(partial, 'state'),
          tensor_names=list(tensors),
          shape_and_slices=[''] * len(tensors),
          tensors=[tf.convert_to_tensor(t) for t in tensors.values()],
        )
      except tf.errors.OpError as e:
        self._sweep()
        raise UserError(
          f'the checkpoint of step {step} could not be written to {self.directory} ({e.message.splitlines()[0]}): make '
          'room there; the one before is kept, and the same command goes on from it'
        ) from None
      self._write_dev_loss(partial, dev_loss)
      for name in os.listdir(partial):
        _fsync(os.path.join(partial, name))
      os.rename(partial, final)
      _fsync(self.directory)
    else:
      self._write_dev_loss(final, dev_loss)
    self._drop_old()
    return self.path(step)

  def fingerprint(self, step: int) -> str:
    """A short hash of a checkpoint's contents: its index holds the checksum of every tensor."""
    try:
      with open(self.path(step) + '.index', 'rb') as f:
        return hashlib.sha256(f.read()).hexdigest()[:16]
    except FileNotFoundError:
      return 'gone'

  def note_dev_loss(self, step: int, dev_loss: float) -> None:
    """Adds the dev cross-entropy of a step that was saved before it was evaluated."""
    self._write_dev_loss(os.path.dirname(self.path(step)), dev_loss)
    self._drop_old()

  def restore(self, step: int, specs: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Reads the named tensors of a checkpoint, whose shapes must be those given."""
    if step not in self.steps():
      there = ', '.join(map(str, self.steps())) or 'none'
      raise UserError(f'{self.directory} has no checkpoint of step {step}; there: {there}')
    return load(self.path(step), specs)

  def _write_dev_loss(self, folder: str, dev_loss: float | None):
    if dev_loss is None or not math.isfinite(dev_loss):
      return
    path = os.path.join(folder, _DEV_LOSS)
    with open(path + '.partial', 'w', encoding='utf-8') as f:
      json.dump({'dev_loss': dev_loss}, f)
    os.replace(path + '.partial', path)

  def dev_loss(self, step: int) -> float | None:
    """Dev cross-entropy of a checkpoint; None where it was not evaluated."""
    try:
      with open(os.path.join(os.path.dirname(self.path(step)), _DEV_LOSS), encoding='utf-8') as f:
        return float(json.load(f)['dev_loss'])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
      return None

  def _sweep(self):
    """Removes what a crash left half written or half removed."""
    for path in glob.glob(os.path.join(glob.escape(self.directory), '.partial_*')):
      shutil.rmtree(path, ignore_errors=True)

  def _drop_old(self):
    best = self.best()
    for step in self.steps()[: -self.keep]:
      if best is None or step != best[0]:
        going = os.path.join(self.directory, f'.partial_{step:08d}')
        os.rename(os.path.dirname(self.path(step)), going)  # first out of sight, so that no half of it is ever seen
        shutil.rmtree(going, ignore_errors=True)


def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
  """Name -> shape of everything in a checkpoint."""
  return {name: tuple(shape) for name, shape in _reader(prefix).get_variable_to_shape_map().items()}


def load(prefix: str, specs: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
  """Reads tensors by name; UserError where one is missing, has another shape, or fails its checksum."""
  there = shapes(prefix)
  for name, shape in specs.items():
    if name not in there:
      raise UserError(
        f'{prefix} has no tensor {name!r}: it is a checkpoint of another model; '
        'use the --model and bindings that it was trained with'
      )
    if there[name] != tuple(shape):
      raise UserError(
        f'{prefix}: {name!r} has shape {there[name]}, but this model has {tuple(shape)}; '
        'use the --model, bindings and vocabulary that it was trained with'
      )
  reader = _reader(prefix)
  try:
    return {name: reader.get_tensor(name) for name in specs}
  except _READ_ERRORS as e:
    raise _damaged(prefix, e) from None


def _reader(prefix: str):
  if not os.path.exists(prefix + '.index'):
    raise UserError(f'there is no checkpoint {prefix} (no file {prefix}.index)')
  try:
    return tf.train.load_checkpoint(prefix)
  except _READ_ERRORS as e:
    raise _damaged(prefix, e) from None


def _damaged(prefix: str, error: Exception) -> UserError:
  reason = str(error).splitlines()[0]
  return UserError(
    f'checkpoint {prefix} is damaged or cut short ({reason}): restore it from a copy, or move '
    f'{os.path.dirname(prefix)} away to go on from the one before'
  )


def _fsync(path: str) -> None:
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
