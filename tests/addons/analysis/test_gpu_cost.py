"""Cost on GPUs: kernels, library products and collectives of a program for an H100, worked out by hand, without CUDA.

What compiles for a GPU is in the extra gpu-aot (5.5 GB), which no test needs.
"""

import types

import forks
import numpy as np
import pytest

from lingvo_moe.addons.analysis import hlo, torus
from lingvo_moe.config import registry
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.runtime.chips import GPUS, Topology
from lingvo_moe.runtime.torus_placement import place

pytest.importorskip('jax')
cost = pytest.importorskip('lingvo_moe.addons.analysis.cost')
aot = pytest.importorskip('lingvo_moe.runtime.aot')

H100 = GPUS['h100']

# Lines as XLA writes them for an H100, shortened.
TEXT = """HloModule jit_call, is_scheduled=true

%gemm_fusion (p0: bf16[4096,4096], p1: bf16[4096,4096]) -> bf16[4096,4096] {
  %p0 = bf16[4096,4096]{1,0} parameter(0)
  %p1 = bf16[4096,4096]{1,0} parameter(1)
  ROOT %dot.1 = bf16[4096,4096]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(call)/call_tf/encoder/layer_00/attention/projection/einsum"}
}

%body (s: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %s = (s32[], f32[1024]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[1024]{0} get-tuple-element(%s), index=1
  %y = f32[1024]{0} negate(%x), metadata={op_name="jit(call)/call_tf/update/neg"}
  ROOT %t = (s32[], f32[1024]{0}) tuple(%i, %y)
}

%condition (q: (s32[], f32[1024])) -> pred[] {
  %q = (s32[], f32[1024]{0}) parameter(0)
  ROOT %less = pred[] constant(true)
}

%joined (p0: f32[512], p1: f32[512]) -> f32[1024] {
  %p0 = f32[512]{0} parameter(0)
  %p1 = f32[512]{0} parameter(1)
  ROOT %all = f32[1024]{0} concatenate(%p0, %p1), dimensions={0}
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (w: bf16[4096,4096], x: bf16[4096,4096], l: f32[8,64,32], r: f32[8,64,32], u: f32[1024]) -> f32[1024] {
  %w = bf16[4096,4096]{1,0} parameter(0), metadata={op_name="args[0][\\'weights\\'][\\'a\\']"}
  %x = bf16[4096,4096]{1,0} parameter(1)
  %l = f32[8,64,32]{2,1,0} parameter(2)
  %r = f32[8,64,32]{2,1,0} parameter(3)
  %u = f32[1024]{0} parameter(4)
  %gemm = bf16[4096,4096]{1,0} fusion(%w, %x), kind=kCustom, calls=%gemm_fusion, \
backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
  %called = (f32[8,64,64]{2,1,0}, s8[33554432]{0}) custom-call(%l, %r), custom_call_target="__cublas$gemm", \
metadata={op_name="jit(call)/call_tf/encoder/layer_00/attention/einsum"}, backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
  %zero = s32[] constant(0)
  %init = (s32[], f32[1024]{0}) tuple(%zero, %u)
  %loop = (s32[], f32[1024]{0}) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"},"known_init_step":{"init":"0","step":"1"}}
  %out = f32[1024]{0} get-tuple-element(%loop), index=1
  %one = f32[512]{0} slice(%out), slice={[0:512]}, metadata={op_name="jit(call)/call_tf/gradient_tape/encoder/sum"}
  %joint = f32[1024]{0} fusion(%one, %one), kind=kLoop, calls=%joined
  %begun = f32[1024]{0} all-reduce-start(%joint), replica_groups=[1,8]<=[8], to_apply=%sum
  ROOT %ended = f32[1024]{0} all-reduce-done(%begun)
}
"""


