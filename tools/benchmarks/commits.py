"""Comparison of two commits: this checkout as it is, and another commit in a temporary git worktree."""

import contextlib
import functools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks import processes
from benchmarks.against import identity
from lingvo_moe.core.errors import UserError

# The benchmark of a commit: the script, or in some earlier commits only a command.
_SCRIPT, _COMMAND = 'tools/bench.py', 'lingvo_moe/commands/bench.py'


def compare(
  root: str, commit: str, flags: Sequence[str], rounds: int, progress: Callable[[str], object] = lambda _: None
) -> list[tuple[dict[str, Any], list[float], list[float], float]]:
  """Runs the benchmark of both sides with the same flags, in turn: this, that, this, that, ...

  Each side runs its own, so the flags must be ones that the other commit has too.

  Args:
    root: this checkout, including uncommitted changes.
    commit: any name that git has for a commit.
    flags: flags of tools/bench.py.
    rounds: number of runs of each side.
    progress: function called with a line of text before each run.

  Returns:
    For each measurement (model, what, ...; tokens a second of this side in each round; of that side; ratio of medians).

  Raises:
    UserError: root is no git checkout; it has no such commit, or one without a benchmark; or one side failed.
  """
  with worktree(root, commit) as other:
    sides = {'this checkout': root, commit: other}
    runs = {name: functools.partial(_run, path, flags, name) for name, path in sides.items()}
    ours, theirs = processes.alternate(runs, rounds, progress).values()
  compared = []
  for key in filter(lambda key: all(key in measured for measured in (*ours, *theirs)), ours[0]):
    this, that = ([measured[key] for measured in side] for side in (ours, theirs))
    compared.append((dict(key), this, that, round(statistics.median(this) / statistics.median(that), 4)))
  return compared


@contextlib.contextmanager
def worktree(root: str, commit: str) -> Iterator[str]:
  """Makes a temporary worktree of a commit, whose path it yields; the worktree's own packages are imported there."""
  top = _git(root, 'rev-parse', '--show-toplevel')
  if top.returncode or os.path.realpath(top.stdout.strip()) != os.path.realpath(root):
    raise UserError(f'--versus times a commit of a git checkout; {root} is none: run tools/bench.py of a clone')
  revision = _git(root, 'rev-parse', '--verify', '--quiet', '--end-of-options', commit + '^{commit}')
  if revision.returncode:
    raise UserError(f'--versus takes a commit of this checkout; saw {commit!r}, which git does not know: see git log')
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'checkout')
    added = _git(root, 'worktree', 'add', '--detach', path, revision.stdout.strip())
    try:
      if added.returncode:
        raise UserError(f'git made no worktree of {commit}: {processes.last_line(added.stderr)}')
      if not any(os.path.exists(os.path.join(path, file)) for file in (_SCRIPT, _COMMAND)):
        raise UserError(f'--versus={commit} has no benchmark: give a later commit')
      # setup.py installs params/ below the package; the worktree is not installed, so a link stands for it.
      os.symlink(os.path.join(path, 'params'), os.path.join(path, 'lingvo_moe', 'params'))
      yield path
    finally:
      _git(root, 'worktree', 'remove', '--force', path)


def _run(root: str, flags: Sequence[str], name: str) -> dict[tuple, float]:
  """Tokens a second of each figure, by its identifying fields."""
  script = os.path.join(root, _SCRIPT)
  what = [script] if os.path.exists(script) else ['-m', 'lingvo_moe.commands.bench']
  search = os.pathsep.join([root, *filter(None, [os.environ.get('PYTHONPATH')])])
  found = processes.records([sys.executable, *what, *flags], name, env={**os.environ, 'PYTHONPATH': search})
  return {tuple(identity(record).items()): record['tokens_per_s'] for record in found}


def _git(root: str, *args: str) -> subprocess.CompletedProcess:
  try:
    return subprocess.run(['git', '-C', root, *args], capture_output=True, text=True)
  except FileNotFoundError:
    raise UserError('--versus needs git, which is not installed') from None
