"""Extras of setup.py that are not installed: the error that names the line to type."""

from __future__ import annotations

import importlib.metadata
import re
import shlex

from lingvo_moe.core.errors import UserError


def not_installed(what: str, error: object, extra: str) -> UserError:
  """The error for a module of an extra that cannot be imported.

  Args:
    what: what needs which package, such as 'plots need matplotlib'.
    error: the import's.
    extra: its name in setup.py.
  """
  return UserError(f'{what}, which is not installed ({error}): {install_line(extra)}')


def install_line(extra: str) -> str:
  """The command that installs what an extra names, anywhere: the package itself is on no index."""
  try:
    lines = importlib.metadata.requires('lingvo_moe') or []
  except importlib.metadata.PackageNotFoundError:
    lines = []
  of_extra = re.compile(rf'^(.+?) *; *(?:\(.*\) and )?extra *== *[\'"]{re.escape(extra)}[\'"]')
  wanted = [found[1].replace(' ', '') for line in lines if (found := of_extra.match(line))]
  return f'pip install {shlex.join(wanted)}' if wanted else f"pip install -e '.[{extra}]' in a checkout of lingvo_moe"
