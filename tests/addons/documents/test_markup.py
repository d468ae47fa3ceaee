"""Walker of markup: what is translated, where inline elements go, and that all else stays as it was."""

import time

import pytest

from lingvo_moe.addons.documents.formats import DOCX, HTML, ODT, SRT
from lingvo_moe.addons.documents.markup import MarkedUp
from lingvo_moe.text.inline_placement import Aligned

DOCX_TEXT = (
  '<?xml version="1.0"?>\n<w:body><w:p><w:pPr><w:jc/><w:rPr><w:b/></w:rPr></w:pPr><w:r w:rsidR="2"><w:rPr><w:b/>'
  '</w:rPr><w:t xml:space="preserve">Der </w:t></w:r><w:proofErr w:type="x"/><w:r><w:t xml:space="preserve">Hund '
  '&amp; ich.</w:t></w:r></w:p><w:p><w:r><w:t xml:space="preserve">Zwei</w:t><w:tab/><w:t xml:space="preserve">Katzen'
  '</w:t></w:r><w:r><w:instrText>PAGE a</w:instrText></w:r></w:p></w:body>'
)
ODT_TEXT = (
  '<office:body><text:p text:style-name="P1">Der <text:span text:style-name="T1">Hund</text:span> läuft<text:s/>.'
  '</text:p>\n<text:h>Kopf<text:tab/>Zeile</text:h><dc:creator>Ich</dc:creator></office:body>'
)
SRT_TEXT = (
  '1\n00:00:01,000 --> 00:00:02,500\n<i>Hello there,</i>\nfriend.\n\n2\r\n00:00:03,0 --> 00:00:04,0\r\n{\\an8}Bye\r\n'
)
HTML_TEXT = (
  '<!doctype html><p class="x>y">Ein <b>Hund</b> läuft &amp; springt.</p >\n<ul><LI> A <a href=\'?a&b\'>Link <i>da</i>'
  '</a> </LI></ul><script>if (a<b) x</script> 12 <br> <code>x()</code> und <!-- y --> Ende<pre> as is </pre>'
)


@pytest.mark.parametrize(
  'text, markup, paragraphs',
  [
    (HTML_TEXT, HTML, ['Ein Hund läuft & springt.', 'A Link da', 'und Ende']),
    (DOCX_TEXT, DOCX, ['Der Hund & ich.', 'Zwei', 'Katzen']),
    (ODT_TEXT, ODT, ['Der Hund läuft.', 'Kopf', 'Zeile']),
    (SRT_TEXT, SRT, ['Hello there, friend.', 'Bye']),
    ('<b>a<p>x</p>b</b> <i>y <b>z</i> w</b> 1 < 2', HTML, ['a', 'x', 'b', 'y', 'z', 'w']),
    ('', HTML, []),
  ],
)
def test_paragraphs_are_plain_text_and_what_is_not_changed_stays(text, markup, paragraphs):
  document = MarkedUp(text, markup)
  assert document.texts == paragraphs
  same = document.written([Aligned(paragraph) for paragraph in paragraphs])
  # Space within a paragraph may be on the other side of a tag that has no text.
  assert [same.replace(' ', '').replace('\n', '')] == [text.replace(' ', '').replace('\n', '')]
  assert MarkedUp(same, markup).texts == paragraphs and same.count('\n') == text.count('\n')


def put(source, translation, *links):
  """A translation of one paragraph in HTML, by words: (source, target) of links."""
  document = MarkedUp(source, HTML)
  spans = lambda text: [(text.index(word), text.index(word) + len(word)) for word in text.split()]
  of_source, of_target = spans(document.texts[0]), spans(translation)
  return document.written([Aligned(translation, [(*of_source[s], *of_target[t]) for s, t in links])])


def test_elements_go_around_the_words_that_come_from_theirs():
  source = 'Ein <b>Hund</b> läuft <i>schnell</i>'
  assert put(source, 'Quickly runs a dog', (3, 0), (2, 1), (0, 2), (1, 3)) == '<i>Quickly</i> runs a <b>dog</b>'
  assert put(source, 'A dog runs fast') == 'A <b>dog</b> runs <i>fast</i>'  # in order, where nothing is known
  assert put('<b>a b</b> c', 'x y z', (0, 0), (1, 2), (2, 1)) == '<b>x</b> y <b>z</b>'
  assert put('Siehe <a href="?x">das Haus</a><img src="y">', 'house see', (2, 0), (0, 1)) == (
    '<a href="?x">house</a> see<img src="y">'
  )
  assert put('ab <a>c</a> d', 'x y', (0, 0), (1, 0), (2, 0)).count('<a>') == 1  # no link is lost
  assert put('<b>狗</b>跑得快', '开心') in (
    '<b>开</b>心',
    '开<b>心</b>',
    '<b></b>开心',
  )  # no word of several characters


