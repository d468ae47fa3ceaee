"""Files of pairs: tables, TMX and JSON lines, pipes, and names of languages."""

import csv
import gzip
import json
import os
import re
import subprocess
import zipfile

import hypothesis
import hypothesis.strategies as st
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import pair_files
from lingvo_moe.corpora.pair_files import Texts

PAIRS = [('Der Hund läuft, "er" bellt.', 'The dog runs.'), ('Ja.', 'Yes & no <i>.')]


def pairs_of(texts):
  """All pairs, as text."""
  rows = [pair for sides in texts.batches() for pair in zip(*sides, strict=True)]
  return [tuple(side if side is None else side.decode() for side in pair) for pair in rows]


def read(path, **more):
  return pairs_of(Texts(pairs_file=str(path), **{'pair': 'de-en', **more}))


@pytest.mark.parametrize('delimiter', [',', ';', '\t'])
@pytest.mark.parametrize(
  ('header', 'more'),
  [
    (('id', 'de', 'en'), {}),
    (('id', 'Source', 'Target'), {}),
    (('id', 'German', 'English'), {'columns': ('German', 'english')}),
    (None, {'columns': ('2', '3')}),
  ],
)
def test_csv_is_read_with_its_quotes_and_by_the_names_of_its_first_row(tmp_path, delimiter, header, more):
  with open(tmp_path / 'a.csv', 'w', newline='') as f:
    rows = csv.writer(f, delimiter=delimiter)
    rows.writerows([header] if header else [])
    rows.writerows((i, source, f'\n{target[:3]}\r\n{target[4:]}') for i, (source, target) in enumerate(PAIRS))
  assert read(tmp_path / 'a.csv', **more) == PAIRS


@pytest.mark.parametrize(
  ('first', 'more', 'note'),
  [
    ('Satz,English text', {}, r"'Satz', 'English text', was taken .*: .*, give --columns='Satz,English text'\Z"),
    ('Satz,Translation', {'columns': (2, 1)}, r"'Translation', 'Satz', was .* give --columns=Translation,Satz\Z"),
    ('Satz,Translation', {'columns': ('Satz', 'translation')}, None),
    ('German,English', {}, None),
    ('Der alte Hund schläft.,The dog sleeps.', {}, None),
  ],
)
def test_a_first_row_of_words_that_may_name_columns_is_told(tmp_path, first, more, note):
  (tmp_path / 'a.csv').write_text(f'{first}\nJa.,Yes.\nNein.,No.\n')
  texts = Texts(pairs_file=str(tmp_path / 'a.csv'), **{'pair': 'de-en', **more})
  pairs = pairs_of(texts)
  assert len(pairs) == 2 + bool(note or 'Hund' in first)
  assert re.search(note, texts.note) if note else not texts.note


SEPARATED = st.text(st.sampled_from('ab Ä是,;\t"\''), min_size=1, max_size=8)


@hypothesis.given(
  st.lists(st.tuples(SEPARATED, SEPARATED), min_size=1, max_size=5),
  st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
  st.sampled_from(sorted(pair_files.SEPARATORS)),
)
def test_csv_without_a_header_is_read_right_or_asked_about(tmp_path_factory, rows, quoting, name):
  path = tmp_path_factory.mktemp('csv') / 'a.csv'
  with open(path, 'w', newline='') as f:
    csv.writer(f, delimiter=pair_files.SEPARATORS[name], quoting=quoting).writerows(rows)
  assert read(path, separator=name) == rows
  try:
    assert read(path) == rows
  except UserError as e:
    assert quoting != csv.QUOTE_ALL and '--separator' in str(e)


