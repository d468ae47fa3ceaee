"""Locks of files and folders."""

import os

from lingvo_moe.storage import locks


def test_the_lock_is_of_what_is_at_the_path_though_it_was_replaced_while_it_was_opened(tmp_path):
  path, opened = tmp_path / 'folder', []
  path.mkdir()

  def open_(path):
    fd = os.open(path, os.O_RDONLY)
    opened.append(fd)
    if len(opened) == 1:  # a holder renames what it had locked, and another takes its place
      os.rename(path, tmp_path / 'renamed')
      os.mkdir(path)
    return fd

  fd = locks.open_locked(str(path), open_)
  assert len(opened) == 2 and os.path.samestat(os.fstat(fd), os.stat(path))
  assert locks.open_locked(str(path), lambda path: os.open(path, os.O_RDONLY), wait=False) is None
  os.close(fd)


def test_the_lock_is_taken_again_where_the_path_is_gone(tmp_path):
  path, opened = tmp_path / 'file', []

  def open_(path):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    opened.append(fd)
    if len(opened) == 1:
      os.unlink(path)
    return fd

  fd = locks.open_locked(str(path), open_)
  assert len(opened) == 2 and os.path.samestat(os.fstat(fd), os.stat(path))
  os.close(fd)
