"""Checkpoints: TensorFlow's TensorBundle, one logical tensor per weight, committed whole or not at all.

`<directory>/step_00001000/state.{index,data-*}` holds 'step', every weight under its name ('decoder/layer_03/moe/wi')
and every optimizer slot under 'slots/<name>/<slot>'. `tf.train.load_checkpoint` reads it on any machine.

- Each process writes and reads only the slices of tensors that its devices hold, so a checkpoint written by any number
  of devices can be restored onto any other number.
- Weights that a scanned stack keeps stacked, [L, ...], are written and read layer by layer under the names of the
  unrolled stack.
- A checkpoint is written into a temporary folder that is then renamed, so a crash leaves the one before. On a remote file
  system (core/files.py), where that is not one operation, it is written in its place, and an empty file `committed`, the
  last to be written, makes it one.
- `dev_loss.json` in the folder holds the dev loss, where the step was evaluated: a hash of the dev text that it was
  measured on, how often that text had changed before, and, in the best checkpoint, the steps that were evaluated since.
  Losses on the latest dev text alone are compared.
"""

from __future__ import annotations

import dataclasses
import glob
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple, Protocol

import numpy as np
import tensorflow as tf

from lingvo_moe.core import errors
from lingvo_moe.core import files
from lingvo_moe.core import json_files
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime.slices import Slice
from lingvo_moe.runtime.slices import slice_spec

_STATE = 'state'  # a checkpoint's prefix in its folder
_STEP = re.compile(r'step_(\d+)$')
_TYPES = {'step': tf.int64}  # of all other tensors: float32
_DEV_LOSS = 'dev_loss.json'
_COMMITTED = 'committed'  # marks a checkpoint of a remote file system as whole
# Raised by TensorFlow's reader on a bad file; IndexError by a file cut short.
_READ_ERRORS = (tf.errors.OpError, RuntimeError, ValueError, IndexError)


class Evaluation(NamedTuple):
  """Dev loss of a checkpoint.

  Attributes:
    loss: cross-entropy.
    text: hash of the dev text; '' where an earlier version did not note it.
    changes: how often the run's dev text had changed before. Only losses of the latest text are compared.
    later: steps that were evaluated since on that text, if this is the best; None: an earlier version did not note them.
  """

  loss: float
  text: str = ''
  changes: int = 0
  later: Sequence[int] | None = ()


class Holder(Protocol):
  """The part of a state that one process holds; the processes of a run save a checkpoint together."""

  process_index: int
  process_count: int
  step: int

  def slices(self) -> Iterable[Slice]:
    """The slices that this process saves; over all processes, every element once."""

  def agree(self, flag: bool) -> bool:
    """Whether the flag is set in every process; waits for all of them."""


@dataclasses.dataclass(frozen=True)
class Stored:
  """A tensor in a checkpoint, read slice by slice: stored[...] or stored[0:2, 3:4]."""

  prefix: str
  name: str
  shape: tuple[int, ...]
  dtype: tf.DType

  def __getitem__(self, index) -> np.ndarray:
    index = (index,) if not isinstance(index, tuple) else index
    index = () if index == (...,) else index
    ranges = [part.indices(size)[:2] for part, size in zip(index, self.shape)]
    ranges += [(0, size) for size in self.shape[len(ranges) :]]
    begin, sizes = tuple(a for a, _ in ranges), tuple(b - a for a, b in ranges)
    try:
      slices = [slice_spec(self.shape, begin, sizes)]
      return tf.raw_ops.RestoreV2(
        prefix=self.prefix, tensor_names=[self.name], shape_and_slices=slices, dtypes=[self.dtype]
      )[0].numpy()
    except _READ_ERRORS as e:
      raise _damaged(self.prefix, e) from None


