"""Text files: what is read, what is refused and why, and the limit of what a packed file may unpack to."""

import bz2
import codecs
import gzip
import io
import lzma
import os
import tarfile
import time

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import documents as plain_text
from lingvo_moe.corpora import packed, text
from lingvo_moe.corpora.pair_files import Texts

MANY = 60_000_000


@pytest.fixture(scope='module')
def bombs(tmp_path_factory):
  """Files of some 60 kB that unpack to 60 MB: of empty lines, in one gzip member or many, and of one line."""
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
  assert os.path.getsize(path) < 70_000

  for read in (text.count_lines, plain_text.read, lambda path: list(text.lines([path]))):
    with pytest.raises(UserError, match='may unpack to 100 times its size beyond its first 8 MiB; saw .*: see what'):
      read(path)

  assert time.monotonic() - begun < 60


def test_preparation_refuses_it_too(bombs):
  texts = Texts(str(bombs / 'many.de.gz'), str(bombs / 'one.en.gz'))

  with pytest.raises(UserError, match='may unpack to 100 times its size'):
    for _ in texts.batches():
      pass


@pytest.mark.parametrize('pack', [lzma.compress, bz2.compress])
def test_what_xz_and_bzip2_unpack_to_is_bounded_too(tmp_path, pack):
  path = tmp_path / 'a.de'
  path.write_bytes(pack(b'\n' * 10_000_000))
  with pytest.raises(UserError, match='a packed file may unpack to 100 times its size'):
    text.count_lines(str(path))


def test_text_that_packs_well_is_read(tmp_path):
  lines = [b'line %d of a text that repeats itself' % (i % 1000) for i in range(300_000)]
  path = tmp_path / 'a.gz'
  path.write_bytes(gzip.compress(b'\n'.join(lines), compresslevel=1))

  assert len(b'\n'.join(lines)) > packed._ALWAYS_BYTES
  assert [line for batch in text.line_batches(str(path)) for line in batch] == lines


LINES = [f'{i} schöne Häuser' for i in range(50)]
TEXT = '\n'.join(LINES).encode()
READERS = (lambda path: list(text.lines([path])), lambda path: plain_text.read(path).split('\n'))


@pytest.mark.parametrize('name', ['a.de.gz', 'a.de.GZ', 'a.de.xz', 'a.de', 'a.de.BZ2'])
@pytest.mark.parametrize('pack', [gzip.compress, lzma.compress, bz2.compress])
def test_a_packed_file_is_known_by_its_first_bytes_whatever_its_name(tmp_path, name, pack):
  (tmp_path / name).write_bytes(pack(TEXT))
  for read in READERS:
    assert read(str(tmp_path / name)) == LINES


@pytest.mark.parametrize('pack', [bytes, gzip.compress])
def test_a_byte_order_mark_is_no_text_and_the_character_is_elsewhere(tmp_path, pack):
  (tmp_path / 'a.de').write_bytes(pack(codecs.BOM_UTF8 + 'eins\n\ufeffzwei'.encode()))
  for read in READERS:
    assert read(str(tmp_path / 'a.de')) == ['eins', '\ufeffzwei']


def tar_of(data, kind=tarfile.USTAR_FORMAT):
  packed_data = io.BytesIO()
  with tarfile.open(fileobj=packed_data, mode='w', format=kind) as archive:
    member = tarfile.TarInfo('a.de')
    member.size = len(data)
    archive.addfile(member, io.BytesIO(data))
  return packed_data.getvalue()


CHINESE = '一个人 和 狗。\n一二三，四五六。\n' * 9


@pytest.mark.parametrize(
  ('data', 'what'),
  [
    (tar_of(TEXT), 'a.de is a tar archive: unpack it with tar -xf'),
    (gzip.compress(tar_of(TEXT, tarfile.GNU_FORMAT)), 'a.de is a tar archive: unpack it with tar -xf'),
    (b'PK\3\4' + bytes(30), 'a.de is a zip archive: unpack it with unzip'),
    (b'\x28\xb5\x2f\xfd' + bytes(30), 'a.de is packed by zstd: unpack it with zstd -d'),
    (gzip.compress(gzip.compress(TEXT)), 'a.de is packed twice'),
    (b'\x7fELF\2\1\1' + bytes(90) + TEXT, 'a.de is a binary file .*NUL'),
    *(
      (mark + sample.encode(encoding), f'must be UTF-8; .*a.de is {named.upper()}: convert it with iconv -f {named} -t')
      for sample in (TEXT.decode(), CHINESE)
      for encoding in ('utf-16-le', 'utf-16-be', 'utf-32-le', 'utf-32-be')
      for mark, named in ((b'', encoding), ('\ufeff'.encode(encoding), encoding[:6]))
    ),
  ],
)
def test_a_file_that_is_no_text_is_refused_by_what_it_is(tmp_path, data, what):
  (tmp_path / 'a.de').write_bytes(data)
  for read in (*READERS, lambda path: next(text.line_batches(path, strict=False))):
    with pytest.raises(UserError, match=what):
      read(str(tmp_path / 'a.de'))


@pytest.mark.parametrize('line', ['x' * 255 + 'ajustar', 'BZh ist kein Wort', 'PAR1 %PDF- PK'])
def test_text_that_looks_a_little_like_another_file_is_read(tmp_path, line):
  (tmp_path / 'a.es').write_text(f'{line}\n')
  assert list(text.lines([str(tmp_path / 'a.es')])) == [line]


def test_a_nul_far_into_a_file_is_named_by_its_line(tmp_path):
  (tmp_path / 'a.de').write_bytes(b'eine Zeile\n' * 5000 + b'ab\0c\n')
  for read in READERS:
    with pytest.raises(UserError, match=r'text has no NUL bytes; line 5001 of .*a\.de has one \(byte 3'):
      read(str(tmp_path / 'a.de'))