@pytest.mark.parametrize(
  'content, expected',
  [
    ('"Am Montag, Tag 1";"On Monday, day 1"\n', [('Am Montag, Tag 1', 'On Monday, day 1')]),
    ('Ja, gut;Yes\nNein;No, no, no\n', [('Ja, gut', 'Yes'), ('Nein', 'No, no, no')]),
    ('a;b\n\nc\nd;e;f\n', [('a', 'b'), ('c', None), ('d', 'e')]),  # no other divides a row
    ('a;b, c\n\nd;e, f, g\n\n', [('a', 'b, c'), ('d', 'e, f, g')]),  # an empty line is no row
    ('en,de\n"Yes; a",Ja;\nNo\n', [('Ja;', 'Yes; a'), (None, 'No')]),  # named in the first row
    ('de,en\na;b,c\nd;e\n', [('a;b', 'c'), ('d;e', None)]),
  ],
)
def test_the_separator_of_csv_gives_all_rows_as_many_cells(tmp_path, content, expected):
  (tmp_path / 'a.csv').write_text(content)
  assert [pair for pair in read(tmp_path / 'a.csv') if pair != (None, None)] == expected


@pytest.mark.parametrize(
  'content, seen',
  [
    ('Ja, gut;Yes, fine\n', 'comma, semicolon, each of which does, in'),
    ('a;b\nc,d\n', 'comma, semicolon, none of which does, in'),
  ],
)
def test_csv_that_several_separators_divide_is_asked_about(tmp_path, content, seen):
  (tmp_path / 'a.csv').write_text(content)
  with pytest.raises(
    UserError, match=f'one separator must give all rows of CSV as many cells; saw {seen} .*: name it by'
  ):
    read(tmp_path / 'a.csv')
  (tmp_path / 'a.tsv').write_text(content)
  with pytest.raises(UserError, match='--separator is for CSV; .*a.tsv is none: leave it out'):
    read(tmp_path / 'a.tsv', separator='comma')


def test_tsv_has_no_quotes_and_may_have_names(tmp_path):
  (tmp_path / 'a.tsv').write_text('en\tde\n"Yes\tJa"\nNo\n')
  assert read(tmp_path / 'a.tsv') == [('Ja"', '"Yes'), (None, 'No')]
  assert read(tmp_path / 'a.tsv', columns=('2', '1'))[0] == ('Ja"', '"Yes')
  with pytest.raises(UserError, match="--columns=x,en must be names in the first row of .*; it has 'en', 'de'"):
    read(tmp_path / 'a.tsv', columns=('x', 'en'))


TEXTS = ('Der Hund läuft.', 'The dog runs.'), ('Ja.', 'Yes.'), ('3 Katzen', '3 cats')


@pytest.mark.parametrize(
  ('header', 'row', 'columns', 'ending'),
  [
    ('en-US,de-DE', '{1},{0}', '', 'csv'),
    ('English,German', '{1},{0}', '', 'csv'),
    ('id,en_US,DEU', '{i},{1},{0}', '', 'csv'),
    ('id;Deutsch;English', '{i};{0};{1}', '', 'csv'),
    ('sep=;\nid;Deutsch;Englisch', '{i};{0};{1}', '', 'csv'),
    ('sep=;', '{0};{1}', '', 'csv'),
    ('', '{i}\t{0}\t9{i}\t{1}', '', 'tsv'),  # Tatoeba
    ('', '1.{i}9\t{0}\t{1}', '', 'tsv'),  # WikiMatrix
    ('', 'http://a.de/{i}\thttp://b.org/?q={i}\t{0}\t{1}', '', 'tsv'),  # ParaCrawl
    ('', 'deu\ts_{i}\t{0}\t\t{1}', '', 'tsv'),
    ('id\tde-AT\ten\tnote', '{i}\t{0}\t{1}\tx {i}', '2,3', 'tsv'),
    ('de\ten\tfr', '{0}\t{1}\tx {i}', '', 'tsv'),
  ],
)
def test_columns_are_known_by_codes_and_names_of_languages_or_as_those_with_text(
  tmp_path, header, row, columns, ending
):
  """Kind: a table of which other columns than those of the two languages become a corpus."""
  rows = [row.format(*pair, i=i) for i, pair in enumerate(TEXTS)]
  (tmp_path / f'a.{ending}').write_text('\n'.join([header] * bool(header) + rows))
  assert tuple(read(tmp_path / f'a.{ending}', columns=columns.split(',') if columns else ())) == TEXTS


