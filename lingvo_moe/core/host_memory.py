"""Memory of the host that this process may use: the physical one, or less by the limits of its control groups."""

import os
import pathlib

# Of cgroup v2 and v1: the folder in which its control groups are, and the file of a group that has its limit.
_LIMITS = {'': ('sys/fs/cgroup', 'memory.max'), 'memory': ('sys/fs/cgroup/memory', 'memory.limit_in_bytes')}


def size(root: str = '/') -> int:
  """Bytes; a control group is also limited by those around it. `root` is where proc/ and sys/ are."""
  return min([os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'), *_limits(pathlib.Path(root))])


def _limits(root: pathlib.Path) -> list[int]:
  """Limits of the process's control groups, in bytes; none where there are none."""
  try:
    lines = (root / 'proc/self/cgroup').read_text(encoding='utf-8').splitlines()
  except (OSError, ValueError):
    return []
  limits = []
  for line in lines:  # number:controllers:path, without controllers in v2
    _, controllers, path = [*line.split(':', 2), '', ''][:3]
    for controller in {*controllers.split(',')} & {*_LIMITS}:
      top, name = root / _LIMITS[controller][0], _LIMITS[controller][1]
      group = top / path.strip('/')
      for folder in [group, *group.parents]:  # in a container, the path may be that of the host
        limits += _limit(folder / name)
        if folder == top:
          break
  return limits


def _limit(file: pathlib.Path) -> list[int]:
  try:
    text = file.read_text(encoding='ascii').strip()
  except (OSError, ValueError):
    return []
  return [int(text)] if text.isdecimal() and int(text) > 0 else []  # 'max': none
