"""Kinds of markup: which elements of HTML, DOCX, ODT and subtitles are within paragraphs, and which are left alone.

A name that is in no table ends a paragraph, but in HTML, where it is inline.
"""

import dataclasses
import re
from collections.abc import Mapping

# Attributes as HTML's standard has them, but for '<', which begins the next tag.
_ATTRIBUTES = r"""(?:\s++|/(?!>)|=?[^\s/<>=]++(?:\s*+=\s*+(?:"[^"]*+"|'[^']*+'|[^\s<>"'][^\s<>]*+)?+)?+)*+"""
_TAG = rf'<(?P<close>/)?+(?P<name>[A-Za-z][^\s/<>]*+){_ATTRIBUTES}(?P<empty>/)?+>'
_XML_NOTES = r'(?P<note><!--.*?(?:-->|\Z)|<\?.*?(?:\?>|\Z)|<!\[CDATA\[.*?(?:\]\]>|\Z))'
_HTML_NOTES = r'(?P<note><!--(?:-?>|.*?(?:--!?>|\Z))|<\?(?:php\b|=).*?(?:\?>|\Z)|<\?[^<>]*+>)'
_RAW = r'script|style|textarea|xmp|iframe|noembed|noframes'  # elements in HTML that have no markup within


def _names(text: str) -> frozenset[str]:
  return frozenset(text.split())


@dataclasses.dataclass(frozen=True)
class Markup:
  """Kind of markup, by the names of its elements."""

  # matches what is no text. Groups: `note`, inline without text; `raw`, name of an element without markup within;
  # `name` of a tag, `close` of an end tag, `empty` of a tag without an end.
  token: re.Pattern[str]
  inline: frozenset[str]  # within paragraphs
  void: frozenset[str] = frozenset()  # inline, without text
  kept: frozenset[str] = frozenset()  # inline, left alone with all that is within
  apart: frozenset[str] = frozenset()  # left alone; they end paragraphs
  nested: frozenset[str] = frozenset()  # inline, with paragraphs of their own
  properties: frozenset[str] = frozenset()  # left alone; they belong to the tag before them
  holders: frozenset[str] = frozenset()  # those whose own text is translated; none: all, and names are in any case
  endless: frozenset[str] = frozenset()  # tags without an end
  # what else than its own end tag ends an element: begin tags, by its name
  ended_by: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
  blocks: frozenset[str] = frozenset()  # those that end paragraphs, where all others are inline
  is_html: bool = False  # whether attributes may say that text is not translated
  escaped: bool = True  # whether text has entities
  lines: bool = False  # whether a translation has as many lines as its source

  def is_inline(self, name: str) -> bool:
    return name in self.inline or (bool(self.blocks) and name not in self.blocks)

  def leaves_alone(self, name: str) -> bool:
    return name in self.kept or name in self.apart or name in self.properties


