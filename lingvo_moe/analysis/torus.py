"""Lower bound on the time of a collective on the torus that connects the chips of a TPU pod."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.runtime.chips import HOP_SECONDS
from lingvo_moe.runtime.chips import Chip
from lingvo_moe.runtime.chips import Topology


class Place(NamedTuple):
  """Device with the one attribute that `seconds` reads."""

  coords: tuple[int, ...]


def places(topology: Topology) -> list[Place]:
  """Places of a slice's devices, chip by chip along the torus."""
  return [Place(chip) for chip in np.ndindex(*topology.shape) for _ in range(topology.chip.devices)]


def seconds(kind: str, size: int, groups: np.ndarray, devices: Sequence[Any], chip: Chip) -> float:
  """Least time in seconds that a collective's bytes take on the torus.

  The devices of a group lie in a box of chips, which all groups inside it share. An AllReduce uses rings along every
  axis of the box, in both directions at once; AllGather and ReduceScatter take half its time. Half of the bytes of an
  AllToAll cross the middle of the box's axis with most chips to a link, limited by the bandwidth of all links there: in
  a square box its time grows with the square root of the number of devices. The ends of an axis are linked where it
  spans the pod (`Chip.wraps`), for groups that span all of it; elsewhere a cut has half as many links. Of the pairs of
  a CollectivePermute the farthest counts.

  Args:
    kind: one of hlo.COLLECTIVES.
    size: bytes that a device sends or receives.
    groups: [groups, devices of a group], indices into `devices`.
    devices: all devices of the slice, with the `coords` of their chip.
    chip: generation of the devices.
  """
  coordinates = np.array([device.coords for device in devices])
  if kind == 'collective-permute':
    return max(_seconds(kind, size, pair, coordinates, chip) for pair in groups)
  return _seconds(kind, size, groups[0], coordinates, chip)


def _seconds(kind: str, size: int, group: np.ndarray, coordinates: np.ndarray, chip: Chip) -> float:
  """Seconds of one group; `coordinates` [devices, axes] are of all devices."""
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