@pytest.mark.parametrize(
  ('content', 'columns', 'message'),
  [
    ('a b\tc d\te f\ng h\ti j\tk l\n', (), "has 3 of 3, and begins with 1 'a b', 2 'c d', 3 'e f': .*--columns=1,2"),
    ('id\tGerman\tTranslation\n1\ta b\tc d\n2\te f\tg h\n', (), "begins with 1 'id', 2 'German', 3 'Translation'"),
    ('de\ten-US\ten-GB\na b\tc d\te f\n', (), "begins with 1 'de', 2 'en-US', 3 'en-GB'"),
    ('en\tde\nYes\tJa\n', (1, 2), "--columns=1,2 are de and en; the first row of .* has 'en', 'de': exchange"),
    ('1\thttp://a.b\n' * 10, (), 'has 0 of 2'),
    ('| a | b |\n| c | d |\n', (), r"is with \| between the cells \('\| a \| b \|'\): write it as TSV"),
    ('msgid "a"\nmsgstr "b"\n', (), 'is a PO catalogue'),
    ('eins\nzwei\n', (), "is lines \\('eins'\\)"),
    ('de\ten\rJa\tYes\rNein\tNo\r', (), 'lines end with LF; .* has CR alone'),
    ('<?xml version="1.0"?><xliff><file/></xliff>', (), 'a.tsv is XML of <xliff>, which is not TMX'),
  ],
)
def test_a_table_whose_columns_cannot_be_told_is_refused(tmp_path, content, columns, message):
  """Kind: what is no table of two texts, or says which they are in another way than is read here."""
  path = tmp_path / ('a.tsv' if content[0] != '<' else 'a')
  path.write_text(content)
  with pytest.raises(UserError, match=message.replace('a.tsv', path.name)):
    read(path, columns=columns)


def test_quote_marks_in_cells_of_csv_stay_and_one_that_takes_in_other_rows_is_refused(tmp_path):
  """Kind: quote marks that do not quote a whole cell."""
  (tmp_path / 'a.csv').write_text('"Ja" sagte er,Er "ja" said\n"a, b","c ""d"""\n"x\ny",z\n5" hoch,5" high\n')
  assert read(tmp_path / 'a.csv') == [
    *(('"Ja" sagte er', 'Er "ja" said'), ('a, b', 'c "d"'), ('x y', 'z'), ('5" hoch', '5" high'))
  ]
  (tmp_path / 'a.csv').write_text('Eins,One\n"Hallo, du\nda",Hello\n')  # a comma of the text
  assert read(tmp_path / 'a.csv') == [('Eins', 'One'), ('Hallo, du da', 'Hello')]
  (tmp_path / 'a.csv').write_text('Eins,One\n"Haus,house\n5",6\n')  # the inches of another row end it, in two cells
  with pytest.raises(UserError, match='that in line 2 of .*a.csv does not, or takes in other rows'):
    read(tmp_path / 'a.csv')
  (tmp_path / 'a.csv').write_text('Eins,One\n"Hallo,Hello\n' + 'Er sagte "Ja",x\n"Zwei",Two\n' * 150)
  with pytest.raises(UserError, match='that in line 2 of .*a.csv does not, or takes in other rows'):
    read(tmp_path / 'a.csv')