@dataclasses.dataclass(frozen=True)
class StoredLayers:
  """Tensors of several layers in a checkpoint, stacked along a leading axis for a scanned stack; read as Stored is."""

  layers: tuple[Stored, ...]

  @property
  def shape(self) -> tuple[int, ...]:
    return (len(self.layers), *self.layers[0].shape)

  @property
  def dtype(self) -> tf.DType:
    return self.layers[0].dtype

  def __getitem__(self, index) -> np.ndarray:
    index = (index,) if not isinstance(index, tuple) else index
    layers, rest = (slice(None), ...) if index == (...,) else (index[0], index[1:] or ...)
    return np.stack([layer[rest] for layer in self.layers[layers]])


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Checkpoints of a run: saves, finds, restores and drops them.

  Attributes:
    directory: where they are.
    keep: how many of the newest to keep beside the best.
    keep_every: checkpoints of steps that are multiples of it are kept as well; 0: none.
  """

  directory: str
  keep: int = 3
  keep_every: int = 0

  def path(self, step: int) -> str:
    """The prefix that tf.train.load_checkpoint takes."""
    return os.path.join(self.directory, f'step_{step:08d}', _STATE)

  def steps(self) -> list[int]:
    """Steps with a committed checkpoint, oldest first; UserError if something else than a folder is in its place."""
    if not files.isdir(self.directory):
      if not self._is_remote and os.path.lexists(self.directory):
        kind = 'a link to what is not there: mount it' if os.path.islink(self.directory) else 'no folder: move it away'
        raise UserError(f'checkpoints are in {self.directory}, which is {kind}')
      return []
    found = (int(m[1]) for m in map(_STEP.match, files.listdir(self.directory)) if m)
    return sorted(step for step in found if not self._is_remote or files.exists(self._marker(step)))

  def latest(self) -> int | None:
    return max(self.steps(), default=None)

  def best(self) -> tuple[int, float] | None:
    """(step, dev loss) of the checkpoint with the lowest dev loss, the earliest of equals."""
    best = self.best_evaluation()
    return best and (best[0], best[1].loss)

  def best_evaluation(self) -> tuple[int, Evaluation] | None:
    """As `best`, with what the loss was measured on."""
    found = {step: evaluation for step in self.steps() if (evaluation := self.evaluation(step)) is not None}
    changes = max((evaluation.changes for evaluation in found.values()), default=0)
    comparable = [(step, evaluation) for step, evaluation in found.items() if evaluation.changes == changes]
    return min(comparable, key=lambda item: (item[1].loss, item[0]), default=None)

  def save(self, holder: Holder, *, dev_loss: float | None = None) -> str:
    """Writes a state, then drops what is no longer kept; every process calls it. Returns the checkpoint's prefix.

    Args:
      holder: this process's part of the state.
      dev_loss: dev cross-entropy at this step, where it is known; the lowest marks the best checkpoint.
    """
    if self.begin(holder):
      self.commit(holder, self.write(holder), dev_loss)
    elif holder.process_index == 0:
      self._write_evaluation(self._folder(holder.step), None if dev_loss is None else Evaluation(dev_loss))
      self._drop_old()
    holder.agree(True)
    return self.path(holder.step)

  def begin(self, holder: Holder) -> bool:
    """First part of `save`, by every process: makes a folder. False if the step is saved already."""
    if holder.agree(holder.step in self.steps()):
      return False
    if holder.process_index == 0:
      self.sweep()
      files.makedirs(self._partial(holder.step))
    holder.agree(True)
    return True

  def write(self, holder: Holder) -> str:
    """Second part: writes what this process holds, and waits for no other. Returns what failed, '' if nothing did."""
    name = _STATE if holder.process_count == 1 else f'part_{holder.process_index:05d}'
    prefix = os.path.join(self._partial(holder.step), name)
    reason = _write(prefix, _by_layer(holder.slices()))
    for path in () if reason or self._is_remote else glob.glob(glob.escape(prefix) + '.*'):
      _fsync(path)
    return reason

  def commit(self, holder: Holder, reason: str, dev_loss: float | None = None) -> None:
    """Last part, by every process: makes one checkpoint of what they have written, and drops old ones.

    Args:
      holder: as before.
      reason: what `write` returned here.
      dev_loss: see `save`.

    Raises:
      UserError: a process could not write its part.
    """
    step, leads = holder.step, holder.process_index == 0
    if not holder.agree(not reason):
      if leads:
        self.sweep()
      raise UserError(
        f'the checkpoint of step {step} could not be written to {self._partial(step)} ({reason or "by another process"}): '
        f'make room there; {self._left()}'
      )
    if leads:
      partial = self._partial(step)
      if holder.process_count > 1:
        parts = sorted(name.removesuffix('.index') for name in files.listdir(partial) if name.endswith('.index'))
        tf.raw_ops.MergeV2Checkpoints(
          checkpoint_prefixes=[os.path.join(partial, part) for part in parts],
          destination_prefix=os.path.join(partial, _STATE),
          delete_old_dirs=False,
        )
      self._write_evaluation(partial, None if dev_loss is None else Evaluation(dev_loss))
      if self._is_remote:
        files.write(self._marker(step), '')
      else:
        for name in os.listdir(partial):
          _fsync(os.path.join(partial, name))
        os.rename(partial, self._folder(step))
        _fsync(self.directory)
      self._drop_old()

  def _left(self) -> str:
    """What is left to go on from, in words."""
    step = self.latest()
    if step is None:
      return 'there is no checkpoint before it, and the same command begins anew'
    return f'that of step {step} is kept, and the same command goes on from it'

  def fingerprint(self, step: int) -> str:
    """A short hash of a checkpoint's contents: its index holds the checksum of every tensor."""
    try:
      return files.sha256(self.path(step) + '.index')[:16]
    except FileNotFoundError:
      return 'gone'

  def note_dev_loss(self, step: int, dev_loss: float, text: str = '') -> None:
    """Adds the dev cross-entropy of a step that was saved before it was evaluated, or measures the best on another text.

    Args:
      step: of the checkpoint.
      dev_loss: its loss.
      text: hash of the dev text. Where it is another than that of the best so far, losses so far no longer count.
    """
    changes, later = 0, ()
    if found := self.best_evaluation():
      best_step, best = found
      changes = best.changes + (text != best.text)
      if text == best.text and best.later is not None and best_step < step and not dev_loss < best.loss:
        counted = best._replace(later=sorted({*best.later, step}))
        self._write_evaluation(self._folder(best_step), counted)  # there, since that checkpoint is always kept
      if best_step == step and not best.text:
        later = best.later  # of an earlier version: patience counts on
    self._write_evaluation(self._folder(step), Evaluation(dev_loss, text, changes, later))
    self._drop_old()

  def restore(self, step: int, specs: Mapping[str, tuple[int, ...]]) -> dict[str, Stored | StoredLayers]:
    """The named tensors of a checkpoint, which must have the given shapes; they are read when they are sliced."""
    if step not in self.steps():
      there = ', '.join(map(str, self.steps())) or 'none'
      raise UserError(f'{self.directory} has no checkpoint of step {step}; there: {there}')
    return load(self.path(step), specs)

  @property
  def _is_remote(self) -> bool:
    return files.is_remote(self.directory)

  def _marker(self, step: int) -> str:
    return os.path.join(self._folder(step), _COMMITTED)

  def _folder(self, step: int) -> str:
    return os.path.dirname(self.path(step))

  def _partial(self, step: int) -> str:
    """Folder of a checkpoint that is being written or removed."""
    return self._folder(step) if self._is_remote else os.path.join(self.directory, f'.partial_{step:08d}')

  def _write_evaluation(self, folder: str, found: Evaluation | None) -> None:
    if found is None or not math.isfinite(found.loss):
      return
    values = {'dev_loss': found.loss, 'dev_text': found.text, 'text_changes': found.changes}
    values |= {} if found.later is None else {'evaluated_after': [*found.later]}
    files.write(os.path.join(folder, _DEV_LOSS), json_files.dump(values))

  def evaluated_after_best(self) -> Sequence[int] | None:
    """Steps that were evaluated after the best one, so without gain; None: an earlier version did not note them."""
    best = self.best_evaluation()
    return best[1].later if best else []

  def evaluation(self, step: int) -> Evaluation | None:
    """Dev loss of a checkpoint; None where it was not evaluated."""
    path = os.path.join(self._folder(step), _DEV_LOSS)
    way_out = 'restore it from a copy, or remove it; the step then counts as not evaluated'
    kinds = {
      'dev_loss': json_files.NUMBER,
      'evaluated_after': json_files.optional(json_files.list_of(json_files.INTEGER)),
      'dev_text': json_files.optional(json_files.TEXT),
      'text_changes': json_files.optional(json_files.INTEGER),
    }
    try:
      found = json_files.read(path, 'a dev loss', way_out, **kinds)
    except FileNotFoundError:
      return None
    text, changes = found.get('dev_text') or '', found.get('text_changes') or 0
    return Evaluation(float(found['dev_loss']), text, changes, found.get('evaluated_after'))

  def sweep(self) -> None:
    """Removes what a crash left half written or half removed."""
    partial = set(files.listdir(self.directory)) if files.isdir(self.directory) else set()
    whole = {os.path.basename(self._folder(step)) for step in self.steps()} if self._is_remote else partial
    for name in partial:
      if name.startswith('.partial_') or (_STEP.match(name) and name not in whole):
        files.rmtree(os.path.join(self.directory, name))

  def _drop_old(self):
    best = self.best()
    for step in self.steps()[: -self.keep]:
      for_good = self.keep_every and step % self.keep_every == 0
      if not for_good and (best is None or step != best[0]):
        if self._is_remote:  # first out of sight, so that no half of it is ever seen
          files.remove(self._marker(step))
        else:
          os.rename(self._folder(step), self._partial(step))
        files.rmtree(self._partial(step))


