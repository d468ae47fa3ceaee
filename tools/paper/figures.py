"""Tables and figures of the paper next to the numbers of our compiled programs: Markdown blocks and plots.

Each is made by a method of Figures. If a program could not be compiled, its cells are '-'.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.analysis import torus
from lingvo_moe.analysis.parts import PHASES
from lingvo_moe.core.markdown import image
from lingvo_moe.core.markdown import table
from lingvo_moe.runtime.chips import Topology
from lingvo_moe.tasks import sizes
from lingvo_moe.xla_sharding import Mesh
from paper import claims
from paper import operator_tables
from paper import plots
from paper import programs
from paper.claims import Case
from paper.claims import Row
from paper.report_cache import ReportCache
from paper.report_cache import configured

Report = Mapping[str, Any]

# In the order in which they are made: those without a compiled model first.
NAMES = ('figure9', 'table4', 'compile', 'figure8', 'figure7', 'table1', 'table3', 'newer', 'programs')
_GIB = 2**30
_NONE = '-'


class Figures:
  """Maker of tables and figures, with a method for each of NAMES.

  Args:
    reports: cache of the reports of compiled programs.
    folder: folder for the plots.
    tiny: True to compile the tiny siblings of the giant models instead, for 8 and for 128 cores.
  """

  def __init__(self, reports: ReportCache, folder: str, tiny: bool = False):
    self._reports, self._folder, self._tiny = reports, folder, tiny

  def make(self, name: str) -> list[str]:
    """Markdown blocks of the table or figure with this name."""
    return getattr(self, name)()

  def figure9(self) -> list[str]:
    """Time of AllReduce and AllToAll against the number of partitions."""
    slices = [Topology.parse(text) for text in claims.SLICES]
    devices = [topology.num_devices for topology in slices]
    kinds = {'AllReduce': 'all-reduce', 'AllToAll': 'all-to-all'}
    seconds = {
      (name, size): [_seconds(kind, size, topology) for topology in slices]
      for name, kind in kinds.items()
      for size in claims.FIGURE_9['sizes']
    }
    label = lambda name, size: f'{name}, {size // 2**20} MB'
    rows = [
      (str(d), str(topology), *(f'{1e3 * values[i]:.3f}' for values in seconds.values()))
      for i, (d, topology) in enumerate(zip(devices, slices))
    ]
    grows = {key: values[-1] / values[0] for key, values in seconds.items()}
    with plots.page(self._path('figure9'), width=8) as (axes,):
      for (key, values), colour in zip(seconds.items(), plots.COLOURS):
        plots.line(axes, devices, [1e3 * s for s in values], label(*key), colour)
      for style, size in zip(('--', ':'), claims.FIGURE_9['sizes']):
        first = seconds['AllToAll', size][0]
        root = [1e3 * first * math.sqrt(d / devices[0]) for d in devices]
        plots.line(axes, devices, root, f'sqrt(D), the paper for AllToAll, {size // 2**20} MB', 'black', style)
      plots.powers_of_two(axes, devices)
      plots.plain_log(axes, (0.1, 0.2, 0.5, 1, 2, 5, 10))
      axes.set(xlabel='partitions D (cores of TPU v3)', ylabel='milliseconds, estimated')
      axes.set_title('Collectives on the torus, from bytes and hops')
      axes.figure.legend(fontsize=8, loc='outside lower center', ncols=3)
    return [
      '## Figure 9: communication against the number of partitions',
      'Milliseconds by `torus.seconds`: bytes over the links of the slice that carry most of them, and hops. An axis '
      'of 32 chips is a ring, the ends of a shorter one are not linked; AllToAll is bound by the longest axis, so it '
      'takes as long on 4 x 8 chips as on 8 x 8.',
      table(['D', 'slice', *(f'{label(*key)}, ms' for key in seconds)], rows),
      table(
        [f'time with {devices[-1]} partitions over that with {devices[0]}', 'here', 'the paper'],
        [
          (label(*key), f'{grow:.2f}', f'{claims.FIGURE_9["AllToAll grows"]:g}' if key[0] == 'AllToAll' else 'about 1')
          for key, grow in grows.items()
        ],
      ),
      image('figure9'),
    ]

  def table4(self) -> list[str]:
    """Operators partitioned one by one."""
    return operator_tables.blocks()

  def compile(self) -> list[str]:
    """Compile time and program size against devices and depth."""
    by_devices = [(case.devices, self._get(case)) for case in map(self._growing, self._squares)]
    by_depth = [
      (config.encoder_layers + config.decoder_layers, self._get(case))
      for case, config in ((case, configured(case)) for case in self._depths())
    ]
    figures = {'seconds to compile': _compile_seconds, 'program, MiB of text': _program_mib}
    with plots.page(self._path('compile'), columns=2, rows=2, width=5.5, height=3.2) as pages:
      for row, (figure, of) in enumerate(figures.items()):
        for column, (points, label) in enumerate(((by_devices, 'cores D'), (by_depth, 'layers'))):
          axes, there = pages[2 * row + column], [(x, of(report)) for x, report in points if report]
          xs, ys = zip(*there) if there else ((), ())
          plots.line(axes, xs, ys, 'here', plots.COLOURS[0])
          if there:
            plots.line(axes, xs, [ys[0]] * len(xs), 'constant', 'black', '--')
            axes.set_ylim(0, 1.25 * max(ys))
            plots.powers_of_two(axes, xs) if column == 0 else axes.set_xticks(xs)
          axes.set(xlabel=label, ylabel=figure)
          axes.legend(fontsize=8, loc='lower right')
      pages[0].set_title(f'{_layers_of(self._growing(self._squares[0]))} layers, D experts on D cores')
      pages[1].set_title(f'{configured(self._depths()[0]).num_experts} experts on {self._depths()[0].devices} cores')
    columns = ['seconds to trace and lower', 'seconds to compile', 'program, MiB of text', 'of code']
    columns.append('collectives in a step')
    cells = lambda report: [
      _of(report, lambda r: f'{r["trace_seconds"]:.0f}'),
      _of(report, lambda r: f'{_compile_seconds(r):.0f}'),
      _of(report, lambda r: f'{_program_mib(r):.2f}'),
      _of(report, lambda r: f'{r["code_bytes"] / 2**20:.0f}'),
      _of(report, _collectives),
    ]
    return [
      '## Compile time and program size',
      'The paper: compilation takes near constant time for any number of partitions (section 3.3). Seconds are '
      'wall-clock times, on a machine that may have been busy with other work. With scanned stacks the program is '
      'constant in depth too, except for the trip counts of its loops.',
      f'### Against devices: {_layers_of(self._growing(self._squares[0]))} layers, as many experts as cores',
      table(['cores', *columns], [(str(d), *cells(report)) for d, report in by_devices]),
      _spread(by_devices, 'cores'),
      '### Against depth',
      table(['layers', *columns], [(str(n), *cells(report)) for n, report in by_depth]),
      _spread(by_depth, 'layers'),
      image('compile'),
    ]

  def figure8(self) -> list[str]:
    """Time of a step by the seven parts of the paper and by phase, with few and with many experts."""
    cases = [self._growing(topology) for topology in self._squares[2 if not self._tiny else 0 :]]
    compiled = [(case.devices, report) for case in cases if (report := self._get(case))]
    if not compiled:
      return ['## Figure 8: the time of a step by part', 'None of the programs was compiled.']
    # {part: {phase: milliseconds for each number of devices}}, of the layers and of the rest of a step
    layers, rest = (
      {
        part: {p: [1e3 * of(report['phases'][p]) for _, report in compiled] for p in PHASES}
        for part, of in parts.items()
      }
      for parts in (_LAYER_PARTS, _OTHER_PARTS)
    )
    of_phase = lambda parts, phase: {part: phases[phase] for part, phases in parts.items()}
    forward = of_phase(layers, 'forward')
    whole = _sums(forward)
    shares = {part: [100 * ms / total for ms, total in zip(values, whole)] for part, values in forward.items()}
    with plots.page(self._path('figure8'), columns=2, width=5.8, height=5.6) as (absolute, relative):
      names = [f'{d} experts\non {d} cores' for d, _ in compiled]
      of_step = {phase: _sums(of_phase({**layers, **rest}, phase)) for phase in PHASES}
      plots.stacked(absolute, names, of_step, 'milliseconds a step, estimated')
      absolute.set_title('The whole train step, by phase')
      absolute.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.12), ncols=2)
      plots.stacked(relative, names, shares, 'per cent of the forward time of the layers')
      relative.set_title('Its layers forward, by part')
      relative.legend(fontsize=8, loc='upper center', bbox_to_anchor=(0.5, -0.12), ncols=2)
      for x, (d, _) in enumerate(compiled):
        if d in claims.FIGURE_8['AllToAll'] and not self._tiny:
          at = 100 - 100 * claims.FIGURE_8['AllToAll'][d]
          relative.hlines(at, x - 0.42, x + 0.42, color='black', linestyle='--')
          relative.annotate(
            f'paper: {100 - at:.0f}%', (x + 0.3, at), xytext=(4, 3), textcoords='offset points', fontsize=8
          )
    line = lambda name, phases: (name, *(f'{phases[p][i]:.4g}' for i in range(len(compiled)) for p in PHASES))
    total = lambda parts: {phase: _sums(of_phase(parts, phase)) for phase in PHASES}
    rows = [line(part, phases) for part, phases in layers.items()]
    rows.append(line('the layers', total(layers)))
    rows += [line(part, phases) for part, phases in rest.items()]
    rows.append(line('the step', total({**layers, **rest})))
    percent = [(part, *(f'{share:.1f}%' for share in values)) for part, values in shares.items()]
    blocks = [
      '## Figure 8: the time of a step by part',
      f'{_layers_of(cases[0])} layers, {_tokens_a_core(cases[0]):,} source tokens a core, as many experts and groups '
      'as cores. A roofline: every operation at the peak of what bounds it, with no overlap. The parts are those of '
      "the paper's section 5.2: gate einsums are the first two einsums and the last of Algorithm 2, with the softmax "
      'and the argmax of the gate; cumsum is what finds the places in the queues of experts; dispatch and combine is '
      'the AllToAll. A norm, dropout and residual sum belong to the part they stand before or after.',
      '### Forward, of the time of the layers, as the paper draws it',
      table(['', *(f'{d} experts' for d, _ in compiled)], percent),
      '### Milliseconds a step by phase',
      table(['', *(f'{d} experts, {phase}' for d, _ in compiled for phase in PHASES)], rows),
    ]
    by_devices = {d: i for i, (d, _) in enumerate(compiled)}
    if {128, 2048} <= set(by_devices):
      few, many = by_devices[128], by_devices[2048]
      exchange, cumsum = forward[_EXCHANGE], shares[_CUMSUM]
      blocks += [
        '### Beside the statements of the paper, forward',
        table(
          ['', 'here', 'the paper'],
          [
            *(
              (
                f'share of AllToAll in the layers, {d} experts',
                f'{shares[_EXCHANGE][i]:.0f}%',
                f'{claims.FIGURE_8["AllToAll"][d]:.0%}',
              )
              for d, i in ((128, few), (2048, many))
            ),
            (
              'AllToAll, 2048 experts over 128',
              f'{exchange[many] / exchange[few]:.2f}',
              f'{claims.FIGURE_8["AllToAll grows"]:g}',
            ),
            ('the layers, 2048 experts over 128', f'{whole[many] / whole[few]:.2f}', f'{claims.FIGURE_8["step"]:g}'),
            (
              'share of the gate without einsums in the layers, 2048 experts',
              f'{cumsum[many]:.1f}%',
              f'below {claims.FIGURE_8["cumsum"]:.0%}',
            ),
          ],
        ),
      ]
    return [*blocks, image('figure8')]

  def figure7(self) -> list[str]:
    """Memory of a device by kind."""
    rows = sorted([*claims.TABLE_1, claims.MOE_2048E_24L], key=lambda row: (row.layers, row.weights or 0))
    compiled = [(row, case, report) for row in rows if (report := self._get(case := self._case(row)))]
    kinds = [_memory_kinds(case, report) for _, case, report in compiled]
    if compiled:
      with plots.page(self._path('figure7'), width=11, height=4.8) as (axes,):
        parts = {kind: [memory[kind] / _GIB for memory in kinds] for kind in kinds[0]}
        plots.stacked(axes, [row.name.replace('(', '\n(') for row, _, _ in compiled], parts, 'GiB of a core')
        usable = compiled[0][2]['memory_per_device']['hbm'] / _GIB
        if not self._tiny:
          axes.axhline(usable, color='black', linestyle='--', linewidth=1)
          axes.annotate(f'{usable:.2f} GiB usable', (-0.4, usable), xytext=(0, 3), textcoords='offset points')
          axes.set_ylim(0, 1.3 * max(usable, *_sums(parts)))
        axes.set_title('Memory of a core by kind')
        axes.legend(fontsize=8, ncols=3, loc='upper right')
    columns = list(kinds[0]) if kinds else []
    return [
      '## Figure 7: memory of a device',
      "GiB of a core. The paper's bars are drawn, not printed; its text says that weights and activations stay "
      'constant with more experts and grow with layers, up to where activations are rematerialised (its 36 and 60 '
      "layers; here always, by blocks). Split weights are the experts', and the dense ones too where they are split. "
      'Activations are the values that backward needs from forward; gradients are among the temporaries. The last '
      "columns have the share of the step, at the compiler's estimate, that recomputes values for backward; the "
      "paper's is of the cycles.",
      table(
        ['model', 'cores', *columns, 'in all', 'time of rematerialisation', 'the paper'],
        [
          (row.name, str(report['devices']), *(f'{memory[kind] / _GIB:.2f}' for kind in columns))
          + (f'{report["memory_per_device"]["total"] / _GIB:.2f}', _percent(_rematerialised(report)))
          + (_percent(claims.REMATERIALISED.get(row.layers)),)
          for (row, _, report), memory in zip(compiled, kinds)
        ],
      ),
      *([image('figure7')] if compiled else []),
    ]

  def table1(self) -> list[str]:
    """Models of Table 1: weights, memory and compile time on the paper's machines."""
    rows = []
    for row in claims.TABLE_1:
      case = self._case(row)
      config, report = configured(case), self._get(case)
      rows.append(
        (
          row.name,
          sizes.short(int(row.weights)),
          _of(report, lambda r: sizes.short(r['weights'])),
          f'{case.topology}, {case.devices} cores',
          case.mesh,
          f'{config.batch_tokens:,}',
          f'{_tokens_a_core(case):,}',
          'yes' if case.split_dense else 'no',
          str(config.micro_batches),
          config.remat,
          config.activation_dtype,
          _of(report, lambda r: f'{_compile_seconds(r):.0f}'),
          _of(report, lambda r: f'{r["memory_per_device"]["total"] / _GIB:.2f}'),
          _of(report, lambda r: 'yes' if r['fits'] else 'no'),
          _of(report, _collectives),
        )
      )
    config = configured(self._case(claims.TABLE_1[0]))
    return [
      '## Table 1: the models, compiled for the machines of the paper',
      f'Source tokens are positions of rows of {config.max_length}, packed; a batch has as many target tokens. '
      'Weights, gradients and the optimiser are float32. Of the 16 GiB of a core the compiler allows '
      f'{claims.USABLE_GIB}.',
      table(
        [
          'model',
          'weights: paper',
          'counted',
          'slice',
          'mesh',
          'source tokens a batch',
          'a core',
          'dense weights split',
        ]
        + [
          'micro-batches',
          'rematerialised',
          'activations',
          'seconds to compile',
          f'GiB of {claims.USABLE_GIB}',
          'fits',
        ]
        + ['collectives in a step'],
        rows,
      ),
    ]

  def table3(self) -> list[str]:
    """Steps a second, estimated, next to the paper's measurements."""
    pairs = [(row, self._get(self._case(row))) for row in claims.TABLE_1]
    rate = lambda report, key: 1 / report[key] if report and report[key] else None
    with plots.page(self._path('table3'), width=11, height=4.2) as (axes,):
      series = {
        'the paper, measured': [row.steps_per_second for row, _ in pairs],
        "at the compiler's estimate": [rate(report, 'step_seconds_compiler') for _, report in pairs],
        'at most (roofline)': [rate(report, 'step_seconds_roofline') for _, report in pairs],
      }
      plots.grouped(axes, [row.name.replace('(', '\n(') for row, _ in pairs], series, 'steps a second')
      axes.set_title('Steps a second')
      axes.legend(fontsize=8)
    number = lambda value, digits=2: _NONE if value is None else f'{value:.{digits}f}'
    rows = [
      (
        row.name,
        f'{row.batch_tokens // 2**20}M' if row.batch_tokens else _NONE,
        number(row.steps_per_second),
        number(rate(report, 'step_seconds_compiler')),
        number(rate(report, 'step_seconds_roofline')),
        number(row.core_years, 1),
        number(row.core_years_at(rate(report, 'step_seconds_compiler')), 1),
        _of(report, lambda r: f'{r["flops"] / 1e12:.1f}'),
        _of(report, lambda r: _NONE if r['flops_share_of_peak'] is None else f'{r["flops_share_of_peak"]:.0%}'),
      )
      for row, report in pairs
    ]
    return [
      '## Table 3: steps a second',
      "Estimates, not measurements. The compiler's own counts of cycles and our time of collectives, one after the "
      'other; and a roofline, which is the least that a step could take. A batch here has the source tokens of the '
      'paper and as many target tokens. The paper prints no steps a second for T(96L), which it trained with GPipe, '
      'and nothing for MoE(2048E, 60L). Core-years are those of as many steps as the paper took: its steps a second '
      'times its days, about a trillion tokens; 300,000 for T(96L).',
      table(
        ['model', 'tokens a batch', 'the paper, measured', "at the compiler's estimate", 'at most (roofline)']
        + ['TPU core-years: the paper', "at the compiler's estimate"]
        + ['TFLOPs a core and step', 'of peak, at the estimate'],
        rows,
      ),
      image('table3'),
    ]

  def newer(self) -> list[str]:
    """Model of 600B weights on fewer, newer chips."""
    rows = []
    for case in dict.fromkeys(map(self._in_size, claims.NEWER)):
      config, report = configured(case), self._get(case)
      rows.append(
        (
          case.topology,
          str(case.devices),
          str(config.micro_batches),
          'yes' if case.split_dense else 'no',
          _of(report, lambda r: f'{r["memory_per_device"]["total"] / _GIB:.1f}'),
          _of(report, lambda r: f'{r["memory_per_device"]["hbm"] / _GIB:.1f}'),
          _of(report, lambda r: 'yes' if r['fits'] else f'no: {r["refused"]}'),
          _of(report, lambda r: f'{_compile_seconds(r):.0f}'),
          _of(report, lambda r: f'{1 / r["step_seconds_roofline"]:.2f}'),
        )
      )
    return [
      '## MoE(2048E, 36L) on newer machines',
      'The same batch, in micro-batches of 2,048 tokens a device or at once. Float32 weights and '
      'gradients alone take 4.5 TiB.',
      table(
        [
          'slice',
          'devices',
          'micro-batches',
          'dense weights split',
          'GiB of a device',
          'allowed',
          'fits',
          'seconds to compile',
        ]
        + ['steps a second at most (roofline)'],
        rows,
      ),
    ]

  def programs(self) -> list[str]:
    """All programs of the giants: training, evaluation, scoring, encoding and decoding."""
    return programs.blocks(lambda case: (case := self._in_size(case), self._get(case)))

  @property
  def _squares(self) -> Sequence[str]:
    return (claims.SQUARES[0], claims.SQUARES[2]) if self._tiny else claims.SQUARES

  def _growing(self, topology: str) -> Case:
    return claims.tiny_growing(topology) if self._tiny else claims.growing(topology)

  def _depths(self) -> list[Case]:
    """Cases with equal experts and a growing number of layers."""
    if self._tiny:
      first = self._growing(self._squares[0])
      layers = lambda n: (*first.values, ('encoder_layers', n), ('decoder_layers', n))
      return [first, *(dataclasses.replace(first, values=layers(n)) for n in (4, 8))]
    rows = [row for row in (*claims.TABLE_1, claims.MOE_2048E_24L) if '(2048E' in row.name]
    return [row.case for row in sorted(rows, key=lambda row: row.layers)]

  def _case(self, row: Row) -> Case:
    return self._in_size(row.case)

  def _in_size(self, case: Case) -> Case:
    return claims.tiny(case) if self._tiny else case

  def _get(self, case: Case) -> Report | None:
    return self._reports.get(case)

  def _path(self, name: str) -> str:
    return os.path.join(self._folder, f'{name}.png')