@pytest.mark.parametrize(
  ('shape', 'more'),
  [
    (lambda s, t: {'translation': {'de': s, 'en': t}}, {}),
    (lambda s, t: {'id': 1, 'de': s, 'en': t}, {}),
    (lambda s, t: {'src': s, 'tgt': t}, {}),
    (lambda s, t: {'x': s, 'y': t}, {'columns': ('x', 'y')}),
  ],
)
def test_json_lines_are_read_by_their_keys(tmp_path, shape, more):
  (tmp_path / 'a.jsonl').write_text('\n'.join(json.dumps(shape(*pair)) for pair in PAIRS) + '\n\n')
  assert read(tmp_path / 'a.jsonl', **more) == PAIRS


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    ('{"x": "a"}', "no line of .* has text by the keys de,en or source,target or src,tgt; it has 'x': name two"),
    ('[{"de": "a"}]', 'line 1 has another value: write a list as lines'),
    ('{"de": 1', 'must have a JSON object in each line; line 1 has none'),
  ],
)
def test_json_that_has_no_pairs_is_answered(tmp_path, content, message):
  (tmp_path / 'a.jsonl').write_text(content)
  with pytest.raises(UserError, match=message):
    read(tmp_path / 'a.jsonl')


def test_half_of_a_surrogate_pair_is_dropped_as_no_utf8(tmp_path):
  (tmp_path / 'a.jsonl').write_text('{"de": "\\ud800", "en": "x"}')
  ((source, _),) = Texts(pairs_file=str(tmp_path / 'a.jsonl'), pair='de-en').batches()
  with pytest.raises(UnicodeDecodeError):
    source[0].decode()


TMX = """<?xml version="1.0" encoding="{encoding}"?>
<!DOCTYPE tmx SYSTEM "tmx14.dtd">
<tmx version="1.4"><header/><body>
<tu><note>no text</note>
  <tuv xml:lang="en-US"><seg>Yes &amp; no <hi>&lt;i&gt;</hi>.</seg></tuv>
  <tuv xml:lang="DE"><seg><bpt i="1">{{b}}</bpt>Ja<ept i="1">{{/b}}</ept>.<ph>code</ph></seg></tuv></tu>
<tu><tuv lang="de_AT"><seg>Nur
  deutsch</seg></tuv></tu>
</body></tmx>
"""


@pytest.mark.parametrize('encoding', ['utf-8', 'utf-16', 'iso-8859-1'])
def test_tmx_is_read_by_language_without_codes_and_in_the_encoding_it_names(tmp_path, encoding):
  (tmp_path / 'a.TMX.gz').write_bytes(gzip.compress(TMX.format(encoding=encoding).encode(encoding)))
  assert read(tmp_path / 'a.TMX.gz') == [('Ja.', 'Yes & no <i>.'), ('Nur deutsch', None)]
  assert read(tmp_path / 'a.TMX.gz', pair='en-US-de')[0] == ('Yes & no <i>.', 'Ja.')
  with pytest.raises(UserError, match="has both de and en-GB; its languages are 'de', 'de-at', 'en-us'"):
    read(tmp_path / 'a.TMX.gz', pair='de-en-GB')


def tmx(path, *units):
  """Writes TMX of units, (language, segment) each."""
  tuv = '<tuv xml:lang="{}"><seg>{}</seg></tuv>'
  tus = ''.join(f'<tu>{"".join(tuv.format(*segment) for segment in unit)}</tu>' for unit in units)
  path.write_text(f'<tmx version="1.4"><body>{tus}</body></tmx>')
  return path


