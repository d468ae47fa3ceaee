"""Choice of a layout: all layouts of N devices, the cheapest of them, and the reasons for those that are refused."""

from __future__ import annotations

import dataclasses
import json
from typing import NamedTuple

import forks
import pytest

from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.runtime.chips import Topology

pytest.importorskip('jax')
cost = pytest.importorskip('lingvo_moe.addons.analysis.cost')
layouts = pytest.importorskip('lingvo_moe.addons.analysis.layouts')

COMMAND = ['-m', 'lingvo_moe.cli.commands.main', 'cost']
SMALL = {
  'source_vocab_size': 60,
  'target_vocab_size': 50,
  'batch_tokens': 128,
  'max_length': 16,
  'encoder_layers': 1,
  'decoder_layers': 1,
  'moe_every': 1,
  'num_groups': 4,
}
CONFIG = registry.get('mt.cldr.Tiny')(**SMALL)


def flags_of(found):
  return [layout.flags for layout in found]


def test_all_layouts_of_eight_devices():
  found = layouts.layouts(8, experts=True)
  assert flags_of(found) == [
    '--mesh=data:8',
    '--mesh=data:8 --split_dense',
    '--mesh=model:8',
    '--mesh=data:2,model:4',
    '--mesh=data:4,model:2',
    '--mesh=expert:8',
    '--mesh=data:2,expert:4',
    '--mesh=data:4,expert:2',
    '--mesh=node:2,expert:4',
    '--mesh=node:4,expert:2',
    '--mesh=data:2,node:2,expert:2',
    '--mesh=expert:2,model:4',
    '--mesh=expert:4,model:2',
    '--mesh=data:2,expert:2,model:2',
    '--mesh=expert:2,hidden:4',
    '--mesh=expert:4,hidden:2',
    '--mesh=data:2,expert:2,hidden:2',
    '--mesh=data:8/expert:8',
    '--mesh=data:8/expert:2,hidden:4',
    '--mesh=data:8/expert:4,hidden:2',
  ]
  scanned = layouts.layouts(8, experts=True, scanned=True)
  assert flags_of(scanned[len(found) :]) == [
    '--mesh=stage:8',
    '--mesh=stage:2,data:4',
    '--mesh=stage:4,data:2',
    '--mesh=stage:2,expert:4',
    '--mesh=stage:4,expert:2',
  ]
  assert {layout.name for layout in scanned} == set(layouts.NAMES)
  assert flags_of(layouts.layouts(8, experts=False)) == flags_of(found)[:5]
  assert flags_of(layouts.layouts(8, True, ['EP', 'EP+DP'])) == flags_of(found)[5:8]
  with pytest.raises(UserError, match=r"there is no layout 'EPP'; closest: PP, EP"):
    layouts.layouts(8, True, ['EPP'])
  with pytest.raises(UserError, match=r'2 devices have no layout of EP\+DP'):
    layouts.layouts(2, True, ['EP+DP'])


class FakeReport(NamedTuple):
  """The fields of a report that a choice reads."""

  collectives: list
  collective_counts: dict
  step_seconds_roofline: float | None
  phases: dict
  refused: str = ''
  step_seconds_compiler: float | None = None


def exchange(size, seconds=None, asynchronous=False):
  return cost.CollectiveCost(
    'all-to-all', 2, size, ('expert',), 'encoder/layer_00/moe', 'dispatch/combine', 'forward', seconds, asynchronous
  )


def fake(of_mesh, monkeypatch):
  """Replaces the compiler by a function of mesh and configuration; returns the meshes of its calls."""
  compiled = []

  def estimate(name, config, mesh, topology, program, rounds):
    compiled.append((str(mesh), config.capacity_chunks))
    return of_mesh(str(mesh), config)

  monkeypatch.setattr(cost, 'estimate', estimate)
  return compiled


def of_bytes(mesh, config):
  del config
  size = {'data:4': 300, 'expert:4': 100, 'model:4': 200, 'data:2,expert:2': 50}[mesh]
  return FakeReport([exchange(size)], {'all-to-all': 2}, None, {})