def test_a_subtitle_has_as_many_lines_as_before():
  found = MarkedUp(SRT_TEXT, SRT).written([Aligned('Hallo, guter alter Freund.'), Aligned('Tschüs')])
  assert '-->' in found and 'Hallo, guter\nalter Freund.' in found.replace('<i>', '').replace('</i>', '')


def capitals(text, markup=HTML):
  document = MarkedUp(text, markup)
  assert document.written([Aligned(paragraph) for paragraph in document.texts]) == text
  return document.written([Aligned(paragraph.upper()) for paragraph in document.texts])


@pytest.mark.parametrize(
  'name', ['svg-icon', 'code-block', 'pre-line', 'math-field', 'object-card', 'template-x', 'var-name', 'b']
)
def test_an_element_with_a_longer_name_is_not_left_alone(name):
  text = f'<p>ein hund <{name}></{name}> rennt.</p><p>zwei hunde.</p>'
  assert capitals(text) == f'<p>EIN HUND <{name}></{name}> RENNT.</p><p>ZWEI HUNDE.</p>'
  assert MarkedUp(text, HTML).texts == ['ein hund rennt.', 'zwei hunde.']


@pytest.mark.parametrize(
  'text, expected',
  [
    (
      '<p>run <code>a</code> or <code>b</code>, then <code>c</code>.</p>',
      '<p>RUN <code>a</code> OR <code>b</code>, THEN <code>c</code>.</p>',
    ),
    ('run <img> or <input>(<!-- b -->), <svg>c</svg> so', 'RUN <img> OR <input>(<!-- b -->), <svg>c</svg> SO'),
    ('ein <b> hund</b> <i>\nrennt </i>weit', 'EIN <b> HUND</b> <i>\nRENNT </i>WEIT'),
    (
      'h<b>u</b>nd CO<sub>2</sub> do<wbr>nau 5&nbsp;km &auml;rgert',
      'H<b>U</b>ND CO<sub>2</sub> DO<wbr>NAU 5&nbsp;KM ÄRGERT',
    ),
    ('a &lt;b&gt; &copy2 &quot;c" 1 < 2', 'A &lt;B&gt; &copy2 &quot;C" 1 < 2'),
    ('<meta charset=iso-8859-1><p>&auml;pfel ü</p>', '<meta charset=iso-8859-1><p>&#196;PFEL &#220;</p>'),
    ('<meta content="text/html; charset=\'latin1\'">ä', '<meta content="text/html; charset=\'latin1\'">&#196;'),
    ('<meta charset="UTF-8">&auml;', '<meta charset="UTF-8">Ä'),
    ('a <span translate="no">b <span>c</span> d</span> e', 'A <span translate="no">b <span>c</span> d</span> E'),
    ('a <b class="x notranslate">b</b> c', 'A <b class="x notranslate">b</b> C'),
    (
      "<p translate=no>a<p>b<ul><li Translate='NO'>c<li>d</ul>",
      "<p translate=no>a<p>B<ul><li Translate='NO'>c<li>D</ul>",
    ),
    # Of an attribute that comes twice, HTML has the first.
    ('<b translate=no translate=yes>a</b> b', '<b translate=no translate=yes>a</b> B'),
    ('<b translate=yes translate=no>a</b> b', '<b translate=yes translate=no>A</b> B'),
    ('<b class="notranslate-x">a</b>', '<b class="notranslate-x">A</b>'),
    ('<b title="translate=no" translate=yes>a</b>', '<b title="translate=no" translate=yes>A</b>'),
    ('<table><tr><td translate=no>a<td>b<tr><td class=notranslate>c</table>d', None),
    (
      '<!-->a<?xml:namespace b />c<!--[if x]><!-->d<!--<![endif]-->',
      '<!-->A<?xml:namespace b />C<!--[if x]><!-->D<!--<![endif]-->',
    ),
    ("<p title=it's>don't</p> <script src=a />b", "<p title=it's>DON'T</p> <script src=a />B"),
    (
      '<code>a<code>b</code>c</code> d <svg><svg>e</svg>f</svg> g',
      '<code>a<code>b</code>c</code> D <svg><svg>e</svg>f</svg> G',
    ),
    ('<p>a <code>b</p><p>c</p>', '<p>A <code>b</p><p>C</p>'),
    ('\ufeffa', '\ufeffA'),
  ],
)
def test_capitals_change_the_text_of_html_alone(text, expected):
  expected = expected or '<table><tr><td translate=no>a<td>B<tr><td class=notranslate>c</table>D'
  assert capitals(text) == expected


