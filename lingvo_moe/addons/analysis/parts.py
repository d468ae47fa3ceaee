"""Parts, phases and layers of a model: those that an operation belongs to, from its name scopes."""

import re

PARTS = ('attention', 'projections', 'feed-forward', 'experts', 'gating', 'cumsum', 'dispatch/combine')
PARTS += ('softmax', 'optimiser', 'other')

# Part of each name scope; a scope is a step of an operation's path.
_SCOPES = {
  'attention': 'attention',
  'cross_attention': 'attention',
  'projection': 'projections',
  'ffn': 'feed-forward',
  'moe': 'experts',
  'gating': 'gating',
  'cumsum': 'cumsum',
  'dispatch': 'dispatch/combine',
  'combine': 'dispatch/combine',
  'softmax': 'softmax',
  'update': 'optimiser',
}
PHASES = ('forward', 'rematerialisation', 'backward', 'update')
_LAYER = re.compile(r'(?:encoder|decoder)(?:/(?:layer_\d+|layers_\d+of\d+)(?:/[a-z_]+)?)?')
OUTSIDE = 'outside the layers'
_NUMBER = re.compile(r'_\d+$')  # suffix that TensorFlow adds to a scope's name when it is used again


def part_of(op_name: str) -> str:
  """Part of an operation, one of PARTS: that of the innermost name scope listed in _SCOPES.

  Args:
    op_name: name in TensorFlow, 'gradient_tape/encoder/layer_01/moe/gating/einsum/Einsum', or in XLA, where it begins
      with 'jit(f)/.../call_tf/'.
  """
  return next((_SCOPES[step] for step in reversed(_steps(op_name)) if step in _SCOPES), 'other')


def phase_of(op_name: str) -> str:
  """Phase of a train step that an operation belongs to, one of PHASES.

  The gradient of a rematerialised operation belongs to the backward phase, 'gradient_tape/rematerialised/...'.
  """
  steps = _steps(op_name)
  if 'gradient_tape' in steps:
    return 'backward'
  if 'rematerialised' in steps:
    return 'rematerialisation'
  return 'update' if part_of(op_name) == 'optimiser' else 'forward'


def layer_of(name: str) -> str:
  """Layer of an operation: 'gradient_tape/encoder/layer_01/moe/einsum' -> 'encoder/layer_01/moe'; else OUTSIDE."""
  match = _LAYER.search(name)
  return match[0] if match else OUTSIDE


def _steps(op_name: str) -> list[str]:
  return [_NUMBER.sub('', step) for step in op_name.rpartition('call_tf/')[2].split('/')]
