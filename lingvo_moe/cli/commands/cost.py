"""lingvo-moe cost --model=mt.m4.MoE2048E36L --topology=v3:32x32 [--program=decode] [--mesh=expert:2048] [--json=FILE]

Predicts the cost of a program of a model on a TPU slice, or on GPUs of a host (--topology=h100:8). Compiles the program
with the devices' own compiler, which needs none of them; nothing is allocated or run. Prints
  compile time and program size
  the memory of a device by kind, and the limit of the compiler, or of JAX on a GPU
  FLOPs, and every collective with its mesh axes and its layer
  the time by part of the model and by phase, as a roofline
The exit status is 1 if the program does not fit. The largest values are then listed, and settings that need less.

--program is train (a train step), eval (dev loss), score (log-probabilities of given translations), encode (the
encoder, of a model that has one) or decode (flat beam search, counted as max_length steps). All programs but train drop
no token. Their MoE layers make as many rounds over the experts as the longest queue needs; --rounds states how many to
assume.

--choose_remat compiles the train step with each policy of the field `remat`: 'none' keeps the results of all matrix
products for the gradient, 'attention' those outside attention, 'block' only the inputs of blocks of layers. It prints
time, recomputation and memory of each, the fastest that fits first.

A topology is the number of chips along each axis of the torus: v2:16x16, v3:32x32, v4:4x4x4, v5e:16x16, v5p:4x4x4,
v6e:16x16, tpu7x:4x4x4. A chip of v2, v3, v4 and tpu7x is two devices. Up to 8 GPUs of a host, linked by NVLink, are
a100, h100 or h200, and h100:8 for 8; their compiler is in the extra gpu-aot (5.5 GB). --platform=cpu compiles for a
mesh of virtual CPU devices, without times. A batch has --batch_tokens source positions, in rows of the model's
max_length, and as many target positions. The default mesh is the paper's, expert:<devices>, and data:<devices> for a
model without experts.

--placement=expert:8x4 puts each group of devices along the axis expert in a box of 8 x 4 chips of the torus. Without
it, devices follow the order of libtpu, host by host (on v3, blocks of 2 x 2 chips). The report lists the time of the
collectives for the placement with the fastest AllToAll along one axis of the torus, and along two.
"""

import dataclasses
import functools
import operator
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from lingvo_moe.cli import app
from lingvo_moe.cli.machine import MeshOptions
from lingvo_moe.cli.model_flags import ModelOptions
from lingvo_moe.cli.options import flag
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.progress import working
from lingvo_moe.runtime.chips import GPUS, Topology
from lingvo_moe.text import markdown as markdown_lib

os.environ.setdefault('JAX_PLATFORMS', 'cpu')  # no accelerator of this machine is needed


class Options(MeshOptions, ModelOptions):
  """Options of the command."""

  platform: str = flag('tpu', 'tpu: TPUs or GPUs of --topology; cpu: virtual devices of --mesh.', one_of=['tpu', 'cpu'])
  batch_tokens: int = flag(0, "Source positions of a batch; 0: the model's.", lower_bound=0)
  program: str = flag('train', 'What to compile.', one_of=['train', 'eval', 'score', 'encode', 'decode'])
  rounds: int = flag(
    1, 'Rounds over the experts in each MoE layer where no token is dropped; 1: perfect balance.', lower_bound=1
  )
  choose: bool = flag(False, 'Compile every layout of the devices, and print the cheapest first.')
  choose_remat: bool = flag(
    False, 'Compile the train step under every policy of remat, and print the fastest that fits first.'
  )
  devices: int = flag(0, 'For --choose without --topology: number of virtual devices of this CPU.')
  layouts: Sequence[str] = flag((), "For --choose: layouts such as 'EP,EP+DP'; all by default.")
  json: str | None = flag(None, 'File for the report as JSON.')
  markdown: str | None = flag(None, 'File for the report as a page of Markdown.')


_GIB = 2**30


