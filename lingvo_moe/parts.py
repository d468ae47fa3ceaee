"""Which part of a model an operation belongs to, told by the name scopes that layers set."""

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
