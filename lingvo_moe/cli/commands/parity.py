"""lingvo-moe parity --model=mt.cldr.Tiny [--meshes='expert:2;expert:4;data:2,expert:2'] [--grid] [--json=FILE]

Compares a model on meshes with the same model on one device. Decodes with the initial weights and trains for a few
steps, with the same seeds and batches in float32. Prints the differences of
  the objective, all gradients, the updated weights and the optimizer slots: max|a - b| / max(max|a|, 1e-4 of the
  model's largest gradient), for the worst tensor of the worst step
  the routing: the number of tokens that were routed differently
  the decoder's symbols and scores
and the collectives of the partitioned train step. Devices are virtual ones of this CPU, or those that JAX finds.

'expert:4@2' is this mesh in two processes, 'local' is plain TensorFlow. --grid runs every mesh with dispatch by einsum
and by gather, unscanned and scanned. Its meshes are those of every kind in docs/meshes.md unless --meshes names others.

Adam and Adafactor make updates of about one size from gradients of any size. If a gradient is rounding noise, so is the
update. An entry's update therefore counts by the gradient's own scale: its difference relative to the updates so far is
multiplied by the gradient's entry, relative to the scale by which gradients are compared, if the product is less than
its difference relative to the weight.

Updates that differ by rounding may open a ReLU or turn a choice of a gate in the next step, whose gradients then differ
by the share of one token. With --equal_states each step begins with the weights and slots of one device.

The exit status is 1 if a difference is above --tolerance, a difference of scores is above 3e-5, a symbol differs, or a
token was routed differently by a decision with a margin above 1e-6.
"""

import dataclasses
import pathlib
import pickle
import sys
import tempfile
from collections.abc import Sequence

from lingvo_moe.cli import app, machine
from lingvo_moe.cli.commands import launch
from lingvo_moe.cli.model_flags import ModelOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import working


class Options(ModelOptions):
  """Options of the command."""

  meshes: str | None = flag(
    None, "Meshes, separated by semicolons; 'local;expert:2;expert:4;data:2,expert:2' by default."
  )
  grid: bool = flag(False, 'Run every mesh with both dispatchers, unscanned and scanned.')
  steps: int = flag(3, 'Number of train steps.', lower_bound=1)
  equal_states: bool = flag(False, 'Begin every step with the weights and slots of one device.')
  tolerance: float = flag(1e-5, 'Largest difference allowed.', lower_bound=0.0)
  json: str | None = flag(None, 'File for the table as JSON.')
  split_dense: bool = flag(False, machine.SPLIT_DENSE)
  split_update: bool = flag(False, machine.SPLIT_UPDATE)
  dump: str | None = flag(None, 'Internal, set by this command: file for the observation of process 0.')
  coordinator: str = flag('', 'Internal, set by this command.')
  num_processes: int = flag(1, 'Internal, set by this command.')
  process_id: int = flag(0, 'Internal, set by this command.')


LEGEND = """\
objective, gradient, weights, slots: max|a - b| / max(max|a|, 1e-4 of the largest gradient), the largest of any step
routed otherwise: tokens that went to other experts, within the margin of that decision
symbols, scores: the decoder's translations, and the largest difference of their scores
collectives: in the partitioned train step"""

_FEW = 'local;expert:2;expert:4;data:2,expert:2'
_EVERY_KIND = 'data:2;expert:2;model:2;data:2,expert:2;data:2,model:2;expert:2,model:2;data:2,expert:2,model:2'
_EVERY_KIND += ';node:2,expert:2;expert:2,hidden:2;data:2/expert:2'


def grid(options: Options) -> dict[str, list[str]]:
  """Settings of every dispatcher by label, unscanned and scanned; a dense model has no dispatcher."""
  scans = {'unscanned': ['scan_layers=False'], 'scanned': ['scan_layers=True', 'remat=block']}
  dispatches = ('einsum', 'gather') if config_of(options).num_experts else ('auto',)
  return {
    f'{dispatch} {scan}': [f'dispatch={dispatch}', *scanned]
    for dispatch in dispatches
    for scan, scanned in scans.items()
  }


def config_of(options: Options, settings: Sequence[str] = ()):
  """Configuration of the model in float32, with dropout if it has none, as masks must be equal on every mesh."""
  config = options.resolve(options.model, *settings)
  changes = {'activation_dtype': 'float32'}
  if not config.residual_dropout:
    rates = 'input_dropout', 'residual_dropout', 'attention_dropout'
    changes |= {name: 0.1 for name in rates if hasattr(config, name)}
  return dataclasses.replace(config, **changes)


