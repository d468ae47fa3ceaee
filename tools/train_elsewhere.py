#!/usr/bin/env python
"""python tools/train_elsewhere.py --logdir=RUN --out=DIR --steps=6000, and later --logdir=RUN --take=DIR

Trains a run on another machine, such as one with a GPU, that has JAX and neither TensorFlow nor this package.

1. `lingvo-moe train ... --logdir=RUN --max_steps=0` begins a run here, and an existing one goes on.
2. `--out=DIR` exports its step, its state unless that is the initial one, the batches of the next updates, and the dev
   text with the step that evaluates it.
3. `python train.py` in a copy of DIR on the other machine trains and evaluates, as often as the run would, and writes
   state_<step>.npz: weights and optimizer slots, compressed at the end.
4. `--take=DIR` makes checkpoints of those files, with their dev losses, from which RUN goes on like from its own.
"""

from __future__ import annotations

import glob
import json
import math
import os
import sys

from absl import flags

from lingvo_moe.cli import app

_LOGDIR = flags.DEFINE_string('logdir', None, 'A run, which lingvo-moe train has begun.', required=True)
_OUT = flags.DEFINE_string('out', None, 'Folder to export to; it must not exist.')
_TAKE = flags.DEFINE_string('take', None, 'Folder in which train.py has trained, to take into the run.')
_STEPS = flags.DEFINE_integer('steps', 1000, 'Updates to export batches for.', lower_bound=1)
_MESH = flags.DEFINE_string('mesh', 'data:1', "Devices by axis, such as 'data:2,expert:2'.")

_OF_RUN = ('eval_every', 'save_every', 'keep_checkpoints', 'keep_every', 'patience')  # values that train.py follows
_FETCH = 'fetch it again from the machine that trained'


@app.command()
def main():
  from lingvo_moe.core.errors import UserError
  from lingvo_moe.run.rundir import RunDir

  if (_OUT.value is None) == (_TAKE.value is None):
    raise UserError(f'either --out or --take is given; saw --out={_OUT.value}, --take={_TAKE.value}')
  run = RunDir(_LOGDIR.value)
  name, config = run.load()
  with run.lock():
    if _OUT.value:
      export(run, name, config)
    else:
      take(run, config)


def export(run, name, config) -> None:
  """Writes the folder that trains elsewhere."""
  import dataclasses

  import numpy as np
  import step_export
  from step_export import batches

  from lingvo_moe.addons.analysis import flops
  from lingvo_moe.core.errors import UserError
  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.inputs.feed import Feed
  from lingvo_moe.run import warm_start
  from lingvo_moe.storage import new_folder
  from lingvo_moe.tasks.task import task_of

  new_folder.check(_OUT.value, 'an export')
  checkpoints, mesh, feed = run.checkpoints(), Mesh.parse(_MESH.value), Feed()
  step = checkpoints.choose()
  # A schedule may end with max_steps, which is 0 where the run was only begun.
  config = dataclasses.replace(config, max_steps=max(config.max_steps, step + _STEPS.value))
  task, program = task_of(config), config.program()
  stream = task.train_input(run.cache_dir, feed)
  with new_folder.writing(_OUT.value) as folder:
    file = lambda name: os.path.join(folder, name)
    first = {key: np.asarray(x) for key, x in next(iter(stream.dataset(step))).items()}
    made = sum(flops.train_step(config).values())
    step_export.save(folder, name, program, mesh, first, task.token_counts, flops=made)
    arrays = ({key: x.numpy() for key, x in batch.items()} for batch in stream.dataset(step))
    batches.save(file('batches.npz'), arrays, step, _STEPS.value)
    # An exported step has one shape of batches. The dev loss depends on no shape.
    of_one_length = task_of(dataclasses.replace(config, boundaries=(config.max_length,)))
    dev = [{key: batch[key] for key in first} for batch in of_one_length.dev_input(run.cache_dir, feed)]
    if not dev:
      raise UserError(f'a run goes on elsewhere by its dev loss; the dev text of {run.path} has no sentence')
    batches.save(file('dev.npz'), dev, 0, len(dev))
    step_export.save_eval(folder, program, mesh, dev[0])
    dev_text, best = task.dev_input(run.cache_dir, feed).content_hash, checkpoints.best()
    of_run = {field: getattr(config, field) for field in _OF_RUN} | {'dev_text': dev_text, 'best': None}
    if best is not None and best.dev_text == dev_text:
      of_run |= {'best': best.dev_loss, 'evaluated_after': len(best.evaluated_after or ())}
    with open(file('run.json'), 'w', encoding='utf-8') as f:
      json.dump({'evaluated_after': 0} | of_run, f)
    if step or warm_start.noted(run):
      state = checkpoints.restore(step, shapes_of(program))
      np.savez_compressed(file('state.npz'), **{name: stored[...] for name, stored in state.items()})
  print(f'{name}, steps {step + 1} to {step + _STEPS.value}: python {os.path.join(_OUT.value, "train.py")}')


