"""Tables and figures of the paper, with a stand-in for lingvo-moe cost, and once with the real one."""

import dataclasses
import importlib.util
import json
import math
import pathlib
import re

import forks
import pytest

pytest.importorskip('jax')
pytest.importorskip('matplotlib')

from lingvo_moe.addons.analysis.parts import PARTS
from lingvo_moe.models import sizes
from paper import claims, figures, plots, report_cache, step_times
from paper.claims import Case
from paper.report_cache import ReportCache

ROOT = pathlib.Path(__file__).resolve().parents[3]
TOOL = ROOT / 'tools' / 'paper_figures.py'
TINY = claims.tiny_growing('v3:2x2')

# Answers as lingvo-moe cost does, and keeps a list of what it was asked; ends as it is told for some models.
STAND_IN = """
import json, pathlib, sys
args = dict(arg[2:].split('=', 1) for arg in sys.argv[1:] if not arg.startswith('--gin'))
bindings = [arg.split('=', 1)[1] for arg in sys.argv[1:] if arg.startswith('--gin')]
here = pathlib.Path(__file__).parent
with open(here / 'asked', 'a') as f:
  f.write(json.dumps({**args, 'bindings': bindings}) + '\\n')
report = json.loads((here / 'report.json').read_text())
report['devices'] = int(args['mesh'].split(':')[1])
ends = json.loads((here / 'ends.json').read_text())
if args['model'] in ends.get('crash', ()):
  print('the compiler said')
  print('something')
  sys.exit(134)
report['fits'] = args['model'] not in ends.get('refused', ())
report['refused'] = '' if report['fits'] else 'Used 40.60G of 15.48G hbm.'
pathlib.Path(args['json']).write_text(json.dumps(report))
sys.exit(0 if report['fits'] else 1)
"""

# Milliseconds a power of two each, so that any sum of them tells what it is made of.
SECONDS = {part: (1e-3 * 2**i, 1e-3 * 2 ** (i + len(PARTS))) for i, part in enumerate(PARTS)}
TIMES = {'forward': 1, 'rematerialisation': 0.5, 'backward': 2, 'update': 0.25}
PHASES = {
  phase: {
    part: {'cycles': 100 * times, 'compute_seconds': times * a, 'collective_seconds': times * b}
    for part, (a, b) in SECONDS.items()
  }
  for phase, times in TIMES.items()
}
REPORT = {
  'weights': 1_234_567,
  'trace_seconds': 1.0,
  'compile_seconds': 2.0,
  'program_bytes': 3 * 2**20,
  'code_bytes': 40 * 2**20,
  'uncounted_loops': 0,
  'memory_per_device': {
    'weights': 2 * 2**30,
    'slots': 2**20,
    'activations': 2**30,
    'temporaries': 2**29,
    'other': 0,
    'total': int(3.501 * 2**30),
    'hbm': int(15.48 * 2**30),
  },
  'collective_counts': {'all-to-all': 12, 'all-reduce': 3},
  'phases': PHASES,
  'flops': 5 * 10**12,
  'flops_share_of_peak': 0.5,
  'step_seconds_roofline': 0.25,
  'step_seconds_compiler': 0.5,
}


@pytest.fixture
def stand_in(tmp_path):
  """A folder with the stand-in, and what it is to answer."""
  folder = tmp_path / 'stand_in'
  folder.mkdir()
  (folder / 'cost.py').write_text(STAND_IN)
  (folder / 'report.json').write_text(json.dumps(REPORT))
  (folder / 'ends.json').write_text('{}')
  return folder


def asked(stand_in):
  path = stand_in / 'asked'
  return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def cache(stand_in, tmp_path, told=None):
  tell = (lambda line: None) if told is None else told.append
  return ReportCache(str(tmp_path / 'out'), [str(stand_in / 'cost.py')], tell)


def made(stand_in, tmp_path, name, tiny=True):
  reports = cache(stand_in, tmp_path)
  return '\n\n'.join(figures.Figures(reports, str(tmp_path / 'out'), tiny).make(name))


def cells(text, first, which=0):
  """The row of a table that begins with a cell: the first one, or a later one."""
  row = [line for line in text.splitlines() if line.startswith(f'| {first} |')][which]
  return [cell.strip() for cell in row.strip('|').split('|')]


def test_the_command_is_told_the_case(stand_in, tmp_path):
  case = Case('mt.m4.T96LTiny', 'v3:2x2', 'data:8', (('max_length', 32), ('remat', 'block')), split_dense=True)
  assert cache(stand_in, tmp_path).get(case)['devices'] == 8
  (was,) = asked(stand_in)
  assert (was['model'], was['topology'], was['mesh'], was['split_dense']) == (
    'mt.m4.T96LTiny',
    'v3:2x2',
    'data:8',
    'True',
  )
  assert was['bindings'] == ['T96LTiny.max_length = 32', "T96LTiny.remat = 'block'"]