def test_without_a_topology_the_fewest_bytes_win(monkeypatch):
  compiled = fake(of_bytes, monkeypatch)
  found = layouts.choose('m', CONFIG, layouts.layouts(4, True, ['DP', 'EP', 'MP', 'EP+DP']))
  assert [(c.layout.name, c.bytes) for c in found] == [('EP+DP', 100), ('EP', 200), ('MP', 400), ('DP', 600)]
  assert len(compiled) == 4 and {chunks for _, chunks in compiled} == {1}


def test_a_layout_that_does_not_divide_the_batch_is_refused_before_it_is_compiled(monkeypatch):
  compiled = fake(of_bytes, monkeypatch)
  found = layouts.choose(
    'm', dataclasses.replace(CONFIG, batch_tokens=96, num_groups=2), layouts.layouts(4, True, ['DP', 'MP'])
  )
  assert compiled == [('model:4', 1)]
  assert [c.layout.name for c in found] == ['MP', 'DP']
  assert 'axis B (rows of a batch) has size 6, which cannot be split over the 4 devices' in found[1].refused


def test_a_pipeline_divides_the_whole_batch_and_its_layers(monkeypatch):
  compiled = fake(lambda mesh, config: FakeReport([exchange(1)], {}, None, {}), monkeypatch)
  # 8 rows in 4 micro-batches: two at a time cannot be split over 4 devices; 2 layers cannot be split over 4 stages.
  config = dataclasses.replace(CONFIG, scan_layers=True, encoder_layers=2, decoder_layers=2, micro_batches=4)
  found = layouts.choose('m', config, layouts.layouts(4, True, ['DP', 'PP', 'PP+DP'], scanned=True))
  assert compiled == [('stage:2,data:2', 1)] and found[0].layout.name == 'PP+DP'
  refused = {c.layout.name: c.refused for c in found[1:]}
  assert 'axis B (rows of a batch) has size 2' in refused['DP'] and 'axis L' in refused['PP']


def test_a_batch_of_another_program_that_a_mesh_cannot_split_refuses_that_layout_alone(monkeypatch):
  compiled = fake(of_bytes, monkeypatch)
  candidates = layouts.layouts(4, True, ['DP', 'MP'])
  found = layouts.choose('m', CONFIG, candidates, program='score', batch_tokens=CONFIG.max_length)
  assert compiled == [('model:4', 1)] and [c.layout.name for c in found] == ['MP', 'DP']
  assert found[1].refused.startswith('eval_batch_tokens must hold num_groups rows')


def test_a_model_that_does_not_divide_is_refused_with_the_reason():
  odd = dataclasses.replace(CONFIG, num_experts=6, num_heads=6)
  found = layouts.choose('m', odd, layouts.layouts(4, True, ['EP', 'MP']))
  assert [c.report for c in found] == [None, None]
  by_name = {c.layout.name: c.refused for c in found}
  assert 'axis E (experts) has size 6' in by_name['EP'] and 'axis N' in by_name['MP']


def test_weights_that_do_not_fit_are_refused_before_anything_is_compiled(monkeypatch):
  compiled = fake(of_bytes, monkeypatch)
  giant = dataclasses.replace(CONFIG, model_dim=8192, ff_dim=65536)
  (found,) = layouts.choose('m', giant, layouts.layouts(4, True, ['DP']), Topology.parse('v5e:2x2'))
  # Two layers with 8 experts of 4 GiB, and Adam's two slots of each weight.
  assert compiled == [] and found.refused == 'weights and optimizer slots take 192 GiB of a device, which has 15.75'


