"""Cost reports: FLOPs by part against a formula, memory against the specs, communication by hand; for TPUs too."""

from __future__ import annotations

import collections
import dataclasses
import functools
import json

import forks
import numpy as np
import pytest

from lingvo_moe.addons.analysis import flops, hlo, hlo_collectives, hlo_loops
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.ops import output_softmax
from lingvo_moe.runtime.chips import Topology
from lingvo_moe.runtime.torus_placement import place

pytest.importorskip('jax')
cost = pytest.importorskip('lingvo_moe.addons.analysis.cost')
aot = pytest.importorskip('lingvo_moe.runtime.aot')

pytestmark = pytest.mark.compiled

COMMAND = ['-m', 'lingvo_moe.cli.commands.main', 'cost']
SMALL = {
  'source_vocab_size': 60,
  'target_vocab_size': 50,
  'max_length': 16,
  'encoder_layers': 1,
  'decoder_layers': 1,
  'moe_every': 1,
  'num_experts': 8,
  'num_groups': 8,
  'batch_tokens': 256,
  'scan_layers': False,
  'remat': 'none',
}
MOE = dataclasses.replace(registry.get('mt.m4.MoE2048E36LTiny')(), **SMALL)
MIXED = dataclasses.replace(MOE, encoder_layers=2, decoder_layers=2, moe_every=2)
# A stack instead of two, of as many features, experts and tokens.
LANGUAGE = registry.get('lm.shakespeare.Tiny')(
  vocab_size=60, num_layers=1, num_groups=8, batch_tokens=256, dispatch=MOE.dispatch
)
DENSE = dataclasses.replace(LANGUAGE, num_experts=0)
LANGUAGE_SCANNED = dataclasses.replace(LANGUAGE, num_layers=2, scan_layers=True, remat='block')
CONFIGS = {
  'moe': MOE,
  'dense': DENSE,
  'scanned': LANGUAGE_SCANNED,
  'kept': dataclasses.replace(LANGUAGE_SCANNED, remat='none'),
  'mixed': dataclasses.replace(LANGUAGE, num_layers=2, moe_every=2),
}
LIMIT = 600  # bytes, above which no tensor of these sizes may be gathered


@functools.cache
def on_cpu(name):
  return cost.estimate(name, CONFIGS[name], Mesh.parse('data:4' if name == 'dense' else 'expert:4'))


@pytest.mark.parametrize('name', ['moe', 'dense', 'scanned', 'mixed'])
def test_flops_by_part_are_those_of_the_formula(name):
  found = {name: 4 * part.flops for name, part in on_cpu(name).parts.items()}
  assert found == flops.train_step(CONFIGS[name])
  assert 4 * on_cpu(name).flops == sum(found.values())