def take(run, config) -> None:
  """Makes checkpoints of the states that came back, and notes their dev losses."""
  import numpy as np

  from lingvo_moe.core.errors import UserError
  from lingvo_moe.run import checkpoint
  from lingvo_moe.runtime.slices import Slice
  from lingvo_moe.storage import json_files, new_folder

  program, checkpoints = config.program(), run.checkpoints(keep=sys.maxsize)
  before, shapes = checkpoints.latest() or 0, shapes_of(program)
  found = sorted(glob.glob(os.path.join(glob.escape(_TAKE.value), f'state_{"[0-9]" * 8}.npz')))
  paths = {int(os.path.basename(path).removeprefix('state_').removesuffix('.npz')): path for path in found}
  if not paths:
    raise UserError(f'--take={_TAKE.value} has state_<step>.npz, which train.py writes; saw none: run it there')
  if there := sorted({*paths} & {*checkpoints.steps()}):
    path, step = paths[there[0]], there[0]
    raise UserError(f'{run.path} has a checkpoint of step {step} already: remove {path}, or that checkpoint')
  kinds = {'dev_text': json_files.TEXT, 'losses': json_files.list_of(json_files.list_of(json_files.NUMBER))}
  path = os.path.join(_TAKE.value, 'dev_losses.json')
  noted = json_files.read_if_any(path, 'dev losses of train.py', _FETCH, **kinds) or {'losses': []}
  for step, path in paths.items():
    state = arrays_of(path)
    if odd := {(name, x.shape) for name, x in state.items()} ^ {*shapes.items()}:
      raise UserError(f'{path} must have the state of {run.path}; {min(odd)} is in one of them alone')
    saved = (name for name in state if not step or name not in program.constant)
    slices = [Slice(name, shapes[name], (0,) * len(shapes[name]), state[name]) for name in saved]
    prefix = checkpoints.path(step)
    with new_folder.writing(os.path.dirname(prefix)) as folder:  # whole or not at all
      number = Slice('step', (), (), np.asarray(step, np.int64))
      checkpoint.write(os.path.join(folder, os.path.basename(prefix)), [number, *checkpoint.slices_by_layer(slices)])
    print(f'{prefix}: {len(slices)} tensors')
  for step, loss in noted['losses']:
    if step > before:  # one without a checkpoint counts for patience alone
      checkpoints.note_dev_loss(step, loss if step in paths else math.inf, noted['dev_text'])
  if best := checkpoints.best():
    print('best dev loss {1:.4f} at step {0}'.format(*best[:2]))


def arrays_of(path: str) -> dict:
  """Arrays by name from a file that train.py has written; UserError if it is damaged."""
  import zipfile
  import zlib

  import numpy as np

  from lingvo_moe.core.errors import UserError

  try:
    with np.load(path) as arrays:
      return dict(arrays)
  except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
    raise UserError(f'{path} cannot be read ({e}): {_FETCH}') from None


def shapes_of(program) -> dict[str, tuple[int, ...]]:
  """Shapes of weights and optimizer slots, by their names in checkpoints and in files of states."""
  from lingvo_moe.runtime.slices import named_slots

  return {name: tuple(spec.shape) for name, spec in (program.weight_specs | named_slots(program.slot_specs)).items()}


if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'  # read when JAX is first imported; no step is run on this machine
  main()
