"""Files to translate: office documents by their entries, and archives that are refused."""

import io
import zipfile

import pytest

from lingvo_moe.addons.documents import document_files
from lingvo_moe.core.errors import UserError
from lingvo_moe.text.inline_placement import Aligned

DOCUMENT = '<w:p><w:r><w:t>Guten Tag.</w:t></w:r></w:p>'
NAMESPACE = '<{0}:p xmlns:{0}="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><{0}:t>Ja.</{0}:t></{0}:p>'
CONTENT = '<text:p>Guten <text:span>Tag</text:span>.</text:p>'


def archive(*entries):
  packed = io.BytesIO()
  with zipfile.ZipFile(packed, 'w', zipfile.ZIP_DEFLATED) as made:
    for name, content in entries:
      made.writestr(name, content)
  return packed.getvalue()


def test_an_office_document_has_other_text_and_the_same_entries():
  picture = bytes(range(256))
  data = archive(('[Content_Types].xml', '<x/>'), ('word/document.xml', DOCUMENT), ('word/media/a.png', picture))
  document = document_files.read('A.DOCX', data, 10_000)
  assert document.texts == ['Guten Tag.']
  with zipfile.ZipFile(io.BytesIO(document.written([Aligned('Good day.')]))) as made:
    assert made.namelist() == ['[Content_Types].xml', 'word/document.xml', 'word/media/a.png']
    assert made.read('word/media/a.png') == picture
    assert b'<w:t>Good day.</w:t>' in made.read('word/document.xml')


def test_odt_keeps_its_type_first_and_unpacked():
  packed = io.BytesIO()
  with zipfile.ZipFile(packed, 'w') as made:
    made.writestr('mimetype', 'application/vnd.oasis.opendocument.text', zipfile.ZIP_STORED)
    made.writestr('content.xml', CONTENT, zipfile.ZIP_DEFLATED)
  document = document_files.read('a.odt', packed.getvalue(), 10_000)
  written = document.written([Aligned('Good day.')])
  assert document.texts == ['Guten Tag.'] and written[30:38] == b'mimetype' and b'opendocument.text' in written[:90]


@pytest.mark.parametrize(
  'data, message',
  [
    (b'PK\x03\x04 no archive', 'is not a whole .docx file'),
    (archive(('a.xml', DOCUMENT)), 'has its text in word/document.xml; none of its 1 entries is that'),
    (archive(('word/document.xml', DOCUMENT), ('zeros', b'\0' * 10**6)), 'unpack to at most 10000 bytes'),
    (archive(('word/document.xml', DOCUMENT), ('../../etc/passwd', 'x')), "plain paths; saw '../../etc/passwd'"),
    (archive(('word/document.xml', DOCUMENT), ('/etc/passwd', 'x')), 'plain paths'),
    (archive(('word/document.xml', '<!DOCTYPE a [<!ENTITY b "c">]>' + DOCUMENT)), 'must not declare entities'),
    (archive(('word/document.xml', DOCUMENT.encode('utf-16'))), 'text must be UTF-8'),
    (archive(('word/document2.xml', DOCUMENT), ('word/footer1.xml', DOCUMENT)), 'has its text in word/document.xml'),
    (archive(('word/document.xml', NAMESPACE.format('ns0'))), 'word/document.xml has xmlns:ns0="http://schemas.open'),
    (archive(('word/document.xml', NAMESPACE.format('ns0').replace(':ns0', ''))), 'has xmlns="http://schemas.openxml'),
    (archive(('word/document.xml', DOCUMENT))[:-30], 'is not a whole .docx file'),
    (
      archive(('word/document.xml', DOCUMENT)).replace(b'Guten', b'gUTEN').replace(b'PK\x01\x02', b'PK\x01\x03'),
      'not a whole',
    ),
  ],
)
def test_an_archive_that_is_damaged_too_large_or_sly_is_refused(data, message):
  with pytest.raises(UserError, match=message):
    document_files.read('a.docx', data, 10_000)


@pytest.mark.parametrize('compression', [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
def test_a_damaged_entry_is_refused_however_it_is_packed(compression):
  """Kind: what another packing than that of most archives raises where it is damaged."""
  packed = io.BytesIO()
  with zipfile.ZipFile(packed, 'w', compression) as made:
    made.writestr('word/document.xml', DOCUMENT * 99 + ' '.join(map(str, range(999))))
  data = packed.getvalue()
  with pytest.raises(UserError, match='the file is not a whole .docx file'):
    document_files.read('a.docx', data[:60] + data[60:900][::-1] + data[900:], 100_000)


def test_line_ends_may_be_cr_alone():
  document = document_files.read('a.srt', b'1\r00:01 --> 00:02\rEin Hund.\r\r2\r00:03 --> 00:04\rJa.\r', 10_000)
  assert document.texts == ['Ein Hund.', 'Ja.']
  assert (
    document.written(map(Aligned, ['A dog.', 'Yes.'])).split()
    == '1 00:01 --> 00:02 A dog. 2 00:03 --> 00:04 Yes.'.split()
  )
  document = document_files.read('a.txt', b'Ein Hund.\rJa.', 10_000)
  assert document.texts == ['Ein Hund.', 'Ja.'] and document.written(map(Aligned, 'ab')) == 'a\rb'


def test_a_namespace_has_its_usual_prefix():
  assert document_files.read('a.docx', archive(('word/document.xml', NAMESPACE.format('w'))), 10_000).texts == ['Ja.']


@pytest.mark.filterwarnings('ignore:Duplicate name')
def test_an_archive_has_each_name_once_and_not_too_many(monkeypatch):
  twice = archive(('word/document.xml', DOCUMENT), ('word/document.xml', DOCUMENT))
  with pytest.raises(UserError, match='at most 10000 entries, each once; saw 2'):
    document_files.read('a.docx', twice, 10_000)
  monkeypatch.setattr(document_files, '_MOST_ENTRIES', 1)
  with pytest.raises(UserError, match='at most 1 entries, each once; saw 2'):
    document_files.read('a.docx', archive(('word/document.xml', DOCUMENT), ('a', '')), 10_000)


def test_a_document_that_is_not_changed_has_the_same_bytes():
  for name, data in (('a.txt', '\ufeffEins\r\n\n zwei'), ('a.html', '<p>&auml; <b>b</b>\r\n c'), ('a.srt', 'a\r\nb')):
    document = document_files.read(name, data.encode(), 10_000)
    assert document.written([Aligned(text) for text in document.texts]) == data
  assert document_files.read('a.txt', '\ufeffEins'.encode(), 100).texts[-1] == 'Eins'
  data = archive(('word/document.xml', DOCUMENT.replace('Guten', ' Guten  &amp;')), ('word/comments.xml', DOCUMENT))
  document = document_files.read('a.docx', data, 10_000)
  with zipfile.ZipFile(io.BytesIO(document.written([Aligned(text) for text in document.texts]))) as made:
    with zipfile.ZipFile(io.BytesIO(data)) as before:
      assert [made.read(name) for name in made.namelist()] == [before.read(name) for name in before.namelist()]
