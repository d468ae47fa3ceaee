"""HLO parser: shapes, padding, FLOPs, device groups and execution counts, worked out by hand for small texts."""

import numpy as np
import pytest

from lingvo_moe.addons.analysis import hlo, hlo_collectives, hlo_loops
from lingvo_moe.addons.analysis.hlo import Array

LOOP = """HloModule jit_f, is_scheduled=true

%fused (param_0: f32[4,8], param_1: f32[8,16]) -> f32[4,16] {
  %param_0 = f32[4,8]{1,0} parameter(0)
  %param_1 = f32[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,16]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/call_tf/encoder/layer_01/moe/einsum"}
}

%body (p: (s32[], f32[4,8], f32[8,16])) -> (s32[], f32[4,8], f32[8,16]) {
  %p = (s32[], f32[4,8]{1,0}, /*index=2*/f32[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,16]{1,0} get-tuple-element(%p), index=2
  %y = f32[4,16]{1,0} fusion(%x, %w), kind=kLoop, calls=%fused
  %sent = f32[4,8]{1,0} all-to-all(%x), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}
  ROOT %t = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%i, %sent, %w)
}

%condition (q: (s32[], f32[4,8], f32[8,16])) -> pred[] {
  %q = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x0: f32[4,8], w0: f32[8,16]) -> f32[4,8] {
  %x0 = f32[4,8]{1,0} parameter(0), metadata={op_name="args[0][\\'weights\\'][\\'a\\']"}
  %w0 = f32[8,16]{1,0} parameter(1)
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) tuple(%zero, %x0, %w0)
  %loop = (s32[], f32[4,8]{1,0}, f32[8,16]{1,0}) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
  %begun = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-start(%out), replica_groups=[1,4]<=[4], dimensions={0}
  %ended = f32[16,8]{1,0} all-gather-done(%begun)
  ROOT %all = f32[4,8]{1,0} all-reduce(%out), replica_groups={}, to_apply=%sum
}
"""


def executions(module, rounds=1):
  times = dict(hlo_loops.executed(module, rounds))
  return {c.name: times[c.root] for c in module.computations.values() if c.root in times}


def test_a_loop_runs_its_body_as_often_as_its_trip_count():
  module = hlo.parse(LOOP)
  assert module.entry.name == 'main'
  assert executions(module) == {'main': 1, 'body': 6, 'condition': 6}
  assert {(i.name, times) for i, times in hlo_loops.executed(module) if i.opcode == 'fusion'} == {('y', 6)}


COUNTED = """
%at_most (p0: s32[], p1: s32[]) -> pred[] {
  %p0 = s32[] parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %below = pred[] compare(%p0, %p1), direction=LT
}

%next (p0: s32[]) -> s32[] {
  %p0 = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %sum = s32[] add(%p0, %two)
}

%until_constant (s: (s32[], s32[], pred[])) -> pred[] {
  %s = (s32[], s32[], pred[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %done = pred[] get-tuple-element(%s), index=2
  %n = s32[] constant(11)
  %few = pred[] fusion(%i, %n), kind=kLoop, calls=%at_most
  ROOT %both = pred[] and(%few, %done)
}

%forward (s: (s32[], s32[], pred[])) -> (s32[], s32[], pred[]) {
  %s = (s32[], s32[], pred[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %rounds = s32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %i2 = s32[] fusion(%i), kind=kLoop, calls=%next
  %rounds2 = s32[] add(%rounds, %one)
  %done = pred[] get-tuple-element(%s), index=2
  ROOT %t = (s32[], s32[], pred[]) tuple(%i2, %rounds2, %done)
}

%until_counted (s: (s32[], s32[])) -> pred[] {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  ROOT %more = pred[] compare(%n, %i), direction=GT
}

%backward (s: (s32[], s32[])) -> (s32[], s32[]) {
  %s = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %n = s32[] get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %i2 = s32[] add(%i, %one)
  ROOT %t = (s32[], s32[]) tuple(%i2, %n)
}

ENTRY %main (p: pred[]) -> s32[] {
  %p = pred[] parameter(0)
  %zero = s32[] constant(0)
  %copied = s32[] copy(%zero)
  %init = (s32[], s32[], pred[]) tuple(%copied, %zero, %p)
  %there = (s32[], s32[], pred[]) while(%init), condition=%until_constant, body=%forward
  %rounds = s32[] get-tuple-element(%there), index=1
  %init2 = (s32[], s32[]) tuple(%zero, %rounds)
  %back = (s32[], s32[]) while(%init2), condition=%until_counted, body=%backward
  ROOT %r = s32[] get-tuple-element(%back), index=0
}
"""


def test_trip_counts_that_xla_does_not_tell_are_worked_out():
  module = hlo.parse(COUNTED)
  # 0, 2, 4, 6, 8, 10 are below 11; and backward once for each of those six.
  assert executions(module)['forward'] == executions(module)['backward'] == 6