@pytest.mark.parametrize(
  'units',
  [
    [(('en', 'Yes'), ('zh-TW', '是嗎'), ('zh-CN', '是吗'))],
    [(('en', 'Yes'), ('zh-TW', '是嗎')), (('en', 'No'), ('zh-CN', '不'))],
    [(('en', 'Yes'), ('zh-HK', '是嗎')), (('en', 'No'), ('zh-Hans', '不'))],
  ],
)
def test_variants_of_a_language_in_tmx_are_asked_for(tmp_path, units):
  """Kind: several segments of one language, of which the first was taken, in whatever script."""
  path = tmx(tmp_path / 'a.tmx', *units)
  with pytest.raises(UserError, match="has several variants of zh: 'zh-.*', 'zh-.*': name one, as --pair=en-zh-"):
    read(path, pair='en-zh')
  assert read(tmx(path, (('en', 'Yes'), ('zh-TW', '是嗎'), ('zh-CN', '是吗'))), pair='en-zh-CN') == [('Yes', '是吗')]
  path = tmx(path, (('en-US', 'Yes'), ('de', 'Ja')), (('en-GB', 'No'), ('de', 'Nein')))
  assert read(path) == [('Ja', 'Yes'), ('Nein', 'No')]


def test_inline_elements_of_tmx_separate_words(tmp_path):
  segment = 'eins<ph type="lb"/>Zeile <it/>zwei<ph/>, <bpt i="1"/>dr<ept i="1"/>ei<ph>x</ph>.'
  assert read(tmx(tmp_path / 'a.tmx', (('de', segment), ('en', 'x')))) == [('eins Zeile zwei, drei.', 'x')]


def zipped(path, files):
  with zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
    for name, lines in files.items():
      archive.writestr(name, lines)
  return path


def test_a_moses_zip_of_opus_is_read_by_the_endings_of_its_files(tmp_path):
  sides = ['\ufeffEin Hund.\r\nJa.\n', 'A dog.\nYes.']
  files = {
    'README': 'x',
    **{f'Corpus.de-en.{ending}': text for ending, text in zip(('de', 'en', 'xml'), [*sides, '<'])},
  }
  path = zipped(tmp_path / 'de-en.txt.zip', files)
  texts, counts = Texts(pairs_file=str(path)), []
  assert texts.sides == ('de', 'en') and pairs_of(texts) == [('Ein Hund.', 'A dog.'), ('Ja.', 'Yes.')]
  assert list(texts.batches(counts.append)) and 0 < sum(counts) <= texts.bytes()
  assert read(path, pair='en-de') == [('A dog.', 'Ein Hund.'), ('Yes.', 'Ja.')]


@pytest.mark.parametrize(
  'files, message',
  [
    ({'a.de': 'x'}, "two files of one name that end in .de and .en; .*x.zip has 'a.de'"),
    ({'a.de': 'x\n', 'a.en': 'x\nx\n'}, 'saw 1 in a.de and 2 in a.en: align them'),
    ({'a.de': 'x' * (9 << 20), 'a.en': 'x'}, 'a.de in .*x.zip would unpack to 9,437,184 bytes'),
    ({'a.de': 'x\ry\r', 'a.en': 'x\ny\n'}, 'lines end with LF; a.de in .*x.zip has CR alone'),
    ({'a.de': 'x\n', 'a.en': 'y\n'.encode('utf-16')}, 'a.en in .*x.zip is UTF-16'),
  ],
)
def test_a_zip_without_two_sides_is_answered(tmp_path, files, message):
  with pytest.raises(UserError, match=message):
    read(zipped(tmp_path / 'x.zip', files))


def test_a_damaged_zip_is_answered(tmp_path):
  path = zipped(tmp_path / 'x.zip', {'a.de': 'Hund ' * 99, 'a.en': 'dog ' * 99})
  path.write_bytes(path.read_bytes().replace(b'Hund', b'Humd', 1)[:80] + path.read_bytes()[60:])
  with pytest.raises(UserError, match='damaged'):
    read(path)


@pytest.mark.parametrize('compression', [zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2, zipfile.ZIP_DEFLATED])
def test_a_damaged_entry_of_a_zip_is_answered_however_it_is_packed(tmp_path, compression):
  with zipfile.ZipFile(tmp_path / 'x.zip', 'w', compression) as archive:
    for name in ('a.de', 'a.en'):
      archive.writestr(name, ' '.join(map(str, range(9999))))
    begin = archive.getinfo('a.en').header_offset - 60
  data = bytearray((tmp_path / 'x.zip').read_bytes())
  data[60:begin] = bytes(reversed(data[60:begin]))
  (tmp_path / 'x.zip').write_bytes(data)
  with pytest.raises(UserError, match='damaged'):
    read(tmp_path / 'x.zip')


