"""Checkpoints of a run, committed whole or not at all: `<directory>/step_00001000/state.{index,data-*}`, dev_loss.json.

- Each process writes and reads only the slices of tensors that its devices hold, so a checkpoint written by any number
  of devices can be restored onto any other number (checkpoint.py).
- A checkpoint is written into a temporary folder that is then renamed, so a crash leaves the one before. On a remote
  file system (storage/files.py), where that is not one operation, it is written in its place, and an empty file
  `committed`, the last to be written, makes it one.
- `dev_loss.json` holds the dev loss, where the step was evaluated: a hash of the dev text that it was measured on, how
  often that text had changed before, and, in the best checkpoint, the steps that were evaluated since. Losses on the
  latest dev text alone are compared.
"""

import dataclasses
import glob
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from lingvo_moe.core import errors
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import checkpoint
from lingvo_moe.runtime.runtime import Runtime
from lingvo_moe.runtime.slices import Slice
from lingvo_moe.storage import files, json_files
from lingvo_moe.tasks.task import TaskConfig

_STEP = re.compile(r'step_(\d+)$')
_DEV_LOSS = 'dev_loss.json'
_COMMITTED = 'committed'  # marks a checkpoint of a remote file system as whole
_KINDS = {  # of dev_loss.json
  'dev_loss': json_files.NUMBER,
  'evaluated_after': json_files.optional(json_files.list_of(json_files.INTEGER)),
  'counted_best': json_files.optional(json_files.list_of(json_files.NUMBER)),
  'dev_text': json_files.optional(json_files.TEXT),
  'text_changes': json_files.optional(json_files.INTEGER),
  'metric': json_files.optional(json_files.TEXT),
  'score': json_files.optional(json_files.NUMBER),
}


class CheckpointEvaluation(NamedTuple):
  """Dev loss of a checkpoint, and the score by which it is ranked, where that is not the loss."""

  step: int  # of the checkpoint
  dev_loss: float  # cross-entropy
  dev_text: str = ''  # hash of the dev text; '' where an earlier version did not note it
  text_changes: int = 0  # how often the dev text had changed before; only losses of the latest text are compared
  evaluated_after: Sequence[int] | None = ()  # steps evaluated since on that text, if this is the best; None: not noted
  metric: str | None = None  # by whose score checkpoints are ranked; None: by the loss
  score: float | None = None  # the larger the better
  # (step, rank) of the best evaluation that counts for patience, () where none does yet; None: this one
  counted_best: Sequence[float] | None = None

  @property
  def rank(self) -> float:
    """The lower the better."""
    return self.dev_loss if self.metric is None else -self.score

  @property
  def to_beat(self) -> tuple[float, float]:
    """Step and rank of the best evaluation that counts for patience."""
    return (self.step, self.rank) if self.counted_best is None else tuple(self.counted_best) or (-1, math.inf)

  def measured(self, digits: str) -> tuple[str, str]:
    """Name and value by which checkpoints are ranked: ('dev loss', '1.234')."""
    return f'dev {self.metric or "loss"}', format(abs(self.rank), digits)