def table(report, markdown: bool = False) -> str:
  """Report as text, or with headings and tables in Markdown."""
  memory = [(name, size) for name, size in dataclasses.asdict(report.memory_per_device).items() if size is not None]
  phases = {name: functools.reduce(operator.add, parts.values()) for name, parts in report.phases.items()}
  timed = report.step_seconds_roofline is not None
  costs = '', 'GFLOPs', 'GB moved', 'kernels', *(('ms computing', 'ms in collectives', 'of the step') if timed else ())
  collectives = 'kind', 'times', 'MiB a device', 'axes', 'layer', 'part', 'phase', *(('ms',) if timed else ())
  placements = '--placement', 'chips of a group', 'torus axes', 'ms in AllToAll', 'ms in all collectives'
  placed = [
    [c.placement, 'x'.join(map(str, c.chips)), f'{c.torus_axes}', _ms(c.all_to_all_seconds), _ms(c.collective_seconds)]
    for c in report.placements
  ]
  largest = [(f'{held.bytes / _GIB:.3f}', held.shape, held.layer, held.op) for held in report.largest]
  sections = [
    ('What', ('', ''), _summary(report)),
    ('Memory of a device', ('', 'GiB'), [(name, f'{size / _GIB:.3f}') for name, size in memory]),
    ('Largest values when most is in memory', ('GiB', 'shape', 'layer', 'operation'), largest),
    ('By part, of a device and step', costs, [_cost(report, *item) for item in report.parts.items()]),
    ('By phase, of a device and step', costs, [_cost(report, *item) for item in phases.items()]),
    ('Collectives', collectives, _collectives(report)),
    ('Placement of the expert axis on the torus', placements, placed),
  ]
  notes = []
  if report.uncounted_loops:
    notes.append(f'{report.uncounted_loops} loops of unknown length are counted as if they ran once.')
  if report.fits:
    notes.append('It fits.')
  else:
    notes += [f'It does not fit: {report.refused}', 'What would take less:', *(f'  {line}' for line in report.advice)]
  title = f'{report.model}, {report.program}, on {report.platform}, mesh {report.mesh}'
  return _page(title, sections, notes, markdown)


def _page(title: str, sections, notes: list[str], markdown: bool) -> str:
  """Sections (name, columns, rows), those with rows, and notes after them."""
  lines = [f'# {title}' if markdown else title, '']
  for name, columns, rows in sections:
    if rows:
      lines += [f'## {name}' if markdown else name, ''] if name else []
      lines += [markdown_lib.table(columns, rows) if markdown else _aligned(columns, rows), '']
  return '\n'.join(lines + notes)