def test_a_loop_of_unknown_length_counts_once():
  module = hlo.parse(COUNTED.replace('constant(11)', 'parameter(1)'))
  loop = module.entry.by_name['there']
  assert hlo_loops.trip_count(loop) is None
  assert executions(module)['forward'] == executions(module)['backward'] == 1


def test_a_loop_of_rounds_counts_as_many_as_it_is_said_to_run():
  named = 'calls=%next, metadata={op_name="jit(f)/call_tf/decoder/layers_1of2/moe/rounds/add"}'
  text = COUNTED.replace('constant(11)', 'parameter(1)').replace('calls=%next', named)
  module = hlo.parse(text)
  loop = module.entry.by_name['there']
  assert hlo_loops.times_run(loop, 3) == 3
  assert [executions(module, rounds)['forward'] for rounds in (1, 3)] == [1, 3]
  of_known_length = hlo.parse(COUNTED.replace('calls=%next', named))
  assert executions(of_known_length, 3)['forward'] == 6
  assert hlo_loops.times_run(module.entry.by_name['back'], 3) is None


def test_flops_of_a_product_within_a_fusion_within_a_loop():
  module = hlo.parse(LOOP)
  counted = [(i.name, times * hlo.flops(i)) for i, times in hlo_loops.executed(module) if hlo.flops(i)]
  assert counted == [('y', 6 * 2 * 4 * 16 * 8)]


def test_collectives_count_once_each_with_what_they_carry():
  found = {c.kind: c for c in hlo_collectives.collectives(hlo.parse(LOOP))}
  assert set(found) == {'all-to-all', 'all-gather', 'all-reduce'}
  assert (found['all-to-all'].times, found['all-to-all'].bytes) == (6, 4 * 8 * 4)
  assert (found['all-gather'].times, found['all-gather'].bytes) == (1, 16 * 8 * 4)  # what comes out
  assert found['all-gather'].groups.tolist() == [[0, 1, 2, 3]]
  assert found['all-reduce'].groups is None  # all devices


SUMMED_IN_FUSION = """
%all-reduce-scatter (input: f32[4,8]) -> f32[2,8] {
  %input = f32[4,8]{1,0} parameter(0)
  %summed = f32[4,8]{1,0} all-reduce(%input), channel_id=2, replica_groups={{0,1}}
  %zero = s32[] constant(0)
  ROOT %own = f32[2,8]{1,0} dynamic-slice(%summed, %zero, %zero), dynamic_slice_sizes={2,8}
}

ENTRY %main (x: f32[4,8]) -> f32[2,8] {
  %x = f32[4,8]{1,0} parameter(0)
  ROOT %part = f32[2,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter
}
"""


def test_a_collective_that_a_tpu_compiler_put_into_a_fusion_counts():
  (found,) = hlo_collectives.collectives(hlo.parse(SUMMED_IN_FUSION))
  assert (found.instruction.name, found.bytes, found.times) == ('summed', 4 * 8 * 4, 1)


def test_names_operands_and_parameters_are_read():
  module = hlo.parse(LOOP)
  x0, w0 = module.entry.parameters
  assert x0.op_name == "args[0]['weights']['a']" and w0.op_name == ''
  assert module.entry.by_name['loop'].operands == (module.entry.by_name['init'],)
  assert module.entry.by_name['loop'].arrays[2].shape == (8, 16)
  assert module.entry.root.name == 'all'
  assert module.computations['fused'].root.op_name.endswith('encoder/layer_01/moe/einsum')