@pytest.mark.parametrize('name', ['moe', 'scanned', 'kept'])
def test_flops_by_phase_are_those_of_the_formula(name):
  config = CONFIGS[name]
  found = {
    phase: {part: 4 * cost.flops for part, cost in parts.items()} for phase, parts in on_cpu(name).phases.items()
  }
  expected, once = (
    flops.train_step(config),
    flops.train_step(dataclasses.replace(config, scan_layers=False, remat='none')),
  )
  assert found['rematerialisation'] == {part: expected[part] - once[part] for part in expected}
  for part in set(expected) - {'dispatch/combine'}:  # whose masks have no gradient of their own
    assert (found['forward'][part], found['backward'][part]) == (once[part] // 3, once[part] - once[part] // 3)
  assert not any(found['update'].values())


def test_collectives_are_of_a_phase():
  exchanges = {'scanned': collections.Counter(), 'kept': collections.Counter()}
  for name, phases in exchanges.items():
    for c in on_cpu(name).collectives:
      if c.kind == 'all-to-all':
        phases[c.phase] += c.count
  # Two of each of 2 layers; tokens that were kept are not sent again.
  assert exchanges['scanned'] == {'forward': 4, 'rematerialisation': 4, 'backward': 4}
  assert exchanges['kept'] == {'forward': 4, 'backward': 4}
  assert {c.phase for c in on_cpu('dense').collectives if c.part == 'optimiser'} == {'update'}


def test_a_scanned_stack_that_recomputes_no_product_keeps_more():
  kept, again = (on_cpu(name).memory_per_device for name in ('kept', 'scanned'))
  hidden = 4 * 2 * 2 * 64 * 64  # bytes of the hidden layer of the experts in 2 layers, 2 slots for each of 64 tokens
  assert kept.activations + kept.temporaries > again.activations + again.temporaries + hidden


@pytest.mark.slow
def test_what_two_scanned_stacks_keep_is_activations():
  found = {}
  for remat in ('none', 'block'):
    config = dataclasses.replace(MOE, encoder_layers=2, decoder_layers=2, scan_layers=True, remat=remat)
    found[remat] = cost.estimate('scanned', config, Mesh.parse('expert:4')).memory_per_device.activations
  assert found['none'] > found['block'] + 4 * 4 * 2 * 64 * 64  # as above, in 4 layers


def test_the_fastest_policy_of_rematerialisation_that_fits_comes_first(monkeypatch):
  refused = dataclasses.replace(on_cpu('kept'), fits=False, refused='too large')
  of = {'none': refused, 'attention': on_cpu('kept'), 'block': on_cpu('scanned')}
  monkeypatch.setattr(cost, 'estimate', lambda name, config, mesh, topology: of[config.remat])
  tried = []
  reports = cost.choose_remat('scanned', LANGUAGE_SCANNED, Mesh.parse('expert:4'), progress=tried.append)
  assert tried == ['none', 'attention', 'block'] and list(reports) == ['attention', 'block', 'none']
  assert reports['block'].flops > reports['attention'].flops
  recurrent = registry.get('lm.moe_lstm.Tiny')()
  with pytest.raises(UserError, match='has no layers to rematerialise'):
    cost.choose_remat('lm.moe_lstm.Tiny', recurrent, Mesh.parse('expert:4'))


@pytest.mark.slow
def test_the_command_compares_policies_of_rematerialisation(tmp_path):
  flags = ['--model=mt.m4.MoE128E12LTiny', '--choose_remat', '--platform=cpu', '--mesh=expert:2']
  done = run(*flags, f'--json={tmp_path}/policies.json')
  assert done.returncode == 0 and done.stdout.endswith('Fastest that fits: --set remat=none.\n'), done.stderr
  told = json.loads((tmp_path / 'policies.json').read_text())
  assert list(told) == ['none', 'attention', 'block'] and told['block']['flops'] > told['none']['flops']


def test_a_device_holds_its_part_of_the_experts_and_all_else():
  specs = MOE.program().weight_specs
  held = sum(4 * s.size // (4 if s.dims.startswith('E') else 1) for s in specs.values())
  report = on_cpu('moe')
  assert report.memory_per_device.weights == held and report.weights == sum(s.size for s in specs.values())
  used = report.memory_per_device
  assert used.total == used.weights + used.slots + used.activations + used.temporaries + used.other
  assert 0 < used.activations and 0 < used.temporaries and used.hbm is None and report.fits


def test_collectives_name_axes_and_layers():
  moved = [c for c in on_cpu('moe').collectives if c.kind == 'all-to-all']
  assert {c.layer for c in moved} == {'encoder/layer_00/moe', 'decoder/layer_00/moe'}
  assert {(c.axes, c.part) for c in moved} == {(('expert',), 'dispatch/combine')}
  assert on_cpu('moe').collective_counts['all-to-all'] == sum(c.count for c in moved) == 2 * 4
  # Slots of both choices of 64 tokens of a device, one float32 each feature.
  assert {c.bytes for c in moved} == {2 * 64 * 32 * 4}
  assert set(on_cpu('dense').collective_counts) == {'all-reduce'}


def test_sums_over_the_hidden_features_of_experts_are_of_experts():
  report = cost.estimate('language model', LANGUAGE, Mesh.parse('expert:2,hidden:2'))
  slots = 4 * 2 * 128 * 32  # bytes, for both choices of the 64 tokens of each of two devices
  sums = [c for c in report.collectives if c.kind == 'all-reduce' and c.bytes >= slots]
  assert {(c.axes, c.part) for c in sums} == {(('hidden',), 'experts')}
  assert sum(c.count for c in sums) == 2  # outputs and gradients of tokens
  (gradients,) = [c for c in report.collectives if c.axes == ('expert', 'hidden') and c.part == 'optimiser']
  assert gradients.kind == 'all-reduce' and gradients.bytes < slots  # of all weights but those of experts


def test_without_a_chip_there_are_no_times():
  report = on_cpu('dense')
  assert report.step_seconds_roofline is None and report.flops_share_of_peak is None
  assert all(part.compute_seconds is None for part in report.parts.values())


def test_a_report_is_json():
  told = json.loads(json.dumps(on_cpu('moe').to_json()))
  assert told['memory_per_device']['weights'] > 0 and told['collectives'][0]['kind'] in hlo.COLLECTIVES


def test_decoding_is_compiled_too():
  report = cost.estimate('moe', dataclasses.replace(MOE, max_length=4), Mesh.parse('expert:2'), program='decode')
  assert report.memory_per_device.slots == 0 and report.parts['experts'].flops > 0
  assert report.parts['optimiser'].bytes == 0 and report.program == 'decode' and not report.uncounted_loops
  # 64 rows of 4 hypotheses, of which each has 50 scores, for as many steps as a row is long.
  assert 2 * report.parts['softmax'].flops == 2 * 64 * 4 * MOE.model_dim * 50 * 4


@pytest.mark.parametrize('program', ['eval', 'score', 'encode'])
def test_programs_of_inference_cost_what_their_forward_pass_does(program):
  config = dataclasses.replace(MIXED, capacity_factor=8.0)
  report = cost.estimate('mixed', config, Mesh.parse('expert:4'), program=program)
  stacks = 1 if program == 'encode' else 2
  tokens, feed_forward = 256, 2 * 2 * MOE.model_dim * MOE.ff_dim
  assert report.program == program and report.memory_per_device.slots == 0 and not report.uncounted_loops
  # A dense layer of either stack has each token once; experts have all slots, which depend on the backend's rounds.
  assert 4 * report.parts['feed-forward'].flops == stacks * tokens * feed_forward
  assert 4 * report.parts['experts'].flops >= stacks * tokens * feed_forward * 2
  logits = 0 if program == 'encode' else 2 * tokens * MOE.model_dim * MOE.target_vocab_size
  assert 4 * report.parts['softmax'].flops == logits
  assert {c.part for c in report.collectives if c.kind == 'all-to-all'} == {'dispatch/combine'}
  assert report.moe_all_to_alls == 2


def test_a_decoder_of_any_depth_has_the_same_program():
  config = dataclasses.replace(MOE, scan_layers=True, remat='block', max_length=4, batch_tokens=64)
  texts = []
  for layers in (2, 6):
    deep = dataclasses.replace(config, decoder_layers=layers)
    report = cost.estimate('scanned', deep, Mesh.parse('expert:2'), program='decode')
    texts.append(report.program_bytes)
    moved = [c for c in report.collectives if c.kind == 'all-to-all' and c.layer == 'decoder/layers_0of1/moe']
    assert sum(c.count for c in moved) == layers * 2 * 4 and report.moe_all_to_alls == 2  # to experts and back, 4 steps
  assert abs(texts[1] - texts[0]) < 0.01 * texts[0]


FUSED = """
%slices (p: f32[9,100], q: f32[9,100], r: f32[1,100]) -> f32[9,100] {
  %p = f32[9,100]{1,0} parameter(0)
  %q = f32[9,100]{1,0} parameter(1)
  %r = f32[1,100]{1,0} parameter(2)
  %z = s32[] constant(0)
  %part = f32[1,100]{1,0} dynamic-slice(%p, %z, %z), dynamic_slice_sizes={1,100}
  %sum = f32[1,100]{1,0} add(%part, %r)
  ROOT %kept = f32[9,100]{1,0} dynamic-update-slice(%q, %sum, %z, %z)
}

ENTRY %main {
  %x = f32[9,100]{1,0} parameter(0)
  %y = f32[9,100]{1,0} parameter(1)
  %r0 = f32[1,100]{1,0} parameter(2)
  %fast = f32[1,100]{1,0:S(1)} parameter(3)
  %plain = f32[1,100]{1,0} add(%r0, %fast)
  ROOT %f = f32[9,100]{1,0} fusion(%x, %y, %plain), kind=kLoop, calls=%slices
}
"""


def test_only_what_is_sliced_or_updated_is_moved():
  module = hlo.parse(FUSED)
  moved = {i.name: hlo.traffic(i) for i in module.entry.instructions}
  assert moved['f'] == 4 * (100 + 100 + 100)  # the slice, r, and the update; neither of the stacks
  assert moved['plain'] == 4 * (100 + 100)  # what is in the fast memory is not
  assert moved['x'] == 0


NESTED = """
%inner (p: f32[9,100], i: s32[]) -> f32[100] {
  %p = f32[9,100]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %part = f32[1,100]{1,0} dynamic-slice(%p, %i, %z), dynamic_slice_sizes={1,100}
  ROOT %flat = f32[100]{0} bitcast(%part)
}

%outer (q: f32[900], i: s32[], r: f32[100]) -> f32[100] {
  %q = f32[900]{0} parameter(0)
  %i = s32[] parameter(1)
  %r = f32[100]{0} parameter(2)
  %rows = f32[9,100]{1,0} bitcast(%q)
  %taken = f32[100]{0} fusion(%rows, %i), kind=kLoop, calls=%inner
  ROOT %sum = f32[100]{0} add(%taken, %r)
}

ENTRY %main {
  %x = f32[900]{0} parameter(0)
  %i = s32[] parameter(1)
  %r0 = f32[100]{0} parameter(2)
  ROOT %f = f32[100]{0} fusion(%x, %i, %r0), kind=kLoop, calls=%outer
}
"""


def test_a_slice_in_an_inner_fusion_moves_no_more_than_the_slice():
  module = hlo.parse(NESTED)
  moved = hlo.traffic(module.entry.by_name['f'])
  assert moved == 4 * (100 + 1 + 100 + 100)  # the slice, its index, r, and the sum


def test_axes_of_groups():
  mesh = Mesh.parse('data:2,expert:4')
  assert cost.axes_of(np.arange(8).reshape(2, 4), mesh) == ('expert',)
  assert cost.axes_of(np.arange(8).reshape(2, 4).T, mesh) == ('data',)
  assert cost.axes_of(np.arange(8)[None], mesh) == ('data', 'expert')


def test_the_command_reports_on_cpu_devices(tmp_path):
  flags = ['--model=lm.shakespeare.Tiny', '--platform=cpu', '--mesh=expert:2', '--batch_tokens=64']
  bindings = ['--gin_bindings=Tiny.num_layers = 1', '--gin_bindings=Tiny.vocab_size = 60']
  done = run(*flags, *bindings, f'--json={tmp_path}/r.json', f'--markdown={tmp_path}/r.md')
  assert done.returncode == 0, done.stderr
  assert 'all-to-all' in done.stdout and done.stdout.rstrip().endswith('It fits.')
  assert json.loads((tmp_path / 'r.json').read_text())['batch_tokens'] == 64
  assert '| kind | times |' in (tmp_path / 'r.md').read_text()


@pytest.mark.parametrize(
  'flags, message',
  [
    (['--platform=cpu'], '--platform=cpu takes --mesh'),
    ([], '--topology says for which TPU'),
    (['--topology=v3:2x2', '--placement=expert:2x1'], 'one axis has all 2 of each chip; saw expert:2x1 for 8'),
    (['--topology=v9:4x4'], "there is no TPU or GPU 'v9'; closest: v"),
  ],
)
def test_mistakes_get_one_line(flags, message):
  done = run('--model=mt.m4.MoE2048E36LTiny', *flags)
  assert done.returncode == 1 and message in done.stderr.splitlines()[-1]


def run(*flags):
  return forks.run([*COMMAND, *flags], timeout=600)


# Scanned, and of a size that 8 devices divide, and 128.
SIZES = {'num_experts': 128, 'num_groups': 128, 'batch_tokens': 128 * 2 * LANGUAGE.window}
LARGE = dataclasses.replace(LANGUAGE, **SIZES, num_layers=2, scan_layers=True, remat='block')


@pytest.fixture(scope='module')
def on_tpu():
  """A tiny sibling on 8 cores and on 128, compiled by the TPU's own compiler."""
  pytest.importorskip('libtpu', reason='compiling for TPUs needs libtpu: pip install -e ".[test]"')
  found = {}
  for name in ('v3:2x2', 'v3:8x8'):
    topology = Topology.parse(name)
    mesh = Mesh((('expert', topology.num_devices),))
    found[name] = LARGE, mesh, topology, cost.compile_step(LARGE, mesh, topology)
  return found


def test_the_program_is_no_larger_for_128_cores_than_for_8(on_tpu):
  (*_, small), (*_, large) = on_tpu.values()
  kinds = [collections.Counter(c.kind for c in hlo_collectives.collectives(hlo.parse(c.text))) for c in (small, large)]
  assert kinds[0] == kinds[1] and kinds[0]['all-to-all'] == 6  # in the loop of the stack
  assert len(large.text) <= len(small.text)


def test_nothing_large_is_gathered_on_a_tpu(on_tpu):
  for *_, compiled in on_tpu.values():
    gathered = [c.bytes for c in hlo_collectives.collectives(hlo.parse(compiled.text)) if c.kind == 'all-gather']
    assert all(size <= LIMIT for size in gathered)


def test_a_tpu_program_costs_what_the_formula_says(on_tpu):
  for config, mesh, topology, compiled in on_tpu.values():
    told = cost.analyze(compiled, config.program(), mesh, topology)
    found = {name: mesh.num_devices * part.flops for name, part in told['parts'].items()}
    # Rows of a small table are looked up by a product.
    assert found.pop('other') < 0.05 * told['flops'] * mesh.num_devices
    expected = flops.train_step(config)
    # The compiler may compute a projection and the product of attention that reads it in one fusion, which counts as
    # the larger of the two.
    both = [{name: of.pop(name) for name in ('attention', 'projections')} for of in (found, expected)]
    assert sum(both[0].values()) == sum(both[1].values())
    assert 0.7 * both[1]['attention'] <= both[0]['attention'] <= both[1]['attention']
    assert expected.pop('other') == 0 and found == expected  # though most are written as convolutions
    used = told['memory_per_device']
    assert used.total == used.weights + used.slots + used.activations + used.temporaries + used.other
    assert used.weights > 0 and used.total < used.hbm
    assert 0 < told['step_seconds_roofline'] and 0 < told['flops_share_of_peak'] < 1


def test_a_placed_mesh_is_compiled_for_its_places():
  pytest.importorskip('libtpu', reason='compiling for TPUs needs libtpu: pip install -e ".[test]"')
  topology, config = Topology.parse('v3:4x4'), dataclasses.replace(LANGUAGE, num_groups=32, batch_tokens=512)
  mesh = place(Mesh.parse('data:4,expert:8'), topology, 'expert:2x2')
  report = cost.estimate('moe', config, mesh, topology)
  compiled, one, two = report.placements
  assert compiled.chips == (2, 2) and compiled[2:] == pytest.approx(two[2:])
  assert (one.torus_axes, sorted(one.chips)) == (1, [1, 4]) and two.torus_axes == 2
  exchange = sum(c.seconds for c in report.collectives if c.kind == 'all-to-all')
  assert exchange == pytest.approx(compiled.all_to_all_seconds)


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['none', 'block', 'attention'])
def test_unrolled_layers_made_again_on_a_tpu_cost_what_the_formula_says(remat):
  pytest.importorskip('libtpu', reason='compiling for TPUs needs libtpu: pip install -e ".[test]"')
  config, topology = dataclasses.replace(MIXED, remat=remat), Topology.parse('v3:2x2')
  mesh = Mesh((('expert', topology.num_devices),))
  compiled = cost.compile_step(config, mesh, topology)
  told = cost.analyze(compiled, config.program(), mesh, topology)
  found = {name: mesh.num_devices * part.flops for name, part in told['parts'].items()}
  expected, none = flops.train_step(config), flops.train_step(dataclasses.replace(config, remat='none'))
  lookups = found.pop('other')  # rows of a small table are looked up by a product
  assert expected.pop('other') == 0 <= lookups < 0.1 * sum(expected.values())
  # Products of attention in the forward pass, a third of all without `remat`, may be fused with projections, see above.
  fused = expected['attention'] - found['attention']
  assert 0 <= fused <= none['attention'] / 3
  assert found == {**expected, 'attention': found['attention'], 'projections': expected['projections'] + fused}
  again = sum(part.flops for part in told['phases']['rematerialisation'].values())
  assert mesh.num_devices * again == sum(expected.values()) - sum(none.values())


def test_what_does_not_fit_is_reported_with_a_way_out(monkeypatch):
  pytest.importorskip('libtpu', reason='compiling for TPUs needs libtpu: pip install -e ".[test]"')
  monkeypatch.setattr(output_softmax, 'CHUNK_BYTES', 2**40)  # in chunks it would fit
  config = dataclasses.replace(DENSE, vocab_size=12000, batch_tokens=2**22, num_groups=8)
  report = cost.estimate('dense', config, Mesh.parse('data:8'), Topology.parse('v3:2x2'))
  assert not report.fits and 'exceeds available HBM (15.48G)' in report.refused
  used = report.memory_per_device
  assert used.total > used.hbm and used.activations > 2**32
  assert report.largest[0].shape.endswith(',16,12000]') and report.largest[0].op.startswith('softmax/')
  assert any(line.startswith("activation_dtype = 'bfloat16'") for line in report.advice)
  assert any(line.startswith('--batch_tokens=2097152') for line in report.advice)
  assert report.step_seconds_roofline > 0


def test_a_compiler_that_is_not_installed_is_told(monkeypatch):
  def refuse(**kwargs):
    raise RuntimeError('JAX TPU support not installed')

  monkeypatch.setattr(aot.topologies, 'get_topology_desc', refuse)
  with pytest.raises(UserError, match=r"not installed \(JAX TPU .*pip install 'jax\[tpu\]"):
    aot.devices_of(Topology.parse('v3:2x2'))


def test_a_slice_that_does_not_exist_is_told():
  pytest.importorskip('libtpu', reason='compiling for TPUs needs libtpu: pip install -e ".[test]"')
  with pytest.raises(UserError, match='the TPU compiler does not know --topology=v3:3x5'):
    aot.devices_of(Topology.parse('v3:3x5'))


def test_a_mesh_of_other_size_than_its_topology_is_told():
  with pytest.raises(UserError, match='saw --mesh=expert:4 of 4 for v3:2x2 of 8: change either'):
    cost.estimate('moe', MOE, Mesh.parse('expert:4'), Topology.parse('v3:2x2'))


def test_the_loops_of_tensorflow_are_counted_forward_and_backward():
  import jax
  import tensorflow as tf
  from jax.experimental.jax2tf import call_tf

  def gradient(x_BM, w_LMM):
    with tf.GradientTape() as tape:
      tape.watch(w_LMM)
      body = lambda i, x: (i + 1, tf.nn.relu(tf.einsum('BM,MK->BK', x, w_LMM[i])))
      y = tf.while_loop(lambda i, _: i < 6, body, (0, x_BM), maximum_iterations=6)[1]
      loss = tf.reduce_sum(tf.square(y))
    return tape.gradient(loss, w_LMM)

  shapes = jax.ShapeDtypeStruct((8, 4), np.float32), jax.ShapeDtypeStruct((6, 4, 4), np.float32)
  module = hlo.parse(jax.jit(call_tf(gradient, has_side_effects=False)).lower(*shapes).compile().as_text())
  total = sum(times * hlo.flops(i) for i, times in hlo_loops.executed(module))
  assert total == 3 * 6 * 2 * 8 * 4 * 4
