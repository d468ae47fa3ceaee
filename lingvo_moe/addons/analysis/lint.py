"""Sharding lint: finds the tensors in a partitioned program that a device holds whole but should hold a part of.

The annotations in TensorFlow's graph state which tensors are split, and how; the program from XLA's partitioner has the
shapes on each device. Both have the name of the layer that an operation comes from.
"""

import collections
import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from unittest import mock

import tensorflow as tf

from lingvo_moe import xla_sharding
from lingvo_moe.addons.analysis import hlo
from lingvo_moe.addons.analysis.parts import OUTSIDE, layer_of, part_of
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.layers import dispatch, experts, moe
from lingvo_moe.layers.gates import gate
from lingvo_moe.models.batches import ArrayBatch
from lingvo_moe.ops import backend, xla
from lingvo_moe.program import Program

PLANTS = ('topk', 'unsharded')

# Parts of a layer without a weight that is a vector: a long vector summed over devices there is no gradient of a
# weight, but values scattered by a flat index over the tokens of all groups, as by the gradient of tf.math.top_k.
_WITHOUT_VECTORS = ('gating', 'dispatch/combine')

_GATHERED = 'weights/'  # name scope in which weights that are stored in parts are gathered, as the rules say


class Annotated(NamedTuple):
  """Tensor that an annotation splits: its layer, the part of it (parts.py), its whole shape and the shape of a part."""

  layer: str
  role: str
  whole: tuple[int, ...]
  part: tuple[int, ...]


class Finding(NamedTuple):
  """Tensor of which a device holds more than the rules say."""

  layer: str
  what: str  # 'all-gathered', 'whole on every device', or 'scattered over all tokens and all-reduced'
  shape: tuple[int, ...]
  megabytes: float
  op: str

  def __str__(self) -> str:
    shape = ','.join(map(str, self.shape))
    return f'{self.layer}: [{shape}] ({self.megabytes:.3g} MiB) is {self.what}, at {self.op}'


def annotations(program: Program, mesh: Mesh, batch: ArrayBatch) -> list[Annotated]:
  """Tensors that the annotations of a train step split."""
  specs = lambda values: {name: tf.TensorSpec(s.shape, s.dtype) for name, s in values.items()}
  state = {'step': tf.TensorSpec([], tf.int32)}
  state |= {'weights': specs(program.weight_specs), 'slots': specs(program.slot_specs)}
  with xla_sharding.use(mesh), backend.use(xla.BACKEND), xla_sharding.recorded() as made:
    tf.function(program.train_step, autograph=False).get_concrete_function(state, specs(batch))
  split = {}
  for x, sharding in made:
    whole = tuple(x.shape)
    tiles = sharding.tile_assignment_dimensions[: len(whole)]
    if x.shape.is_fully_defined() and math.prod(tiles) > 1:
      part = tuple(size // n for size, n in zip(whole, tiles, strict=True))
      split[Annotated(layer_of(x.op.name), part_of(x.op.name), whole, part)] = None
  return list(split)


def default_limit(batch: ArrayBatch, micro_batches: int = 1) -> int:
  """Largest size in bytes of a tensor that is ignored: less than one number of 4 bytes for each token of a micro-batch.

  The rules split rows and groups, so whatever has a number for each token is split; the smallest are the gate's choices
  and weights [G, S], and a gate's mistake may gather no more than these.
  """
  tokens = min(x.size for x in batch.values()) // micro_batches
  return 4 * tokens - 1


def read(program: str, annotated: Iterable[Annotated], limit: int) -> list[Finding]:
  """Findings in the text of a partitioned program, one a layer, kind and shape, of tensors above `limit` bytes."""
  wholes, parts, parts_by_role = (collections.defaultdict(set) for _ in range(3))
  for a in annotated:
    wholes[a.layer].add(a.whole)
    parts[a.layer].add(tuple(sorted(a.part)))
    parts_by_role[a.layer, a.role].add(a.part)
  findings = {}
  for instruction in hlo.parse(program).instructions():
    op = instruction.op_name
    if instruction.opcode in ('parameter', 'get-tuple-element', 'tuple') or not op or _GATHERED in op:
      continue
    layer, role = layer_of(op), part_of(op)
    is_sum = instruction.collective == 'all-reduce' and 'Scatter' in op and role in _WITHOUT_VECTORS
    for array in instruction.arrays:
      shape = array.shape
      if array.bytes <= limit:
        continue
      # Parts of weights, with axes in any order, are no finding in a layer; their annotations are outside of it. XLA
      # merges axes for matrix products: a part [E, G, C, M] may become [E, G * C, M], which may be the whole shape of
      # another tensor [G, S, M].
      is_part = any(tuple(sorted(shape)) in parts[where] for where in (layer, OUTSIDE)) or any(
        _merges(part, shape) for part in parts_by_role[layer, role]
      )
      if instruction.opcode.startswith('all-gather'):
        what = 'all-gathered'
      elif layer != OUTSIDE and shape in wholes[layer] and not is_part:
        what = 'whole on every device'
      elif is_sum and len(shape) == 1:
        what = 'scattered over all tokens and all-reduced'
      else:
        continue
      findings.setdefault((layer, what, shape), Finding(layer, what, shape, array.bytes / 2**20, op))
  return list(findings.values())


@functools.cache
def _merges(axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
  """Whether each axis of a shape is the product of some of the axes, in any order, and all of them are used."""
  if not shape:
    return math.prod(axes) == 1
  for count in range(len(axes) + 1):
    for chosen in itertools.combinations(range(len(axes)), count):
      rest = tuple(n for i, n in enumerate(axes) if i not in chosen)
      if math.prod(axes[i] for i in chosen) == shape[0] and _merges(rest, shape[1:]):
        return True
  return False


@contextlib.contextmanager
def planted(plant: str) -> Iterator[None]:
  """Plants a mistake in the layers, to show that the lint finds it: one of PLANTS; '' for none."""
  if plant not in ('', *PLANTS):
    raise UserError(f'there is no plant {plant!r}; {closest(plant, PLANTS)}')
  unsharded = lambda x, dims: x if 'E' in dims else xla_sharding.shard(x, dims)
  changes = {
    'topk': [(gate, 'at_choices', _values_by_top_k)],
    'unsharded': [(module, 'shard', unsharded) for module in (moe, dispatch, experts)]
    + [(dispatch, 'reshard', lambda x, *_: x)],
  }
  with contextlib.ExitStack() as stack:
    for module, name, planted in changes.get(plant, ()):
      stack.enter_context(mock.patch.object(module, name, planted))
    yield


def _values_by_top_k(values_GSE: tf.Tensor, expert_GSR: tf.Tensor) -> tf.Tensor:
  """Values at the top choices by tf.math.top_k, whose gradient scatters into those of all groups by a flat index."""
  return tf.math.top_k(values_GSE, expert_GSR.shape[-1]).values
