"""Paths, as users give them: of a file system that is mounted here, not of one that is named by a scheme."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import shown

_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*)://')


def check(what: str, path: str | os.PathLike, schemes: Collection[str] = ()) -> None:
  """Refuses a path such as gs://bucket/run, for which Python would make a folder 'gs:' here.

  Args:
    what: whose path it is, for the message.
    path: as given.
    schemes: those that are known, without '://'.

  Raises:
    UserError: the path has another scheme.
  """
  found = _SCHEME.match(os.fspath(path))
  if found and found[1] not in schemes:
    known = ', '.join(f'{scheme}://' for scheme in sorted(schemes)) or 'no scheme'
    raise UserError(
      f'{what} is a path of a file system that is mounted on this machine ({known} is known); saw {shown(path)}: mount '
      'it and give its folder'
    )
