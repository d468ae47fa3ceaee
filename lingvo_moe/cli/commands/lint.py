"""lingvo-moe lint --model=mt.cldr.Tiny --mesh=data:2,expert:2 [--plant=topk]

Checks the sharding of a model's train step. Partitions the step, and fails (exit status 1) if a device holds or gathers
the whole of a tensor that the sharding rules split. Prints the layer of the tensor. Nothing is allocated or run.

Tensors up to --limit_mib are ignored. The default limit is one number of 4 bytes per token of a micro-batch, because
the rules split every tensor of that size. --plant introduces a mistake into MoE layers, to show that the command finds
it: 'topk' takes the gates by tf.math.top_k, 'unsharded' omits the annotations around the experts.
"""

import math

from absl import flags

from lingvo_moe.cli import app
from lingvo_moe.cli.commands import values
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.task import task_of

_MODEL = flags.DEFINE_string('model', None, 'A registered model.', required=True)
_MESH = flags.DEFINE_string('mesh', None, "Devices by axis, such as 'data:2,expert:2'.", required=True)
_BINDINGS = values.define('dispatch=einsum')
_SPLIT_DENSE = flags.DEFINE_bool('split_dense', False, 'Split the weights of dense layers over the devices too.')
_LIMIT = flags.DEFINE_float('limit_mib', None, 'Size up to which a tensor may be whole everywhere.', lower_bound=0.0)
_PLANT = flags.DEFINE_string('plant', '', 'Mistake to introduce: topk or unsharded.')
_JSON = flags.DEFINE_string('json', None, 'File for the findings as JSON.')


@app.command()
def main():
  from lingvo_moe.addons.analysis import lint
  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.runtime import spmd

  config = configuration.resolve(_MODEL.value, [], _BINDINGS(_MODEL.value))
  mesh = Mesh.parse(_MESH.value, split_dense=_SPLIT_DENSE.value)
  if mesh.num_devices < 2:
    raise UserError(f'one device holds everything; saw --mesh={_MESH.value}: name a mesh of several')
  for axis, what in {'stage': 'a pipeline', 'hidden': 'tokens gathered for parts of an expert'}.items():
    if mesh.size([axis]) > 1:
      raise UserError(f'lint reads programs without {what}; saw --mesh={mesh}: leave out {axis}')
  if _PLANT.value and not config.num_experts:
    raise UserError(
      f'--plant={_PLANT.value} changes layers with experts; {_MODEL.value} has none: name another --model'
    )
  batch = task_of(config).random_batch()
  annotated = lint.annotations(config.program(), mesh, batch)
  largest = max((4 * math.prod(a.whole) for a in annotated), default=0)
  limit = lint.default_limit(batch, config.micro_batches) if _LIMIT.value is None else int(_LIMIT.value * 2**20)
  with lint.planted(_PLANT.value):
    program = spmd.SpmdRuntime(config.program(), mesh, spmd.connect(mesh)).train_program(batch)
  findings = lint.read(program.as_text(), annotated, limit)
  for finding in findings:
    print(finding)
  print(
    f'{_MODEL.value} on {mesh}: {len(annotated)} annotations split a tensor, the largest of {largest / 2**20:.3g} MiB; '
    f'{len(findings) or "no"} tensors above {limit / 2**20:.3g} MiB are whole where they should be split'
  )
  app.write_json(_JSON.value, [finding._asdict() for finding in findings])
  return 1 if findings else 0


if __name__ == '__main__':
  main()
