"""Which part of a model and which of its layers an operation belongs to, told by the name scopes that layers set."""

from __future__ import annotations

import re

PARTS = ('attention', 'feed-forward', 'gating', 'dispatch/combine', 'softmax', 'optimiser', 'other')

# Name scopes, as steps of an operation's path, and the part that each begins.
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
_NUMBER = re.compile(r'_\d+$')  # that TensorFlow adds to a scope's name where it comes again


def part_of(op_name: str) -> str:
  """One of PARTS, by the innermost name scope that tells.

  Args:
    op_name: as TensorFlow has it, 'gradient_tape/encoder/layer_01/moe/gating/einsum/Einsum', or as XLA keeps it, with
      'jit(f)/.../call_tf/' before that.
  """
  steps = op_name.rpartition('call_tf/')[2].split('/')
  for step in reversed(steps):
    part = _SCOPES.get(_NUMBER.sub('', step))
    if part:
      return part
  return 'other'


def layer_of(name: str) -> str:
  """'gradient_tape/encoder/layer_01/moe/einsum' -> 'encoder/layer_01/moe'; 'outside the layers' elsewhere."""
  match = _LAYER.search(name)
  return match[0] if match else OUTSIDE
