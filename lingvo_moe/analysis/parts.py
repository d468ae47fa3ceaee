"""Parts and layers of a model: the part and the layer that an operation belongs to, from its name scopes."""

from __future__ import annotations

import re

PARTS = ('attention', 'feed-forward', 'gating', 'dispatch/combine', 'softmax', 'optimiser', 'other')

# Part of each name scope; a scope is a step of an operation's path.
_SCOPES = {
  'attention': 'attention',
  'cross_attention': 'attention',
  'ffn': 'feed-forward',
  'moe': 'feed-forward',
  'gating': 'gating',
  'dispatch': 'dispatch/combine',
  'combine': 'dispatch/combine',
  'softmax': 'softmax',
  'update': 'optimiser',
}
_LAYER = re.compile(r'(?:encoder|decoder)(?:/(?:layer_\d+|layers_\d+of\d+)(?:/[a-z_]+)?)?')
OUTSIDE = 'outside the layers'
_NUMBER = re.compile(r'_\d+$')  # suffix that TensorFlow adds to a scope's name when it is used again


def part_of(op_name: str) -> str:
  """Part of an operation, one of PARTS: that of the innermost name scope listed in _SCOPES.

  Args:
    op_name: name in TensorFlow, 'gradient_tape/encoder/layer_01/moe/gating/einsum/Einsum', or in XLA, where it begins
      with 'jit(f)/.../call_tf/'.
  """
  steps = op_name.rpartition('call_tf/')[2].split('/')
  for step in reversed(steps):
    part = _SCOPES.get(_NUMBER.sub('', step))
    if part:
      return part
  return 'other'


def layer_of(name: str) -> str:
  """Layer of an operation: 'gradient_tape/encoder/layer_01/moe/einsum' -> 'encoder/layer_01/moe'; else OUTSIDE."""
  match = _LAYER.search(name)
  return match[0] if match else OUTSIDE
