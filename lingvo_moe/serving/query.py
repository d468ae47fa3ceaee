"""Body of POST /translate, as LibreTranslate has it: JSON or a form with q, source, target, format and alternatives."""

from __future__ import annotations

import json
import urllib.parse
from typing import Any, NamedTuple


class BadQueryError(Exception):
  """Body that is no query; the message says why."""


class Query(NamedTuple):
  """What is to be translated."""

  texts: list[str]
  is_list: bool  # whether q was a list, and so the answer is
  source: str | None  # None: not said, or 'auto'
  target: str | None
  alternatives: int = 0

  @property
  def lines(self) -> list[str]:
    """Lines of all texts: a model translates a line at a time."""
    return [line for text in self.texts for line in lines_of(text)]


def lines_of(text: str) -> list[str]:
  return text.replace('\r\n', '\n').split('\n')


def parse(body: bytes, content_type: str) -> Query:
  """The query of a body; raises BadQueryError."""
  fields = _form(body) if content_type == 'application/x-www-form-urlencoded' else _json(body)
  if 'q' not in fields:
    raise BadQueryError('missing q: the text to translate, a string or a list of strings')
  q = fields['q']
  texts = q if isinstance(q, list) else [q]
  if not all(isinstance(text, str) for text in texts):
    raise BadQueryError('q must be a string or a list of strings')
  if any('\ud800' <= c <= '\udfff' for text in texts for c in text):
    raise BadQueryError('q must be Unicode; it holds half of a surrogate pair')
  if fields.get('format', 'text') != 'text':
    raise BadQueryError("format must be 'text'; others are not supported")
  alternatives = fields.get('alternatives', 0)
  if isinstance(alternatives, str) and alternatives.isascii() and alternatives.isdigit():
    alternatives = int(alternatives[:9])
  if isinstance(alternatives, bool) or not isinstance(alternatives, int) or alternatives < 0:
    raise BadQueryError('alternatives must be a number of translations, 0 or more')
  source, target = (_language(fields, name) for name in ('source', 'target'))
  return Query(texts, isinstance(q, list), None if source == 'auto' else source, target, alternatives)


def _json(body: bytes) -> dict[str, Any]:
  try:
    fields = json.loads(body)
  except (ValueError, RecursionError) as e:  # bad UTF-8 too
    reason = 'it is nested too deeply' if isinstance(e, RecursionError) else e
    raise BadQueryError(f'the body must be JSON, with Content-Type: application/json; {reason}') from None
  if not isinstance(fields, dict):
    raise BadQueryError('the body must be a JSON object, such as {"q": "Guten Tag.", "source": "de", "target": "en"}')
  return fields


def _form(body: bytes) -> dict[str, Any]:
  try:
    found = urllib.parse.parse_qs(body.decode('utf-8'), keep_blank_values=True, errors='strict')
  except ValueError:
    raise BadQueryError('a form must be UTF-8') from None
  return {name: values if name == 'q' and len(values) > 1 else values[-1] for name, values in found.items()}


def _language(fields: dict[str, Any], name: str) -> str | None:
  language = fields.get(name) or None
  if language is not None and not isinstance(language, str):
    raise BadQueryError(f'{name} must be the code of a language, a string')
  return language
