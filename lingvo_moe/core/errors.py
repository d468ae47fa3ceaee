"""Errors that are reported to a user as a message, without a stack trace."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
  """User mistake, whose message gives the rule, the values seen and the way out."""


class ProcessLostError(UserError):
  """Loss of another process of the run: it died or cannot be reached, so no collective step can complete."""


class ToldElsewhereError(UserError):
  """Failure in another process of the run, which prints the message; this process exits without printing one."""


def closest(name: str, known: Iterable[str]) -> str:
  """Suggestions to end an 'unknown name' message with: 'closest: a, b', or the first 12 names if none is close."""
  known = sorted(known)
  lowered = {k.lower(): k for k in known}
  near = [lowered[m] for m in difflib.get_close_matches(name.lower(), lowered, n=3, cutoff=0.5)]
  if near:
    return 'closest: ' + ', '.join(near)
  return 'known: ' + (', '.join(known[:12]) + (', ...' if len(known) > 12 else '') or 'none')
