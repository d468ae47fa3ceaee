"""Schemes of paths, as users give them, such as gs://bucket/run."""

from __future__ import annotations

import os
import re
from collections.abc import Collection

from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import shown

_SCHEME = re.compile(r'([A-Za-z][A-Za-z0-9+.-]*)://')


def scheme(path: str | os.PathLike) -> str:
  """Scheme of a path, 'gs' of gs://bucket/run; '' if it has none."""
  found = _SCHEME.match(os.fspath(path))
  return found[1] if found else ''


def check(what: str, path: str | os.PathLike, schemes: Collection[str] = ()) -> None:
  """Refuses a path such as gs://bucket/run, for which Python would make a folder 'gs:' here.

  Args:
    what: whose path it is, for the message.
    path: as given.
    schemes: those that are known, without '://'.

  Raises:
    UserError: the path has another scheme.
  """
  if scheme(path) not in ('', *schemes):
    known = ', '.join(f'{name}://' for name in sorted(schemes)) or 'no scheme'
    raise UserError(
      f'{what} is a path of a file system that is mounted on this machine ({known} is known); saw {shown(path)}: mount '
      'it and give its folder'
    )


def check_for_tensorflow(what: str, path: str | os.PathLike) -> None:
  """Refuses a folder in which TensorFlow would write files that it cannot read again.

  Args:
    what: whose path it is, for the message.
    path: of a folder; also the folders above it count.

  Raises:
    UserError: its name has a bracket or a backslash, which TensorFlow reads as a pattern, or is not UTF-8.
  """
  text = os.fspath(path) if scheme(path) else os.path.abspath(path)
  if re.search(r'[\[\\]', text) or any('\ud800' <= c <= '\udfff' for c in text):
    raise UserError(
      f'TensorFlow cannot read files in a folder with [ or \\ in its path, or a name that is not UTF-8; saw {what}='
      f'{shown(text)}: choose another name, or rename the folder'
    )
