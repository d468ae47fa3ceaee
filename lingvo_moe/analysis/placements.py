"""Time of a program's collectives for other placements of its expert axis on the torus, without compiling it again.

A placement changes which chips the devices of a group are, and nothing else of a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lingvo_moe.analysis import torus
from lingvo_moe.analysis.hlo_collectives import Collective
from lingvo_moe.runtime import placement
from lingvo_moe.runtime.chips import Topology
from lingvo_moe.xla_sharding import Mesh

_AXIS = 'expert'


class PlacementCost(NamedTuple):
  """Seconds of a step's collectives for a placement of the expert axis."""

  placement: str  # 'expert:8x4', or 'as compiled'
  chips: tuple[int, ...]  # along each axis of the torus, of the box that the devices of the expert axis span
  all_to_all_seconds: float
  collective_seconds: float  # of all kinds

  @property
  def torus_axes(self) -> int:
    return sum(side > 1 for side in self.chips)


def costs(
  collectives: Sequence[Collective], mesh: Mesh, topology: Topology, devices: Sequence[Any]
) -> list[PlacementCost]:
  """Costs as compiled, then with the expert axis along one axis of the torus, along two, ...

  Of the placements along as many axes it is the one with the fastest AllToAll. Other collectives may take longer: groups
  along the data axis then lie further apart.

  Args:
    collectives: those of the program.
    mesh: its mesh.
    topology: its slice.
    devices: its devices, in the order in which it numbers them.
  """
  if dict(mesh.axes).get(_AXIS, 1) == 1:
    return []
  best: dict[int, PlacementCost] = {}
  for text in placement.options(mesh, topology, _AXIS):
    found = _cost(text, collectives, mesh, topology, places(placement.place(mesh, topology, text), topology))
    known = best.get(found.torus_axes)
    if known is None or found[2:] < known[2:]:
      best[found.torus_axes] = found
  return [_cost('as compiled', collectives, mesh, topology, devices), *(best[axes] for axes in sorted(best))]


def places(mesh: Mesh, topology: Topology) -> list[torus.Place]:
  """Places of the devices of a placed mesh, in the order in which a program numbers them."""
  placed = torus.places(topology)
  return [placed[i] for i in mesh.device_ids().flat]


def _cost(text, collectives, mesh, topology, devices) -> PlacementCost:
  exchange = total = 0.0
  for collective in collectives:
    groups = collective.groups_of(mesh.num_devices)
    seconds = collective.times * torus.seconds(collective.kind, collective.bytes, groups, devices, topology.chip)
    total += seconds
    exchange += seconds if collective.kind == 'all-to-all' else 0.0
  at = [name for name, _ in mesh.axes].index(_AXIS)
  group = np.moveaxis(np.arange(mesh.num_devices).reshape(mesh.shape), at, -1).reshape(-1, mesh.shape[at])[0]
  coords = np.array([devices[i].coords for i in group])
  box = tuple(int(n) for n in coords.max(axis=0) - coords.min(axis=0) + 1)
  return PlacementCost(text, box[: len(topology.shape)], exchange, total)
