"""Errors that are reported to a user as a message, without a stack trace, and the words of messages."""

import contextlib
import difflib
import re
import shlex
from collections.abc import Container, Iterable
from typing import Any

_COMPARED = 200  # characters of a name; the time to compare grows with the square


class UserError(ValueError):
  """User mistake, whose message gives the rule, the values seen and the way out."""


class ProcessLostError(UserError):
  """Loss of another process of the run: it died or cannot be reached, so no collective step can complete."""


class PeerError(UserError):
  """Failure in another process of the run, which prints the message; this process exits without printing one."""


def shown(value: Any, most: int = 80) -> str:
  """A value as a message shows it: its repr, cut where it is long."""
  try:
    text = repr(value)
  except (ValueError, RecursionError):  # an integer of over 4300 digits; lists deep in each other
    text = f'<{type(value).__name__} too long to show>'
  return text if len(text) <= most else f'{text[:most]}...'


def plural(count: int, one: str) -> str:
  """A count with its noun: '1 line', '1,234 lines'."""
  return f'{count:,} {one}{"" if count == 1 else "s"}'


def listed(names: Iterable[str], most: int = 8, between: str = ', ') -> str:
  """The first names of many: 'a, b and 3 more'; 'none' of none."""
  names = list(names)
  return (between.join(names[:most]) or 'none') + (f' and {len(names) - most} more' if len(names) > most else '')


def respelled(message: str, names: Container[str] | None, prefix: str = '') -> str:
  """A message on arguments as Python has them, 'n_best=4' and 'a larger beam_size=', for those who have other ones.

  Before `names` (None: all) comes a prefix, such as that of flags; a = without a value is left out.
  """

  def spelled(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f'{prefix}{name}{"=" * bool(value)}' if names is None or name in names else match[0]

  return re.sub(r'(?<![\w./=-])([a-z]\w*)=(?=([^\s,;:)])?)', spelled, message)


def not_installed(what: str, error: object, extra: str) -> UserError:
  """The error for a module of an extra of setup.py that cannot be imported; `what` says 'plots need matplotlib'."""
  return UserError(f'{what}, which is not installed ({error}): {install_line(extra)}')


def install_line(extra: str) -> str:
  """The command that installs what an extra names, anywhere: the package itself is on no index."""
  from importlib import metadata  # takes long, and an error is seldom

  lines = []
  with contextlib.suppress(metadata.PackageNotFoundError):
    lines = metadata.requires('lingvo_moe') or []
  of_extra = re.compile(rf'^(.+?) *; *(?:\(.*\) and )?extra *== *[\'"]{re.escape(extra)}[\'"]')
  wanted = [match[1].replace(' ', '') for line in lines if (match := of_extra.match(line))]
  return f'pip install {shlex.join(wanted)}' if wanted else f"pip install -e '.[{extra}]' in a checkout of lingvo_moe"


def reason(error: Exception) -> str:
  """First line of an error's message, without what TensorFlow adds about its graph: {{node ...}}, [Op:SaveV2]."""
  lines = re.sub(r'\{\{[^{}]*+\}\}|\[Op:[^][]*+\]( name:)?', '', str(error)).strip().splitlines()
  return lines[0].strip() if lines else type(error).__name__


def closest(name: str, known: Iterable[str]) -> str:
  """Suggestions to end an 'unknown name' message with: 'closest: a, b', or the first 12 names if none is close.

  Close are names with these initials (lr: learning_rate) and similar ones; else those that have the name within, or
  begin with its first letter and have the others in order (lrate: learning_rate).
  """
  known = sorted(known)
  name, lowered = name[:_COMPARED].lower(), {k.lower(): k for k in known}
  letters = [c for c in name if c.isalnum()]
  initials = lambda k: [word[0] for word in re.split('[^a-z0-9]+', k) if word]
  in_order = lambda k, rest: k[:1] == name[:1] and all(c in rest for c in letters)  # `in` moves the iterator on
  near = [k for k in lowered if initials(k) == letters]
  near += difflib.get_close_matches(name, lowered, n=3, cutoff=0.5)
  for is_near in (lambda k: name in k, lambda k: in_order(k, iter(k))) if len(letters) > 1 else ():
    near = near or sorted(filter(is_near, lowered), key=len)
  if near:
    return 'closest: ' + ', '.join(lowered[k] for k in list(dict.fromkeys(near))[:3])
  return 'known: ' + (', '.join(known[:12]) + (', ...' if len(known) > 12 else '') or 'none')