def observation(options: Options, mesh: str, settings: Sequence[str], reference=None):
  """Observation of 'local', of a mesh, or of a mesh in several processes ('expert:4@2')."""
  from lingvo_moe.addons.analysis import parity

  mesh, _, count = mesh.partition('@')
  if count and not count.isdecimal():
    raise UserError(f"a mesh in two processes is written 'expert:4@2'; saw {mesh}@{count}")
  if count:
    return _of_processes(options, mesh, settings, int(count))
  runtime = machine.LOCAL
  if mesh != 'local':
    names = 'split_dense', 'split_update', 'coordinator', 'num_processes', 'process_id'
    runtime = machine.RuntimeOptions(runtime='spmd', mesh=mesh, **{name: getattr(options, name) for name in names})
  return parity.observe(config_of(options, settings), machine.connect(runtime).make_runtime, options.steps, reference)


def _of_processes(options: Options, mesh: str, settings: Sequence[str], count: int):
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'observation')
    command = [sys.executable, '-P', '-m', 'lingvo_moe.cli.commands.main', 'parity', f'--meshes={mesh}']
    command += [f'--{name}={getattr(options, name)}' for name in ('model', 'steps', 'split_dense', 'split_update')]
    command += [f'--gin_bindings={binding}' for binding in options.gin_bindings]
    command += [f'--set={setting}' for setting in (*options.set, *settings)]
    if status := launch.launch([*command, f'--dump={path}'], count):
      raise UserError(f'--mesh={mesh} in {count} processes ended with exit status {status}')
    return pickle.loads(path.read_bytes())


def heading(width: int) -> str:
  """Heading of the table; `width` is that of the longest name of a mesh."""
  return f'{"mesh":{width}}  objective  gradient weights  slots    routed otherwise  symbols  scores   collectives'


def line(mesh: str, row, width: int) -> str:
  """Line of the table for the differences on a mesh."""
  flips = f'{row.flips} (within {row.flip_margin:.0e})' if row.flips else '0'
  kinds = ', '.join(f'{n} {kind}' for kind, n in sorted(row.collectives.items())) or '-'
  numbers = '  '.join(f'{x:7.1e}' for x in (row.gradients, row.weights, row.slots))
  same = 'same' if row.same_ids else 'DIFFER'
  return f'{mesh:{width}}  {row.objective:9.1e}  {numbers}  {flips:16}  {same:7}  {row.scores:7.1e}  {kinds}'


@app.command(Options)
def main(options: Options) -> int:
  from lingvo_moe.addons.analysis import parity
  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.runtime import spmd

  asked = (_EVERY_KIND if options.grid else _FEW) if options.meshes is None else options.meshes
  meshes = [mesh.strip() for mesh in asked.split(';') if mesh.strip()]
  if not meshes:
    raise UserError("--meshes names at least one, such as 'expert:2;data:2,expert:2'")
  if options.equal_states and '@' in asked:
    raise UserError(f'--equal_states is for meshes in one process; saw --meshes={asked}: leave either out')
  parsed = [Mesh.parse(mesh.partition('@')[0]) for mesh in meshes if mesh != 'local']
  if options.dump:
    dumped = observation(options, meshes[0], ())
    if options.process_id == 0:
      pathlib.Path(options.dump).write_bytes(pickle.dumps(dumped))
    return 0
  variants = grid(options) if options.grid else {'': ()}
  for settings in variants.values():
    config_of(options, settings)  # mistakes in it are reported before JAX starts
  most = max((mesh.num_devices for mesh in parsed), default=1)
  spmd.connect(Mesh((('data', most),)))  # all virtual devices at once, before JAX starts with fewer
  names = {(label, mesh): f'{mesh} {label}'.strip() for label in variants for mesh in meshes}
  width = max(len('mesh'), *map(len, names.values()))
  print(heading(width), flush=True)
  work = f': compiling, decoding and {options.steps} train steps'
  rows = {}
  for label, settings in variants.items():
    with working(f'one device {label}'.strip() + work):
      reference = observation(options, 'data:1', settings)
    for mesh in meshes:
      name = names[label, mesh]
      with working(name + work):
        observed = observation(options, mesh, settings, reference if options.equal_states else None)
      rows[name] = parity.compare(reference, observed)
      print(line(name, rows[name], width), flush=True)
      spmd.release()
  failed = [mesh for mesh, row in rows.items() if not row.agrees(options.tolerance)]
  app.write_json(options.json, {m: {**row._asdict(), 'agrees': m not in failed} for m, row in rows.items()})
  print(f'\n{LEGEND}')
  if failed:
    print(f'differ by more than {options.tolerance:g}: {"; ".join(f"{m} ({rows[m].worst})" for m in failed)}')
    return 1
  print(f'all agree with one device to {options.tolerance:g}')
  return 0


if __name__ == '__main__':
  main()