@pytest.mark.parametrize('markup', [HTML, DOCX, ODT])
def test_an_entity_of_thousands_of_digits_stays_as_it_is(markup):
  for entity in ('&#' + '9' * 5000 + ';', '&#x' + 'f' * 5000 + ';', '&#' + '9' * 5000):
    begin, end = ('<w:r><w:t>', '</w:t></w:r>') if markup is DOCX else ('<text:p>', '</text:p>')
    found = capitals(f'{begin}ein {entity} hund{end}', markup)
    assert found == f'{begin}EIN {entity if "x" not in entity else "&amp;" + entity.upper()[1:]} HUND{end}'


DOCX_PARTS = (
  '<w:commentRangeStart w:id="0"/>',
  '<w:commentRangeEnd w:id="0"/><w:r><w:rPr/><w:commentReference w:id="0"/></w:r>',
  '<w:r><w:endnoteReference w:id="2"/></w:r>',
  '<w:del w:id="1"><w:r><w:delText>mops</w:delText></w:r></w:del>',
  '<w:moveFrom w:id="1"><w:r><w:t>mops</w:t></w:r></w:moveFrom>',
  '<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText> REF mops </w:instrText></w:r>',
  '<w:sdt><w:sdtPr><w:id w:val="1"/></w:sdtPr><w:sdtContent></w:sdtContent></w:sdt>',
  '<w:fldSimple w:instr="PAGE"></w:fldSimple>',
  '<m:oMath><m:r><m:t>x</m:t></m:r></m:oMath>',
)
ODT_PARTS = (
  '<text:change-start text:change-id="c"/>',
  '<text:change text:change-id="c"/>',
  '<office:annotation-end office:name="a"/>',
  '<text:reference-mark text:name="a"/>',
  '<text:page-number>mops</text:page-number>',
  '<text:note><text:note-citation>1</text:note-citation></text:note>',
)


@pytest.mark.parametrize('part', DOCX_PARTS)
def test_what_stands_in_a_sentence_of_docx_does_not_cut_it(part):
  run = '<w:r><w:rPr><w:b/></w:rPr><w:t xml:space="preserve">{}</w:t></w:r>'.format
  text = f'<w:p>{run("ein hund")}{part}{run(" rennt.")}</w:p>'
  assert MarkedUp(text, DOCX).texts == ['ein hund rennt.']
  assert capitals(text, DOCX) == f'<w:p>{run("EIN HUND")}{part}{run(" RENNT.")}</w:p>'


@pytest.mark.parametrize('part', ODT_PARTS)
def test_what_stands_in_a_sentence_of_odt_does_not_cut_it(part):
  text = f'<text:p>ein hund{part} rennt.</text:p>'
  assert MarkedUp(text, ODT).texts == ['ein hund rennt.']
  assert capitals(text, ODT) == f'<text:p>EIN HUND{part} RENNT.</text:p>'


def test_text_of_content_controls_and_fields_is_part_of_its_sentence():
  run = '<w:r><w:t xml:space="preserve">{}</w:t></w:r>'.format
  control = '<w:sdt>\n<w:sdtPr><w:text/></w:sdtPr><w:sdtContent>{}</w:sdtContent></w:sdt>'.format
  text = f'<w:p>{run("ein ")}{control(run("hund"))}<w:fldSimple w:instr="x">{run(" rennt")}</w:fldSimple></w:p>'
  assert MarkedUp(text, DOCX).texts == ['ein hund rennt']
  block = control(f'<w:p>{run("eins")}</w:p><w:p>{run("zwei")}</w:p>')
  assert MarkedUp(block, DOCX).texts == ['eins', 'zwei'] and '>EINS<' in capitals(block, DOCX)


