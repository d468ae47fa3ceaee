"""Memory that a process may use: the host's, or the least limit of its control groups."""

import os

import pytest

from lingvo_moe.core import host_memory

PHYSICAL = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')


def host(root, groups, limits):
  """A root with /proc/self/cgroup and, by path under /sys/fs/cgroup, limits."""
  (root / 'proc/self').mkdir(parents=True)
  (root / 'proc/self/cgroup').write_text(groups)
  for path, limit in limits.items():
    file = root / 'sys/fs/cgroup' / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f'{limit}\n')
  return host_memory.size(str(root))


@pytest.mark.parametrize(
  ('groups', 'limits', 'size'),
  [
    ('0::/jobs/mine\n', {'jobs/mine/memory.max': 4096, 'jobs/memory.max': 8192}, 4096),
    ('0::/jobs/mine\n', {'jobs/mine/memory.max': 'max', 'jobs/memory.max': 8192}, 8192),  # of the group around it
    ('0::/\n', {'memory.max': 4096}, 4096),  # a container with a namespace of its own
    ('0::/docker/abc\n', {'memory.max': 4096}, 4096),  # one that sees the path of the host
    ('4:memory:/jobs\n1:cpu:/\n', {'memory/jobs/memory.limit_in_bytes': 4096}, 4096),  # v1
    ('4:cpu,memory:/jobs\n', {'memory/memory.limit_in_bytes': 4096}, 4096),
    ('1:cpu:/jobs\n', {'memory/jobs/memory.limit_in_bytes': 4096}, PHYSICAL),  # another controller
    ('4:memory:/\n', {'memory/memory.limit_in_bytes': 2**63 - 4096}, PHYSICAL),  # v1 has no word for none
    ('0::/jobs\n', {'jobs/memory.max': 'max'}, PHYSICAL),
    ('nothing\n\n', {}, PHYSICAL),
  ],
)
def test_the_least_limit_around_a_process_counts(tmp_path, groups, limits, size):
  assert host(tmp_path, groups, limits) == size


def test_without_control_groups_it_is_the_physical_memory(tmp_path):
  assert host_memory.size(str(tmp_path)) == PHYSICAL