def test_nothing_is_compiled_twice_not_even_by_another_run(stand_in, tmp_path):
  first = cache(stand_in, tmp_path)
  assert first.get(TINY) == first.get(TINY) == cache(stand_in, tmp_path).get(TINY)
  assert len(asked(stand_in)) == 1


def test_whatever_would_be_another_program_has_another_report(stand_in, tmp_path):
  reports = cache(stand_in, tmp_path)
  names = {
    reports.name(case)
    for case in (
      TINY,
      Case(TINY.model, TINY.topology, TINY.mesh),
      Case(TINY.model, TINY.topology, TINY.mesh, TINY.values, split_dense=True),
      Case(TINY.model, TINY.topology, 'data:2,expert:4', TINY.values),
      claims.tiny_growing('v3:4x4'),
    )
  }
  assert len(names) == 5
  assert all(re.fullmatch(r'MoE2048E12LTiny-v3_\dx\d-[0-9a-f]{12}', name) for name in names)
  decoding = reports.name(dataclasses.replace(TINY, program='decode'))
  assert re.fullmatch(r'MoE2048E12LTiny-decode-v3_2x2-[0-9a-f]{12}', decoding)


def test_all_programs_of_all_giants_are_compiled_and_have_a_row(stand_in, tmp_path):
  report = {**REPORT, 'batch_tokens': 8 * 1024, 'moe_all_to_alls': 2, 'rounds': 1, 'program_bytes': 2**20}
  report |= {'round_seconds_compiler': 0.25, 'round_seconds_roofline': 0.125}
  (stand_in / 'report.json').write_text(json.dumps(report))
  text = made(stand_in, tmp_path, 'programs')
  compiled = [(was['model'], was['program']) for was in asked(stand_in)]
  assert len(set(compiled)) == len(claims.TABLE_1) * 5 and {'mt.m4.MoE128E12LTiny', 'decode'} in map(set, compiled)
  row = cells(text, 'MoE2048E36LTiny | eval')
  rounds = int(row[9])
  assert row[2:9] == ['1,024', '2', '1.0', '3.5', '2', '0.5', '16.4k'] and rounds > 1
  assert row[10] == sizes.short(int(8 * 1024 / (0.5 + 0.25 * (rounds - 1))))
  assert cells(text, 'MoE2048E36LTiny | train')[9:] == ['-'] * 4


def test_a_model_that_changes_is_compiled_again(stand_in, tmp_path, monkeypatch):
  reports = cache(stand_in, tmp_path)
  before = reports.name(TINY)
  changed = report_cache.configured(Case(TINY.model, TINY.topology, TINY.mesh, (('label_smoothing', 0.2),)))
  monkeypatch.setattr(report_cache, 'configured', lambda case: changed)
  assert reports.name(TINY) != before


def test_a_crash_loses_one_row_and_is_told(stand_in, tmp_path):
  (stand_in / 'ends.json').write_text('{"crash": ["mt.m4.MoE512E36LTiny"]}')
  told = []
  reports = cache(stand_in, tmp_path, told)
  text = '\n\n'.join(figures.Figures(reports, str(tmp_path / 'out'), tiny=True).make('table1'))
  assert cells(text, 'MoE(512E, 36L)')[-4:] == ['-'] * 4
  assert cells(text, 'MoE(512E, 12L)')[-4:] == ['2', '3.50', 'yes', '3 all-reduce, 12 all-to-all']
  (line,) = [line for line in told if 'no report' in line]
  assert 'exit status 134 (the compiler said / something): its row stays empty; see' in line
  assert len(asked(stand_in)) == len(claims.TABLE_1)

  (stand_in / 'ends.json').write_text('{}')  # the next run tries what failed, and that alone
  assert cells(made(stand_in, tmp_path, 'table1'), 'MoE(512E, 36L)')[-2] == 'yes'
  assert len(asked(stand_in)) == len(claims.TABLE_1) + 1


def test_what_an_interrupted_run_left_is_no_report(stand_in, tmp_path):
  reports = cache(stand_in, tmp_path)
  (tmp_path / 'out' / f'{reports.name(TINY)}.json.partial').write_text(json.dumps(REPORT))
  (stand_in / 'cost.py').write_text('import sys; sys.exit(1)')  # a mistake, not a model that does not fit
  assert reports.get(TINY) is None