def test_paragraphs_within_a_paragraph_are_translated_behind_it():
  note = '<text:note><text:note-citation>1</text:note-citation><text:p>{}</text:p></text:note>'
  text = f'<text:p>ein{note} hund</text:p>'
  assert MarkedUp(text.format('fuß'), ODT).texts == ['ein hund', 'fuß']
  assert capitals(text.format('note'), ODT) == f'<text:p>EIN{note.format("NOTE")} HUND</text:p>'
  box = '<mc:AlternateContent><w:drawing><w:p><w:r><w:t>{}</w:t></w:r></w:p></w:drawing></mc:AlternateContent>'
  text = f'<w:p><w:r><w:t>ein</w:t>{box}<w:t> hund</w:t></w:r></w:p>'
  assert MarkedUp(text.format('kasten'), DOCX).texts == ['ein hund', 'kasten']
  assert capitals(text.format('12'), DOCX) == text.format('12').replace('ein', 'EIN').replace('hund', 'HUND')
  deep = note.format('x')
  for _ in range(2000):
    deep = note.format(deep)
  assert 'X' in capitals(f'<text:p>{deep}</text:p>', ODT)


def test_elements_that_are_too_deep_end_a_paragraph():
  deep = lambda count: 'a ' + '<b>' * count + 'b' + '</b>' * count + ' c'
  assert MarkedUp(deep(64), HTML).texts == ['a b c'] and MarkedUp(deep(65), HTML).texts == ['a', 'b', 'c']


def test_a_space_at_the_edge_of_a_run_is_marked_where_the_translation_has_one():
  text = '<w:p><w:r><w:t>Hund</w:t></w:r><w:r><w:rPr><w:b/></w:rPr><w:t xml:space="preserve"> da</w:t></w:r></w:p>'
  assert '<w:t>A</w:t>' in MarkedUp(text, DOCX).written([Aligned('A dog')])
  [found] = [MarkedUp(text, DOCX).written([Aligned('A dog is here')])]
  assert '<w:t xml:space="preserve">A dog</w:t>' in found and '<w:t xml:space="preserve"> is here</w:t>' in found


def test_what_stays_keeps_its_spaces_in_any_translation():
  code = '<p>run <code>a</code> or <code>b</code>, then <code>c</code>.</p>'
  of = lambda text: MarkedUp(code, HTML).written([Aligned(text)])
  assert of('lauf oder, dann.') == '<p>lauf <code>a</code> oder <code>b</code>, dann <code>c</code>.</p>'
  assert of('los') == '<p><code>a</code> <code>b</code> los <code>c</code></p>'
  assert of('').count('<code>') == 3
  assert put('Fett<b>druck</b> ist', 'Bold is') == 'Bold<b></b> is'
  for text, other, expected in (
    ('a < b >', 'a <b>', 'a &lt;b>'),
    ('a </ b>', 'a </b>', 'a &lt;/b>'),
    ('a &# 65;', 'a &#65;', 'a &amp;#65;'),
    ('a & lt;', 'a &lt;', 'a &amp;lt;'),
    ('a &b; <img>?', 'x &b; ?', 'x &b; <img>?'),
  ):
    assert put(text, other) == expected  # no markup is made of text


def test_a_word_that_another_element_needs_stays_with_its_own():
  found = put('<b>a</b> <i>c d</i>', 'x y', (0, 0), (1, 1), (2, 1))
  assert found == '<b>x</b> <i>y</i>'
  assert put('<b>a</b> <i>b</i> c', 'x y', (2, 0), (0, 1)) in (
    '<i></i>x <b>y</b>',
    'x<i></i> <b>y</b>',
    '<b></b><i>x</i> y',
  )


def test_words_that_come_twice_have_their_markup_once_and_most_votes_choose_an_element():
  assert put('Do<wbr>nau da', 'x y z', (0, 0), (0, 1), (1, 2)).count('<wbr>') == 1
  assert put('a <img> b', 'x y z w', (0, 0), (1, 1), (0, 2), (1, 3)) == 'x <img> y z w'
  assert put('a <b>c d e</b>', 'x', (0, 0)).count('<b>') == 1
  assert put('a <b>c d</b> e', 'x y', (0, 0), (1, 0), (2, 0), (3, 1)) == '<b>x</b> y'
  # Two words of the element have more votes together than the one outside, and fewer each.
  assert put('a <b>c d</b>', 'x', *[(0, 0)] * 3, *[(1, 0), (2, 0)] * 2) == '<b>x</b>'
  assert capitals('a&NotEqualTilde;b') == 'A&NotEqualTilde;B'


