"""Weight counts of a model: by part, of its experts, and used per token."""

import collections
import math

from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.weights import WeightSpec
from lingvo_moe.layers.gates.gate import is_gate_weight


def count_per_token(specs: weights_lib.Nested, experts_per_token: float = 2) -> int:
  """Number of weights used to compute with one source token and one target token.

  These are the whole encoder and decoder, with `experts_per_token` experts of each MoE layer; the whole output softmax,
  which is the target embedding; and one row of an embedding that is not the output softmax too. Gates count whole.
  """
  flat = weights_lib.flatten(specs)
  looked_up = ('source_embedding/', *(['target_embedding/'] if 'output_embedding/table' in flat else []))
  return sum(_used_by_a_token(name, spec, experts_per_token, looked_up) for name, spec in flat.items())


def count_experts(specs: weights_lib.Nested) -> int:
  """Number of experts, over all MoE layers."""
  return sum(_experts(s) for name, s in weights_lib.flatten(specs).items() if name.endswith('/wi'))


def parts(specs: weights_lib.Nested) -> dict[str, int]:
  """Number of weights by part: 'embeddings/source', 'encoder/attention', 'decoder/experts', ..."""
  sums = collections.Counter()
  for name, spec in weights_lib.flatten(specs).items():
    sums[part_of(name, spec)] += spec.size
  return dict(sorted(sums.items(), key=lambda item: _ORDER.index(item[0])))


def part_of(name: str, spec: WeightSpec) -> str:
  """Part that a weight belongs to, from its flat name."""
  stack, *path = name.split('/')
  if stack.endswith('_embedding'):
    return f'embeddings/{stack.removesuffix("_embedding")}'
  if {'norm', 'post_norm'} & set(path):
    return f'{stack}/norms'
  if is_gate_weight(path[-1]):
    return f'{stack}/gates'
  if _experts(spec):
    return f'{stack}/experts'
  if 'lstm' in path:
    return f'{stack}/lstm'
  return f'{stack}/feed_forward' if {'ffn', 'shared'} & set(path) else f'{stack}/attention'


def short(number: int) -> str:
  """Count written with three digits: 619B, 1.43B, 585k."""
  for unit, letter in ((10**12, 'T'), (10**9, 'B'), (10**6, 'M'), (10**3, 'k')):
    if number >= unit:
      return f'{float(f"{number / unit:.3g}"):g}{letter}'
  return str(number)


KINDS = ('attention', 'lstm', 'feed_forward', 'experts', 'gates', 'norms')
_ORDER = [
  'embeddings/source',
  'embeddings/target',
  'embeddings/output',
  *(f'{s}/{k}' for s in ('encoder', 'decoder') for k in KINDS),
]


def _experts(spec: WeightSpec) -> int:
  """Number of experts in a weight, over all layers of a scanned stack; 0 for a weight without experts."""
  if 'E' not in spec.dims:
    return 0
  return math.prod(size for size, letter in zip(spec.shape, spec.dims, strict=True) if letter in 'LE')


def _used_by_a_token(name: str, spec: WeightSpec, experts_per_token: float, looked_up: tuple[str, ...]) -> int:
  if is_gate_weight(name.rpartition('/')[2]):
    return spec.size
  if experts := _experts(spec):
    layers = spec.shape[0] if spec.dims.startswith('L') else 1
    return round(spec.size // experts * layers * experts_per_token)
  if name.startswith(looked_up):
    return spec.size // spec.shape[0]
  return spec.size
