"""Files of our own making: whole or not at all, also beside other writers and strangers' links."""

import errno
import os
import threading

import pytest
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import content_hashes, files, remote_files


def test_a_file_is_replaced_when_the_block_ends_and_not_before(tmp_path):
  path = tmp_path / 'file'
  files.write(str(path), 'old')
  with files.replacing(str(path)) as f:
    f.write('grün\n')
    f.flush()
    assert path.read_text() == 'old'
  assert path.read_text(encoding='utf-8') == 'grün\n' and os.listdir(tmp_path) == ['file']


def test_a_file_is_on_disk_before_it_takes_its_place(tmp_path, monkeypatch):
  done, fsync, replace = [], os.fsync, os.replace
  monkeypatch.setattr(os, 'fsync', lambda fd: (done.append(os.fstat(fd).st_size), fsync(fd)))
  monkeypatch.setattr(os, 'replace', lambda *paths: (done.append('replaced'), replace(*paths)))
  files.write(str(tmp_path / 'file'), 'four')
  assert done == [4, 'replaced']


def test_an_error_leaves_what_was_there_and_nothing_beside_it(tmp_path):
  path = tmp_path / 'file'
  files.write(str(path), b'old')
  with pytest.raises(OSError) as caught:
    with files.replacing(str(path), binary=True) as f:
      f.write(b'half')
      raise OSError(errno.ENOSPC, 'No space left on device')  # as a write to a full disk, which names no file
  assert caught.value.filename == str(path) and caught.value.strerror == 'No space left on device'
  assert path.read_bytes() == b'old' and os.listdir(tmp_path) == ['file']


def test_a_pipe_is_not_replaced(tmp_path):
  path = tmp_path / 'pipe'
  os.mkfifo(path)
  with pytest.raises(UserError, match='pipe must be a file; saw a pipe or a device, which would be replaced'):
    files.write(str(path), 'text')
  assert path.is_fifo() and os.listdir(tmp_path) == ['pipe']


def test_what_a_killed_writer_left_is_written_over(tmp_path):
  (tmp_path / 'file.partial').write_text('a longer text that was cut sh')
  files.write(str(tmp_path / 'file'), 'short')
  assert (tmp_path / 'file').read_text() == 'short' and os.listdir(tmp_path) == ['file']


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path):
  (tmp_path / 'victim').write_text('mine')
  os.symlink(tmp_path / 'victim', tmp_path / 'file.partial')
  files.write(str(tmp_path / 'file'), 'text')
  assert (tmp_path / 'victim').read_text() == 'mine' and (tmp_path / 'file').read_text() == 'text'
  assert not os.path.islink(tmp_path / 'file')


def test_writers_at_the_same_time_leave_a_text_of_one_of_them(tmp_path):
  path = str(tmp_path / 'file')
  texts = {str(i) * 100_000 for i in range(4)}
  threads = [threading.Thread(target=lambda t=t: [files.write(path, t) for _ in range(5)]) for t in texts]
  for t in threads:
    t.start()
  for t in threads:
    t.join()
  with open(path) as f:
    assert f.read() in texts
  assert os.listdir(tmp_path) == ['file']


def test_a_file_is_hashed_again_only_when_it_may_have_changed(tmp_path, monkeypatch):
  path, read = tmp_path / 'text', []
  path.write_text('eins')
  os.utime(path, ns=(0, 0))
  hash_of = files.sha256
  monkeypatch.setattr(files, 'sha256', lambda path, progress: read.append(path) or hash_of(path, progress))
  hashes = lambda: content_hashes.of([str(path)], str(tmp_path / 'cache'), quiet=True)
  monkeypatch.setattr(content_hashes, '_SETTLED_NS', 10**12)  # it may change again within the tick of a slow clock
  assert hashes() == hashes() and len(read) == 2
  read.clear()
  monkeypatch.setattr(content_hashes, '_SETTLED_NS', -(10**9))  # as if it had been written long ago
  first = hashes()
  assert hashes() == first == [hash_of(str(path))] and len(read) == 1
  changed_at = path.stat().st_ctime_ns
  path.write_text('zwei')
  while path.stat().st_ctime_ns == changed_at:  # a clock may tick every 4 ms
    os.utime(path, ns=(0, 0))  # same size, same time of modification: that of the inode's change tells
  os.utime(path, ns=(0, 0))
  assert hashes() == [hash_of(str(path))] != first and len(read) == 2
  memo = tmp_path / 'cache' / 'hashes.json'
  memo.write_text(memo.read_text().replace(hashes()[0][:8], 'deadbeef'))
  assert hashes() == [hash_of(str(path))]


def test_a_file_that_has_just_changed_is_hashed_each_time(tmp_path, monkeypatch):
  monkeypatch.setattr(content_hashes, '_SETTLED_NS', 10**18)
  (tmp_path / 'text').write_text('eins')
  content_hashes.of([str(tmp_path / 'text')], str(tmp_path / 'cache'), quiet=True)
  assert not (tmp_path / 'cache' / 'hashes.json').exists()


def test_a_remote_file_system_that_does_not_answer_is_an_error_with_its_path(monkeypatch):
  class Unreachable:
    def exists(self, path):
      raise tf.errors.AbortedError(None, None, 'could not resolve host\nmore')

    stat = listdir = exists

  monkeypatch.setattr(remote_files, '_gfile', Unreachable)
  for ask in (files.exists, files.isdir, files.listdir):
    with pytest.raises(OSError, match='could not resolve host') as caught:
      ask('gs://bucket/run')
    assert caught.value.filename == 'gs://bucket/run' and 'more' not in str(caught.value)
