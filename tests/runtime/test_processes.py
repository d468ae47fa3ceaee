"""Processes of a run as a cluster's scheduler has started them, and the order of devices on a torus."""

import collections
import itertools
import os
import types

import numpy as np
import pytest

pytest.importorskip('jax')

from lingvo_moe.cli.machine import RuntimeOptions
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.mesh import Mesh
from lingvo_moe.runtime import spmd

SLURM = {
  'SLURM_JOB_ID': '4097',
  'SLURM_STEP_NODELIST': 'node[007-009],other',
  'SLURM_NTASKS': '4',
  'SLURM_PROCID': '2',
  'SLURM_LOCALID': '0',
}
OPEN_MPI = {
  'OMPI_MCA_orte_hnp_uri': '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911',
  'OMPI_COMM_WORLD_SIZE': '2',
  'OMPI_COMM_WORLD_RANK': '1',
  'OMPI_COMM_WORLD_LOCAL_RANK': '1',
}
OPTIONS = RuntimeOptions('expert:4', runtime='spmd', distributed='auto')


@pytest.fixture
def environment(monkeypatch):
  """Sets variables, where no scheduler's are set."""
  for name in list(os.environ):
    if name.startswith(('SLURM_', 'OMPI_', 'JAX_COORDINATOR', 'KUBERNETES_')):
      monkeypatch.delenv(name)
  return lambda variables: [monkeypatch.setenv(*item) for item in variables.items()]


def test_slurm_and_open_mpi_say_which_process_this_is(environment):
  environment(SLURM)
  found = OPTIONS.detected()
  assert (found.coordinator, found.num_processes, found.process_id) == ('node007:61441', 4, 2)


def test_open_mpi_says_which_process_this_is(environment):
  environment(OPEN_MPI)
  found = OPTIONS.detected()
  assert found.coordinator.startswith('10.96.0.1:') and (found.num_processes, found.process_id) == (2, 1)


def test_one_process_of_a_scheduler_needs_no_coordinator(environment):
  environment({**SLURM, 'SLURM_NTASKS': '1', 'SLURM_PROCID': '0'})
  assert OPTIONS.detected().num_processes == 1 and OPTIONS.detected().coordinator == ''


@pytest.mark.parametrize(
  'variables, message',
  [
    ({}, r'Slurm \(srun\), Open MPI \(mpirun\), Kubernetes .* or a TPU pod; saw none of them: start by one, or give'),
    ({'SLURM_JOB_ID': '1'}, 'saw none of them'),  # a batch script, without srun
    ({**SLURM, 'SLURM_PROCID': 'x'}, 'could not read what the scheduler says .*ValueError'),
    ({**SLURM, 'SLURM_PROCID': '4'}, 'several processes need'),
  ],
)
def test_what_is_not_detected_is_told(environment, variables, message):
  environment(variables)
  with pytest.raises(UserError, match=message):
    OPTIONS.detected()


def test_processes_are_given_or_detected():
  with pytest.raises(UserError, match='--distributed=auto finds .* saw .*, 2 and 0: leave them out'):
    RuntimeOptions('expert:2', runtime='spmd', distributed='auto', num_processes=2).detected()
  with pytest.raises(UserError, match='--distributed is for a mesh of devices in several processes'):
    RuntimeOptions(distributed='auto')


def torus(side):
  """Chips of a TPU v5e slice, numbered as JAX does: host by host, 2 x 2 chips each."""
  chips = [
    types.SimpleNamespace(platform='tpu', device_kind='TPU v5 lite', coords=(x, y, 0), core_on_chip=0, slice_index=0)
    for y, x in itertools.product(range(side), repeat=2)
  ]
  for chip in chips:
    chip.process_index = chip.coords[0] // 2 + chip.coords[1] // 2 * (side // 2)
  chips.sort(key=lambda chip: (chip.process_index, chip.coords[1], chip.coords[0]))
  for number, chip in enumerate(chips):
    chip.id = number
  return chips


def test_an_axis_of_a_mesh_follows_the_links_of_a_torus():
  chips = torus(4)
  mesh = Mesh.parse('data:4,expert:4')
  ordered = spmd.along_torus(mesh, chips)
  assert collections.Counter(chip.id for chip in ordered) == dict.fromkeys(range(16), 1)
  apart = lambda a, b: sum(min(d, 4 - d) for d in (abs(i - j) for i, j in zip(a.coords, b.coords, strict=True)))
  rows = np.array(ordered, object).reshape(4, 4)
  assert all(apart(a, b) == 1 for line in (*rows, *rows.T) for a, b in itertools.pairwise(line))
  unordered = np.array(chips, object).reshape(4, 4)
  assert any(apart(a, b) > 1 for line in unordered for a, b in itertools.pairwise(line))


def test_other_devices_and_placed_meshes_keep_their_order():
  cpus = [types.SimpleNamespace(platform='cpu', id=i) for i in (2, 0, 1, 3)]
  assert spmd.along_torus(Mesh.parse('expert:4'), cpus) == cpus
  chips = torus(2)
  placed = Mesh((('expert', 4),), topology=(2, 2), placement=((0, 1),))
  assert spmd.along_torus(placed, chips) == chips
