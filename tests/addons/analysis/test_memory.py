"""Memory of programs of a few lines, whose values can be followed by hand."""

from lingvo_moe.addons.analysis import hlo, memory
from lingvo_moe.runtime.aot import Compiled
from lingvo_moe.runtime.chips import CHIPS

# Two activations are made forward and used backward; another is only used forward. One float is 4 bytes.
STEP = """
ENTRY %main {
  %w = f32[100]{0} parameter(0), metadata={op_name="args[0][\\'weights\\'][\\'a\\']"}
  %s = f32[10]{0} parameter(1), metadata={op_name="args[0][\\'slots\\'][\\'a/row\\']"}
  %x = f32[20]{0} parameter(2), metadata={op_name="args[1][\\'src_ids\\']"}
  %a = f32[30]{0} add(%x, %x), metadata={op_name="jit(f)/call_tf/encoder/layer_00/ffn/add"}
  %b = f32[40]{0} add(%a, %a), metadata={op_name="jit(f)/call_tf/encoder/layer_01/ffn/add"}
  %c = f32[1000]{0} add(%b, %b), metadata={op_name="jit(f)/call_tf/softmax/add"}
  %d = f32[50]{0} add(%c, %c), metadata={op_name="jit(f)/call_tf/softmax/sub"}
  %view = f32[5,8]{1,0} bitcast(%b)
  %db = f32[60]{0} add(%d, %view), metadata={op_name="jit(f)/call_tf/gradient_tape/encoder/layer_01/ffn/add"}
  %da = f32[70]{0} add(%db, %a), metadata={op_name="jit(f)/call_tf/gradient_tape/encoder/layer_00/ffn/add"}
  %new = f32[100]{0} add(%w, %da), metadata={op_name="jit(f)/call_tf/update/add"}
  ROOT %out = (f32[100]{0}) tuple(%new)
}
"""

LOOP = """
%body {
  %p = (f32[500]{0}, f32[7]{0}) parameter(0)
  %stack = f32[500]{0} get-tuple-element(%p), index=0
  %y = f32[7]{0} get-tuple-element(%p), index=1
  %inner = f32[900]{0} add(%y, %y), metadata={op_name="jit(f)/call_tf/decoder/layer_01/moe/add"}
  %z = f32[7]{0} add(%inner, %inner), metadata={op_name="jit(f)/call_tf/decoder/layer_01/moe/sub"}
  %kept = f32[500]{0} dynamic-update-slice(%stack, %z, %z)
  ROOT %t = (f32[500]{0}, f32[7]{0}) tuple(%kept, %z)
}

ENTRY %main {
  %x = f32[7]{0} parameter(0)
  %zeros = f32[500]{0} broadcast(%x), metadata={op_name="jit(f)/call_tf/decoder/zeros"}
  %init = (f32[500]{0}, f32[7]{0}) tuple(%zeros, %x)
  %loop = (f32[500]{0}, f32[7]{0}) while(%init), condition=%never, body=%body, \
metadata={op_name="jit(f)/call_tf/decoder/while"}
  %saved = f32[500]{0} get-tuple-element(%loop), index=0
  %grad = f32[3]{0} add(%saved, %saved), metadata={op_name="jit(f)/call_tf/gradient_tape/decoder/while"}
  ROOT %r = f32[3]{0} negate(%grad)
}
"""


def compiled(text, temporaries):
  sizes = {'arguments': 4 * 130, 'outputs': 4 * 103, 'aliased': 4 * 100, 'temporaries': temporaries, 'code': 16}
  return Compiled(text, 0.0, 0.0, devices=[], **sizes)


def test_what_is_kept_and_what_is_saved_for_the_backward_pass():
  used = memory.measure(hlo.parse(STEP), compiled(STEP, temporaries=6000), CHIPS['v3'])
  assert used.weights == 4 * 100 and used.slots == 4 * 10
  assert used.activations == 4 * (30 + 40 + 50)  # a, b by another name, and d; c dies forward
  assert used.temporaries == 6000 - used.activations
  assert used.other == 4 * 20 + 4 * 3 + 16
  assert used.total == used.weights + used.slots + used.activations + used.temporaries + used.other
  assert used.hbm == int(15.48 * 2**30)


def test_what_no_gradient_uses_is_no_activation():
  text = STEP.replace('add(%d, %view)', 'add(%b, %view)')
  used = memory.measure(hlo.parse(text), compiled(text, temporaries=6000), None)
  assert used.activations == 4 * (30 + 40) and used.hbm is None


def test_the_largest_values_are_those_at_the_peak():
  held = memory.largest(hlo.parse(STEP))
  assert [(h.bytes, h.layer) for h in held] == [
    (4000, 'outside the layers'),
    (200, 'outside the layers'),  # d, as it is made from c
    (160, 'encoder/layer_01/ffn'),
    (120, 'encoder/layer_00/ffn'),
  ]
  assert held[0].shape == 'f32[1000]' and held[0].op == 'softmax/add'


def test_a_loop_saves_in_place_and_holds_its_own_values_while_it_runs():
  module = hlo.parse(LOOP)
  assert [(h.bytes, h.op) for h in memory.largest(module)] == [
    (3600, 'decoder/layer_01/moe/add'),
    (2000, 'decoder/zeros'),
  ]
  assert memory.measure(module, compiled(LOOP, temporaries=9000), None).activations == 2000