@dataclasses.dataclass(frozen=True)
class _Copy:
  """A copy of a state in memory, which training does not change."""

  step: int
  copied: tuple[Slice, ...]
  process_index: int
  process_count: int
  agree: Callable[[bool], bool]

  @classmethod
  def of(cls, holder: Holder) -> _Copy:
    # A TensorFlow tensor is immutable; an array may be a view of a device's memory.
    copied = (p._replace(value=p.value.copy()) if isinstance(p.value, np.ndarray) else p for p in holder.slices())
    return cls(holder.step, tuple(copied), holder.process_index, holder.process_count, holder.agree)

  def slices(self) -> Iterable[Slice]:
    return self.copied


class Saver:
  """Saves in the background: copies the state at once and writes it in a thread, while training goes on.

  Of several processes each writes its part so. A thread could not wait for other processes, since that takes the devices
  with which they compute: they wait for each other where training calls `save`, `wait` or `commit_if_written`, at the
  same steps.
  """

  def __init__(self, checkpoints: Checkpoints, holder: Holder):
    self.checkpoints = checkpoints
    self._holder = holder
    self._thread = futures.ThreadPoolExecutor(1)
    self._writing: tuple[_Copy, futures.Future] | None = None

  def save(self) -> None:
    """Begins to save the current state, once the one before is saved."""
    self.wait()
    if self._holder.process_count == 1:
      copy = _Copy.of(self._holder)
      self._writing = copy, self._thread.submit(self.checkpoints.save, copy)
    elif self.checkpoints.begin(self._holder):
      copy = _Copy.of(self._holder)
      self._writing = copy, self._thread.submit(self.checkpoints.write, copy)

  def commit_if_written(self) -> None:
    """Ends what `save` began if all processes have written their parts; for one process there is nothing to do."""
    if self._writing and self._holder.process_count > 1:
      _, written = self._writing
      if self._holder.agree(written.done()):
        self.wait()

  def wait(self) -> None:
    """Waits until the state that was saved is on disk; raises the error if that failed."""
    if self._writing:
      (copy, written), self._writing = self._writing, None
      result = written.result()
      if copy.process_count > 1:
        self.checkpoints.commit(copy, result)
        copy.agree(True)


