"""The one error a user is meant to see."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """A mistake of the user's: the message gives the rule, what was seen, and the way out."""


class ProcessLostError(UserError):
  """Another process of the run is gone, and with it all that the processes could end together."""


class ToldElsewhereError(UserError):
  """What went wrong in another process of the run, which tells it; this one only ends."""


def closest(name: str, known: Iterable[str]) -> str:
  """Ends an 'unknown name' message: 'closest: a, b' (or the first few names there are)."""
  known = sorted(known)
  lowered = {k.lower(): k for k in known}
  near = [lowered[m] for m in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
  if near:
    return 'closest: ' + ', '.join(near)
  return 'known: ' + (', '.join(known[:12]) + (', ...' if len(known) > 12 else '') or 'none')