def _seconds(kind: str, size: int, topology: Topology) -> float:
  """Seconds of a collective among all devices of a slice."""
  places = torus.places(topology)
  return torus.seconds(kind, size, np.arange(len(places))[None], places, topology.chip)


# Seconds, by phase of a report, of the parts into which the paper's section 5.2 and Figure 8 divide a MoE layer and the
# Transformer layer next to it, and of the rest of a step.
_seconds_of = lambda part, *kinds: lambda phase: sum(phase[part][f'{kind}_seconds'] for kind in kinds)
_both = lambda part: _seconds_of(part, 'compute', 'collective')
_EXCHANGE, _CUMSUM = 'MoE dispatch and combine (AllToAll)', 'gate cumsum'
_LAYER_PARTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
  'Transformer attention': _both('attention'),
  'Transformer projections': _both('projections'),
  'Transformer feed-forward': _both('feed-forward'),
  'MoE feed-forward': _both('experts'),
  'gate einsums': lambda phase: _both('gating')(phase) + _seconds_of('dispatch/combine', 'compute')(phase),
  _CUMSUM: _both('cumsum'),
  _EXCHANGE: _seconds_of('dispatch/combine', 'collective'),
}
_OTHER_PARTS: Mapping[str, Callable[[Mapping[str, Any]], float]] = {
  'output softmax': _both('softmax'),
  'optimiser and AllReduce': _both('optimiser'),
  'other': _both('other'),
}