def test_damaged_tmx_and_entities_are_refused(tmp_path):
  (tmp_path / 'a.tmx').write_text(TMX.format(encoding='utf-8')[:300])
  with pytest.raises(UserError, match='is damaged or not TMX'):
    read(tmp_path / 'a.tmx')
  (tmp_path / 'a.tmx').write_text('<!DOCTYPE tmx [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><tmx>&b;</tmx>')
  with pytest.raises(UserError, match='defines entities of its own'):
    read(tmp_path / 'a.tmx')


def test_a_file_of_pairs_given_as_lines_is_answered_with_its_flag(tmp_path):
  for name in ('a.tmx', 'a.jsonl.gz', 'a.csv'):
    (tmp_path / name).touch()
    with pytest.raises(UserError, match='give it by --pairs_file'):
      Texts(tsv=str(tmp_path / name), pair='de-en')
    with pytest.raises(UserError, match='give it by --pairs_file'):
      Texts(str(tmp_path / name), str(tmp_path / 'b.en'), pair='de-en')


def test_a_pipe_is_copied_so_that_it_is_read_twice_and_known_by_its_beginning(tmp_path):
  (tmp_path / 'a.jsonl').write_text('\n'.join(json.dumps({'de': s, 'en': t}) for s, t in PAIRS))
  (tmp_path / 'a.de').write_text(''.join(s + '\n' for s, _ in PAIRS))
  (tmp_path / 'a.en').write_text(''.join(t + '\n' for _, t in PAIRS))
  for pipe in ('one', 'two'):
    os.mkfifo(tmp_path / pipe)
  command = 'cat a.jsonl > one & wait; xz -c a.de > one & cat a.en > two'
  with subprocess.Popen(['bash', '-c', command], cwd=tmp_path):
    texts = Texts(pairs_file=str(tmp_path / 'one'), pair='de-en')
    assert pairs_of(texts) == pairs_of(texts) == PAIRS
    texts = Texts(str(tmp_path / 'one'), str(tmp_path / 'two'), pair='de-en')
    assert pairs_of(texts) == pairs_of(texts) == PAIRS
    assert texts.where(0) == str(tmp_path / 'one')


@pytest.mark.parametrize(
  ('names', 'pair', 'sides'),
  [
    (('a.de', 'a.en.GZ'), '', ('de', 'en')),
    (('a.pt-BR', 'a.en'), '', ('pt-BR', 'en')),
    (('a.en', 'a.pt-br.xz'), 'en-pt-br', ('en', 'pt-br')),
    (('a', 'b'), 'pt-BR-en', ('pt-BR', 'en')),
    (('a', 'b'), 'en-zh-Hans', ('en', 'zh-Hans')),
    (('mine.de-en.tmx.gz',), '', ('de', 'en')),
    (('x.tsv',), 'de_AT-en', ('de_AT', 'en')),
    (('p-de-en.tsv',), '', ('de', 'en')),
    (('my-corpus-v2-en-pt-BR.tsv',), '', ('en', 'pt-BR')),
    (('news-zh-Hant-eng.tsv',), '', ('zh-Hant', 'eng')),
    (('xx-yy.tsv',), '', ('xx', 'yy')),
  ],
)
def test_languages_are_named_as_the_trainer_names_them(tmp_path, names, pair, sides):
  for name in names:
    (tmp_path / name).touch()
  paths = [str(tmp_path / name) for name in names]
  texts = Texts(*paths, pair=pair) if len(paths) == 2 else Texts(pairs_file=paths[0], pair=pair)
  assert texts.sides == sides
