"""Lower bounds on the time of collectives: on a TPU's torus, as compiled and for other placements; between GPUs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lingvo_moe.addons.analysis.hlo_collectives import Collective
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.runtime import torus_placement
from lingvo_moe.runtime.chips import HOP_SECONDS, Chip, Gpu, Topology

_AXIS = 'expert'  # which is placed


def coordinates(topology: Topology) -> np.ndarray:
  """Coordinates [devices, axes] on the torus of a slice's devices, chip by chip."""
  return np.repeat(list(np.ndindex(*topology.shape)), topology.chip.devices, axis=0)


def seconds(kind: str, size: int, groups: np.ndarray, coordinates: np.ndarray, chip: Chip | Gpu) -> float:
  """Least time in seconds that a collective's bytes take on the torus, or between GPUs through their switches.

  The devices of a group lie in a box of chips, which all groups inside it share. An AllReduce uses rings along every
  axis of the box, in both directions at once; AllGather and ReduceScatter take half its time. Half of the bytes of an
  AllToAll cross the middle of the box's axis with most chips to a link, limited by the bandwidth of all links there: in
  a square box its time grows with the square root of the number of devices. The ends of an axis are linked where it
  spans the pod (`Chip.wraps`), for groups that span all of it; elsewhere a cut has half as many links. Of the pairs of
  a CollectivePermute the farthest counts.

  Args:
    kind: one of hlo.COLLECTIVES.
    size: bytes that a device sends or receives.
    groups: [groups, devices of a group], numbers of devices.
    coordinates: [devices, axes], the chips of all devices of the slice.
    chip: their generation, or the GPU.
  """
  if isinstance(chip, Gpu):
    return _switched_seconds(kind, size, groups.shape[1], chip)
  different = groups if kind == 'collective-permute' else groups[:1]
  return max(_seconds(kind, size, group, coordinates, chip) for group in different)


def _seconds(kind: str, size: int, group: np.ndarray, coordinates: np.ndarray, chip: Chip) -> float:
  """Seconds of one group."""
  coords, slice_shape = coordinates[group], np.ptp(coordinates, axis=0) + 1
  box = np.ptp(coords, axis=0) + 1
  n, members = len(group), len({tuple(c) for c in coords.tolist()})
  if n == 1 or not size:
    return 0.0
  if members == 1:  # cores of one chip, which exchange data through its memory
    return size / chip.hbm_bandwidth
  # Each axis of the box: chips along it, and links from one to the next, two where the ends are linked.
  axes = [
    (int(extent), 2 if extent == whole and extent >= chip.wraps else 1)
    for extent, whole in zip(box, slice_shape)
    if extent > 1
  ]
  hops = sum(extent // 2 if links == 2 else extent - 1 for extent, links in axes)
  chips = math.prod(extent for extent, _ in axes)
  sharing = chips * chip.devices / n  # groups whose rings pass through the same links
  if kind == 'all-to-all':
    longest, links = max(axes, key=lambda axis: axis[0] / axis[1])
    cut = links * chips // longest
    return chips * chip.devices * size / 4 / (cut * chip.link_bandwidth) + hops * HOP_SECONDS
  if kind == 'collective-permute':
    return size / chip.link_bandwidth + hops * HOP_SECONDS
  links = sum(links for _, links in axes)
  once = size * (members - 1) / members * sharing / (links * chip.link_bandwidth) + hops * HOP_SECONDS
  return 2 * once if kind == 'all-reduce' else once


def _switched_seconds(kind: str, size: int, members: int, gpu: Gpu) -> float:
  """Seconds between GPUs: the bytes but for a device's own part pass its links, twice in the ring of an AllReduce."""
  if members == 1 or not size:
    return 0.0
  share = 1 if kind == 'collective-permute' else (1 + (kind == 'all-reduce')) * (members - 1) / members
  return share * size / gpu.link_bandwidth + HOP_SECONDS


class PlacementCost(NamedTuple):
  """Seconds of a step's collectives for a placement of the expert axis."""

  placement: str  # 'expert:8x4', or 'as compiled'
  chips: tuple[int, ...]  # along each axis of the torus, of the box that the devices of the expert axis span
  all_to_all_seconds: float
  collective_seconds: float  # of all kinds

  @property
  def torus_axes(self) -> int:
    return sum(side > 1 for side in self.chips)


def placement_costs(
  collectives: Sequence[Collective], mesh: Mesh, topology: Topology, compiled: np.ndarray
) -> list[PlacementCost]:
  """Costs as compiled for devices at `compiled`, then with the expert axis along one axis of the torus, along two, ...

  A placement changes which chips the devices of a group are, and nothing else of a program. Of the placements along as
  many axes it is the one with the fastest AllToAll. Other collectives may take longer: groups along the data axis then
  lie further apart.
  """
  if dict(mesh.axes).get(_AXIS, 1) == 1 or isinstance(topology.chip, Gpu):
    return []
  mesh = dataclasses.replace(mesh, storage=None)  # a placement is of one mesh
  best: dict[int, PlacementCost] = {}
  for text in torus_placement.options(mesh, topology, _AXIS):
    devices = torus_placement.place(mesh, topology, text).device_ids()
    cost = _cost(text, collectives, mesh, topology, coordinates(topology)[devices.ravel()])
    best[cost.torus_axes] = min(best.get(cost.torus_axes, cost), cost, key=lambda cost: cost[2:])
  return [_cost('as compiled', collectives, mesh, topology, compiled), *(best[axes] for axes in sorted(best))]


def _cost(text, collectives, mesh, topology, coordinates) -> PlacementCost:
  exchange = total = 0.0
  for collective in collectives:
    groups = collective.groups_of(mesh.num_devices)
    spent = collective.times * seconds(collective.kind, collective.bytes, groups, coordinates, topology.chip)
    total += spent
    exchange += spent if collective.kind == 'all-to-all' else 0.0
  at = [name for name, _ in mesh.axes].index(_AXIS)
  group = np.moveaxis(np.arange(mesh.num_devices).reshape(mesh.shape), at, -1).reshape(-1, mesh.shape[at])[0]
  box = tuple((np.ptp(coordinates[group], axis=0) + 1).tolist())
  return PlacementCost(text, box[: len(topology.shape)], exchange, total)