def _memory_kinds(case: Case, report: Report) -> dict[str, float]:
  """Bytes of a device by kind; they sum to the total."""
  used = report['memory_per_device']
  mesh = Mesh.parse(case.mesh, split_dense=case.split_dense)
  split = 0
  for spec in configured(case).program().weight_specs.values():
    parts = math.prod(map(mesh.size, mesh.stored_spec(spec.shape, spec.dims)))
    split += 4 * spec.size // parts if parts > 1 else 0
  return {
    'weights, split': split,
    'weights, whole': used['weights'] - split,
    'optimiser': used['slots'],
    'activations': used['activations'],
    'temporaries': used['temporaries'],
    'other': used['other'],
  }


def _rematerialised(report: Report) -> float | None:
  """Share of a step, at the compiler's estimate, that recomputes values; None if the compiler estimates no cycles."""
  estimate, phases = report['step_seconds_compiler'], report['phases']
  if not estimate:
    return None
  total = lambda phase, key: sum(part[key] for part in phases[phase].values())
  exchange = {phase: total(phase, 'collective_seconds') for phase in PHASES}
  cycles = {phase: total(phase, 'cycles') for phase in PHASES}
  computing = (estimate - sum(exchange.values())) * cycles['rematerialisation'] / sum(cycles.values())
  return (computing + exchange['rematerialisation']) / estimate


