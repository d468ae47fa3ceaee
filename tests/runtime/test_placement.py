"""Placement of a mesh's axes on a torus: boxes of chips, their costs, and mistakes."""

from __future__ import annotations

import numpy as np
import pytest

from lingvo_moe.addons.analysis import torus
from lingvo_moe.addons.analysis.hlo_collectives import Collective
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.runtime import torus_placement
from lingvo_moe.runtime.chips import HOP_SECONDS, Topology
from lingvo_moe.runtime.torus_placement import place


def boxes_of(mesh_text, topology_text, text, axis):
  """Chips along each axis of the torus that each group of devices along a mesh axis spans."""
  topology = Topology.parse(topology_text)
  mesh = place(Mesh.parse(mesh_text), topology, text)
  coords = torus.coordinates(topology)[mesh.device_ids().ravel()].reshape(*mesh.shape, -1)
  at = [name for name, _ in mesh.axes].index(axis)
  groups = np.moveaxis(coords, at, -2).reshape(-1, mesh.shape[at], len(topology.shape))
  return {tuple((group.max(axis=0) - group.min(axis=0) + 1).tolist()) for group in groups}


@pytest.mark.parametrize('text, box', [('expert:4x1', (4, 1)), ('expert:1x4', (1, 4)), ('expert:2x2', (2, 2))])
def test_groups_of_an_axis_lie_in_its_box(text, box):
  assert boxes_of('data:4,expert:8', 'v3:4x4', text, 'expert') == {box}  # 8 cores of 4 chips
  assert boxes_of('expert:8,data:4', 'v3:4x4', text, 'expert') == {box}


def test_by_hand():
  # Chips (x, y) are numbered 0: (0, 0), 1: (0, 1), 2: (1, 0), ... of a chip of one core each.
  mesh = place(Mesh.parse('data:4,expert:4'), Topology.parse('v5e:4x4'), 'expert:2x2')
  assert mesh.topology == (2, 2, 2, 2) and mesh.placement == ((0, 2), (1, 3))
  np.testing.assert_array_equal(mesh.device_ids()[0], [0, 1, 4, 5])
  np.testing.assert_array_equal(mesh.device_ids()[:, 0], [0, 2, 8, 10])


def test_the_first_axis_has_neighbours_and_the_next_one_boxes_of_its_boxes():
  text = 'model:2x1,expert:2x2'
  assert boxes_of('data:4,expert:4,model:4', 'v3:4x8', text, 'model') == {(2, 1)}
  assert boxes_of('data:4,expert:4,model:4', 'v3:4x8', text, 'expert') == {(3, 2)}  # every second column
  assert boxes_of('data:4,expert:4,model:4', 'v3:4x8', text, 'data') == {(1, 7)}


def test_the_cores_of_a_chip_may_belong_to_another_axis():
  assert boxes_of('data:8,expert:4', 'v3:4x4', 'expert:2x2', 'expert') == {(2, 2)}
  assert boxes_of('data:8,expert:4', 'v3:4x4', 'expert:2x1', 'expert') == {(2, 1)}


def test_every_device_has_one_place():
  mesh = place(Mesh.parse('data:32,expert:64'), Topology.parse('v3:32x32'), 'expert:8x4')
  assert sorted(mesh.device_ids().flat) == list(range(2048))


def test_options_are_the_boxes_of_an_axis():
  of = lambda mesh, topology: set(torus_placement.options(Mesh.parse(mesh), Topology.parse(topology), 'expert'))
  assert of('expert:32', 'v3:4x4') == {'expert:4x4'}
  assert of('data:4,expert:8', 'v3:4x4') == {
    *('expert:4x1', 'expert:2x2', 'expert:1x4'),  # both cores of 4 chips
    *('expert:4x2', 'expert:2x4'),  # one core each of 8
  }
  assert of('data:32', 'v3:4x4') == set() == of('data:2,expert:4,model:4', 'v3:4x4')


@pytest.mark.parametrize(
  'text, message',
  [
    ('expert', r"along each axis of the torus, such as 'expert:8x4'; saw 'expert'"),
    ('expert:4x0', r"such as 'expert:8x4'; saw 'expert:4x0'"),
    ('model:2x2', r'names all axes of the mesh that have several devices, or all but one; saw model for'),
    ('expert:3x1', r'divides the chips of its slice along each axis; saw expert:3x1, and 4x4 chips of v3:4x4'),
    ('expert:2x1', r'one axis has all 2 of each chip; saw expert:2x1 for 8, data:2x4 for 4 devices on v3:4x4'),
    ('expert:2x2,data:2x1', r'saw expert:2x2 for 8, data:2x1 for 4 devices'),
  ],
)
def test_mistakes_are_told(text, message):
  with pytest.raises(UserError, match=message):
    place(Mesh.parse('data:4,expert:8'), Topology.parse('v3:4x4'), text)


def test_a_mesh_of_another_size_is_told():
  with pytest.raises(UserError, match='saw --mesh=expert:4 of 4 for v3:2x2 of 8'):
    place(Mesh.parse('expert:4'), Topology.parse('v3:2x2'), '')


def test_an_all_to_all_in_a_box_takes_half_the_time_of_one_in_a_row():
  mesh, topology = Mesh.parse('data:32,expert:64'), Topology.parse('v3:32x32')
  groups = np.arange(2048).reshape(32, 64)
  exchange = Collective(None, 'all-to-all', 10**9, 3, groups, ())
  total = Collective(None, 'all-reduce', 10**6, 1, groups.T, ())
  devices = torus.coordinates(topology)[place(mesh, topology, 'expert:1x32').device_ids().ravel()]
  compiled, one, two = torus.placement_costs([exchange, total], mesh, topology, devices)
  # Half of the bytes of 64 cores cross the middle, one way: over 2 links of a ring of 32 chips, or 4 of a box of 8 x 4.
  row, box = 64 * 1e9 / 4 / (2 * 82e9) + 16 * HOP_SECONDS, 64 * 1e9 / 4 / (4 * 82e9) + 10 * HOP_SECONDS
  assert (compiled.placement, compiled.chips, compiled.torus_axes) == ('as compiled', (1, 32), 1)
  assert compiled.all_to_all_seconds == one.all_to_all_seconds == pytest.approx(3 * row)
  assert two.torus_axes == 2 and sorted(two.chips) == [4, 8] and two.all_to_all_seconds == pytest.approx(3 * box)
  assert two.collective_seconds > two.all_to_all_seconds


def test_places_are_of_the_mesh_that_computes():
  topology, devices = Topology.parse('v3:2x2'), torus.coordinates(Topology.parse('v3:2x2'))
  exchange = Collective(None, 'all-to-all', 10**6, 1, np.arange(8).reshape(2, 4), ())
  costs = lambda mesh: torus.placement_costs([exchange], Mesh.parse(mesh), topology, devices)
  assert costs('data:2,expert:4/expert:8') == costs('data:2,expert:4')
