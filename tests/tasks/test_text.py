"""Text files: the limit of what a gzip file may unpack to."""

from __future__ import annotations

import gzip
import os
import time

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks import text
from lingvo_moe.tasks.mt import preparation
from lingvo_moe.tasks.plain_text import corpus as plain_text

MANY = 300_000_000


@pytest.fixture(scope='module')
def bombs(tmp_path_factory):
  """Files of some 300 kB that unpack to 300 MB: of empty lines, in one gzip member or many, and of one line."""
  folder = tmp_path_factory.mktemp('bombs')
  part = gzip.compress(b'\n' * (MANY // 100))
  (folder / 'many.de.gz').write_bytes(part * 100)
  with gzip.open(folder / 'one.en.gz', 'wb', compresslevel=9) as f:
    for _ in range(100):
      f.write(b'\n' * (MANY // 100))
  (folder / 'line.txt.gz').write_bytes(gzip.compress(b'a' * (MANY // 100)) * 100)
  return folder


@pytest.mark.parametrize('name', ['many.de.gz', 'one.en.gz', 'line.txt.gz'])
def test_a_small_file_that_unpacks_to_very_much_is_refused_soon(bombs, name):
  path, begun = str(bombs / name), time.monotonic()
  assert os.path.getsize(path) < 320_000

  for read in (text.count_lines, plain_text.read, lambda path: text.read_lines([path])):
    with pytest.raises(UserError, match='may unpack to 100 times its size beyond its first 8 MiB; saw .*: see what'):
      read(path)

  assert time.monotonic() - begun < 60


def test_preparation_refuses_it_too(bombs):
  texts = preparation.Texts(str(bombs / 'many.de.gz'), str(bombs / 'one.en.gz'))

  with pytest.raises(UserError, match='may unpack to 100 times its size'):
    for _ in texts.batches():
      pass


def test_text_that_packs_well_is_read(tmp_path):
  lines = [b'line %d of a text that repeats itself' % (i % 1000) for i in range(300_000)]
  path = tmp_path / 'a.gz'
  path.write_bytes(gzip.compress(b'\n'.join(lines), compresslevel=1))

  assert len(b'\n'.join(lines)) > text._ALWAYS_BYTES
  assert [line for batch in text.line_batches(str(path)) for line in batch] == lines
