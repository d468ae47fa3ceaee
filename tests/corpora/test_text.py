"""Sentences as they compare, and lines of which nothing can be seen."""

import unicodedata

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import text

CHARACTERS = [chr(code) for code in (*range(0xD800), *range(0xE000, 0x32000), *range(0xE0000, 0xE1000))]


@pytest.mark.parametrize(
  'line',
  [
    'Der  Hund läuft', 'Der\u00a0Hund läuft', 'Der Hund la\u0308uft', 'Der Hund läuft\u200e', 'Der Hund l\u200bäuft',
    '\ufeffDer Hund läuft', ' Der\tHund läuft\r', 'Der\u3000Hund läuft', 'Der Hu\u00adnd läuft',
    'Der Hund la\u200d\u0308uft', 'Ｄer Hund läuft', 'Der Hund\0 läuft',
  ],
)  # fmt: skip
def test_a_sentence_has_one_key_however_its_spaces_and_composition_are_written(line):
  assert text.key(line) == 'Der Hund läuft'


def test_sentences_of_other_words_case_or_punctuation_have_other_keys():
  lines = ['Der Hund', 'der Hund', 'DerHund', 'Der Hund.', 'Der Hünd', '']
  assert len(set(map(text.key, lines))) == len(lines)


def test_a_line_is_empty_if_and_only_if_its_key_is():
  assert [c for c in CHARACTERS if text.is_empty(c) != (text.key(c) == '')] == []


def test_no_format_or_control_character_and_no_space_can_be_seen():
  unseen = [c for c in CHARACTERS if unicodedata.category(c) in ('Cf', 'Cc', 'Zs', 'Zl', 'Zp')]
  assert [c for c in unseen if not text.is_empty(c)] == [] and text.is_empty(''.join(unseen))
  letters = [c for c in CHARACTERS if unicodedata.category(c)[0] in 'LNP']
  assert {c for c in letters if text.is_empty(c)} == set('\u115f\u1160\u3164\uffa0')  # fillers of Hangul


def test_a_key_is_its_own_key():
  assert [c for c in CHARACTERS if text.key(text.key(c)) != text.key(c)] == []


@pytest.mark.parametrize('size', [1, 2, 3, 5, 7, 100])
def test_parts_of_a_file_have_each_line_once(tmp_path, size):
  path = tmp_path / 'x'
  path.write_bytes(b'\xef\xbb\xbfa\n\nbcd\r\n\nef\nghijklmn\no')
  parts = text.parts(str(path), size)
  lines = [line for part in parts for batch in part.batches() for line in batch]
  assert lines == [b'a', b'', b'bcd', b'', b'ef', b'ghijklmn', b'o']
  some = text.FilePart(str(path), first=2, last=5)
  assert [*some.batches()] == [[b'bcd', b'', b'ef']]


def test_a_bad_line_of_a_part_has_its_number_in_the_file(tmp_path):
  path = tmp_path / 'x'
  path.write_bytes(b'a\nb\nc\n\xff\n')
  with pytest.raises(UserError, match='line 4 of .* is not'):
    [*text.parts(str(path), 5)[1].batches()]


@pytest.mark.parametrize('size', [2, 3, 5, 100])
def test_a_line_of_a_part_has_its_number_in_the_file(tmp_path, size):
  path = tmp_path / 'x'
  path.write_bytes(b'1\n2\n3\n4\n5\n6\n7\n')
  for part in text.parts(str(path), size):
    for skipped in (0, 1):
      lines = [line for batch in part._replace(first=skipped).batches() for line in batch]
      numbers = [part._replace(first=skipped).number(place) for place in range(len(lines))]
      assert [str(number).encode() for number in numbers] == lines