HTML = Markup(
  re.compile(
    rf'{_HTML_NOTES}|<(?P<raw>{_RAW})(?=[\s/>]){_ATTRIBUTES}>.*?(?:</(?P=raw)(?=[\s/>])[^<>]*+>|\Z)|<![^<>]*+>|'
    rf'\A\ufeff|{_TAG}',
    re.S | re.I,
  ),
  inline=frozenset(),  # phrasing content, and elements that HTML does not know
  blocks=_names(
    'address article aside base basefont blockquote body br caption center col colgroup dd details dialog dir div dl dt'
    ' fieldset figcaption figure footer form frame frameset h1 h2 h3 h4 h5 h6 head header hgroup hr html legend li link'
    ' listing main marquee menu menuitem meta nav noframes ol optgroup option p param plaintext pre search section'
    ' summary table tbody td textarea tfoot th thead title tr track ul xmp'
  ),
  void=_names('area embed img input source wbr'),
  kept=_names('code iframe kbd math noembed object rp rt samp script style svg template var'),
  apart=_names('noframes pre textarea xmp'),
  nested=_names('audio canvas datalist select video'),
  endless=_names('area base br col embed hr img input link meta param source track wbr'),
  ended_by={
    'p': _names(
      'address article aside blockquote details div dl fieldset figcaption figure footer form h1 h2 h3 h4 h5 h6 header'
      ' hgroup main menu nav ol p pre section table ul'
    ),
    **dict.fromkeys(('dd', 'dt'), _names('dd dt')),
    **dict.fromkeys(('rp', 'rt'), _names('rp rt')),
    **dict.fromkeys(('td', 'th'), _names('td th tr tbody tfoot')),
    **dict.fromkeys(('tbody', 'thead'), _names('tbody tfoot')),
    'li': _names('li'),
    'option': _names('optgroup option'),
    'tr': _names('tr tbody tfoot'),
  },
  is_html=True,
)
DOCX = Markup(
  re.compile(rf'{_XML_NOTES}|{_TAG}', re.S),
  inline=_names('w:bdo w:customXml w:dir w:fldSimple w:hyperlink w:ins w:moveTo w:r w:sdt w:sdtContent w:smartTag w:t'),
  void=_names(
    'w:annotationRef w:bookmarkEnd w:bookmarkStart w:commentRangeEnd w:commentRangeStart w:commentReference '
    'w:customXmlDelRangeEnd w:customXmlDelRangeStart w:customXmlInsRangeEnd w:customXmlInsRangeStart '
    'w:customXmlMoveFromRangeEnd w:customXmlMoveFromRangeStart w:customXmlMoveToRangeEnd w:customXmlMoveToRangeStart '
    'w:endnoteRef w:endnoteReference w:fldChar w:footnoteRef w:footnoteReference w:lastRenderedPageBreak '
    'w:moveFromRangeEnd w:moveFromRangeStart w:moveToRangeEnd w:moveToRangeStart w:noBreakHyphen w:permEnd '
    'w:permStart w:pgNum w:proofErr w:softHyphen w:sym'
  ),
  kept=_names('m:oMath m:oMathPara w:del w:delInstrText w:delText w:instrText w:moveFrom'),
  nested=_names('mc:AlternateContent w:drawing w:object w:pict'),
  properties=_names('w:customXmlPr w:pPr w:rPr w:sdtEndPr w:sdtPr w:smartTagPr'),
  holders=_names('w:t'),
)
ODT = Markup(
  re.compile(rf'{_XML_NOTES}|{_TAG}', re.S),
  inline=_names('text:a text:meta text:meta-field text:ruby text:ruby-base text:span'),
  void=_names(
    'office:annotation-end text:alphabetical-index-mark text:alphabetical-index-mark-end '
    'text:alphabetical-index-mark-start text:bookmark text:bookmark-end text:bookmark-start text:change '
    'text:change-end text:change-start text:reference-mark text:reference-mark-end text:reference-mark-start text:s '
    'text:soft-page-break text:toc-mark text:toc-mark-end text:toc-mark-start text:user-index-mark '
    'text:user-index-mark-end text:user-index-mark-start'
  ),
  kept=_names(
    'presentation:date-time presentation:footer presentation:header text:author-initials text:author-name '
    'text:bibliography-mark text:bookmark-ref text:chapter text:character-count text:conditional-text '
    'text:creation-date text:creation-time text:creator text:database-display text:database-name text:date '
    'text:description text:editing-cycles text:editing-duration text:execute-macro text:expression text:file-name '
    'text:hidden-paragraph text:hidden-text text:image-count text:initial-creator text:keywords text:measure '
    'text:modification-date text:modification-time text:note-ref text:object-count text:page-continuation '
    'text:page-count text:page-number text:page-variable-get text:page-variable-set text:paragraph-count '
    'text:placeholder text:print-date text:print-time text:printed-by text:reference-ref text:ruby-text text:script '
    'text:sender-city text:sender-company text:sender-country text:sender-email text:sender-fax text:sender-firstname '
    'text:sender-initials text:sender-lastname text:sender-phone-private text:sender-phone-work text:sender-position '
    'text:sender-postal-code text:sender-state-or-province text:sender-street text:sender-title text:sequence '
    'text:sequence-ref text:sheet-name text:subject text:table-count text:table-formula text:template-name '
    'text:text-input text:time text:title text:user-defined text:user-field-get text:user-field-input '
    'text:variable-get text:variable-input text:variable-set text:word-count'
  ),
  nested=_names('draw:a draw:custom-shape draw:frame draw:g office:annotation text:note'),
  holders=_names('text:a text:h text:meta text:meta-field text:p text:ruby-base text:span'),
)
# A line that begins with a dash and no number behind it, or with >>, is what another speaker says.
SRT = Markup(
  re.compile(
    r'(?:^\d++[ \t]*+\r?\n)?^[^\n]*?-->[^\n]*$|\n[ \t\r]*+(?=\n)|\r?\n(?=(?:<[^<>\n]*+>|\{\\[^{}\n]*+\})*+[ \t]*+'
    r'(?:[-‐‑–—](?!\d)|>>))|(?P<note>\{\\[^{}\n]*+\}|<\d[\d:.]*+>)|\A\ufeff|'
    r'<(?P<close>/)?+(?P<name>[A-Za-z]++)[^<>]*+>',
    re.M,
  ),
  inline=_names('b c font i lang ruby u v'),
  escaped=False,
  lines=True,
)