@pytest.mark.parametrize(
  'attributes, groups',
  [
    ('replica_groups={{0,2},{1,3}}, use_global_device_ids=true', [[0, 2], [1, 3]]),
    ('source_target_pairs={{0,1},{1,0}}', [[0, 1], [1, 0]]),
    ('replica_groups=[2,4]<=[8], dimensions={0}', [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ('replica_groups=[4,2]<=[2,4]T(1,0)', [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("replica_groups=mesh['a'=1,'b'=4,'c'=1] {'a','b'}", [[0, 1, 2, 3]]),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("replica_groups=mesh['a'=8] {'a':(4)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
    ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [[3, 2], [1, 0]]),
  ],
)
def test_groups_in_every_notation(attributes, groups):
  assert hlo_collectives.groups(attributes).tolist() == groups


@pytest.mark.parametrize('attributes', ['replica_groups={}, to_apply=%add', 'dimensions={0}'])
def test_no_groups_are_all_devices(attributes):
  assert hlo_collectives.groups(attributes) is None


@pytest.mark.parametrize(
  'array, stored',
  [
    (Array('f32', (3, 5), '1,0'), 60),
    (Array('f32', (3, 5), '1,0:T(8,128)'), 8 * 128 * 4),
    (Array('f32', (3, 5), '0,1:T(8,128)'), 8 * 128 * 4),
    (Array('f32', (200, 5), '0,1:T(8,128)'), 8 * 256 * 4),  # the axis of 200 is the fastest
    (Array('bf16', (2, 9, 130), '2,1,0:T(8,128)(2,1)'), 2 * 16 * 256 * 2),
    (Array('f32', (32,), '0:T(1024)'), 1024 * 4),
    (Array('f32', (), ':T(256)'), 256 * 4),
    (Array('pred', (4,), '0'), 4),
    (Array('f8e4m3', (4,), '0'), 4),
    (Array('token', (), ''), 0),
  ],
)
def test_padding_of_tiles(array, stored):
  assert array.stored == stored


def test_arrays_in_fast_memory_are_told():
  assert Array('f32', (8,), '0:T(1024)').in_hbm
  assert not Array('f32', (8,), '0:T(1024)S(1)').in_hbm


CONVOLUTION = """
ENTRY %main {{
  %lhs = f32[{lhs}]{{3,2,1,0}} parameter(0)
  %rhs = f32[{rhs}]{{3,2,1,0}} parameter(1)
  ROOT %c = f32[{out}]{{3,2,1,0}} convolution(%lhs, %rhs), window={{{window}}}, dim_labels={labels}
}}
"""


@pytest.mark.parametrize(
  'lhs, rhs, out, window, labels, products',
  [
    # A batch of matrix products, [4, 64, 8] x [4, 64, 8] -> [4, 64, 64]: the batch is a window of which one meets.
    ('4,4,64,8', '4,4,64,8', '4,4,64,64', 'size=4x4 stride=3x3 lhs_dilate=4x4', '01bf_01oi->01bf', 16 * 64 * 64 * 8),
    # Heads of a projection, as padding all around one element.
    (
      '4,1,32,64',
      '1,4,32,8',
      '4,4,64,8',
      'size=1x4 pad=0_0x3_3 rhs_reversal=0x1',
      '01fb_01io->01bf',
      4 * 4 * 64 * 8 * 32,
    ),
    # An ordinary one, 3 x 3 with padding of 1 on 5 x 5: 15 of its 15 pairs less the 2 at the borders, an axis.
    ('5,5,1,2', '3,3,2,7', '5,5,1,7', 'size=3x3 pad=1_1x1_1', '01bf_01io->01bf', 13 * 13 * 2 * 7),
  ],
)
def test_flops_of_convolutions_leave_padding_out(lhs, rhs, out, window, labels, products):
  text = CONVOLUTION.format(lhs=lhs, rhs=rhs, out=out, window=window, labels=labels)
  (computation,) = hlo.parse(text).computations.values()
  assert hlo.flops(computation.root) == 2 * products


def test_pairs_that_meet_are_those_of_a_plain_loop():
  rng = np.random.default_rng(0)
  for _ in range(300):
    inputs, outputs, kernel, stride, lhs_dilation, rhs_dilation = rng.integers(1, 7, 6).tolist()
    pad = int(rng.integers(-3, 9))
    elements = {i * lhs_dilation for i in range(inputs)}
    met = [o * stride + k * rhs_dilation - pad in elements for o in range(outputs) for k in range(kernel)]
    window = f'size={kernel} stride={stride} pad={pad}_0 lhs_dilate={lhs_dilation} rhs_dilate={rhs_dilation}'
    text = f"""
ENTRY %main {{
  %l = f32[1,{inputs},1]{{2,1,0}} parameter(0)
  %r = f32[1,{kernel},1]{{2,1,0}} parameter(1)
  ROOT %c = f32[1,{outputs},1]{{2,1,0}} convolution(%l, %r), window={{{window}}}, dim_labels=b0f_i0o->b0f
}}
"""
    (computation,) = hlo.parse(text).computations.values()
    assert hlo.flops(computation.root) == 2 * sum(met), window


def test_groups_of_a_transposed_grid_are_of_its_columns():
  ids = np.arange(24).reshape(2, 3, 4)
  found = hlo_collectives.groups("replica_groups=mesh['x'=2,'y'=3,'z'=4] {'x','z'}")
  assert found.tolist() == [ids[:, y].ravel().tolist() for y in range(3)]


def test_the_start_of_an_all_to_all_sends_what_its_operands_hold():
  start = hlo.parse(
    """
ENTRY %main {
  %x = bf16[8,2]{1,0} parameter(0)
  %s = ((bf16[8,2]{1,0}), bf16[8,2]{1,0}, u32[], u32[]) all-to-all-start(%x), replica_groups={{0,1}}, dimensions={0}
  ROOT %d = bf16[8,2]{1,0} all-to-all-done(%s)
}
"""
  ).entry.by_name['s']
  assert start.collective == 'all-to-all' and sum(array.bytes for array in start.results) == 2 * 8 * 2
