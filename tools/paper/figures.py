"""Tables and figures of the paper next to the numbers of our compiled programs: Markdown blocks and plots.

Each is made by a method of Figures. If a program could not be compiled, its cells are '-'.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.addons.analysis import torus
from lingvo_moe.addons.analysis.parts import PHASES
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.models import sizes
from lingvo_moe.runtime.chips import Topology
from lingvo_moe.text.markdown import table
from paper import claims, operator_tables, plots, programs, step_times
from paper.claims import Case, Row
from paper.report_cache import ReportCache, configured

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
      plots.image('figure9'),
    ]

  def table4(self) -> list[str]:
    """Operators partitioned one by one."""
    return operator_tables.blocks()

  def compile(self) -> list[str]:
    """Compile time and program size against devices and depth."""
    by_devices = [(case.devices, self._get(case)) for case in map(self._growing, self._squares)]
    by_depth = [(step_times.layers_of(case), self._get(case)) for case in self._depths()]
    figures = {'seconds to compile': _compile_seconds, 'program, MiB of text': _program_mib}
    with plots.page(self._path('compile'), columns=2, rows=2, width=5.5, height=3.2) as pages:
      for row, (figure, of) in enumerate(figures.items()):
        for column, (points, label) in enumerate(((by_devices, 'cores D'), (by_depth, 'layers'))):
          axes, compiled = pages[2 * row + column], [(x, of(report)) for x, report in points if report]
          xs, ys = zip(*compiled) if compiled else ((), ())
          plots.line(axes, xs, ys, 'here', plots.COLOURS[0])
          if compiled:
            plots.line(axes, xs, [ys[0]] * len(xs), 'constant', 'black', '--')
            axes.set_ylim(0, 1.25 * max(ys))
            plots.powers_of_two(axes, xs) if column == 0 else axes.set_xticks(xs)
          axes.set(xlabel=label, ylabel=figure)
          axes.legend(fontsize=8, loc='lower right')
      pages[0].set_title(f'{step_times.layers_of(self._growing(self._squares[0]))} layers, D experts on D cores')
      pages[1].set_title(f'{configured(self._depths()[0]).num_experts} experts on {self._depths()[0].devices} cores')
    columns = {
      'seconds to trace and lower': lambda x, report: _of(report, lambda r: f'{r["trace_seconds"]:.0f}'),
      'seconds to compile': lambda x, report: _of(report, _compile_time),
      'program, MiB of text': lambda x, report: _of(report, lambda r: f'{_program_mib(r):.2f}'),
      'of code': lambda x, report: _of(report, lambda r: f'{r["code_bytes"] / 2**20:.0f}'),
      'collectives in a step': lambda x, report: _of(report, _collectives),
    }
    against = lambda what, points: [_table({what: lambda x, report: str(x)} | columns, points), _spread(points, what)]
    return [
      '## Compile time and program size',
      'The paper: compilation takes near constant time for any number of partitions (section 3.3). Seconds are '
      'wall-clock times, on a machine that may have been busy with other work. With scanned stacks the program is '
      'constant in depth too, except for the trip counts of its loops.',
      f'### Against devices: {step_times.layers_of(self._growing(self._squares[0]))} layers, as many experts as cores',
      *against('cores', by_devices),
      '### Against depth',
      *against('layers', by_depth),
      plots.image('compile'),
    ]

  def figure8(self) -> list[str]:
    """Time of a step by the seven parts of the paper and by phase, with few and with many experts."""
    cases = [self._growing(topology) for topology in self._squares[2 if not self._tiny else 0 :]]
    compiled = [(case.devices, report) for case in cases if (report := self._get(case))]
    return step_times.blocks(cases[0], compiled, self._path('figure8'), self._tiny)

  def figure7(self) -> list[str]:
    """Memory of a device by kind."""
    rows = sorted([*claims.TABLE_1, claims.MOE_2048E_24L], key=lambda row: (row.layers, row.weights or 0))
    compiled = [
      (row, report, _memory_kinds(case, report)) for row in rows if (report := self._get(case := self._case(row)))
    ]
    kinds = list(compiled[0][2]) if compiled else []
    if compiled:
      with plots.page(self._path('figure7'), width=11, height=4.8) as (axes,):
        parts = {kind: [memory[kind] / _GIB for *_, memory in compiled] for kind in kinds}
        plots.stacked(axes, [row.name.replace('(', '\n(') for row, *_ in compiled], parts, 'GiB of a core')
        usable = _gib(compiled[0][1], 'hbm') if not self._tiny else 0
        if usable:
          axes.axhline(usable, color='black', linestyle='--', linewidth=1)
          axes.annotate(f'{usable:.2f} GiB usable', (-0.4, usable), xytext=(0, 3), textcoords='offset points')
          axes.set_ylim(0, 1.3 * max(usable, *step_times.sums(parts)))
        axes.set_title('Memory of a core by kind')
        axes.legend(fontsize=8, ncols=3, loc='upper right')
    columns = {
      'model': lambda row, report, memory: row.name,
      'cores': lambda row, report, memory: str(report['devices']),
    }
    columns |= {kind: lambda row, report, memory, kind=kind: f'{memory[kind] / _GIB:.2f}' for kind in kinds}
    columns |= {
      'in all': lambda row, report, memory: f'{_gib(report):.2f}',
      'time of rematerialisation': lambda row, report, memory: _percent(_rematerialised(report)),
      'the paper': lambda row, report, memory: _percent(claims.REMATERIALISED.get(row.layers)),
    }
    return [
      '## Figure 7: memory of a device',
      "GiB of a core. The paper's bars are drawn, not printed; its text says that weights and activations stay "
      'constant with more experts and grow with layers, up to where activations are rematerialised (its 36 and 60 '
      "layers; here as Table 1 says). Split weights are the experts', and the dense ones too where they are split. "
      'Activations are the values that backward needs from forward; gradients are among the temporaries. The last '
      "columns have the share of the step, at the compiler's estimate, that recomputes values for backward; the "
      "paper's is of the cycles.",
      _table(columns, compiled),
      *([plots.image('figure7')] if compiled else []),
    ]

  def table1(self) -> list[str]:
    """Models of Table 1: weights, memory and compile time on the paper's machines."""
    cases = [(row, case := self._case(row), configured(case), self._get(case)) for row in claims.TABLE_1]
    columns = {
      'model': lambda row, case, config, report: row.name,
      'weights: paper': lambda row, case, config, report: sizes.short(int(row.weights)),
      'counted': lambda *of: _of(of[-1], lambda r: sizes.short(r['weights'])),
      'slice': lambda row, case, config, report: f'{case.topology}, {case.devices} cores',
      'mesh': lambda row, case, config, report: case.mesh,
      'source tokens a batch': lambda row, case, config, report: f'{config.batch_tokens:,}',
      'a core': lambda row, case, config, report: f'{step_times.tokens_a_core(case):,}',
      'dense weights split': lambda row, case, config, report: _yes(case.split_dense),
      'micro-batches': lambda row, case, config, report: str(config.micro_batches),
      'rematerialised': lambda row, case, config, report: config.remat,
      'activations': lambda row, case, config, report: config.activation_dtype,
      'seconds to compile': lambda *of: _of(of[-1], _compile_time),
      f'GiB of {claims.USABLE_GIB}': lambda *of: _of(of[-1], lambda r: f'{_gib(r):.2f}'),
      'fits': lambda *of: _of(of[-1], lambda r: _yes(r['fits'])),
      'collectives in a step': lambda *of: _of(of[-1], _collectives),
    }
    return [
      '## Table 1: the models, compiled for the machines of the paper',
      f'Source tokens are positions of rows of {cases[0][2].max_length}, packed; a batch has as many target tokens. '
      'Weights, gradients and the optimiser are float32. Of the 16 GiB of a core the compiler allows '
      f'{claims.USABLE_GIB}.',
      _table(columns, cases),
    ]

  def table3(self) -> list[str]:
    """Steps a second, estimated, next to the paper's measurements."""
    pairs = [(row, self._get(self._case(row))) for row in claims.TABLE_1]
    rate = lambda report, key: 1 / report[f'step_seconds_{key}'] if report and report[f'step_seconds_{key}'] else None
    with plots.page(self._path('table3'), width=11, height=4.2) as (axes,):
      series = {
        'the paper, measured': [row.steps_per_second for row, _ in pairs],
        "at the compiler's estimate": [rate(report, 'compiler') for _, report in pairs],
        'at most (roofline)': [rate(report, 'roofline') for _, report in pairs],
      }
      plots.grouped(axes, [row.name.replace('(', '\n(') for row, _ in pairs], series, 'steps a second')
      axes.set_title('Steps a second')
      axes.legend(fontsize=8)
    number = lambda value, digits=2: _NONE if value is None else f'{value:.{digits}f}'
    columns = {
      'model': lambda row, report: row.name,
      'tokens a batch': lambda row, report: f'{row.batch_tokens // 2**20}M' if row.batch_tokens else _NONE,
      'the paper, measured': lambda row, report: number(row.steps_per_second),
      "at the compiler's estimate": lambda row, report: number(rate(report, 'compiler')),
      'at most (roofline)': lambda row, report: number(rate(report, 'roofline')),
      'TPU core-years: the paper': lambda row, report: number(row.core_years, 1),
      "core-years at the compiler's estimate": lambda row, report: number(
        row.core_years_at(rate(report, 'compiler')), 1
      ),
      'TFLOPs a core and step': lambda row, report: _of(report, lambda r: f'{r["flops"] / 1e12:.1f}'),
      'of peak, at the estimate': lambda row, report: _of(report, lambda r: _percent(r['flops_share_of_peak'])),
    }
    return [
      '## Table 3: steps a second',
      "Estimates, not measurements. The compiler's own counts of cycles and our time of collectives, one after the "
      'other; and a roofline, which is the least that a step could take. A batch here has the source tokens of the '
      'paper and as many target tokens. The paper prints no steps a second for T(96L), which it trained with GPipe, '
      'and nothing for MoE(2048E, 60L). Core-years are those of as many steps as the paper took: its steps a second '
      'times its days, about a trillion tokens; 300,000 for T(96L).',
      _table(columns, pairs),
      plots.image('table3'),
    ]

  def newer(self) -> list[str]:
    """Model of 600B weights on fewer, newer chips."""
    cases = [(case, configured(case), self._get(case)) for case in dict.fromkeys(map(self._in_size, claims.NEWER))]
    columns = {
      'slice': lambda case, config, report: case.topology,
      'devices': lambda case, config, report: str(case.devices),
      'micro-batches': lambda case, config, report: str(config.micro_batches),
      'dense weights split': lambda case, config, report: _yes(case.split_dense),
      'GiB of a device': lambda *of: _of(of[-1], lambda r: f'{_gib(r):.1f}'),
      'allowed': lambda *of: _of(of[-1], lambda r: f'{_gib(r, "hbm"):.1f}'),
      'fits': lambda *of: _of(of[-1], lambda r: 'yes' if r['fits'] else f'no: {r["refused"]}'),
      'seconds to compile': lambda *of: _of(of[-1], _compile_time),
      'steps a second at most (roofline)': lambda *of: _of(of[-1], lambda r: f'{1 / r["step_seconds_roofline"]:.2f}'),
    }
    return [
      '## MoE(2048E, 36L) on newer machines',
      'The same batch, in micro-batches of 2,048 tokens a device or at once. Float32 weights and '
      'gradients alone take 4.5 TiB.',
      _table(columns, cases),
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
  coordinates = torus.coordinates(topology)
  return torus.seconds(kind, size, np.arange(len(coordinates))[None], coordinates, topology.chip)


def _memory_kinds(case: Case, report: Report) -> dict[str, float]:
  """Bytes of a device by kind; they sum to the total."""
  used = report['memory_per_device']
  mesh = Mesh.parse(case.mesh, split_dense=case.split_dense)
  split = 0
  for spec in configured(case).program().weight_specs.values():
    parts = mesh.stored_sharding(spec.shape, spec.dims).parts
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


def _of(report: Report | None, cell: Callable[[Report], str]) -> str:
  return _NONE if report is None else cell(report)


def _compile_seconds(report: Report) -> float:
  return report['compile_seconds']


def _compile_time(report: Report) -> str:
  return f'{report["compile_seconds"]:.0f}'


def _gib(report: Report, kind: str = 'total') -> float:
  return report['memory_per_device'][kind] / _GIB


def _yes(value: bool) -> str:
  return 'yes' if value else 'no'


def _table(columns: Mapping[str, Callable[..., str]], rows: Sequence[Sequence[Any]]) -> str:
  """Markdown table of columns, each a name and the function of a row that makes its cell."""
  return table(list(columns), [[cell(*row) for cell in columns.values()] for row in rows])


def _program_mib(report: Report) -> float:
  return report['program_bytes'] / 2**20


def _collectives(report: Report) -> str:
  found = ', '.join(f'{count} {kind}' for kind, count in sorted(report['collective_counts'].items())) or 'none'
  return f'{found} (of {report["uncounted_loops"]} loops only once)' if report['uncounted_loops'] else found


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