@dataclasses.dataclass(frozen=True)
class Checkpoints:
  """Checkpoints of a run: saves, finds, restores and drops them."""

  directory: str  # where they are
  keep: int = 3  # how many of the newest to keep beside the best
  keep_every: int = 0  # checkpoints of steps that are multiples of it are kept as well; 0: none
  constant: Collection[str] = ()  # weights that the checkpoint of step 0, which is kept then, has for all others
  # Evaluations by step, but for that of the best, the only one to which more is noted: each is read once.
  _known: dict[int, 'CheckpointEvaluation'] = dataclasses.field(
    default_factory=dict, init=False, repr=False, compare=False
  )

  def path(self, step: int) -> str:
    """The prefix that tf.train.load_checkpoint takes."""
    return checkpoint.path(self.directory, step)

  def steps(self) -> list[int]:
    """Steps with a committed checkpoint, oldest first; UserError if something else than a folder is in its place."""
    if not files.isdir(self.directory):
      if not self._is_remote and os.path.lexists(self.directory):
        kind = 'a link to what is not there: mount it' if os.path.islink(self.directory) else 'no folder: move it away'
        raise UserError(f'checkpoints are in {self.directory}, which is {kind}')
      return []
    steps = (int(m[1]) for m in map(_STEP.match, files.listdir(self.directory)) if m)
    return sorted(step for step in steps if not self._is_remote or files.exists(self._marker(step)))

  def latest(self) -> int | None:
    return max(self.steps(), default=None)

  def best(self) -> CheckpointEvaluation | None:
    """The best by dev loss, or by the score that ranks them, on the latest dev text; the earliest of equals."""
    evaluation_by_step = {step: self._known.get(step) or self.evaluation(step) for step in self.steps()}
    evaluations = [evaluation for evaluation in evaluation_by_step.values() if evaluation is not None]
    changes = max((evaluation.text_changes for evaluation in evaluations), default=0)
    comparable = [evaluation for evaluation in evaluations if evaluation.text_changes == changes]
    best = min(comparable, key=lambda evaluation: (evaluation.rank, evaluation.step), default=None)
    self._known.clear()
    self._known.update({evaluation.step: evaluation for evaluation in evaluations if evaluation is not best})
    return best

  def choose(self, step: int | None = None, which: str = 'last') -> int:
    """The given step, or that of a checkpoint by its rank; UserError if there is none.

    Ranks are 'best', the lowest dev loss; 'last'; and 'best if evaluated', the last where no dev loss is known.
    """
    if step is not None:
      return step
    best = self.best() if which != 'last' else None
    if best is None and which == 'best':
      raise UserError(f'no checkpoint in {self.directory} was evaluated on dev: choose one by step=N')
    step = best.step if best else self.latest()
    if step is None:
      raise UserError(
        f'there is no checkpoint in {self.directory} yet: train first, or let lingvo-moe decode wait for one, without '
        '--once'
      )
    return step

  def describe(self, step: int) -> str:
    """A checkpoint in words: 'step 600, the best by dev loss (1.234); the newest is of step 900'."""
    best = self.best()
    ranks = {'the best by {} ({})'.format(*best.measured('.4g')): best.step} if best else {}
    ranks['the newest'] = self.latest()
    rankings = [rank for rank, its_step in ranks.items() if its_step == step]
    others = [f'{rank} is of step {its_step}' for rank, its_step in ranks.items() if its_step != step]
    return '; '.join([', '.join([f'step {step}', *rankings]), *others])

  def save(self, runtime: Runtime) -> str:
    """Writes a state, then drops old checkpoints; every process calls it. Returns the checkpoint's prefix."""
    self.save_slices(runtime, runtime.step, self.saved(runtime))
    return self.path(runtime.step)

  def save_slices(self, processes: Runtime, step: int, slices: Iterable[Slice]) -> None:
    """Writes the slices of a state of a step. A thread may do the second part while training goes on; see Saver."""
    if self.make_folder(processes, step):
      self.commit(processes, step, self.write(processes, step, slices))

  def make_folder(self, processes: Runtime, step: int) -> bool:
    """First part of saving, by every process. False if the step is saved already."""
    if processes.agree(step in self.steps()):
      return False
    if processes.process_index == 0:
      self.sweep()
      files.makedirs(self._partial(step))
    processes.agree(True)
    return True

  def write(self, processes: Runtime, step: int, slices: Iterable[Slice]) -> str:
    """Second part: writes what this process holds, and waits for no other. Returns what failed, '' if nothing did."""
    name = checkpoint.STATE if processes.process_count == 1 else f'part_{processes.process_index:05d}'
    prefix = os.path.join(self._partial(step), name)
    slices = list(checkpoint.slices_by_layer(slices))
    try:
      if slices:
        checkpoint.write(prefix, slices)
    except tf.errors.OpError as e:
      return errors.reason(e)
    for path in () if self._is_remote else glob.glob(glob.escape(prefix) + '.*'):
      _fsync(path)
    return ''

  def saved(self, runtime: Runtime) -> Iterator[Slice]:
    """Slices of a state that its checkpoint has of this process."""
    return (part for part in runtime.slices() if runtime.step == 0 or part.name not in self.constant)

  def commit(self, processes: Runtime, step: int, reason: str) -> None:
    """Last part, by every process: makes one checkpoint of what they have written, and drops old ones.

    `reason` is what `write` returned here; UserError where a process could not write its part.
    """
    is_leader, partial = processes.process_index == 0, self._partial(step)
    if not processes.agree(not reason):
      if is_leader:
        self.sweep()
      left = 'there is no checkpoint before it, and the same command begins anew'
      if (latest := self.latest()) is not None:
        left = f'that of step {latest} is kept, and the same command goes on from it'
      raise UserError(
        f'the checkpoint of step {step} could not be written to {partial} ({reason or "by another process"}): '
        f'make room there; {left}'
      )
    if is_leader:
      if processes.process_count > 1:
        parts = sorted(name.removesuffix('.index') for name in files.listdir(partial) if name.endswith('.index'))
        checkpoint.merge([os.path.join(partial, part) for part in parts], os.path.join(partial, checkpoint.STATE))
      if self._is_remote:
        files.write(self._marker(step), '')
      else:
        for name in os.listdir(partial):
          _fsync(os.path.join(partial, name))
        os.rename(partial, self._folder(step))
        _fsync(self.directory)
      self._drop_old()
    processes.agree(True)

  def fingerprint(self, step: int) -> str:
    """A short hash of a checkpoint's contents: its index holds the checksum of every tensor."""
    try:
      return files.sha256(self.path(step) + '.index')[:16]
    except FileNotFoundError:
      return 'gone'

  def note_dev_loss(
    self,
    step: int,
    dev_loss: float,
    text: str = '',
    metric: str | None = None,
    score: float | None = None,
    counts: bool = True,
  ) -> None:
    """Adds the dev cross-entropy of a step that was saved before it was evaluated, or that of the best on another text.

    Args:
      step: of the checkpoint.
      dev_loss: its loss. One that is not finite is never the best, and counts as an evaluation without a gain.
      text: hash of the dev text. Where it is another than that of the best so far, losses so far no longer count.
      metric, score: of CheckpointEvaluation.
      counts: whether it counts for patience, as one does that a longer run makes too.
    """
    new = CheckpointEvaluation(step, dev_loss, text, 0, (), metric, score, None if counts else ())
    if (best := self.best()) is not None:
      is_same = text == best.dev_text
      new = new._replace(text_changes=best.text_changes + (not is_same))
      follows = is_same and best.evaluated_after is not None and best.step < step
      if follows and not counts:
        counted = best.to_beat if best.counted_best is None else best.counted_best
        new = new._replace(evaluated_after=best.evaluated_after, counted_best=counted)
      elif follows and not new.rank < best.rank and step != best.to_beat[0]:
        # Into the best one's folder, since that checkpoint is always kept.
        gains = {'evaluated_after': (), 'counted_best': (step, new.rank)}
        more = {'evaluated_after': sorted({*best.evaluated_after, step})}
        self._write_evaluation(best._replace(**(gains if new.rank < best.to_beat[1] else more)))
      if best.step == step and not best.dev_text:
        new = new._replace(evaluated_after=best.evaluated_after)  # of an earlier version: patience counts on
    if math.isfinite(dev_loss):
      self._write_evaluation(new)
    self._drop_old()

  def restore(
    self, step: int, specs: Mapping[str, tuple[int, ...]]
  ) -> dict[str, checkpoint.Stored | checkpoint.StoredLayers]:
    """The named tensors of a checkpoint, which must have the given shapes; they are read when they are sliced."""
    return checkpoint.load(self.existing(step), specs)

  def merged(self, step: int, config: TaskConfig) -> dict[str, checkpoint.Stored]:
    """Weights of a checkpoint with adapters merged, by the names of an unrolled model; read when they are sliced."""
    program = config.program()
    specs = checkpoint.by_layer({name: spec.shape for name, spec in program.model_specs.items()})
    return checkpoint.load(self.existing(step), specs, program.lora)

  def load_weights(self, runtime: Runtime, step: int) -> None:
    """Loads the weights of a checkpoint into a runtime, and not the optimizer slots."""
    specs = {name: spec.shape for name, spec in runtime.program.weight_specs.items()}
    runtime.load({'step': np.asarray(step), 'weights': self.restore(step, specs)})

  def existing(self, step: int) -> str:
    """The prefix of a checkpoint; UserError where there is none of that step."""
    if step not in (steps := self.steps()):
      listed = ', '.join(map(str, steps)) or 'none'
      raise UserError(f'{self.directory} has no checkpoint of step {step}; there: {listed}')
    return self.path(step)

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

  def _write_evaluation(self, evaluation: CheckpointEvaluation) -> None:
    values = {name: value for name, value in evaluation._asdict().items() if name in _KINDS and value is not None}
    self._known.pop(evaluation.step, None)
    files.write(os.path.join(self._folder(evaluation.step), _DEV_LOSS), json_files.dump(values))

  def evaluation(self, step: int) -> CheckpointEvaluation | None:
    """Dev loss of a checkpoint; None where it was not evaluated."""
    way_out = 'restore it from a copy, or remove it; the step then counts as not evaluated'
    read = json_files.read_if_any(os.path.join(self._folder(step), _DEV_LOSS), 'a dev loss', way_out, **_KINDS)
    if read is None:
      return None
    noted = {name: value for name, value in read.items() if name in _KINDS and value is not None}
    return CheckpointEvaluation(step, **{'evaluated_after': None, **noted})

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
      is_multiple = self.keep_every and step % self.keep_every == 0
      if is_multiple or (step == 0 and self.constant) or (best is not None and step == best.step):
        continue
      if self._is_remote:  # first out of sight, so that no half of it is ever seen
        files.remove(self._marker(step))
      else:
        os.rename(self._folder(step), self._partial(step))
      files.rmtree(self._partial(step))


