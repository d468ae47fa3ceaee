"""lingvo-moe parity --model=mt.cldr.Tiny [--meshes='expert:2;expert:4;data:2,expert:2'] [--grid] [--json=FILE]

Compares a model on meshes with the same model on one device. Decodes with the initial weights and trains for a few
steps, with the same seeds and batches in float32. Prints the differences of
  the loss, all gradients, the updated weights and the optimizer slots: max|a - b| / max(max|a|, 1e-4 of the model's
  largest gradient), for the worst tensor of the worst step
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

from absl import flags

from lingvo_moe.cli import app, machine
from lingvo_moe.cli.commands import launch, values
from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import working

_MODEL = flags.DEFINE_string('model', None, 'A registered model.', required=True)
_MESHES = flags.DEFINE_string(
  'meshes', None, "Meshes, separated by semicolons; 'local;expert:2;expert:4;data:2,expert:2' by default."
)
_GRID = flags.DEFINE_bool('grid', False, 'Run every mesh with both dispatchers, unscanned and scanned.')
_BINDINGS = values.define('dispatch=einsum')
_STEPS = flags.DEFINE_integer('steps', 3, 'Number of train steps.', lower_bound=1)
_EQUAL_STATES = flags.DEFINE_bool('equal_states', False, 'Begin every step with the weights and slots of one device.')
_TOLERANCE = flags.DEFINE_float('tolerance', 1e-5, 'Largest difference allowed.', lower_bound=0.0)
_JSON = flags.DEFINE_string('json', None, 'File for the table as JSON.')
_SPLIT_DENSE = flags.DEFINE_bool('split_dense', False, 'Split the weights of dense layers over the devices too.')
_SPLIT_UPDATE = flags.DEFINE_bool(
  'split_update', False, 'Split the update of weights that devices copy, and its slots.'
)
_DUMP = flags.DEFINE_string('dump', None, 'Internal, set by this command: file for the observation of process 0.')
_COORDINATOR = flags.DEFINE_string('coordinator', '', 'Internal, set by this command.')
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', 1, 'Internal, set by this command.')
_PROCESS_ID = flags.DEFINE_integer('process_id', 0, 'Internal, set by this command.')

LEGEND = """\
loss, gradient, weights, slots: largest difference, max|a - b| / max(max|a|, 1e-4 of the largest gradient), in any step
routed otherwise: tokens that went to other experts, within the margin of that decision
symbols, scores: the decoder's translations, and the largest difference of their scores
collectives: in the partitioned train step"""

_FEW = 'local;expert:2;expert:4;data:2,expert:2'
_EVERY_KIND = 'data:2;expert:2;model:2;data:2,expert:2;data:2,model:2;expert:2,model:2;data:2,expert:2,model:2'
_EVERY_KIND += ';node:2,expert:2;expert:2,hidden:2;data:2/expert:2'


def grid(bindings) -> dict[str, list[str]]:
  """Bindings of every dispatcher for meshes by label, unscanned and scanned; a dense model has no dispatcher."""
  own = _MODEL.value.rpartition('.')[2]
  scans = {'unscanned': [f'{own}.scan_layers = False']}
  scans['scanned'] = [f'{own}.scan_layers = True', f"{own}.remat = 'block'"]
  dispatches = ('einsum', 'gather') if config_of(bindings).num_experts else ('auto',)
  return {
    f'{dispatch} {scan}': [*bindings, f'{own}.dispatch = {dispatch!r}', *scanned]
    for dispatch in dispatches
    for scan, scanned in scans.items()
  }


def config_of(bindings):
  """Configuration of the model in float32, with dropout if it has none, as masks must be equal on every mesh."""
  config = configuration.resolve(_MODEL.value, [], bindings)
  changes = {'activation_dtype': 'float32'}
  if not config.residual_dropout:
    rates = 'input_dropout', 'residual_dropout', 'attention_dropout'
    changes |= {name: 0.1 for name in rates if hasattr(config, name)}
  return dataclasses.replace(config, **changes)


def observation(mesh: str, bindings, reference=None):
  """Observation of 'local', of a mesh, or of a mesh in several processes ('expert:4@2')."""
  from lingvo_moe.addons.analysis import parity

  mesh, _, count = mesh.partition('@')
  if count and not count.isdecimal():
    raise UserError(f"a mesh in two processes is written 'expert:4@2'; saw {mesh}@{count}")
  if count:
    return _of_processes(mesh, bindings, int(count))
  options = machine.LOCAL
  if mesh != 'local':
    processes = _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    options = machine.RuntimeOptions('spmd', mesh, _SPLIT_DENSE.value, *processes, split_update=_SPLIT_UPDATE.value)
  return parity.observe(config_of(bindings), machine.connect(options).make_runtime, _STEPS.value, reference)


def _of_processes(mesh: str, bindings, count: int):
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder, 'observation')
    command = [
      sys.executable,
      '-P',
      '-m',
      'lingvo_moe.cli.commands.main',
      'parity',
      f'--meshes={mesh}',
      f'--dump={path}',
    ]
    command += [
      flag.serialize() for flag in (flags.FLAGS[name] for name in ('model', 'steps', 'split_dense', 'split_update'))
    ]
    command += [f'--gin_bindings={b}' for b in bindings]
    if status := launch.launch(command, count):
      raise UserError(f'--mesh={mesh} in {count} processes ended with exit status {status}')
    return pickle.loads(path.read_bytes())


def heading(width: int) -> str:
  """Heading of the table; `width` is that of the longest name of a mesh."""
  return f'{"mesh":{width}}  loss     gradient weights  slots    routed otherwise  symbols  scores   collectives'


def line(mesh: str, row, width: int) -> str:
  """Line of the table for the differences on a mesh."""
  flips = f'{row.flips} (within {row.flip_margin:.0e})' if row.flips else '0'
  kinds = ', '.join(f'{n} {kind}' for kind, n in sorted(row.collectives.items())) or '-'
  numbers = '  '.join(f'{x:7.1e}' for x in (row.loss, row.gradients, row.weights, row.slots))
  same = 'same' if row.same_ids else 'DIFFER'
  return f'{mesh:{width}}  {numbers}  {flips:16}  {same:7}  {row.scores:7.1e}  {kinds}'


@app.command()
def main():
  from lingvo_moe.addons.analysis import parity
  from lingvo_moe.core.mesh import Mesh
  from lingvo_moe.runtime import spmd

  asked = (_EVERY_KIND if _GRID.value else _FEW) if _MESHES.value is None else _MESHES.value
  meshes = [mesh.strip() for mesh in asked.split(';') if mesh.strip()]
  if not meshes:
    raise UserError("--meshes names at least one, such as 'expert:2;data:2,expert:2'")
  if _EQUAL_STATES.value and '@' in asked:
    raise UserError(f'--equal_states is for meshes in one process; saw --meshes={asked}: leave either out')
  parsed = [Mesh.parse(mesh.partition('@')[0]) for mesh in meshes if mesh != 'local']
  bindings = _BINDINGS(_MODEL.value)
  if _DUMP.value:
    dumped = observation(meshes[0], bindings)
    if _PROCESS_ID.value == 0:
      pathlib.Path(_DUMP.value).write_bytes(pickle.dumps(dumped))
    return 0
  variants = grid(bindings) if _GRID.value else {'': bindings}
  for bindings in variants.values():
    config_of(bindings)  # mistakes in it are reported before JAX starts
  most = max((mesh.num_devices for mesh in parsed), default=1)
  spmd.connect(Mesh((('data', most),)))  # all virtual devices at once, before JAX starts with fewer
  names = {(label, mesh): f'{mesh} {label}'.strip() for label in variants for mesh in meshes}
  width = max(len('mesh'), *map(len, names.values()))
  print(heading(width), flush=True)
  work = f': compiling, decoding and {_STEPS.value} train steps'
  rows = {}
  for label, bindings in variants.items():
    with working(f'one device {label}'.strip() + work):
      reference = observation('data:1', bindings)
    for mesh in meshes:
      name = names[label, mesh]
      with working(name + work):
        observed = observation(mesh, bindings, reference if _EQUAL_STATES.value else None)
      rows[name] = parity.compare(reference, observed)
      print(line(name, rows[name], width), flush=True)
      spmd.release()
  failed = [mesh for mesh, row in rows.items() if not row.agrees(_TOLERANCE.value)]
  app.write_json(_JSON.value, {m: {**row._asdict(), 'agrees': m not in failed} for m, row in rows.items()})
  print(f'\n{LEGEND}')
  if failed:
    print(f'differ by more than {_TOLERANCE.value:g}: {"; ".join(f"{m} ({rows[m].worst})" for m in failed)}')
    return 1
  print(f'all agree with one device to {_TOLERANCE.value:g}')
  return 0


if __name__ == '__main__':
  main()