def shapes(prefix: str) -> dict[str, tuple[int, ...]]:
  """Name -> shape of everything in a checkpoint."""
  return {name: tuple(shape) for name, shape in _reader(prefix).get_variable_to_shape_map().items()}


def load(prefix: str, specs: Mapping[str, tuple[int, ...]]) -> dict[str, Stored | StoredLayers]:
  """Tensors by name, stacked ones too; they are read when they are sliced.

  Raises:
    UserError: a tensor is missing or has another shape or type; or, when it is read, fails its checksum.
  """
  there = shapes(prefix)
  types = _reader(prefix).get_variable_to_dtype_map()
  for name, shape in by_layer(specs).items():
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
    if types[name] != (wanted := _TYPES.get(name, tf.float32)):
      raise UserError(
        f'{prefix}: {name!r} has type {types[name].name}, but a model has {wanted.name} there: it was not written by '
        'the trainer, or was converted; use the checkpoint that the trainer wrote'
      )
  stored = lambda name: Stored(prefix, name, there[name], types[name])

  def found(name, shape):
    layers = weights_lib.names_by_layer(name, shape[0]) if shape else None
    return stored(name) if layers is None else StoredLayers(tuple(map(stored, layers)))

  return {name: found(name, shape) for name, shape in specs.items()}


def by_layer(specs: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
  """Names and shapes as in a checkpoint, where stacked layers are separate tensors."""
  found = {}
  for name, shape in specs.items():
    layers = weights_lib.names_by_layer(name, shape[0]) if shape else None
    found.update({name: tuple(shape)} if layers is None else dict.fromkeys(layers, tuple(shape[1:])))
  return found


def _by_layer(slices: Iterable[Slice]) -> Iterator[Slice]:
  """Splits slices of stacked layers into one part a layer."""
  for part in slices:
    layers = weights_lib.names_by_layer(part.name, part.shape[0]) if part.shape else None
    if layers is None:
      yield part
    else:
      for number, value in enumerate(part.value, part.begin[0]):
        yield Slice(layers[number], part.shape[1:], part.begin[1:], value)


def _write(prefix: str, slices: Iterable[Slice]) -> str:
  """Writes slices to a bundle; returns the error message, '' without one."""
  slices = list(slices)
  if not slices:
    return ''
  try:
    tf.raw_ops.SaveV2(
      prefix=prefix,
      tensor_names=[part.name for part in slices],
      shape_and_slices=[part.slice_spec for part in slices],
      tensors=[tf.convert_to_tensor(part.value) for part in slices],
    )
  except tf.errors.OpError as e:
    return errors.reason(e)
  return ''


def _reader(prefix: str):
  if not files.exists(prefix + '.index'):
    raise UserError(f'there is no checkpoint {prefix} (no file {prefix}.index)')
  files.check_for_tensorflow('checkpoint', prefix)
  try:
    return tf.compat.v1.train.NewCheckpointReader(prefix)
  except _READ_ERRORS as e:
    raise _damaged(prefix, e) from None


def _damaged(prefix: str, error: Exception) -> UserError:
  return UserError(
    f'checkpoint {prefix} is damaged or cut short ({errors.reason(error)}): restore it from a copy, or move '
    f'{os.path.dirname(prefix)} away to go on from the one before'
  )


def _fsync(path: str) -> None:
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