class Saver:
  """Saves in the background: copies the state at once and writes it in a thread, while training goes on.

  Of several processes each writes its part so. A thread could not wait for other processes, since that takes the
  devices with which they compute: they wait for each other where training calls `save`, `wait` or `commit_if_written`,
  at the same steps.
  """

  def __init__(self, checkpoints: Checkpoints, runtime: Runtime):
    self.checkpoints = checkpoints
    self._runtime = runtime
    self._thread = futures.ThreadPoolExecutor(1)
    self._writing: tuple[int, futures.Future] | None = None  # the step, and what `write` returns

  def save(self) -> None:
    """Begins to save the current state, once the one before is saved."""
    self.wait()
    runtime, step = self._runtime, self._runtime.step
    alone = runtime.process_count == 1
    if alone or self.checkpoints.make_folder(runtime, step):
      save = self.checkpoints.save_slices if alone else self.checkpoints.write
      slices = list(map(_copied, self.checkpoints.saved(runtime)))
      self._writing = step, self._thread.submit(save, runtime, step, slices)

  def commit_if_written(self) -> None:
    """Ends what `save` began if all processes have written their parts; for one process there is nothing to do."""
    if self._writing and self._runtime.process_count > 1 and self._runtime.agree(self._writing[1].done()):
      self.wait()

  def wait(self) -> None:
    """Waits until the state that was saved is on disk; raises the error if that failed."""
    if self._writing:
      (step, written), self._writing = self._writing, None
      reason = written.result()
      if self._runtime.process_count > 1:
        self.checkpoints.commit(self._runtime, step, reason)


def _copied(part: Slice) -> Slice:
  """Slice in memory that training does not change: a tensor is immutable, an array may be a view of a device's."""
  return part._replace(value=part.value.copy()) if isinstance(part.value, np.ndarray) else part


def _fsync(path: str) -> None:
  fd = os.open(path, os.O_RDONLY)
  try:
    os.fsync(fd)
  finally:
    os.close(fd)
