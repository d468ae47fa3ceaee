"""Placement of a mesh's axes on the torus of a TPU slice (GShard, appendix A.3 and Figure 10).

A placement gives mesh axes boxes of chips: 'expert:8x4' on v3:32x32 lets every group of devices along the axis expert
lie in a box of 8 x 4 chips, while 'expert:32x1' lets it lie in a row. An AllToAll within a box of two long sides has
more links across its middle. Boxes tile each other: the first axis has boxes of neighbouring chips, and the next one
boxes of such boxes. The axis that is not named takes the rest.
"""

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lingvo_moe.core.errors import UserError, shown
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.runtime.chips import Gpu, Topology

Boxes = Mapping[str, tuple[int, ...]]  # mesh axis -> chips along each axis of the torus


def place(mesh: Mesh, topology: Topology, text: str) -> Mesh:
  """Mesh whose axes are placed on a slice as the text says; '' leaves devices in the order of their numbers.

  The devices of a placed mesh are numbered by their coordinates, (x, y, z, core), the last one fastest.

  Raises:
    UserError: the text is no placement of this mesh on this slice.
  """
  check_size(mesh, topology)
  if not text:
    return mesh
  if isinstance(topology.chip, Gpu):
    raise UserError(f'a placement is on the torus of TPUs; saw {shown(text)} on {topology}: leave --placement out')
  boxes, sizes = _with_rest(mesh, topology, parse(text)), dict(mesh.axes)
  # The slice's grid divided by the boxes, the first axis innermost.
  grid, spans = [], {name: [] for name in sizes}
  for side in range(len(topology.shape)):
    for name in reversed(boxes):
      spans[name].append(len(grid))
      grid.append(boxes[name][side])
  if topology.chip.devices > 1:
    whole_chips = next(name for name, box in boxes.items() if sizes[name] > math.prod(box))
    spans[whole_chips].append(len(grid))
    grid.append(topology.chip.devices)
  return dataclasses.replace(mesh, topology=tuple(grid), placement=tuple(tuple(spans[name]) for name in sizes))


def check_size(mesh: Mesh, topology: Topology) -> None:
  """Raises a UserError unless the mesh has as many devices as the slice."""
  if topology.num_devices != mesh.num_devices:
    raise UserError(
      f'a mesh has as many devices as the topology; saw --mesh={mesh} of {mesh.num_devices} for {topology} of '
      f'{topology.num_devices}: change either'
    )


def parse(text: str) -> dict[str, tuple[int, ...]]:
  """Parses 'expert:8x4' or 'model:2x1,expert:8x4'."""
  boxes = {}
  for part in text.replace(' ', '').split(','):
    name, _, sizes = part.partition(':')
    box = sizes.split('x')
    if name in boxes or not all(size.isdecimal() and len(size) < 6 and int(size) > 0 for size in box):
      raise UserError(
        "a placement is the chips that a mesh axis spans along each axis of the torus, such as 'expert:8x4'; saw "
        f'{shown(text)}'
      )
    boxes[name] = tuple(map(int, box))
  return boxes


def options(mesh: Mesh, topology: Topology, axis: str) -> Iterator[str]:
  """Placements of one axis of a mesh, as texts; none if the mesh has more than one other axis of several devices."""
  if axis not in _long_axes(mesh) or len(_long_axes(mesh)) > 2:
    return
  for box in itertools.product(*([n for n in range(1, side + 1) if side % n == 0] for side in topology.shape)):
    with contextlib.suppress(UserError):
      _with_rest(mesh, topology, {axis: box})
      yield f'{axis}:{_text(box)}'


def ordered(devices: Sequence[Any]) -> list[Any]:
  """Devices in the order in which a placed mesh numbers them; those without coordinates, such as CPUs, as they are."""
  return sorted(devices, key=lambda d: (*d.coords, d.core_on_chip)) if hasattr(devices[0], 'coords') else list(devices)


def _long_axes(mesh: Mesh) -> dict[str, int]:
  return {name: size for name, size in mesh.axes if size > 1}


def _with_rest(mesh: Mesh, topology: Topology, boxes: Boxes) -> dict[str, tuple[int, ...]]:
  """Boxes of all axes of several devices, checked."""
  sizes = _long_axes(mesh)
  rest = [name for name in sizes if name not in boxes]
  if len(rest) > 1 or any(name not in sizes for name in boxes):
    raise UserError(
      f'a placement names all axes of the mesh that have several devices, or all but one; saw '
      f'{",".join(boxes)} for --mesh={mesh}'
    )
  boxes = {name: (*box, *[1] * (len(topology.shape) - len(box))) for name, box in boxes.items()}
  left = topology.shape
  for name, box in boxes.items():
    if len(box) > len(left) or any(side % n for side, n in zip(left, box, strict=True)):
      raise UserError(
        f'the box of a placement divides the chips of its slice along each axis; saw {name}:{_text(box)}, and '
        f'{_text(left)} chips of {topology}'
      )
    left = tuple(side // n for side, n in zip(left, box, strict=True))
  boxes |= dict.fromkeys(rest, left)
  cores = topology.chip.devices
  over = [size / math.prod(boxes[name]) for name, size in sizes.items()]
  if sorted(over) != sorted([1] * (len(over) - 1) + [cores]) or (not rest and math.prod(left) > 1):
    seen = ', '.join(f'{name}:{_text(box)} for {sizes[name]}' for name, box in boxes.items())
    several = f', and one axis has all {cores} of each chip' if cores > 1 else ''
    raise UserError(
      f'an axis of a mesh has a device for every chip of its box{several}; saw {seen} devices on {topology}'
    )
  return boxes


def _text(box: Sequence[int]) -> str:
  return 'x'.join(map(str, box))
