"""Generated documents: a translation that changes nothing gives their bytes, and one to capitals changes text alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lingvo_moe.addons.documents.formats import DOCX, HTML, ODT, SRT
from lingvo_moe.addons.documents.markup import MarkedUp
from lingvo_moe.text.inline_placement import Aligned

# What is drawn is (markup, the same with its text in capitals).
same = lambda *texts: st.sampled_from([(text, text) for text in texts])
around = lambda begin, inner, end: inner.map(lambda pair: (begin + pair[0] + end, begin + pair[1] + end))
joined = lambda pairs: tuple(''.join(part) for part in zip(*pairs)) or ('', '')
many = lambda part, least=0, most=6: st.lists(part, min_size=least, max_size=most).map(joined)

PLAIN = st.sampled_from(['hund', 'Äpfel', 'x1', '42', '日本', 'é', 'σ', '.', ',', '(', '“', "'", '-']).map(
  lambda word: (word, word.upper())
)
SPACES = same(' ', '  ', '\n', '\r\n\t', '\xa0', '')
XML_ENTITIES = same('&amp;', '&lt;', '&gt;', '&quot;', '&#38;', '&#x20AC;', '&#10;', '&#' + '9' * 41 + ';')
NAMED = st.sampled_from([('&auml;', 'Ä'), ('&#228;', 'Ä'), ('&#xe4;', 'Ä'), ('&eacute', 'É')])
HTML_ENTITIES = (
  XML_ENTITIES | NAMED | same('&nbsp;', '&nbsp', '&copy;', '&NotEqualTilde;', '&shy;', '&#1;', '& ', ' < ')
)
NOTES = same('<!-- Ein Hund -->', '<!---->', '<?xml a?>')

KEPT = same(
  *(
    '<img src="a>b" alt=x>',
    '<wbr>',
    "<input value=it's>",
    '<!-->',
    '<?php a > b ?>',
    '<?xml:namespace x />',
    '<code/>',
  ),
  *(f'<{n}>if a <b> c &amp; d</b></{n}>' for n in ('code', 'kbd', 'samp', 'var', 'math', 'object')),
  *(f'<{n} a="x>y">a</{n}>' for n in ('svg', 'iframe', 'template')),
  *('<script>if (a<b) "</p>"</script>', '<STYLE>p > a</STYLE >', '<code>a<code>b</code></code>'),
  *('<span translate="no">Ab <span>cd</span> ef</span>', "<b class='a notranslate'>Ab</b>", '<i TRANSLATE=NO>Ab</i>'),
)
APART = same(
  '<br>', '<hr/>', '<pre>Ab <b>cd</b></pre>', '<textarea>Ab</p></textarea>', '<div translate="no">Ab</div>', '</p>'
)
INLINE = ('b', 'i', 'a', 'span', 'my-part', 'U', 'sub')
INLINE_HTML = st.recursive(
  PLAIN | SPACES | HTML_ENTITIES | KEPT | NOTES,
  lambda inner: st.sampled_from(INLINE).flatmap(
    lambda n: around(f'<{n} title="a &auml; > b" b=it\'s>', many(inner), f'</{n} >')
  ),
  max_leaves=8,
)
ANY_HTML = many(
  many(INLINE_HTML)
  | APART
  | st.sampled_from(['p', 'li', 'td', 'h1', 'svg-icon', 'details']).flatmap(
    lambda n: around(f'<{n}>', many(INLINE_HTML), f'</{n}>')
  )
  | same('<p>', '<li>', '<b>', '</i>', '\ufeff')
)

WORDS = many(PLAIN | SPACES | XML_ENTITIES, 1)
VOID_RUNS = same(
  '<w:r><w:footnoteReference w:id="2"/></w:r>',
  '<w:r><w:rPr><w:b/></w:rPr><w:endnoteReference w:id="3"/></w:r>',
  '<w:commentRangeStart w:id="0"/>',
  '<w:commentRangeEnd w:id="0"/><w:r><w:commentReference w:id="0"/></w:r>',
  '<w:del w:id="1"><w:r><w:delText>Ab</w:delText></w:r></w:del>',
  '<w:r><w:fldChar w:fldCharType="begin"/></w:r><w:r><w:instrText> PAGE a </w:instrText></w:r>',
  '<w:proofErr w:type="x"/>',
  '<w:r><w:rPr/><w:softHyphen/></w:r>',
)
PARAGRAPH = lambda runs: around('<w:p><w:pPr><w:rPr><w:b/></w:rPr></w:pPr>', runs, '</w:p>')
RUN = st.sampled_from(['<w:r>', '<w:r a="b"><w:rPr><w:t/></w:rPr>', '<w:r>\n <w:rPr>\n<w:b/></w:rPr>\n ']).flatmap(
  lambda begin: around(f'{begin}<w:t xml:space="preserve">', WORDS, '</w:t>\n</w:r>\n')
)
BOX = PARAGRAPH(RUN).flatmap(lambda inner: around('<w:r><w:drawing><x:a>', st.just(inner), '</x:a></w:drawing></w:r>'))
RUNS = many(
  st.recursive(
    RUN | VOID_RUNS | BOX | NOTES,
    lambda inner: (
      around('<w:hyperlink r:id="a">', many(inner), '</w:hyperlink>')
      | around('<w:ins w:id="9">', many(inner), '</w:ins>')
      | around('<w:sdt><w:sdtPr><w:id/></w:sdtPr><w:sdtContent>', many(inner), '</w:sdtContent></w:sdt>')
      | around('<w:fldSimple w:instr="PAGE">', many(inner), '</w:fldSimple>')
    ),
    max_leaves=6,
  )
)
ANY_DOCX = around('<?xml version="1.0"?>\n<w:body>', many(PARAGRAPH(RUNS) | same('\n')), '</w:body>')

NOTE = around(
  '<text:note><text:note-citation>1</text:note-citation><text:note-body><text:p>', WORDS, '</text:p></text:note-body>'
).map(lambda pair: tuple(text + '</text:note>' for text in pair))
COMMENT = around(
  '<office:annotation office:name="a"><dc:creator>Ab</dc:creator><text:p>', WORDS, '</text:p></office:annotation>'
)
VOID_ODT = same(
  '<text:change-start text:change-id="c"/>',
  '<text:change-end/>',
  '<text:s text:c="2"/>',
  '<office:annotation-end/>',
  '<text:page-number>12</text:page-number>',
  '<text:date>1. Mai</text:date>',
)
INLINE_ODT = st.recursive(
  WORDS | VOID_ODT | NOTE | COMMENT,
  lambda inner: (
    around('<text:span text:style-name="T1">', many(inner), '</text:span>')
    | around('<text:a xlink:href="x">', many(inner), '</text:a>')
  ),
  max_leaves=6,
)
ANY_ODT = around(
  '<office:text>\n', many(around('<text:p>', many(INLINE_ODT), '</text:p>') | same('\n')), '</office:text>'
)

LINE = many(PLAIN | same(' ', '{\\an8}', '&', '&;', ' <00:01.0>') | around('<i>', PLAIN, '</i>'), 1)
CUE = st.tuples(LINE, many(around('\n', LINE, '') | around('\r\n- ', LINE, ''))).map(joined)
ANY_SRT = many(around('1\n00:00:01,000 --> 00:00:02,500\n', CUE, '\n\n'))


@pytest.mark.parametrize('markup, drawn', [(HTML, ANY_HTML), (DOCX, ANY_DOCX), (ODT, ANY_ODT), (SRT, ANY_SRT)])
def test_only_the_text_of_a_document_changes_in_its_place_and_no_markup_is_lost(markup, drawn):
  @given(drawn, st.lists(st.sampled_from(['', 'a', 'b c', 'd, e.', '<b> &amp; c', 'f g h i j k l']), min_size=1))
  def check(pair, translations):
    text, capitals = pair
    document = MarkedUp(text, markup)
    assert not any('\n' in paragraph or paragraph != paragraph.strip() for paragraph in document.texts)
    assert document.written([Aligned(paragraph) for paragraph in document.texts]) == text
    assert document.written([Aligned(paragraph.upper()) for paragraph in document.texts]) == capitals
    found = document.written([Aligned(translations[i % len(translations)]) for i in range(len(document.texts))])
    names = lambda text: [match['name'] for match in markup.token.finditer(text) if match['name']]
    assert set(names(found)) >= set(names(text))
    notes = lambda text: [match[0] for match in markup.token.finditer(text) if match['note']]
    assert notes(found) == notes(text)

  check()