def test_what_does_not_fit_is_a_report_too(stand_in, tmp_path):
  (stand_in / 'ends.json').write_text('{"refused": ["mt.m4.MoE2048E36LTiny"]}')
  text = made(stand_in, tmp_path, 'newer')
  assert 'no: Used 40.60G of 15.48G hbm.' in text
  text = made(stand_in, tmp_path, 'table1')
  assert cells(text, 'MoE(2048E, 36L)')[-2] == 'no' and cells(text, 'MoE(2048E, 12L)')[-2] == 'yes'


def test_table_3_has_the_estimates_beside_the_measured(stand_in, tmp_path):
  text = made(stand_in, tmp_path, 'table3')
  assert cells(text, 'MoE(2048E, 36L)') == [
    'MoE(2048E, 36L)',
    '4M',
    '0.72',
    '2.00',
    '4.00',
    '22.4',
    '8.1',
    '5.0',
    '50%',
  ]
  # 300,000 steps of half a second on 2048 cores: 3.07e8 seconds.
  assert cells(text, 'T(96L)')[1:7] == ['4M', '-', '2.00', '4.00', '235.5', '9.7']
  assert cells(text, 'MoE(2048E, 60L)')[5:7] == ['-', '-']
  assert (tmp_path / 'out' / 'table3.png').stat().st_size > 10_000


def test_figure_8_adds_up(stand_in, tmp_path):
  text = made(stand_in, tmp_path, 'figure8')
  parts = ('attention', 'projections', 'feed-forward', 'experts', 'gating', 'cumsum', 'dispatch/combine')
  seconds = lambda part: sum(SECONDS[part])
  layers, whole = sum(map(seconds, parts)), sum(map(seconds, PARTS))
  exchange = SECONDS['dispatch/combine'][1]
  einsums = seconds('gating') + SECONDS['dispatch/combine'][0]
  # Of 8 and of 128 cores; four digits are printed.
  by_phase = lambda forward: pytest.approx([1e3 * times * forward for times in TIMES.values()] * 2, rel=6e-4)
  milliseconds = lambda *row: [float(cell) for cell in cells(text, *row)[1:]]
  assert milliseconds('the layers') == by_phase(layers)
  assert milliseconds('the step') == by_phase(whole)
  assert milliseconds('gate einsums', 1) == by_phase(einsums)
  assert milliseconds('Transformer projections', 1) == by_phase(seconds('projections'))
  shares = [cells(text, row)[1] for row in step_times.LAYER_PARTS]
  assert sum(float(share.rstrip('%')) for share in shares) == pytest.approx(100, abs=0.3) and len(shares) == 7
  assert cells(text, 'MoE dispatch and combine (AllToAll)')[1:] == [f'{100 * exchange / layers:.1f}%'] * 2
  assert (tmp_path / 'out' / 'figure8.png').exists()


def test_the_share_of_rematerialisation_by_hand():
  phase = lambda cycles, exchange: {'a': {'cycles': cycles, 'compute_seconds': 9.0, 'collective_seconds': exchange}}
  phases = {
    'forward': phase(100, 0.1),
    'rematerialisation': phase(100, 0.2),
    'backward': phase(200, 0.3),
    'update': phase(0, 0),
  }
  # A second, of which 0.4 computing: a quarter of the cycles, and 0.2 of collectives.
  assert figures._rematerialised({'step_seconds_compiler': 1.0, 'phases': phases}) == pytest.approx(0.1 + 0.2)
  assert figures._rematerialised({'step_seconds_compiler': None, 'phases': phases}) is None


def test_figure_7_tells_split_weights_from_whole_ones(stand_in, tmp_path):
  text = made(stand_in, tmp_path, 'figure7')
  header = cells(text, 'model')
  row = dict(zip(header, cells(text, 'MoE(128E, 12L)')))
  # 8 experts on 8 cores: each holds one expert of two layers with experts, 2 x 32 x 64 weights each, of float32.
  assert row['weights, whole'] == f'{2 - 2 * 2 * 32 * 64 * 4 / 2**30:.2f}' and row['cores'] == '8'
  kinds = figures._memory_kinds(claims.tiny(claims.TABLE_1[5].case), REPORT)
  assert kinds['weights, split'] == 2 * 2 * 32 * 64 * 4
  assert row['in all'] == '3.50'
  assert [*header[2:5], header[-3]] == ['weights, split', 'weights, whole', 'optimiser', 'in all']
  assert (row['the paper'], cells(text, 'MoE(2048E, 60L)')[-1], cells(text, 'T(96L)')[-1]) == ('0%', '34%', '-')