def test_space_between_the_tags_of_an_office_document_is_no_text():
  text = '<w:p>\n <w:r>\n <w:t>ein</w:t>\n </w:r>\n <w:proofErr/>\n <w:r><w:t> hund</w:t></w:r>\n</w:p>\n'
  assert MarkedUp(text, DOCX).texts == ['ein hund']
  assert capitals(text, DOCX) == text.replace('ein', 'EIN').replace('hund', 'HUND')


def test_a_note_has_the_letters_of_its_document():
  text = '<?xml version="1.0" encoding="latin1"?><text:p>{}<text:note><text:p>{}</text:p></text:note></text:p>'
  assert capitals(text.format('&#228;', '&#246;'), ODT) == text.format('&#196;', '&#214;')


def test_each_speaker_of_a_subtitle_has_a_line():
  cue = '1\n00:00:01,000 --> 00:00:02,500\n'
  text = f'{cue}- alles ok?\n- ja, alles gut mit dir heute.\n\n'
  document = MarkedUp(text, SRT)
  assert document.texts == ['- alles ok?', '- ja, alles gut mit dir heute.']
  assert document.written([Aligned('- Ok?'), Aligned('- Yes.')]) == f'{cue}- Ok?\n- Yes.\n\n'
  assert MarkedUp(f'{cue}<i>Na?\r\n{{\\i1}}– Gut,\r\ndanke.</i>\n>> Du?', SRT).texts == [
    'Na?',
    '– Gut, danke.',
    '>> Du?',
  ]
  assert MarkedUp(f'{cue}Es sind\n-5 Grad.', SRT).texts == ['Es sind -5 Grad.']
  assert MarkedUp(f'{cue}a b\r\nc', SRT).written([Aligned('a b c d')]) == f'{cue}a b\r\nc d'


@pytest.mark.parametrize('markup', [HTML, DOCX, ODT, SRT])
def test_time_grows_with_the_length_of_the_text_alone(markup):
  units = (
    '<!--',
    '<a "',
    "<a '",
    '<w:r><w:rPr>',
    '<w:pPr>',
    '<b>x',
    '<b>x</b>',
    '<script>',
    '<!',
    '-->',
    '{\\',
    '<b ////',
    '1\n',
    'a\n',
  )
  for unit in units:
    begin = time.process_time()
    document = MarkedUp(unit * 2000, markup)
    document.written([Aligned(text) for text in document.texts])
    assert time.process_time() - begin < 0.5, unit
  begin = time.process_time()
  MarkedUp('<' + 'a' * 80_000, markup)
  assert time.process_time() - begin < 1


@pytest.mark.parametrize('name', ['g', 'mytag', 'o:p', 'my-tag', 'button', 'meter', 'progress', 'noscript', 'map'])
def test_unknown_elements_and_phrasing_content_of_html_are_parts_of_a_sentence(name):
  """Kind: an element that cuts a sentence, whose words between were translated alone."""
  text = f'<p>Klicken Sie <{name}>hier</{name}>, um</p><p>Ja</p>'
  document = MarkedUp(text, HTML)
  assert document.texts == ['Klicken Sie hier, um', 'Ja']
  assert document.written([Aligned(text) for text in document.texts]) == text


@pytest.mark.parametrize('name', ['select', 'datalist', 'audio', 'video', 'canvas'])
def test_elements_of_html_with_other_text_within_are_inline(name):
  text = f'<p>Wählen Sie <{name}><option>Rot<option>Blau</{name}> aus</p>'
  document = MarkedUp(text, HTML)
  assert document.texts == ['Wählen Sie aus', 'Rot', 'Blau']
  assert document.written([Aligned(text) for text in document.texts]) == text


@pytest.mark.parametrize(
  ('second', 'texts'),
  [
    ('- 3 Kilometer.', ['- Wie weit?', '- 3 Kilometer.']),
    ('– 3 Kilometer.', ['- Wie weit?', '– 3 Kilometer.']),
    ('>> 3 Kilometer.', ['- Wie weit?', '>> 3 Kilometer.']),
    ('-3 Grad.', ['- Wie weit? -3 Grad.']),
  ],
)
def test_a_dash_with_a_space_before_a_number_is_a_speaker(second, texts):
  assert MarkedUp(f'1\n00:01 --> 00:02\n- Wie weit?\n{second}\n', SRT).texts == texts