def test_the_roofline_of_a_gpu_program_is_worked_out_by_hand():
  devices = [types.SimpleNamespace(coords=(0, 0, n)) for n in range(8)]
  sizes = dict(trace_seconds=1.0, compile_seconds=1.0, code=0, arguments=80, outputs=40, aliased=30, temporaries=10)
  compiled = aot.Compiled(TEXT, devices=devices, **sizes)
  program = registry.get('mt.cldr.Tiny')().program()
  told = cost.analyze(compiled, program, Mesh.parse('data:8'), Topology.parse('h100:8'))
  parts = told['parts']
  assert parts['projections'].flops == 2 * 4096**3 and parts['projections'].bytes == 3 * 2 * 4096**2
  assert parts['projections'].compute_seconds == pytest.approx(2 * 4096**3 / 989e12)  # bound by products
  # A call of a library counts its product, and not the workspace among its results.
  assert parts['attention'].flops == 2 * 8 * 64 * 64 * 32
  assert parts['attention'].bytes == 4 * 8 * (2 * 64 * 32 + 64 * 64)
  assert parts['attention'].compute_seconds == pytest.approx(parts['attention'].bytes / 3350e9)  # bound by memory
  # An elementwise kernel in a loop of six, and the sum of joint gradients over 8 GPUs.
  update, sent = parts['optimiser'], 2 * 7 / 8 * 4 * 1024 / 450e9 + 1e-6
  assert (update.bytes, update.kernels) == (6 * 2 * 4 * 1024, 6)
  assert update.collective_seconds == pytest.approx(sent)
  computing = sum(part.compute_seconds for part in parts.values())
  assert told['step_seconds_roofline'] == pytest.approx(computing + sent)
  assert told['step_seconds_compiler'] == pytest.approx(computing / 0.8 + sent)
  used = told['memory_per_device']
  assert (used.total, used.hbm) == (100, int(0.75 * H100.memory)) and told['placements'] == []


def test_float32_products_are_timed_at_the_rate_of_tf32():
  text = TEXT.replace('bf16', 'f32')
  (made,) = hlo.products(hlo.parse(text).entry.by_name['gemm'])
  assert made == (2 * 4096**3, 'f32') and H100.peak('f32') == H100.peak('bf16') / 2


@pytest.mark.parametrize(
  'kind, share', [('all-reduce', 2 * 3 / 4), ('all-gather', 3 / 4), ('all-to-all', 3 / 4), ('collective-permute', 1)]
)
def test_collectives_of_gpus_pass_through_switches(kind, share):
  groups = np.array([[0, 2, 4, 6], [1, 3, 5, 7]])
  assert torus.seconds(kind, 900_000, groups, None, H100) == pytest.approx(share * 2e-6 + 1e-6)
  assert torus.seconds(kind, 900_000, groups[:, :1], None, H100) == 0


def test_a_program_larger_than_what_jax_takes_does_not_fit():
  sizes = {'arguments': 40 * 2**30, 'outputs': 40 * 2**30, 'aliased': 40 * 2**30, 'temporaries': 19 * 2**30}
  assert aot._too_large(sizes, H100) == ''
  sizes['temporaries'] = 20 * 2**30
  assert 'takes 60.0 GiB of a device, of which JAX takes 59.3 of 79.1 GiB' in aot._too_large(sizes, H100)


def test_a_missing_compiler_of_gpus_is_told_with_its_extra(monkeypatch):
  def refuse(**kwargs):
    assert kwargs['topology'] == '1x1x8' and 'core_count: 132 ' in kwargs['target_config']
    raise NotImplementedError('topology not implemented for cuda')

  monkeypatch.setattr(aot.topologies, 'get_topology_desc', refuse)
  with pytest.raises(UserError, match=r'GPUs needs .* not installed \(topology not .*: pip install .*(cuda12|gpu-aot)'):
    aot.devices_of(Topology.parse('h100:8'))


def test_a_placement_on_gpus_is_refused():
  with pytest.raises(UserError, match="on the torus of TPUs; saw 'expert:4' on h100:8: leave --placement out"):
    place(Mesh.parse('data:2,expert:4'), Topology.parse('h100:8'), 'expert:4')


@pytest.mark.parametrize(
  'flag, message',
  [
    ('--topology=h101', "there is no TPU or GPU 'h101'; closest: h100, h200"),
    ('--topology=h100:16', "GPUs are 1 to 8 of one host, such as 'h100:8'; saw 'h100:16'"),
    ('--mesh=expert:4', 'saw --mesh=expert:4 of 4 for h100:8 of 8'),
  ],
)
def test_mistakes_with_gpus_get_one_line(flag, message):
  flags = [flag] if 'topology' in flag else [flag, '--topology=h100:8']
  done = forks.run(['-m', 'lingvo_moe.cli.commands.main', 'cost', '--model=mt.bench_s.Tiny', *flags], timeout=300)
  assert done.returncode == 1 and message in done.stderr.splitlines()[-1] and 'Traceback' not in done.stderr
