"""lingvo-moe lint --model=mt.cldr.Tiny --mesh=data:2,expert:2 [--plant=topk]

Checks the sharding of a model's train step. Partitions the step, and fails (exit status 1) if a device holds or gathers
the whole of a tensor that the sharding rules split. Prints the layer of the tensor. Nothing is allocated or run.

Tensors up to --limit_mib are ignored. The default limit is one number of 4 bytes per token of a micro-batch, because
the rules split every tensor of that size. --plant introduces a mistake into MoE layers, to show that the command finds
it: 'topk' takes the gates by tf.math.top_k, 'unsharded' omits the annotations around the experts.
"""

import math

from lingvo_moe.cli import app, machine
from lingvo_moe.cli.model_flags import ModelOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.task import task_of


class Options(ModelOptions):
  """Options of the command."""

  mesh: str = flag(None, "Devices by axis, such as 'data:2,expert:2'.", required=True)
  split_dense: bool = flag(False, machine.SPLIT_DENSE)
  limit_mib: float | None = flag(None, 'Size up to which a tensor may be whole everywhere.', lower_bound=0.0)
  plant: str = flag('', 'Mistake to introduce: topk or unsharded.')
  json: str | None = flag(None, 'File for the findings as JSON.')


@app.command(Options)
def main(options: Options) -> int:
  from lingvo_moe.addons.analysis import lint
  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.runtime import spmd

  config = options.resolve(options.model)
  mesh = Mesh.parse(options.mesh, split_dense=options.split_dense)
  if mesh.num_devices < 2:
    raise UserError(f'one device holds everything; saw --mesh={options.mesh}: name a mesh of several')
  for axis, what in {'stage': 'a pipeline', 'hidden': 'tokens gathered for parts of an expert'}.items():
    if mesh.size([axis]) > 1:
      raise UserError(f'lint reads programs without {what}; saw --mesh={mesh}: leave out {axis}')
  if options.plant and not config.num_experts:
    raise UserError(
      f'--plant={options.plant} changes layers with experts; {options.model} has none: name another --model'
    )
  batch = task_of(config).random_batch()
  annotated = lint.annotations(config.program(), mesh, batch)
  largest = max((4 * math.prod(a.whole) for a in annotated), default=0)
  limit = (
    lint.default_limit(batch, config.micro_batches) if options.limit_mib is None else int(options.limit_mib * 2**20)
  )
  with lint.planted(options.plant):
    program = spmd.SpmdRuntime(config.program(), mesh, spmd.connect(mesh)).train_program(batch)
  findings = lint.read(program.as_text(), annotated, limit)
  for finding in findings:
    print(finding)
  print(
    f'{options.model} on {mesh}: {len(annotated)} annotations split a tensor, the largest of {largest / 2**20:.3g} '
    f'MiB; {len(findings) or "no"} tensors above {limit / 2**20:.3g} MiB are whole where they should be split'
  )
  app.write_json(options.json, [finding._asdict() for finding in findings])
  return 1 if findings else 0


if __name__ == '__main__':
  main()
