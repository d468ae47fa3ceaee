#!/usr/bin/env python
"""python tools/parity.py --model=mt.cldr.Tiny [--meshes='expert:2;expert:4;data:2,expert:2'] [--json=FILE]

Compares a model on meshes with the same model on one device. It decodes with the initial weights and trains for a few
steps, with the same seeds and batches in float32, and prints the differences of the loss, all gradients, the updated
weights and the optimizer slots (max|a - b| / max(max|a|, 1e-4 of the model's largest gradient), the worst tensor of the
worst step); the number of tokens that were routed differently; the differences of the decoder's symbols and scores; and
the collectives in the partitioned train step. The devices are virtual ones of this CPU, or those that JAX finds.
'expert:4@2' is that mesh in two processes; 'local' is plain TensorFlow. The exit status is 1 if a difference is above
--tolerance, one of scores is above 3e-5, a symbol differs, or a token was routed differently by a decision with a
margin above 1e-6.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import sys
import tempfile

from absl import flags

from lingvo_moe import app
from lingvo_moe.core.errors import UserError

_MODEL = flags.DEFINE_string('model', None, 'A registered model.', required=True)
_MESHES = flags.DEFINE_string('meshes', 'local;expert:2;expert:4;data:2,expert:2', 'Meshes, separated by semicolons.')
_GIN_BINDINGS = flags.DEFINE_multi_string('gin_bindings', [], 'E.g. \'Tiny.dispatch = "einsum"\'; may be repeated.')
_STEPS = flags.DEFINE_integer('steps', 3, 'Number of train steps.', lower_bound=1)
_TOLERANCE = flags.DEFINE_float('tolerance', 1e-5, 'Largest difference allowed.', lower_bound=0.0)
_JSON = flags.DEFINE_string('json', None, 'File for the table as JSON.')
_SPLIT_DENSE = flags.DEFINE_bool('split_dense', False, 'Split the weights of dense layers over the devices too.')
_DUMP = flags.DEFINE_string('dump', None, 'Internal, set by this command: file for the observation of process 0.')
_COORDINATOR = flags.DEFINE_string('coordinator', '', 'Internal, set by this command.')
_NUM_PROCESSES = flags.DEFINE_integer('num_processes', 1, 'Internal, set by this command.')
_PROCESS_ID = flags.DEFINE_integer('process_id', 0, 'Internal, set by this command.')


def config_of(name: str, bindings):
  """Configuration of the model in float32, with dropout if it has none, as masks must be equal on every mesh."""
  import dataclasses

  from lingvo_moe.core import configuration

  config = configuration.resolve(name, [], bindings)
  if not config.residual_dropout:
    config = dataclasses.replace(config, input_dropout=0.1, residual_dropout=0.1, attention_dropout=0.1)
  return dataclasses.replace(config, activation_dtype='float32')


def observation(name: str, bindings, mesh: str, steps: int, split_dense: bool = False):
  """Observation of 'local', of a mesh, or of a mesh in several processes ('expert:4@2')."""
  from lingvo_moe import runtime_flags
  from lingvo_moe.analysis import parity

  mesh, _, count = mesh.partition('@')
  if count and not count.isdecimal():
    raise UserError(f"a mesh in two processes is written 'expert:4@2'; saw {mesh}@{count}")
  if count:
    return _of_processes(name, bindings, mesh, int(count), steps, split_dense)
  if mesh == 'local':
    choice = runtime_flags.LOCAL
  else:
    choice = runtime_flags.Choice(
      'spmd', mesh, split_dense, _COORDINATOR.value, _NUM_PROCESSES.value, _PROCESS_ID.value
    )
    choice.connect()
  return parity.observe(config_of(name, bindings), choice.make, steps)


def _of_processes(name, bindings, mesh, count, steps, split_dense):
  from lingvo_moe import launcher

  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'observation')
    command = [sys.executable, os.path.abspath(__file__), f'--model={name}', f'--meshes={mesh}', f'--dump={path}']
    command += [f'--steps={steps}', f'--split_dense={split_dense}', *(f'--gin_bindings={b}' for b in bindings)]
    if status := launcher.launch(command, count):
      raise UserError(f'--mesh={mesh} in {count} processes ended with exit status {status}')
    with open(path, 'rb') as f:
      return pickle.load(f)


def table(rows: dict) -> str:
  """Table of the differences by mesh, as text."""
  width = max(len('mesh'), *map(len, rows))
  lines = [f'{"mesh":{width}}  loss     gradient weights  slots    routed otherwise  symbols  scores   collectives']
  for mesh, row in rows.items():
    flips = f'{row.flips} (within {row.flip_margin:.0e})' if row.flips else '0'
    kinds = ', '.join(f'{n} {kind}' for kind, n in sorted(row.collectives.items())) or '-'
    numbers = '  '.join(f'{x:7.1e}' for x in (row.loss, row.gradients, row.weights, row.slots))
    same = 'same' if row.same_ids else 'DIFFER'
    lines.append(f'{mesh:{width}}  {numbers}  {flips:16}  {same:7}  {row.scores:7.1e}  {kinds}')
  return '\n'.join(lines)


def main(argv):
  del argv
  from lingvo_moe.analysis import parity
  from lingvo_moe.xla_sharding import Mesh

  meshes = [mesh.strip() for mesh in _MESHES.value.split(';') if mesh.strip()]
  if not meshes:
    raise UserError("--meshes names at least one, such as 'expert:2;data:2,expert:2'")
  parsed = [Mesh.parse(mesh.partition('@')[0]) for mesh in meshes if mesh != 'local']
  most = max((mesh.num_devices for mesh in parsed), default=1)
  observe = lambda mesh: observation(_MODEL.value, _GIN_BINDINGS.value, mesh, _STEPS.value, _SPLIT_DENSE.value)
  if _DUMP.value:
    found = observe(meshes[0])
    if _PROCESS_ID.value == 0:
      with open(_DUMP.value, 'wb') as f:
        pickle.dump(found, f)
    return 0
  config_of(_MODEL.value, _GIN_BINDINGS.value)  # mistakes in it are reported before JAX starts
  _make_devices(most)
  with contextlib.redirect_stderr(sys.stderr):
    reference = observe('data:1')
    rows = {mesh: parity.compare(reference, observe(mesh)) for mesh in meshes}
  print(table(rows))
  failed = [mesh for mesh, row in rows.items() if not row.agrees(_TOLERANCE.value)]
  if _JSON.value:
    with open(_JSON.value, 'w', encoding='utf-8') as f:
      json.dump({mesh: {**row._asdict(), 'agrees': mesh not in failed} for mesh, row in rows.items()}, f, indent=2)
  if failed:
    print(f'differ by more than {_TOLERANCE.value:g}: {"; ".join(f"{m} ({rows[m].worst})" for m in failed)}')
    return 1
  print(f'all agree with one device to {_TOLERANCE.value:g}')
  return 0


def _make_devices(count: int) -> None:
  """Creates the virtual devices that the largest mesh needs, before JAX starts with fewer."""
  from lingvo_moe.runtime import spmd
  from lingvo_moe.xla_sharding import Mesh

  spmd.connect(Mesh((('data', count),)))


if __name__ == '__main__':
  app.run(main)
