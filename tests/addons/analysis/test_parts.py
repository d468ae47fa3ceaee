"""Parts of a model by the names of its operations."""

import pytest

from lingvo_moe.addons.analysis.parts import part_of, phase_of


@pytest.mark.parametrize(
  'op_name, part',
  [
    ('jit(f)/call_tf/encoder/layer_01/moe/gating/Softmax', 'gating'),
    ('jit(f)/call_tf/encoder/layer_01/moe/gating/cumsum/Cumsum_1', 'cumsum'),
    ('jit(f)/call_tf/encoder/layers_1of2/moe/gating_1/einsum/Einsum', 'gating'),
    ('jit(f)/call_tf/gradient_tape/encoder/layer_01/moe/einsum_1/Einsum', 'experts'),
    ('jit(f)/call_tf/gradient_tape/encoder/layer_01/moe/dispatch/einsum_1/Einsum', 'dispatch/combine'),
    ('jit(f)/call_tf/decoder/layer_00/cross_attention/einsum', 'attention'),
    ('jit(f)/call_tf/decoder/layer_00/cross_attention/projection_1/einsum', 'projections'),
    ('jit(f)/call_tf/decoder/layer_00/ffn/Relu', 'feed-forward'),
    ('jit(f)/call_tf/softmax_1/LogSoftmax', 'softmax'),
    ('jit(f)/call_tf/gradient_tape/softmax/einsum', 'softmax'),
    ('jit(f)/call_tf/update/Sqrt', 'optimiser'),
    ('jit(f)/call_tf/encoder/GatherV2', 'other'),
    ('gradient_tape/decoder/layer_00/attention/einsum_2/Einsum_1', 'attention'),
    ('', 'other'),
  ],
)
def test_parts_by_name(op_name, part):
  assert part_of(op_name) == part


@pytest.mark.parametrize(
  'op_name, phase',
  [
    ('jit(f)/call_tf/encoder/layer_01/moe/gating/Softmax', 'forward'),
    ('jit(f)/call_tf/gradient_tape/encoder/layer_01/moe/einsum_1/Einsum', 'backward'),
    ('jit(f)/call_tf/rematerialised/encoder/layer_01/moe/einsum_1/Einsum', 'rematerialisation'),
    ('jit(f)/call_tf/gradient_tape/rematerialised/encoder/layer_01/ffn/Relu', 'backward'),
    ('jit(f)/call_tf/update_1/Sqrt', 'update'),
    ('', 'forward'),
  ],
)
def test_phases_by_name(op_name, phase):
  assert phase_of(op_name) == phase
