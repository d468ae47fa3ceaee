"""lingvo-moe checkpoint RUN [--step=N] [--slots] [--json=FILE]

Lists and verifies the tensors of a checkpoint: name, shape, type, root mean square and largest absolute value. Every
byte is checked against its checksum, part by part, with little memory. The number of devices that wrote the checkpoint
does not matter. RUN (or --path=RUN) is a log directory (its newest checkpoint, or that of --step), or the folder or the
prefix of a checkpoint. The exit status is 1 if a tensor is damaged, missing or not finite.
"""

import math

from lingvo_moe.cli import app
from lingvo_moe.cli.options import OptionGroup, flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files

_PART_BYTES = 64 << 20


class Options(OptionGroup):
  """Options of the command."""

  path: str = flag(None, 'Log directory, checkpoint folder or prefix, unless it is an argument.')
  step: int | None = flag(None, 'Step of the checkpoint in a log directory; by default the newest.')
  slots: bool = flag(False, 'List optimizer slots too; they are verified in any case.')
  json: str | None = flag(None, 'File for the results as JSON.')


def examine(stored) -> dict:
  """Shape, type, RMS, largest absolute value, and number of elements that are not finite, read part by part."""
  import numpy as np

  from lingvo_moe.run import checkpoint

  squares, largest, bad = 0.0, 0.0, 0
  for index in checkpoint.blocks(stored.shape, _PART_BYTES // stored.dtype.size):
    x = np.asarray(stored[index], np.float64)
    finite = np.isfinite(x)
    bad += int(x.size - finite.sum())
    x = np.where(finite, x, 0.0)
    squares += float(np.sum(x * x))
    largest = max(largest, float(np.max(np.abs(x), initial=0.0)))
  return {
    'shape': list(stored.shape),
    'dtype': stored.dtype.name,
    'rms': math.sqrt(squares / max(math.prod(stored.shape), 1)),
    'max': largest,
    'not_finite': bad,
  }


def find(path: str, step: int | None) -> str:
  """Prefix of the checkpoint that --path and --step name."""
  from lingvo_moe.run import warm_start
  from lingvo_moe.run.rundir import RunDir

  checkpoints = RunDir(path).checkpoints()
  if step is None:
    step = checkpoints.latest()
  return warm_start.find(path) if step is None else checkpoints.existing(step)


@app.command(Options, takes=('path',))
def main(options: Options) -> int:
  from lingvo_moe.run import checkpoint
  from lingvo_moe.runtime import slices

  prefix = find(options.path, options.step)
  shapes = checkpoint.shapes(prefix)
  examined, damaged = {}, []
  for name, stored in sorted(checkpoint.load(prefix, shapes).items()):
    try:
      examined[name] = examine(stored)
    except UserError as e:
      damaged.append(name)
      print(f'{name}: {e}')
      continue
    if not slices.is_slot(name) or options.slots:
      values = examined[name]
      shape = 'x'.join(map(str, values['shape'])) or 'scalar'
      print(f'{name:60} {shape:>16} {values["dtype"]:8} rms {values["rms"]:9.3e} max {values["max"]:9.3e}')
  slots = sum(math.prod(shape) for name, shape in shapes.items() if slices.is_slot(name))
  weights = sum(map(math.prod, shapes.values())) - slots - 1  # without the step
  bad = [name for name, values in examined.items() if values['not_finite']]
  print(f'{prefix}: {len(shapes)} tensors, {weights} weights, {slots} elements of slots')
  report = {'prefix': files.absolute(prefix), 'tensors': examined, 'damaged': damaged, 'not_finite': bad}
  app.write_json(options.json, report)
  if bad:
    print(f'not finite: {", ".join(bad)}')
  print('damaged' if damaged else 'every checksum is right')
  return 1 if damaged or bad else 0


if __name__ == '__main__':
  main()