def _percent(share: float | None) -> str:
  return _NONE if share is None else f'{share:.0%}'


def _sums(parts: Mapping[str, Sequence[float]]) -> list[float]:
  return [sum(values) for values in zip(*parts.values())]


def _of(report: Report | None, cell: Callable[[Report], str]) -> str:
  return _NONE if report is None else cell(report)


def _compile_seconds(report: Report) -> float:
  return report['compile_seconds']


def _program_mib(report: Report) -> float:
  return report['program_bytes'] / 2**20


def _collectives(report: Report) -> str:
  found = ', '.join(f'{count} {kind}' for kind, count in sorted(report['collective_counts'].items())) or 'none'
  return f'{found} (of {report["uncounted_loops"]} loops only once)' if report['uncounted_loops'] else found


def _layers_of(case: Case) -> int:
  config = configured(case)
  return config.encoder_layers + config.decoder_layers


def _tokens_a_core(case: Case) -> int:
  return configured(case).batch_tokens // case.devices


def _spread(points: Sequence[tuple[int, Report | None]], what: str) -> str:
  """Sentence with the ratios of the largest to the smallest compile time and program size."""
  there = [(x, report) for x, report in points if report]
  if len(there) < 2:
    return 'Too few programs were compiled to compare.'
  ratio = lambda of: max(of(r) for _, r in there) / min(of(r) for _, r in there)
  return (
    f'From {there[0][0]} to {there[-1][0]} {what} the longest compilation takes {ratio(_compile_seconds):.2f} times '
    f'the shortest, and the largest program {ratio(_program_mib):.2f} times the smallest.'
  )
