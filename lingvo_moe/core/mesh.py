"""Mesh: devices along named axes, and the tables of rules by which they split the axes of tensors.

xla_sharding.py annotates tensors of a graph by these rules; what plans, stores or lowers needs the mesh alone.
TensorFlow's private modules are imported in these two files only.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Self

import numpy as np
from tensorflow.compiler.xla.xla_data_pb2 import OpSharding

from lingvo_moe.core.axes import AXES as LETTERS
from lingvo_moe.core.axes import check as check_letters
from lingvo_moe.core.errors import UserError, closest, shown

AXES = {
  'data': 'rows of the batch, and with them groups; experts are copied along it',
  'expert': 'experts, and between the layers with experts rows of the batch too',
  'node': 'what expert splits, in as many times more parts; AllToAlls go along expert first, then along node',
  'hidden': 'hidden features of experts alone; between the layers with experts rows of the batch',
  'model': 'hidden features and attention heads',
  'stage': 'layers of scanned stacks, which form a pipeline in training; outside of stacks rows of the batch',
}

_MOST_DEVICES = 65_536  # of a mesh; the largest TPU slices have some 10,000 chips

Rules = Mapping[str, tuple[str, ...]]  # axis letter -> the mesh axes that may split it

# Letters that are not in a table are not split.
ACTIVATIONS: Rules = {
  'B': ('data', 'hidden', 'node', 'expert', 'stage'),
  'G': ('data', 'hidden', 'node', 'expert'),
  'E': ('expert', 'node'),  # in the reverse of G's order, for `reshard`
  'H': ('model',),
  'N': ('model',),
  'Z': ('stage', 'data'),
  'A': ('stage',),
  'D': ('data',),
  'I': ('data', 'hidden', 'node', 'expert'),
}
WEIGHTS: Rules = {
  'E': ('expert', 'node'),
  'H': ('model',),
  'N': ('model',),
  'L': ('stage',),
  'A': ('stage',),
  'Z': ACTIVATIONS['Z'],
}
# Splits every weight along M as well, so that a device stores only a part of the dense layers too (as in ZeRO-3 and
# FSDP). The number of parts is at most that of the devices, and leaves each part at least 8 rows, a tile of a TPU.
WEIGHTS_SPLIT: Rules = {**WEIGHTS, 'M': ('data', 'hidden', 'node', 'expert')}
_MIN_ROWS = {'M': 8}
_OF_EXPERTS = {'H': ('hidden',)}  # added to either table for tensors of experts, where H takes axes before G

# The mesh axes that split each axis of a tensor. 'expert/4' splits it in 4 over the fastest-varying factor 4 of mesh
# axis expert; along the rest of that axis devices hold copies.
Spec = tuple[tuple[str, ...], ...]


class Sharding(NamedTuple):
  """Sharding of a tensor: a spec, and the mesh whose axes it names, as NamedSharding of JAX.

  The mesh of a stored weight may not be the one that computes.
  """

  mesh: 'Mesh'
  spec: Spec

  @property
  def parts(self) -> int:
    """Number of parts of the tensor; devices beyond it hold copies."""
    return math.prod(map(self.mesh.size, self.spec))

  @property
  def op_sharding(self) -> OpSharding:
    """OpSharding, XLA's form."""
    return self.mesh.op_sharding(self.spec)


