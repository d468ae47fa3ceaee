"""Walker of markup: what is translated, where inline elements go, and that all else stays as it was."""

import time

import pytest

from lingvo_moe.documents.markup import DOCX, HTML, ODT, SRT, MarkedUp
from lingvo_moe.documents.placement import Aligned

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
    document = MarkedUp(unit * 5000, markup)
    document.written([Aligned(text) for text in document.texts])
    assert time.process_time() - begin < 3, unit
