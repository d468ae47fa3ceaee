"""SHA-256 of files' contents, computed again only when a file's size, times or inode have changed.

A file of more than 256 MiB is not read whole: its hash, which begins with 'sampled:', is of its size and of 16 samples,
evenly spaced from its beginning to its end.
"""

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence

from lingvo_moe.core import progress as progress_lib
from lingvo_moe.storage import files, json_files

_SETTLED_NS = 10**9  # a file that changed less than this ago may change again within a tick of its clock
_WHOLE = 256 << 20  # bytes of a file
_SAMPLES, _SAMPLE = 16, 1 << 16  # their number, and bytes of one
_HASHES = json_files.by_name(json_files.Kind('a list', lambda value: isinstance(value, list) and len(value) == 5))


def of(paths: Sequence[str], cache_dir: str, quiet: bool = False) -> list[str]:
  """Hash of each file, in hex; hashes.json in a cache folder keeps them, and only saves time."""
  cache = os.path.join(cache_dir, 'hashes.json')
  paths = [files.absolute(path) for path in paths]
  try:
    known = json_files.read(cache, files=_HASHES)['files']
  except (OSError, ValueError):
    known = {}
  states = {path: files.state(path) for path in paths}
  changed = {path: state for path, state in states.items() if known.get(path, [])[:-1] != state}
  with progress_lib.bar(sum(state[0] for state in changed.values()), 'reading the corpus', 'B', quiet) as bar:
    new = {path: [*state, _hash(path, state[0], bar.update)] for path, state in changed.items()}
  settled = time.time_ns() - _SETTLED_NS
  if lasting := {path: entry for path, entry in new.items() if max(entry[1:3]) < settled}:
    with contextlib.suppress(OSError, UnicodeEncodeError):
      files.makedirs(cache_dir)
      files.write(cache, json_files.dump({'files': known | lasting}))
  return [(known | new)[path][-1] for path in paths]


def is_same(before: str, now: str, path: str) -> bool:
  """Whether a file has the hash it had before, which an earlier version may have made of all its contents."""
  return before == now or (_is_sampled(now) and not _is_sampled(before) and before == files.sha256(path))


def _is_sampled(value: str) -> bool:
  return value.startswith('sampled:')


def _hash(path: str, size: int, progress: Callable[[int], object]) -> str:
  if size <= _WHOLE:
    return files.sha256(path, progress)
  digest = hashlib.sha256(str(size).encode())
  for number in range(_SAMPLES):
    digest.update(files.read(path, _SAMPLE, number * (size - _SAMPLE) // (_SAMPLES - 1)))
  progress(size)
  return f'sampled:{digest.hexdigest()}'
