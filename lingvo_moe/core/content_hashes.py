"""Hashes of the contents of files, computed again only when a file may have changed."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence

import tqdm

from lingvo_moe.core import files, json_files

_CHUNK = 1 << 20  # bytes
_SETTLED_NS = 10**9  # a file that changed less than this ago may change again within a tick of its clock
_HASHES = json_files.by_name(json_files.Kind('a list', lambda value: isinstance(value, list) and len(value) == 5))


def in_cache(cache_dir: str, quiet: bool = False) -> ContentHashes:
  """The hashes that are kept in a folder for tokenised text."""
  return ContentHashes(os.path.join(cache_dir, 'hashes.json'), quiet)


class ContentHashes:
  """SHA-256 of files' contents, kept in a JSON file; a file is read again when its size, times or inode have changed.

  Args:
    path: the JSON file, which only saves time.
    quiet: True for no progress bar.
  """

  def __init__(self, path: str, quiet: bool = False):
    self._path, self._quiet = path, quiet

  def of(self, paths: Sequence[str]) -> list[str]:
    """Hash of each file, in hex."""
    paths = [files.absolute(path) for path in paths]
    known = self._load()
    states = {path: files.state(path) for path in paths}
    changed = {path: state for path, state in states.items() if known.get(path, [])[:-1] != state}
    size, hidden = sum(state[0] for state in changed.values()), self._quiet or None
    with tqdm.tqdm(
      total=size, desc='reading the corpus', unit='B', unit_scale=True, disable=hidden, leave=False
    ) as bar:
      new = {path: [*state, _hash(path, bar.update)] for path, state in changed.items()}
    settled = time.time_ns() - _SETTLED_NS
    if lasting := {path: entry for path, entry in new.items() if max(entry[1:3]) < settled}:
      self._save(known | lasting)
    return [(known | new)[path][-1] for path in paths]

  def _load(self) -> dict[str, list]:
    try:
      return json_files.read(self._path, 'a list of hashes', 'remove it', files=_HASHES)['files']
    except (OSError, ValueError):
      return {}

  def _save(self, known: dict[str, list]) -> None:
    with contextlib.suppress(OSError, UnicodeEncodeError):
      os.makedirs(os.path.dirname(self._path), exist_ok=True)
      files.write(self._path, json_files.dump({'files': known}))


def _hash(path: str, progress: Callable[[int], object]) -> str:
  digest = hashlib.sha256()
  with files.open_to_read(path) as f:
    while chunk := f.read(_CHUNK):
      digest.update(chunk)
      progress(len(chunk))
  return digest.hexdigest()
