"""Comparison of two commits: this checkout as it is, and another commit in a temporary git worktree."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from lingvo_moe.bench.against import identity
from lingvo_moe.core.errors import UserError

# The benchmark of a commit: the command, or in earlier commits a script.
_COMMAND, _SCRIPT = 'lingvo_moe/commands/bench.py', 'tools/bench.py'

T = TypeVar('T')


def compare(
  root: str, commit: str, flags: Sequence[str], rounds: int, progress: Callable[[str], object] = lambda _: None
) -> list[tuple[dict[str, Any], list[float], list[float], float]]:
  """Runs lingvo-moe bench of both sides with the same flags, in turn: this, that, this, that, ...

  Each side runs its own lingvo-moe bench, so the flags must be ones that the other commit has too.

  Args:
    root: this checkout, including uncommitted changes.
    commit: any name that git has for a commit.
    flags: flags of lingvo-moe bench.
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
    ours, theirs = alternate(runs, rounds, progress).values()
  compared = []
  for key in filter(lambda key: all(key in measured for measured in (*ours, *theirs)), ours[0]):
    this, that = ([measured[key] for measured in side] for side in (ours, theirs))
    compared.append((dict(key), this, that, round(statistics.median(this) / statistics.median(that), 4)))
  return compared


def alternate(
  runs: Mapping[str, Callable[[], T]], rounds: int, progress: Callable[[str], object] = lambda _: None
) -> dict[str, list[T]]:
  """Calls each function once in every round, in turn; returns the results of each, by name."""
  results = {name: [] for name in runs}
  for number in range(rounds):
    for name, run in runs.items():
      progress(f'round {number + 1} of {rounds}: {name}')
      results[name].append(run())
  return results


def records(command: Sequence[str], name: str, **options: Any) -> list[dict[str, Any]]:
  """Runs a command, which writes lines of JSON to the file of its flag --json; options are those of subprocess.run."""
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'results')
    done = subprocess.run([*command, f'--json={path}'], capture_output=True, text=True, **options)
    if done.returncode:
      raise UserError(f'{name}: its lingvo-moe bench ended with exit status {done.returncode}: {_last(done.stderr)}')
    with open(path, encoding='utf-8') as f:
      return [json.loads(line) for line in f]


@contextlib.contextmanager
def worktree(root: str, commit: str) -> Iterator[str]:
  """Makes a temporary worktree of a commit, whose path it yields; the worktree's own packages are imported there."""
  top = _git(root, 'rev-parse', '--show-toplevel')
  if top.returncode or os.path.realpath(top.stdout.strip()) != os.path.realpath(root):
    raise UserError(f'--versus times a commit of a git checkout; {root} is none: run lingvo-moe bench of a clone')
  revision = _git(root, 'rev-parse', '--verify', '--quiet', '--end-of-options', commit + '^{commit}')
  if revision.returncode:
    raise UserError(f'--versus takes a commit of this checkout; saw {commit!r}, which git does not know: see git log')
  with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, 'checkout')
    added = _git(root, 'worktree', 'add', '--detach', path, revision.stdout.strip())
    try:
      if added.returncode:
        raise UserError(f'git made no worktree of {commit}: {_last(added.stderr)}')
      if not any(os.path.exists(os.path.join(path, file)) for file in (_COMMAND, _SCRIPT)):
        raise UserError(f'--versus={commit} has no lingvo-moe bench: give a later commit')
      # setup.py installs params/ below the package; the worktree is not installed, so a link stands for it.
      os.symlink(os.path.join(path, 'params'), os.path.join(path, 'lingvo_moe', 'params'))
      yield path
    finally:
      _git(root, 'worktree', 'remove', '--force', path)


def _run(root: str, flags: Sequence[str], name: str) -> dict[tuple, float]:
  """Tokens a second of each figure, by its identifying fields."""
  script = [os.path.join(root, _SCRIPT)]
  what = ['-m', 'lingvo_moe.commands.bench'] if os.path.exists(os.path.join(root, _COMMAND)) else script
  search = os.pathsep.join([root, *filter(None, [os.environ.get('PYTHONPATH')])])
  found = records([sys.executable, *what, *flags], name, env={**os.environ, 'PYTHONPATH': search})
  return {tuple(identity(record).items()): record['tokens_per_s'] for record in found}


def _git(root: str, *args: str) -> subprocess.CompletedProcess:
  try:
    return subprocess.run(['git', '-C', root, *args], capture_output=True, text=True)
  except FileNotFoundError:
    raise UserError('--versus needs git, which is not installed') from None


def _last(text: str) -> str:
  return next(iter(text.strip().splitlines()[::-1]), 'it says nothing')