@dataclasses.dataclass(frozen=True)
class Mesh:
  """Devices arranged along named axes; annotations number them by position in the mesh, the last axis fastest."""

  axes: tuple[tuple[str, int], ...]  # (name, size) of each
  # Sizes of the physical grid in whose order devices are numbered, last axis fastest; () if that is the mesh.
  topology: tuple[int, ...] = ()
  placement: tuple[tuple[int, ...], ...] = ()  # for each mesh axis, the topology axes that it spans, slowest first
  split_dense: bool = False  # each device stores a part of the weights that all share, and gathers it (WEIGHTS_SPLIT)
  split_update: bool = False  # each device updates such a part, of whole weights (Xu et al., arXiv 2004.13336; ZeRO-1)
  storage: Self | None = None  # mesh of the same devices by which weights are stored between steps; None: this one

  def __post_init__(self):
    names = [name for name, _ in self.axes]
    for name, size in self.axes:
      if name not in AXES:
        raise UserError(f'a mesh has no axis {shown(name)}; {closest(name, list(AXES))}')
      if size < 1:
        raise UserError(f'a mesh axis has at least 1 device; saw {name}:{size}')
    if len(set(names)) < len(names):
      raise UserError(f'a mesh names an axis once; saw {",".join(names)}')
    if self.num_devices > _MOST_DEVICES:
      raise UserError(f'a mesh has at most {_MOST_DEVICES:,} devices; saw {shown(str(self))}: use a smaller one')
    spanned = tuple(math.prod(self.topology[i] for i in places) for places in self.placement)
    every_axis = list(range(len(self.topology)))
    if self.topology and (spanned != self.shape or sorted(sum(self.placement, ())) != every_axis):
      raise UserError(
        f'the axes of a mesh, {self}, must span each axis of the topology {self.topology} once; '
        f'saw placement={self.placement}'
      )
    if (other := self.storage) and (
      self.topology or other.topology or other.storage or self.num_devices != other.num_devices
    ):
      raise UserError(
        f'meshes that share weights have as many devices, and no placement; saw {self} of {self.num_devices} and '
        f'{other.num_devices} devices: use meshes of one size without --placement'
      )

  @classmethod
  def parse(cls, text: str, split_dense: bool = False, split_update: bool = False) -> Self:
    """Parses 'data:2,expert:4', a mesh of 2 x 4 devices; '' is one device.

    'data:8/expert:8' computes as on data:8, and stores weights as on expert:8.
    """
    text, slash, stored = text.partition('/')
    if '/' in stored:
      raise UserError(f"a mesh has one '/', as data:8/expert:8 has; saw {shown(f'{text}/{stored}')}: use two meshes")
    axes, storage = [], cls.parse(stored, split_dense, split_update) if slash else None
    for part in text.replace(' ', '').split(',') if text else ():
      name, _, size = part.partition(':')
      if not size.isdecimal() or len(size) > len(str(_MOST_DEVICES)):
        raise UserError(
          f"a mesh is written 'data:2,expert:4', sizes from 1 to {_MOST_DEVICES:,}; saw {shown(text)}: write it so"
        )
      axes.append((name, int(size)))
    mesh = cls(tuple(axes), split_dense=split_dense, split_update=split_update)
    return mesh if storage in (None, mesh) else dataclasses.replace(mesh, storage=storage)

  def __str__(self) -> str:
    text = lambda mesh: ','.join(f'{name}:{size}' for name, size in mesh.axes)
    return f'{text(self)}/{text(self.storage)}' if self.storage else text(self) or 'one device'

  @property
  def shape(self) -> tuple[int, ...]:
    return tuple(size for _, size in self.axes)

  @property
  def num_devices(self) -> int:
    return math.prod(self.shape)

  @property
  def stored(self) -> Self:
    """Mesh by which weights are stored between steps."""
    return self.storage or self

  @property
  def computing(self) -> Self:
    """Mesh by which a step computes, which stores weights by itself."""
    return dataclasses.replace(self, storage=None)

  def size(self, names: Sequence[str]) -> int:
    """Number of devices along these axes or parts of axes ('expert/4' is 4); an axis that the mesh lacks is 1."""
    sizes = dict(self.axes)
    return math.prod(int(name.partition('/')[2] or sizes.get(name, 1)) for name in names)

  def factors(self, spec: Spec) -> tuple[tuple[str, int], ...]:
    """Mesh axes (name, size), with an axis of which the spec takes a part split in two: copies, and the part.

    With 'expert/4' in the spec, ('expert', 8) becomes ('expert', 2), ('expert/4', 4).
    """
    parts = {name.partition('/')[0]: name for names in spec for name in names if '/' in name}
    factors = []
    for name, size in self.axes:
      part = self.size([parts[name]]) if name in parts else 1
      factors += [(name, size // part), *([(parts[name], part)] if name in parts else [])]
    return tuple(factors)

  def device_ids(self) -> np.ndarray:
    """Physical number of the device at each position of the mesh, in the mesh's shape."""
    ids = np.arange(self.num_devices)
    return (ids.reshape(self.topology).transpose(sum(self.placement, ())) if self.topology else ids).reshape(self.shape)

  def spec(self, dims: str, rules: Rules, first: str = '') -> Spec:
    """Spec of a tensor with these axis letters: letters in `first` and H of experts first, then left to right."""
    check_letters(dims)
    free, claimed = [name for name, size in self.axes if size > 1], {}
    alone = _OF_EXPERTS if 'E' in dims else {}
    for letter in sorted(dims, key=lambda letter: letter not in 'Z' + first and letter not in alone):
      claimed[letter] = tuple(name for name in (*rules.get(letter, ()), *alone.get(letter, ())) if name in free)
      free = [name for name in free if name not in claimed[letter]]
    return tuple(claimed[letter] for letter in dims)

  def op_sharding(self, spec: Spec) -> OpSharding:
    """OpSharding (XLA's form) of a spec: tiles, and devices as a reshaped and transposed iota."""
    used = [name for names in spec for name in names]
    if not used:
      return OpSharding(type=OpSharding.REPLICATED)
    factors = self.factors(spec)
    order = [i for name in used for i, (axis, _) in enumerate(factors) if axis == name]
    order += [i for i in range(len(factors)) if i not in order]
    tiles = [self.size(names) for names in spec]
    copies = self.num_devices // math.prod(tiles)
    sharding = tiled(tiles + ([copies] if copies > 1 else []), partial=copies > 1)
    sharding.iota_reshape_dims.extend(size for _, size in factors)
    sharding.iota_transpose_perm.extend(order)
    return sharding

  def check(self, shape: Sequence[int | None], dims: str, spec: Spec, proposed: str = '') -> None:
    """Raises UserError if the mesh does not divide the size of an axis that the spec splits.

    The message proposes a mesh: the one in the text `proposed`, or this one with fewer devices, which divides it.
    """
    for size, letter, names in zip(shape, dims, spec, strict=True):
      parts = self.size(names)
      if size is not None and size % parts:
        fitting, rest = dict(self.axes), size
        for name in names:
          fitting[name] = math.gcd(rest, fitting[name])
          rest //= fitting[name]
        mesh, axes = Mesh(tuple(fitting.items())), ' x '.join(map(repr, names))
        raise UserError(
          f'axis {letter} ({LETTERS[letter]}) has size {size}, which cannot be split over the {parts} devices of '
          f'mesh axis {axes}: use a multiple of {parts}, or --mesh={proposed or mesh}'
        )

  def stored_sharding(self, shape: Sequence[int], dims: str, name: str = '', update: bool = False) -> Sharding:
    """Sharding of a weight as stored between steps, or as its `update` and slots are split.

    UserError, with its name, if the mesh does not divide its shape.
    """
    mesh = self.stored
    spec = mesh.spec(dims, WEIGHTS_SPLIT if mesh.split_dense or (update and mesh.split_update) else WEIGHTS)
    parts = lambda size, letter, names: mesh._dividing(size, names, _MIN_ROWS[letter]) if letter in _MIN_ROWS else names
    spec = tuple(map(parts, shape, dims, spec))
    try:
      mesh.check(shape, dims, spec, str(self.computing) if self.storage else '')
    except UserError as e:
      raise UserError(f'{name}: {e}' if name else str(e)) from None
    return Sharding(mesh, spec)

  def _dividing(self, size: int, names: tuple[str, ...], least: int) -> tuple[str, ...]:
    """Mesh axes, or parts of axes, that split a size into equal parts of at least `least`."""
    axes, tiles = [], 1 if size % least else size // least
    for name in names:
      whole = self.size([name])
      part = math.gcd(tiles, whole)
      tiles //= part
      axes += [name] if part == whole else [f'{name}/{part}'] if part > 1 else []
    return tuple(axes)


def tiled(tiles: Sequence[int], partial: bool) -> OpSharding:
  """OpSharding with these tiles, whose devices are still to be filled in; `partial`: along the last axis are copies."""
  return OpSharding(type=OpSharding.OTHER, tile_assignment_dimensions=tiles, replicate_on_last_tile_dim=partial)
