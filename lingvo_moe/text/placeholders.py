"""Placeholders of interface strings, such as {{name}} and %1$s: which parts of a text are some, by rule.

An argument of ICU, `{n, plural, one {...} other {...}}`, is one placeholder: nothing in it is translated.
"""

import re

_LETTER = r'[^\W\u0530-\u1dff\u2c00-\U0010ffff]'  # of scripts whose words spaces divide: Latin, Greek, Cyrillic; or 0-9
_FLAGS = r'[-+0#]*+\d*+(?:\.\d++)?+'
_TYPE = r'(?:hh?|ll?|[qjzt])?[@diuoxXeEfFgcs]'
KINDS = {
  'URL': (
    rf'(?<!{_LETTER})(?:(?:https?|ftps?|wss?|file|ssh|git)://|www\.(?=\w))(?:[!#-;=?-_a-~]|{_LETTER})*'
    rf'(?:[/=&#~+-]|{_LETTER})'
  ),
  'e-mail address': (
    rf'(?<![.%+-])(?<!{_LETTER})(?:{_LETTER}|[.%+-])+@[A-Za-z0-9-]++(?:\.[A-Za-z0-9-]++)++(?![A-Za-z0-9_])'
  ),
  '{{name}}': r'\{\{\{[^{}\n]{1,80}\}\}\}|\{\{[^{}\n]{1,80}\}\}',
  '${x}': r'\$\{[^{}\n]{1,80}\}',
  '%{count}': r'[%#]\{\w[\w.]*\}',
  '{0}': (
    r'\{(?:[A-Za-z_][\w.-]*(?:\[\w+\])*|\d{1,3})?(?:![rsa])?(?:[:,][^{}\s]{1,20})?\}|'
    r'\{\s*+(?:[A-Za-z_]\w*+|\d{1,3}+)\s*+\}'
  ),
  '%(name)s': r'%\(\w[\w. ]*\)[-#0+]*+\d*+(?:\.\d++)?+[diouxXeEfFgGcrsa]',
  '%1$s': rf'%\d{{1,2}}\$[-+0#]*+\d*+(?:\.\d++)?+{_TYPE}',
  # Neither the percent sign of '50 %', nor that of '100%ig', nor that of '%change'.
  '%s': rf'(?<![\d%])(?:(?<!\d[ \xa0])%{_FLAGS}(?:{_TYPE}(?![a-z]{{3}})|[@ds])|%{_FLAGS}[@dius](?!{_LETTER}))|%%',
  '%1': rf'(?<!%)(?<!{_LETTER})%(?:L?[1-9](?![\d.,$%]|{_LETTER})|n(?!{_LETTER}))',
  # No price: '$15', '$1.50', '$5M', '$5万'.
  '$1': (
    rf'(?<!\$)(?<!{_LETTER})\$[1-9](?!{_LETTER}|[百千万萬亿億백천만억조]|'
    r'[.,]\d|[ \xa0]?(?:[mb]n\b|million|billion|thousand))'
  ),
  # Neither '10:30' nor 'foo: bar' nor '::' nor a face such as ':p'.
  ':name': r'(?<![^\s(\[{"\'„“«¿¡/=-]):[a-z][a-zA-Z0-9_]*[a-zA-Z0-9]:?',
}
_PLACEHOLDER = re.compile('|'.join(f'(?:{rule})' for rule in KINDS.values()))
_SIGN = re.compile(r'[{%$@:]|www\.')  # one of which is in each
_ICU_ARGUMENT = re.compile(
  r'\{\s*+\w++\s*+,\s*+(?:(?:plural|select|selectordinal)\s*+,|'
  r'(?:number|date|time|spellout|ordinal|duration)\s*+(?=[,}]))'
)
_ICU_SIGN = re.compile(r"''|['{}]")
# What belongs to a placeholder beside it, and is no word: digits and signs, and quotes or brackets around.
_SIGNS = frozenset('-_/@#&=+~*°§€£$%|\\0123456789')
_APART = re.compile(r'[^!-/:-@\[-`{-~]')  # all but punctuation of ASCII
_AROUND = {
  ('(', ')'),
  ('[', ']'),
  ('<', '>'),
  ('"', '"'),
  ("'", "'"),
  *zip('„“«»‹‘「《', '“”»«›’」》'),
  ('„', '”'),
  ('`', '`'),
}


def find(text: str) -> list[tuple[int, int]]:
  """(begin, end) of each placeholder of a text, in order."""
  if not _SIGN.search(text):
    return []
  spans: list[tuple[int, int]] = []
  found = [*_icu_arguments(text), *(match.span() for match in _PLACEHOLDER.finditer(text))]
  for begin, end in sorted(found, key=lambda span: (span[0], -span[1])):
    if not spans or begin >= spans[-1][1]:
      spans.append((begin, end))
  return spans


def _icu_arguments(text: str) -> list[tuple[int, int]]:
  """(begin, end) of the arguments of ICU that have a type, without those in others; braces in quotes are text there."""
  spans: list[tuple[int, int]] = []
  opened: list[tuple[int, bool]] = []  # begin, and whether it is that of an argument
  arguments, is_quoted = 0, False
  for match in _ICU_SIGN.finditer(text):
    begin, end = match.span()
    if is_quoted:
      is_quoted = match[0] != "'"
    elif match[0] == "'":
      is_quoted = arguments > 0 and text[end : end + 1] in ('{', '}')
    elif match[0] == '{':
      opened.append((begin, _ICU_ARGUMENT.match(text, begin) is not None))
      arguments += opened[-1][1]
    elif match[0] == '}' and opened:
      begin, is_argument = opened.pop()
      arguments -= is_argument
      while is_argument and spans and spans[-1][0] > begin:
        spans.pop()
      spans += [(begin, end)] * is_argument
  return spans


def with_what_is_beside(text: str) -> list[tuple[int, int]]:
  """(begin, end) of placeholders with the digits, signs and brackets beside them, in order; words are none of these."""
  spans: list[tuple[int, int]] = []
  for begin, end in find(text):
    least = spans[-1][1] if spans else 0
    while begin > least and text[begin - 1] in _SIGNS:
      begin -= 1
    while text[end : end + 1] in _SIGNS:
      end += 1
    while begin > least and (text[begin - 1], text[end : end + 1]) in _AROUND:
      begin, end = begin - 1, end + 1
    if spans and not _APART.search(text, least, begin):
      spans[-1] = spans[-1][0], max(least, end)
    else:
      spans.append((begin, end))
  return spans
