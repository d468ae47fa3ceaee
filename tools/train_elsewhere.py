#!/usr/bin/env python
"""python tools/train_elsewhere.py --logdir=RUN --out=DIR --steps=6000, and later --logdir=RUN --take=DIR

Trains a run on another machine, such as one with a GPU, that has JAX and neither TensorFlow nor this package.

1. `lingvo-moe train ... --logdir=RUN --max_steps=0` begins a run here.
2. `--out=DIR` exports its step, its state unless that is the initial one, and the batches of the next updates.
3. `python train.py` in a copy of DIR on the other machine trains, and writes weights_<step>.npz.
4. `--take=DIR` makes checkpoints of those files. They have no optimizer slots: the run can be decoded, averaged and
   exported, and another run can begin with its weights (--init_from), but RUN itself is not trained further.
"""

from __future__ import annotations

import glob
import os

from absl import flags

from lingvo_moe.cli import app

_LOGDIR = flags.DEFINE_string('logdir', None, 'A run, which lingvo-moe train has begun.', required=True)
_OUT = flags.DEFINE_string('out', None, 'Folder to export to; it must not exist.')
_TAKE = flags.DEFINE_string('take', None, 'Folder with weights_<step>.npz to take into the run.')
_STEPS = flags.DEFINE_integer('steps', 1000, 'Updates to export batches for.', lower_bound=1)
_MESH = flags.DEFINE_string('mesh', 'data:1', "Devices by axis, such as 'data:2,expert:2'.")


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
  import numpy as np
  import step_export
  from step_export import batches

  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.run import warm_start
  from lingvo_moe.storage import new_folder
  from lingvo_moe.tasks.task import Feed, task_of

  new_folder.check(_OUT.value, 'an export')
  task, program, checkpoints = task_of(config), config.program(), run.checkpoints()
  step = checkpoints.choose()
  stream = task.train_input(run.cache_dir, Feed())
  with new_folder.writing(_OUT.value) as folder:
    first = {key: np.asarray(x) for key, x in next(iter(stream.dataset(step))).items()}
    step_export.save(folder, name, program, Mesh.parse(_MESH.value), first, task.token_counts)
    arrays = ({key: x.numpy() for key, x in batch.items()} for batch in stream.dataset(step))
    batches.save(os.path.join(folder, 'batches.npz'), arrays, step, _STEPS.value)
    if step or warm_start.noted(run):
      parts = {'weights': (program.weight_specs, ''), 'slots': (program.slot_specs, 'slots/')}
      state = {}
      for part, (specs, prefix) in parts.items():
        stored = checkpoints.restore(step, {prefix + n: s.shape for n, s in specs.items()})
        state |= {f'{part}:{n}': stored[prefix + n][...] for n in specs}
      np.savez(os.path.join(folder, 'state.npz'), **state)
  print(f'{name}, steps {step + 1} to {step + _STEPS.value}: python {os.path.join(_OUT.value, "train.py")}')


def take(run, config) -> None:
  """Makes checkpoints of the weights that came back."""
  import zipfile

  import numpy as np

  from lingvo_moe.core.errors import UserError
  from lingvo_moe.run import checkpoint
  from lingvo_moe.runtime.slices import Slice
  from lingvo_moe.storage import new_folder

  specs = checkpoint.by_layer({name: spec.shape for name, spec in config.program().weight_specs.items()})
  found = sorted(glob.glob(os.path.join(glob.escape(_TAKE.value), 'weights_*.npz')))
  if not found:
    raise UserError(f'--take={_TAKE.value} has weights_<step>.npz, which train.py writes; saw none: run it there')
  for path in found:
    step = int(os.path.basename(path).removeprefix('weights_').removesuffix('.npz'))
    whole = lambda x: (x.shape, (0,) * x.ndim, x)
    try:
      with np.load(path) as arrays:
        slices = list(checkpoint.slices_by_layer(Slice(name, *whole(arrays[name])) for name in arrays.files))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as e:
      raise UserError(f'{path} cannot be read ({e}): fetch it again from the machine that wrote it') from None
    if (saw := {part.name: tuple(part.shape) for part in slices}) != {name: tuple(s) for name, s in specs.items()}:
      differs = sorted(set(saw.items()) ^ {(name, tuple(s)) for name, s in specs.items()})[0]
      raise UserError(f'{path} must have the weights of {run.path}; {differs} is in one of them alone')
    if step in run.checkpoints().steps():
      raise UserError(f'{run.path} has a checkpoint of step {step} already: remove {path}, or that checkpoint')
    prefix = run.checkpoints().path(step)
    with new_folder.writing(os.path.dirname(prefix)) as folder:  # whole or not at all
      number = Slice('step', (), (), np.asarray(step, np.int64))
      checkpoint.write(os.path.join(folder, os.path.basename(prefix)), [number, *slices])
    print(f'{prefix}: {len(slices)} tensors')


if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'  # read when JAX is first imported; no step is run on this machine
  main()
