"""Placeholders of interface strings, such as {{name}} and %1$s: which parts of a text are some, by rule.

A message of ICU with cases, `{n, plural, one {...} other {...}}`, is one placeholder: nothing in it is translated.
"""

import re

from lingvo_moe.text.inline_placement import WORD

_CONVERSION = r'(?:hh?|ll?|[qjzt])?[@diuoxXeEfFgcs](?![a-z]{3})'
KINDS = {
  'URL': r'(?<!\w)(?:(?:https?|ftps?|wss?|file|ssh|git)://|www\.(?=\w))[!-~]*[\w/=&#~+-]',
  'e-mail address': r'(?<![\w.+-])[\w.%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+(?!\w)',
  'ICU message': r'\{\w+,\s*(?:plural|select|selectordinal)\s*,(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}',
  '{{name}}': r'\{\{\{[^{}\n]{1,80}\}\}\}|\{\{[^{}\n]{1,80}\}\}',
  '${x}': r'\$\{[^{}\n]{1,80}\}',
  '%{count}': r'[%#]\{\w[\w.]*\}',
  '{0}': r'\{(?:[A-Za-z_][\w.-]*(?:\[\w+\])*|\d{1,3})?(?:![rsa])?(?:[:,][^{}\s]{1,20})?\}',
  '%(name)s': r'%\(\w[\w. ]*\)[-#0+]*\d*(?:\.\d+)?[diouxXeEfFgGcrsa]',
  '%1$s': rf'%\d{{1,2}}\$[-+0#]*\d*(?:\.\d+)?{_CONVERSION}',
  # Neither the percent sign of '50 %', nor that of '100%ig'.
  '%s': rf'(?<![\d%])(?:(?<!\d[ \xa0])%[-+0#]*\d*(?:\.\d+)?{_CONVERSION}|%[-+0#]*\d*(?:\.\d+)?[@dius](?!\w))|%%',
  '%1': r'(?<![\w%])%(?:L?[1-9](?![\d.,$%]|\w)|n(?!\w))',
  # No price: '$15', '$1.50', '$5M'.
  '$1': r'(?<![\w$])\$[1-9](?!\w|[.,]\d|[ \xa0]?(?:[mb]n\b|million|billion|thousand))',
  # Neither '10:30' nor 'foo: bar' nor '::' nor a face such as ':p'.
  ':name': r'(?<![^\s(\[{"\'„“«¿¡/=-]):[a-z][a-zA-Z0-9_]*[a-zA-Z0-9]:?',
}
_PLACEHOLDER = re.compile('|'.join(f'(?:{rule})' for rule in KINDS.values()))
_SIGN = re.compile(r'[{%$@:]|www\.')  # one of which is in each
# What belongs to a placeholder beside it: word and signs before and behind, and quotes or brackets around.
_SIGNS = r'[-_/@#&=+~*°§€£$%|\\]'
_BEFORE = re.compile(rf"(?:(?:{WORD}|{_SIGNS})['’.:]?)+\Z")
_BEHIND = re.compile(rf"(?:['’.:,]?(?:{WORD}|{_SIGNS}))*")
_APART = re.compile(r'[\s\w]')
_LONGEST = 100  # characters before
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
  return [match.span() for match in _PLACEHOLDER.finditer(text)] if _SIGN.search(text) else []


def with_what_is_beside(text: str) -> list[tuple[int, int]]:
  """(begin, end) of placeholders with what is written together with them, in order, which is carried as a whole."""
  spans: list[tuple[int, int]] = []
  for begin, end in find(text):
    least = spans[-1][1] if spans else 0
    if before := _BEFORE.search(text, max(least, begin - _LONGEST), begin):
      begin = before.start()
    end = _BEHIND.match(text, end).end()
    while begin > least and (text[begin - 1], text[end : end + 1]) in _AROUND:
      begin, end = begin - 1, end + 1
    if spans and not _APART.search(text, least, begin):
      spans[-1] = spans[-1][0], max(least, end)
    else:
      spans.append((begin, end))
  return spans