def _aligned(columns, rows) -> str:
  rows = [columns, *rows] if any(columns) else rows
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join('  ' + '  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _summary(report) -> list[tuple[str, str]]:
  round_seconds = report.round_seconds_compiler or report.round_seconds_roofline
  tokens = f'{report.batch_tokens:,} ({report.batch_tokens // report.devices:,} a device)'
  text = lambda value, form: None if value is None else format(value, form)
  gpu = GPUS.get(report.platform.partition(':')[0])
  estimate = f"at {gpu.reached:.0%} of the GPU's peaks" if gpu else "at the compiler's estimate"
  rows = [
    ('weights', f'{report.weights:,}'),
    ('devices', f'{report.devices}'),
    (f'{report.counted} a batch', tokens),
    ('seconds to trace and lower', f'{report.trace_seconds:.1f}'),
    ('seconds to compile', f'{report.compile_seconds:.1f}'),
    ('program', f'{report.program_bytes / 2**20:.1f} MiB of text, {report.code_bytes / 2**20:.1f} MiB of code'),
    ('TFLOPs a device and step', f'{report.flops / 1e12:.4g}'),
    (f'of peak, {estimate}', text(report.flops_share_of_peak, '.1%')),
    (f'seconds a step, {estimate}', text(report.step_seconds_compiler, '.4g')),
    ('seconds a step, at least (roofline)', text(report.step_seconds_roofline, '.4g')),
    (f'{report.counted} a second', text(report.tokens_per_second, ',.0f')),
    (f'seconds of a round in every MoE layer, of {report.rounds}', text(round_seconds or None, '.4g')),
    ('bubble of a pipeline', text(report.bubble or None, '.1%')),
    ('AllToAlls of a MoE layer and round', text(report.moe_all_to_alls or None, 'g')),
  ]
  return [(name, value) for name, value in rows if value is not None]


def _cost(report, name, part) -> list[str]:
  row = [name, f'{part.flops / 1e9:.4g}', f'{part.bytes / 1e9:.4g}', f'{part.kernels}']
  if report.step_seconds_roofline is None:
    return row
  share = (part.compute_seconds + part.collective_seconds) / report.step_seconds_roofline
  return [*row, _ms(part.compute_seconds), _ms(part.collective_seconds), f'{share:.1%}']


def _collectives(report) -> list[list[str]]:
  row = lambda c: [c.kind, f'{c.count}', f'{c.bytes / 2**20:.4g}', ','.join(c.axes), c.layer, c.part, c.phase]
  ordered = sorted(report.collectives, key=lambda c: -c.count * c.bytes)
  return [row(c) if c.seconds is None else [*row(c), _ms(c.seconds)] for c in ordered]


def _ms(seconds: float) -> str:
  return f'{1e3 * seconds:.4g}'


@app.command(Options)
def main(options: Options) -> int:
  own_batch = {'batch_tokens': options.batch_tokens} if options.batch_tokens and options.program == 'train' else {}
  config = options.resolve(options.model, **own_batch)
  if options.choose and options.choose_remat:
    raise UserError('--choose finds a mesh, and --choose_remat is for one: choose the mesh first')
  if options.choose:
    return _choose(options, config)
  if options.devices or options.layouts:
    raise UserError('--devices and --layouts are for --choose: add it, or give --mesh')
  mesh, topology = _mesh_and_topology(options, config)
  from lingvo_moe.addons.analysis import cost

  if options.choose_remat:
    return _choose_remat(options, config, mesh, topology)
  if options.program != 'train':
    config = cost.for_program(config, mesh, options.program, options.batch_tokens)
  with working(f'tracing and compiling {options.model}, {options.program}, for {topology or mesh}'):
    report = cost.estimate(options.model, config, mesh, topology, options.program, options.rounds)
  _write(options, functools.partial(table, report), report.to_json())
  return 0 if report.fits else 1


def _write(options: Options, page, values) -> None:
  """Prints a page, page(markdown=False), and writes the files that options name."""
  print(page())
  app.write_json(options.json, values)
  if options.markdown:
    pathlib.Path(options.markdown).write_text(page(markdown=True) + '\n', encoding='utf-8')


def _choose_remat(options: Options, config: Any, mesh, topology) -> int:
  """Prints the policies of rematerialisation, the fastest that fits first; returns the exit status."""
  from lingvo_moe.addons.analysis import cost

  if options.program != 'train':
    raise UserError(f'--choose_remat is for --program=train; saw {options.program}: only training has gradients')
  progress = lambda policy: print(f'compiling with remat={policy}', file=sys.stderr, flush=True)
  reports = cost.choose_remat(options.model, config, mesh, topology, progress)
  page = functools.partial(_policies, reports, f'{options.model}, rematerialisation on {topology or mesh}')
  _write(options, page, {policy: report.to_json() for policy, report in reports.items()})
  return 0 if any(report.fits for report in reports.values()) else 1


def _policies(reports, title: str, markdown: bool = False) -> str:
  """Policies of rematerialisation as text or Markdown: a table, and the fastest that fits."""
  rows, timed = [], all(report.step_seconds_roofline is not None for report in reports.values())
  for policy, report in reports.items():
    again = sum(part.flops for part in report.phases['rematerialisation'].values()) / max(report.flops, 1)
    seconds = report.step_seconds_compiler or report.step_seconds_roofline
    known = [f'{seconds:.4g}', _ms(report.seconds_of('rematerialisation'))] if report.fits else ['-'] * 2
    times = known if timed else []
    row = [f'--set remat={policy}', *times, f'{again:.1%}', f'{report.memory_per_device.total / _GIB:.4g}']
    rows.append([*row, 'yes' if report.fits else 'no'])
  columns = 'flags', *(('s a step', 'ms recomputing') if timed else ()), 'of FLOPs', 'GiB a device', 'fits'
  policy, report = next(iter(reports.items()))
  note = f'Fastest that fits: --set remat={policy}.' if report.fits else 'No policy fits.'
  return _page(title, [('', columns, rows)], [note], markdown)


def _choose(options: Options, config: Any) -> int:
  """Prints the layouts, the cheapest first; returns the exit status."""
  from lingvo_moe.addons.analysis import layouts

  if options.mesh or options.placement or options.split_dense or options.split_update:
    raise UserError('--choose finds the mesh: leave out --mesh, --placement, --split_dense and --split_update')
  if bool(options.topology) == bool(options.devices):
    raise UserError(
      '--choose takes the number of --devices, such as 8, or a --topology, such as v3:2x2; give one of them'
    )
  topology = Topology.parse(options.topology) if options.topology else None
  devices = topology.num_devices if topology else options.devices
  candidates = layouts.choose(
    options.model,
    config,
    layouts.layouts(devices, bool(config.num_experts), options.layouts, getattr(config, 'scan_layers', False)),
    topology,
    options.program,
    options.batch_tokens,
    options.rounds,
    progress=lambda line: print(f'compiling {line}', file=sys.stderr, flush=True),
  )
  page = functools.partial(_layouts, candidates, f'{options.model}, layouts on {topology or f"{devices} devices"}')
  _write(options, page, [candidate.to_json() for candidate in candidates])
  return 0 if candidates and not candidates[0].refused else 1


def _layouts(candidates, title: str, markdown: bool = False) -> str:
  """Layouts as text or Markdown: a table, the reasons of those that were refused, and the cheapest."""
  fitting, refused = [c for c in candidates if not c.refused], [c for c in candidates if c.refused]
  timed = any(c.seconds is not None for c in fitting)
  rows = []
  for c in fitting:
    chunks = f' capacity_chunks={c.chunks}' if c.chunks > 1 else ''
    counts = ', '.join(f'{count} {kind}' for kind, count in sorted(c.report.collective_counts.items())) or 'none'
    row = [c.layout.name, c.layout.flags + chunks, *([f'{c.seconds:.4g}'] if timed else []), f'{c.bytes / 2**20:.4g}']
    rows.append([*row, f'{c.report.memory_per_device.total / _GIB:.4g}', counts])
  columns = ('layout', 'flags', *(('s a step',) if timed else ()), 'MiB in collectives', 'GiB a device', 'collectives')
  notes = [f'{c.layout.name} {c.layout.flags} is refused: {c.refused}' for c in refused] + [''] * bool(refused)
  return _page(title, [('', columns, rows)], [*notes, _cheapest(fitting, timed)], markdown)


def _cheapest(fitting, timed: bool) -> str:
  if not fitting:
    return 'No layout fits.'
  chunks = lambda c: f' with capacity_chunks = {c.chunks}' if c.chunks > 1 else ''
  best, *others = fitting
  text = f'Cheapest: {best.layout.name}, {best.layout.flags}{chunks(best)}'
  if not others:
    return f'{text}, the only one that fits.'
  takes = f'{best.seconds:.4g} s a step' if timed else f'{best.bytes / 2**20:.4g} MiB in collectives'
  against = []
  for place, c in [('next', others[0]), ('last', others[-1])][: len(others)]:
    times = f'{c.cost / best.cost:.3g} times as much' if best.cost else 'more'
    against.append(f'the {place}, {c.layout.name} {c.layout.flags}{chunks(c)}, takes {times}')
  return f'{text}: {takes}; {"; ".join(against)}.'


def _mesh_and_topology(options: Options, config: Any):
  """Mesh and topology of the options; the topology is None on a CPU."""
  if options.platform == 'cpu':
    if options.topology or options.placement or not options.mesh:
      raise UserError("--platform=cpu takes --mesh, such as 'expert:8', and no --topology or --placement")
    return options.parse_mesh(), None
  if not options.topology:
    raise UserError("--topology says for which TPU or GPU, such as 'v3:32x32' or 'h100:8'; --platform=cpu needs none")
  topology = Topology.parse(options.topology)
  mesh = options.mesh or f'{"expert" if config.num_experts else "data"}:{topology.num_devices}'
  return dataclasses.replace(options, mesh=mesh).parse_mesh(), topology


if __name__ == '__main__':
  main()
