#!/usr/bin/env python
"""python tools/export_step.py --model=mt.cldr.Tiny --out=DIR [--mesh=data:2,expert:2] [--program=train]

Exports a model's step as StableHLO, with one batch of random ids, to a folder that runs with JAX alone, without
TensorFlow or this package: copy the folder and run `python run.py`, which prints the loss, tokens a second and, of a
train step, the FLOPs of its matrix products by formula.
The same folder runs on CPUs, GPUs and TPUs, as many as the mesh has. They need not be on this machine: no step is run.
"""

import os

from absl import flags

from lingvo_moe.cli import app

_MODEL = flags.DEFINE_string('model', None, 'A registered model.', required=True)
_OUT = flags.DEFINE_string('out', None, 'Folder to write; it must not exist.', required=True)
_MESH = flags.DEFINE_string('mesh', 'data:1', "Devices by axis, such as 'data:2,expert:2'.")
_SPLIT_DENSE = flags.DEFINE_bool('split_dense', False, 'Split the weights of dense layers over the devices too.')
_GIN_BINDINGS = flags.DEFINE_multi_string('gin_bindings', [], "E.g. 'Tiny.batch_tokens = 4096'; may be repeated.")
_CUDNN_ATTENTION = flags.DEFINE_bool(
  'cudnn_attention', False, "Attention by cuDNN's kernels, where they have it: the folder is for one NVIDIA GPU."
)
_PROGRAM = flags.DEFINE_string('program', 'train', 'Step to export: train or eval.')


@app.command()
def main():
  import step_export

  from lingvo_moe.addons.analysis import flops
  from lingvo_moe.config import configuration
  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.storage import new_folder
  from lingvo_moe.tasks.task import task_of

  new_folder.check(_OUT.value, 'an export')
  config = configuration.resolve(_MODEL.value, [], _GIN_BINDINGS.value)
  mesh = Mesh.parse(_MESH.value, split_dense=_SPLIT_DENSE.value)
  with new_folder.writing(_OUT.value) as folder:
    program, batch = config.program(), task_of(config).random_batch()
    counts, kind = task_of(config).token_counts, _PROGRAM.value
    made = sum(flops.train_step(config).values()) if kind == 'train' else None
    step_export.save(folder, _MODEL.value, program, mesh, batch, counts, kind, made, _CUDNN_ATTENTION.value)
  print(f'{_MODEL.value}, {_PROGRAM.value} step for {mesh}: python {os.path.join(_OUT.value, "run.py")}')


if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'  # read when JAX is first imported; no step is run on this machine
  main()