def test_compile_tells_how_far_apart_the_programs_are(stand_in, tmp_path):
  text = made(stand_in, tmp_path, 'compile')
  assert 'From 8 to 128 cores the longest compilation takes 1.00 times the shortest' in text
  assert 'From 4 to 16 layers' in text
  assert cells(text, '128') == ['128', '1', '2', '3.00', '40', '3 all-reduce, 12 all-to-all']


@pytest.mark.parametrize('name', ['compile', 'figure7', 'figure8', 'newer', 'table1', 'table3'])
def test_nothing_compiled_is_no_error(name, stand_in, tmp_path):
  models = {case.model for row in (*claims.TABLE_1, claims.MOE_2048E_24L) for case in [claims.tiny(row.case)]}
  (stand_in / 'ends.json').write_text(json.dumps({'crash': sorted(models)}))
  assert made(stand_in, tmp_path, name)


def test_figure_9_by_hand(stand_in, tmp_path):
  text = made(stand_in, tmp_path, 'figure9')
  assert not asked(stand_in)
  # 8 x 8 chips: half of what 128 cores send crosses 8 links of 82 GB/s each way, and 14 hops.
  milliseconds = 1e3 * (128 * 8 * 2**20 / 4 / (8 * 82e9) + 14e-6)
  assert cells(text, '128') == ['128', 'v3:8x8', *cells(text, '128')[2:4], f'{milliseconds:.3f}', cells(text, '128')[5]]
  assert [int(cells(text, str(2**n))[0]) for n in range(4, 12)] == [2**n for n in range(4, 12)]


def test_every_case_names_a_model_that_its_slice_divides():
  rows = [row.case for row in (*claims.TABLE_1, claims.MOE_2048E_24L)]
  growing = [claims.growing(topology) for topology in claims.SQUARES]
  for case in [*rows, *claims.NEWER, *growing, *map(claims.tiny, rows), *map(claims.tiny, claims.NEWER)]:
    config = report_cache.configured(case)
    assert (config.num_groups // config.micro_batches) % case.devices == 0
    assert config.num_experts % case.devices == 0
    assert case.mesh.endswith(f':{case.devices}')
    assert bool(config.num_experts) == case.mesh.startswith('expert')
  assert dataclasses.replace(growing[-1], values=(('remat', 'none'),)) == claims.TABLE_1[1].case


def test_the_paper_counts_what_the_models_have():
  for row in claims.TABLE_1:
    config = report_cache.configured(row.case)
    assert config.encoder_layers + config.decoder_layers == row.layers
    assert math.isclose(sum(s.size for s in config.program().weight_specs.values()), row.weights, rel_tol=0.07)
    assert row.batch_tokens in (None, config.batch_tokens)


def run(*args):
  return forks.run([str(TOOL), *args], timeout=900)


def test_an_unknown_figure_is_told(tmp_path):
  done = run(f'--out={tmp_path}', '--what=figure6')
  assert done.returncode == 1
  assert "--what names tables and figures; saw 'figure6'; closest: figure" in done.stderr


def test_missing_matplotlib_is_answered_with_the_package_to_install(tmp_path):
  code = "import sys; sys.modules['matplotlib'] = None\nfrom paper import plots"
  done = forks.run(['-c', code], cwd=ROOT / 'tools', timeout=300)
  assert 'plots need matplotlib, which is not installed' in done.stderr
  assert "pip install 'matplotlib>=3.9'" in done.stderr


def test_bars_stand_on_each_other(tmp_path):
  with plots.page(str(tmp_path / 'bars.png')) as (axes,):
    plots.stacked(axes, ['a', 'b'], {'one': [1, 2], 'two': [3, 4]}, 'unit')
    assert [(bar.get_y(), bar.get_height()) for bar in axes.patches] == [(0, 1), (0, 2), (1, 3), (2, 4)]
    assert [text.get_text() for text in axes.texts] == ['4', '6']
  assert (tmp_path / 'bars.png').exists()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler, libtpu, is not installed')
def test_the_tiny_siblings_are_compiled_for_8_and_128_cores(tmp_path):
  done = run(f'--out={tmp_path}', '--what=figure8', '--tiny')
  assert done.returncode == 0, done.stderr
  text = (tmp_path / 'paper_figures.md').read_text()
  assert text.strip() == done.stdout.strip()
  few, many = (float(cells(text, 'Transformer attention', 1)[i]) for i in (1, 5))
  assert few > 0 and math.isclose(few, many, rel_tol=0.05)  # of a device: constant in D
  assert (tmp_path / 'figure8.png').exists()