def test_chunks_are_tried_where_all_to_alls_are_asynchronous(monkeypatch):
  def of_chunks(mesh, config, asynchronous=True):
    del mesh
    # The more chunks, the more the AllToAlls take: 6 s in one, 7 s in two, 12 s in four. Experts take 10 s.
    seconds = {1: 6.0, 2: 7.0, 4: 12.0}[config.capacity_chunks]
    phases = {'forward': {'experts': cost.PartCost(compute_seconds=10.0)}}
    return FakeReport([exchange(8, seconds, asynchronous)], {'all-to-all': 2}, 20.0 + seconds, phases)

  compiled = fake(of_chunks, monkeypatch)
  one = layouts.layouts(4, True, ['EP'])
  found = layouts.choose('m', CONFIG, one, Topology.parse('v5e:2x2'))
  # Of 7 s, half is hidden; of 12 s, three quarters of the 10 s that experts take.
  assert [(c.chunks, c.seconds) for c in found] == [(2, 20 + 7 - 3.5), (4, 20 + 12 - 7.5), (1, 20 + 6)]
  assert compiled == [('expert:4', 1), ('expert:4', 2), ('expert:4', 4)]
  fake(lambda mesh, config: of_chunks(mesh, config, asynchronous=False), monkeypatch)
  assert [c.chunks for c in layouts.choose('m', CONFIG, one, Topology.parse('v5e:2x2'))] == [1]


def test_chunks_are_searched_together_with_the_layout(monkeypatch):
  def of(mesh, config):
    # EP is the cheapest whole; chunks hide more of the two-level AllToAll; those of EP+DP cannot pay.
    seconds, rest = {'expert:4': (2.0, 10.0), 'node:2,expert:2': (8.0, 6.0), 'data:2,expert:2': (1.0, 15.0)}[mesh]
    phases = {'forward': {'experts': cost.PartCost(compute_seconds=20.0)}}
    return FakeReport([exchange(8, seconds, True)], {'all-to-all': 2}, rest + seconds, phases)

  compiled = fake(of, monkeypatch)
  found = layouts.choose('m', CONFIG, layouts.layouts(4, True, ['EP', '2DH', 'EP+DP']), Topology.parse('v5e:2x2'))
  assert (found[0].layout.name, found[0].chunks, found[0].seconds) == ('2DH', 4, 14 - 6)
  assert [(c.layout.name, c.chunks) for c in found] == [
    ('2DH', 4),
    ('2DH', 2),
    ('EP', 4),
    ('EP', 2),
    ('EP', 1),
    ('2DH', 1),
    ('EP+DP', 1),
  ]
  assert ('data:2,expert:2', 2) not in compiled


slow = lambda *values: pytest.param(*values, marks=pytest.mark.slow)


def run(*flags):
  return forks.run([*COMMAND, *flags], timeout=600)


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--choose'], 'takes the number of --devices, such as 8, or a --topology'),
    slow(['--choose', '--devices=2', '--mesh=expert:2'], '--choose finds the mesh: leave out --mesh'),
    slow(['--devices=2'], '--devices and --layouts are for --choose: add it, or give --mesh'),
  ],
)
def test_mistakes_get_one_line(flags, message):
  done = run('--model=mt.cldr.Tiny', *flags)
  assert done.returncode == 1 and message in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_the_command_chooses(tmp_path):
  bindings = [f'--gin_bindings=Tiny.{name} = {value!r}' for name, value in {**SMALL, 'num_experts': 6}.items()]
  done = run(
    '--choose', '--devices=4', '--layouts=DP,ZeRO-3,EP', '--model=mt.cldr.Tiny', f'--json={tmp_path}/t.json', *bindings
  )
  assert done.returncode == 0, done.stderr
  assert 'Cheapest: DP, --mesh=data:4' in done.stdout.splitlines()[-1] and 'times as much' in done.stdout
  assert 'EP --mesh=expert:4 is refused: ' in done.stdout and 'axis E (experts) has size 6' in done.stdout
  first, second, refused = json.loads((tmp_path / 't.json').read_text())
  assert first['bytes'] < second['bytes'] and refused['layout'] == 'EP'
  # Gradients are summed in either; ZeRO-3 gathers weights besides.
  assert set(first['collective_counts']) == {'all-reduce'} and second['collective_counts']['all-gather'] > 0


def test_a_language_model_has_layouts_too():
  config = registry.get('lm.shakespeare.Dense')(batch_tokens=256, window=64, num_layers=1)
  found = layouts.choose('lm.shakespeare.Dense', config, layouts.layouts(2, False, ['DP']), None)
  assert [c.layout.flags for c in found if not c.refused]
