"""Lower bound on the time of a collective on the torus that connects the chips of a TPU pod."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lingvo_moe.runtime.chips import HOP_SECONDS
from lingvo_moe.runtime.chips import Chip


def seconds(kind: str, size: int, groups: np.ndarray, devices: Sequence[Any], chip: Chip) -> float:
  """Least time in seconds that a collective's bytes take on the torus.

  The devices of a group lie in a box of chips, which all groups inside it share. An AllReduce uses rings along every
  axis of the box, in both directions at once; AllGather and ReduceScatter take half its time. Half of the bytes of an
  AllToAll cross the middle of the box's longest axis, limited by the bandwidth of all links there: in a square box its
  time grows with the square root of the number of devices. The ends of an axis that does not span the pod are not
  linked, which halves the links across a cut.

  Args:
    kind: one of hlo.COLLECTIVES.
    size: bytes that a device sends or receives.
    groups: [groups, devices of a group], indices into `devices`.
    devices: devices with the `coords` of their chip.
    chip: generation of the devices.
  """
  coords = np.array([devices[i].coords for i in groups[0]])
  box = coords.max(axis=0) - coords.min(axis=0) + 1
  n, members = groups.shape[1], len({tuple(c) for c in coords.tolist()})
  if n == 1 or not size:
    return 0.0
  if members == 1:  # cores of one chip, which exchange data through its memory
    return size / chip.hbm_bandwidth
  spanned = [int(extent) for extent in box if extent > 1]
  ways = lambda extent: 2 if extent >= chip.wraps else 1
  hops = sum(extent // 2 if ways(extent) == 2 else extent - 1 for extent in spanned)
  longest = max(spanned)
  sharing = math.prod(spanned) / members  # groups whose rings pass through the same links
  if kind == 'all-to-all':
    cut = ways(longest) * math.prod(spanned) // longest
    return math.prod(spanned) * chip.devices * size / 4 / (cut * chip.link_bandwidth) + hops * HOP_SECONDS
  if kind == 'collective-permute':
    return size / chip.link_bandwidth + hops * HOP_SECONDS
  links = sum(ways(extent) for extent in spanned)
  once = size * (members - 1) / members * sharing / (links * chip.link_bandwidth) + hops * HOP_SECONDS
  return 2 * once if kind == 'all-reduce' else once
