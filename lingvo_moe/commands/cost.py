"""lingvo-moe cost --model=mt.m4.MoE2048E36L --topology=v3:32x32 [--program=decode] [--mesh=expert:2048] [--json=FILE]

Estimates the cost of a program of a model on a TPU slice: it compiles the program with libtpu's compiler, which needs
no TPU, and prints compile time and program size; the memory of a device by kind, and the compiler's limit; FLOPs; every
collective with the mesh axes that it spans and the layer that it comes from; and the time by part of the model and by
phase, as a roofline. Nothing is allocated and nothing is run.

--program is train (a train step), eval (dev loss), score (log-probabilities of given translations), encode (the encoder
alone, of a model that has one) or decode (flat beam search, counted as max_length steps). Where no token is dropped, as in all but train, a MoE
layer makes as many rounds over its experts as the longest queue needs; --rounds says how many to assume.

A topology is the number of chips along each axis of the torus: v2:16x16, v3:32x32, v4:4x4x4, v5e:16x16, v5p:4x4x4,
v6e:16x16, tpu7x:4x4x4. A chip of v2, v3, v4 and tpu7x is two devices. --platform=cpu compiles for a mesh of virtual CPU
devices, without times. A batch has --batch_tokens source positions, in rows of the model's max_length, and as many
target positions. The default mesh is the paper's, expert:<devices>, and data:<devices> for a model without experts.
--placement=expert:8x4 puts each group of devices along the axis expert in a box of 8 x 4 chips of the torus; without
it devices follow the order of libtpu, host by host (on v3, blocks of 2 x 2 chips). The report has the time of the
collectives for the placement with the fastest AllToAll along one axis of the torus, and along two. The exit status is 1
if the program does not fit; then the largest values and settings that would need less are listed.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import os
import sys

from absl import flags

from lingvo_moe import app
from lingvo_moe.commands import values
from lingvo_moe.core import markdown as markdown_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import Working

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # no accelerator of this machine is needed

_MODEL = flags.DEFINE_string('model', None, 'A registered model.', required=True)
_TOPOLOGY = flags.DEFINE_string('topology', '', "A TPU slice, such as 'v3:32x32'.")
_PLACEMENT = flags.DEFINE_string(
  'placement', '', "Chips that a mesh axis spans along each axis of the torus, such as 'expert:8x4'."
)
_PLATFORM = flags.DEFINE_enum('platform', 'tpu', ['tpu', 'cpu'], 'tpu: of --topology; cpu: virtual devices of --mesh.')
_MESH = flags.DEFINE_string('mesh', '', "Devices by axis, such as 'data:16,expert:128'.")
_SPLIT_DENSE = flags.DEFINE_bool('split_dense', False, 'Split the weights of dense layers over the devices too.')
_BATCH_TOKENS = flags.DEFINE_integer('batch_tokens', 0, "Source positions of a batch; 0: the model's.", lower_bound=0)
_PROGRAM = flags.DEFINE_enum('program', 'train', ['train', 'eval', 'score', 'encode', 'decode'], 'What to compile.')
_ROUNDS = flags.DEFINE_integer(
  'rounds', 1, 'Rounds over the experts in each MoE layer where no token is dropped; 1: perfect balance.', lower_bound=1
)
_CHOOSE = flags.DEFINE_bool('choose', False, 'Compile every layout of the devices, and print the cheapest first.')
_DEVICES = flags.DEFINE_integer('devices', 0, 'For --choose without --topology: number of virtual devices of this CPU.')
_LAYOUTS = flags.DEFINE_list('layouts', [], "For --choose: layouts such as 'EP,EP+DP'; all by default.")
_BINDINGS = values.define('max_length=128')
_JSON = flags.DEFINE_string('json', None, 'File for the report as JSON.')
_MARKDOWN = flags.DEFINE_string('markdown', None, 'File for the report as a page of Markdown.')

_GIB = 2**30


def table(report, title: str = '', markdown: bool = False) -> str:
  """Report as text, or with headings and tables in Markdown."""
  sections = [
    *_summary(report),
    _memory(report),
    _largest(report),
    _parts(report),
    _phases(report),
    _collectives(report),
  ]
  sections.append(_placements(report))
  heading = f'{report.model}, {report.program}, on {report.platform}, mesh {report.mesh}'
  lines = [f'# {heading}' if markdown else heading, '']
  for name, columns, rows in sections:
    if not rows:
      continue
    lines += [f'## {name}' if markdown else name, '']
    lines += [markdown_lib.table(columns, rows)] if markdown else _aligned(columns, rows)
    lines.append('')
  return '\n'.join(lines + _verdict(report))


def _summary(report) -> list:
  rows = [
    ('weights', f'{report.weights:,}'),
    ('devices', f'{report.devices}'),
    (f'{report.counted} a batch', f'{report.batch_tokens:,} ({report.batch_tokens // report.devices:,} a device)'),
    ('seconds to trace and lower', f'{report.trace_seconds:.1f}'),
    ('seconds to compile', f'{report.compile_seconds:.1f}'),
    ('program', f'{report.program_bytes / 2**20:.1f} MiB of text, {report.code_bytes / 2**20:.1f} MiB of code'),
    ('TFLOPs a device and step', f'{report.flops / 1e12:.4g}'),
  ]
  if report.flops_share_of_peak is not None:
    rows.append(("of peak, at the compiler's estimate", f'{report.flops_share_of_peak:.1%}'))
  if report.step_seconds_compiler is not None:
    rows.append(("seconds a step, at the compiler's estimate", f'{report.step_seconds_compiler:.4g}'))
  if report.step_seconds_roofline is not None:
    rows.append(('seconds a step, at least (roofline)', f'{report.step_seconds_roofline:.4g}'))
  if report.tokens_per_second is not None:
    rows.append((f'{report.counted} a second', f'{report.tokens_per_second:,.0f}'))
  if report.round_seconds_compiler or report.round_seconds_roofline:
    more = report.round_seconds_compiler or report.round_seconds_roofline
    rows.append((f'seconds of a round in every MoE layer, of {report.rounds}', f'{more:.4g}'))
  if report.moe_all_to_alls:
    rows.append(('AllToAlls of a MoE layer and round', f'{report.moe_all_to_alls:g}'))
  return [('What', ('', ''), rows)]


def _memory(report) -> tuple:
  used = dataclasses.asdict(report.memory_per_device)
  rows = [(name, f'{size / _GIB:.3f}') for name, size in used.items() if size is not None]
  return 'Memory of a device', ('', 'GiB'), rows


def _largest(report) -> tuple:
  rows = [(f'{held.bytes / _GIB:.3f}', held.shape, held.layer, held.op) for held in report.largest]
  return 'Largest values when most is in memory', ('GiB', 'shape', 'layer', 'operation'), rows


def _parts(report) -> tuple:
  rows = [_cost(report, name, part) for name, part in report.parts.items()]
  return 'By part, of a device and step', _columns(report), rows


def _phases(report) -> tuple:
  rows = [_cost(report, name, functools.reduce(operator.add, parts.values())) for name, parts in report.phases.items()]
  return 'By phase, of a device and step', _columns(report), rows


def _columns(report) -> tuple:
  times = ('ms computing', 'ms in collectives', 'of the step') if report.step_seconds_roofline else ()
  return '', 'GFLOPs', 'GB moved', *times


def _cost(report, name, part) -> list[str]:
  row = [name, f'{part.flops / 1e9:.4g}', f'{part.bytes / 1e9:.4g}']
  if report.step_seconds_roofline:
    both = part.compute_seconds + part.collective_seconds
    milliseconds = [f'{1e3 * s:.4g}' for s in (part.compute_seconds, part.collective_seconds)]
    row += [*milliseconds, f'{both / report.step_seconds_roofline:.1%}']
  return row


def _placements(report) -> tuple:
  rows = []
  for cost in report.placements:
    milliseconds = [f'{1e3 * s:.4g}' for s in (cost.all_to_all_seconds, cost.collective_seconds)]
    rows.append([cost.placement, 'x'.join(map(str, cost.chips)), f'{cost.torus_axes}', *milliseconds])
  columns = '--placement', 'chips of a group', 'torus axes', 'ms in AllToAll', 'ms in all collectives'
  return 'Placement of the expert axis on the torus', columns, rows


def _collectives(report) -> tuple:
  rows = []
  for c in sorted(report.collectives, key=lambda c: -c.count * c.bytes):
    row = [c.kind, f'{c.count}', f'{c.bytes / 2**20:.4g}', ','.join(c.axes), c.layer, c.part, c.phase]
    rows.append([*row, f'{1e3 * c.seconds:.4g}'] if c.seconds is not None else row)
  times = ('ms',) if report.step_seconds_roofline else ()
  return 'Collectives', ('kind', 'times', 'MiB a device', 'axes', 'layer', 'part', 'phase', *times), rows


def _aligned(columns, rows) -> list[str]:
  rows = [columns, *rows] if any(columns) else rows
  widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
  return ['  ' + '  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]


def _verdict(report) -> list[str]:
  notes = []
  if report.uncounted_loops:
    notes.append(f'{report.uncounted_loops} loops of unknown length are counted as if they ran once.')
  if report.fits:
    return [*notes, 'It fits.']
  return [
    *notes,
    f'It does not fit: {report.refused}',
    'What would take less:',
    *(f'  {line}' for line in report.advice),
  ]


def main(argv):
  del argv
  from lingvo_moe.core import configuration

  bindings = _BINDINGS(_MODEL.value)
  if _BATCH_TOKENS.value and _PROGRAM.value == 'train':
    bindings.append(f'{_MODEL.value.rpartition(".")[2]}.batch_tokens = {_BATCH_TOKENS.value}')
  config = configuration.resolve(_MODEL.value, [], bindings)
  if _CHOOSE.value:
    return _choose(config)
  if _DEVICES.value or _LAYOUTS.value:
    raise UserError('--devices and --layouts are for --choose: add it, or give --mesh')
  mesh, topology = _where(config)
  from lingvo_moe.analysis import cost

  if _PROGRAM.value != 'train':
    config = cost.at_inference(config, mesh, _PROGRAM.value, _BATCH_TOKENS.value)
  with Working(f'tracing and compiling {_MODEL.value}, {_PROGRAM.value}, for {topology or mesh}'):
    report = cost.estimate(_MODEL.value, config, mesh, topology, _PROGRAM.value, _ROUNDS.value)
  print(table(report))
  if _JSON.value:
    with open(_JSON.value, 'w', encoding='utf-8') as f:
      json.dump(report.to_json(), f, indent=2)
  if _MARKDOWN.value:
    with open(_MARKDOWN.value, 'w', encoding='utf-8') as f:
      f.write(table(report, markdown=True) + '\n')
  return 0 if report.fits else 1


def _choose(config):
  """Prints the layouts, the cheapest first; returns the exit status."""
  from lingvo_moe.analysis import layouts
  from lingvo_moe.runtime.chips import Topology

  if _MESH.value or _PLACEMENT.value or _SPLIT_DENSE.value:
    raise UserError('--choose finds the mesh: leave out --mesh, --placement and --split_dense')
  if bool(_TOPOLOGY.value) == bool(_DEVICES.value):
    raise UserError(
      '--choose takes the number of --devices, such as 8, or a --topology, such as v3:2x2; give one of them'
    )
  topology = Topology.parse(_TOPOLOGY.value) if _TOPOLOGY.value else None
  devices = topology.num_devices if topology else _DEVICES.value
  found = layouts.choose(
    _MODEL.value,
    config,
    layouts.layouts(devices, bool(config.num_experts), _LAYOUTS.value),
    topology,
    _PROGRAM.value,
    _BATCH_TOKENS.value,
    _ROUNDS.value,
    progress=lambda line: print(f'compiling {line}', file=sys.stderr, flush=True),
  )
  print(choice(found, _MODEL.value, str(topology or f'{devices} devices')))
  if _JSON.value:
    with open(_JSON.value, 'w', encoding='utf-8') as f:
      json.dump([candidate.to_json() for candidate in found], f, indent=2)
  if _MARKDOWN.value:
    with open(_MARKDOWN.value, 'w', encoding='utf-8') as f:
      f.write(choice(found, _MODEL.value, str(topology or f'{devices} devices'), markdown=True) + '\n')
  return 0 if found and not found[0].refused else 1


def choice(found, model: str, where: str, markdown: bool = False) -> str:
  """Layouts as text or Markdown: a table, the reasons of those that were refused, and the cheapest."""
  fitting, refused = [c for c in found if not c.refused], [c for c in found if c.refused]
  timed = any(c.seconds is not None for c in fitting)
  rows = []
  for c in fitting:
    chunks = f' capacity_chunks={c.chunks}' if c.chunks > 1 else ''
    counts = ', '.join(f'{count} {kind}' for kind, count in sorted(c.report.collective_counts.items())) or 'none'
    row = [c.layout.name, c.layout.flags + chunks, *([f'{c.seconds:.4g}'] if timed else []), f'{c.bytes / 2**20:.4g}']
    rows.append([*row, f'{c.report.memory_per_device.total / _GIB:.4g}', counts])
  columns = ('layout', 'flags', *(('s a step',) if timed else ()), 'MiB in collectives', 'GiB a device', 'collectives')
  lines = [f'{"# " if markdown else ""}{model}, layouts on {where}', '']
  if rows:
    lines += [markdown_lib.table(columns, rows)] if markdown else _aligned(columns, rows)
  lines += ['', *(f'{c.layout.name} {c.layout.flags} is refused: {c.refused}' for c in refused)] if refused else []
  return '\n'.join([*lines, '', _cheapest(fitting, timed)])


def _cheapest(fitting, timed: bool) -> str:
  if not fitting:
    return 'No layout fits.'
  best = fitting[0]
  chunks = f' with capacity_chunks = {best.chunks}' if best.chunks > 1 else ''
  text = f'Cheapest: {best.layout.name}, {best.layout.flags}{chunks}'
  if len(fitting) == 1:
    return f'{text}, the only one that fits.'
  unit = (lambda c: f'{c.seconds:.4g} s a step') if timed else (lambda c: f'{c.bytes / 2**20:.4g} MiB in collectives')
  others = [('next', fitting[1])] + ([('last', fitting[-1])] if len(fitting) > 2 else [])
  against = []
  for place, c in others:
    chunks = f' with capacity_chunks = {c.chunks}' if c.chunks > 1 else ''
    times = f'{c.cost / best.cost:.3g} times as much' if best.cost else 'more'
    against.append(f'the {place}, {c.layout.name} {c.layout.flags}{chunks}, takes {times}')
  return f'{text}: {unit(best)}; {"; ".join(against)}.'


def _where(config):
  """Mesh and topology from the flags; the topology is None on a CPU."""
  from lingvo_moe.runtime.chips import Topology
  from lingvo_moe.runtime.placement import place
  from lingvo_moe.xla_sharding import Mesh

  if _PLATFORM.value == 'cpu':
    if _TOPOLOGY.value or _PLACEMENT.value or not _MESH.value:
      raise UserError("--platform=cpu takes --mesh, such as 'expert:8', and no --topology or --placement")
    return Mesh.parse(_MESH.value, split_dense=_SPLIT_DENSE.value), None
  if not _TOPOLOGY.value:
    raise UserError("--topology says for which TPU, such as 'v3:32x32'; --platform=cpu needs none")
  topology = Topology.parse(_TOPOLOGY.value)
  mesh = _MESH.value or f'{"expert" if config.num_experts else "data"}:{topology.num_devices}'
  return place(Mesh.parse(mesh, split_dense=_SPLIT_DENSE.value), topology, _PLACEMENT.value), topology


def command() -> None:
  """The command as typed."""
  app.run(main)


if __name__ == '__main__':
  command()
