"""Body of POST /translate, as LibreTranslate has it: q, source, target, format and alternatives, in JSON or a form."""

from __future__ import annotations

import email.message
import json
import re
import urllib.parse
from typing import Any, NamedTuple

_MOST_FIELDS = 10_000  # of a form
_URLENCODED, _MULTIPART = 'application/x-www-form-urlencoded', 'multipart/form-data'
_TAKEN = f'send JSON with Content-Type: application/json, or a form ({_URLENCODED} or {_MULTIPART})'


class BadQueryError(Exception):
  """Request that is no query; the message says why.

  Attributes:
    status: HTTP status of the answer.
  """

  def __init__(self, message: str, status: int = 400):
    super().__init__(message)
    self.status = status


class Query(NamedTuple):
  """Query of a request: lines, languages and number of alternatives."""

  texts: list[list[str]]  # lines of each, as a model translates a line at a time
  is_list: bool  # whether q was a list, and so the answer is
  source: str | None  # None: not said, or 'auto'
  target: str | None
  alternatives: int = 0


def parse(body: bytes, content_type: str = 'application/json', url_query: str = '') -> Query:
  """The query of a request; raises BadQueryError.

  As LibreTranslate has it, JSON is taken alone, and fields of a form are joined to those of the URL.

  Args:
    body: the body.
    content_type: header of that name; JSON where there is none, but a body.
    url_query: text after ? in the URL.
  """
  kind = content_type.partition(';')[0].strip().lower() or ('application/json' if body else _URLENCODED)
  if kind == 'application/json' or re.fullmatch(r'application/.+\+json', kind):
    fields, seen = _json(body), 'the JSON object'
  else:
    pairs = _pairs(url_query.encode(errors='surrogateescape'))
    if body and kind not in (_URLENCODED, _MULTIPART):
      raise BadQueryError(f'a body of Content-Type {kind:.60} is not read: {_TAKEN}', 415)
    if body:
      pairs += _pairs(body) if kind == _URLENCODED else _multipart(body, content_type)
    fields, seen = dict(reversed(pairs)), 'the form'  # the first of a name
    texts = [value for name, value in pairs if name == 'q']
    if len(texts) > 1:
      fields['q'] = texts
  if 'q' not in fields:
    if seen == 'the form' and body.lstrip()[:1] in (b'{', b'['):
      raise BadQueryError(f'the body is JSON, but its Content-Type says {kind}: send Content-Type: application/json')
    names = ', '.join(sorted(fields))
    raise BadQueryError(
      f'missing q: the text to translate, a string or a list of strings; {seen} has {names or "nothing":.100}'
    )
  return _query(fields)


def _query(fields: dict[str, Any]) -> Query:
  """The query of its fields; those that may be left out may be null, false or empty too."""
  q = fields['q']
  texts = q if isinstance(q, list) else [q]
  for number, text in enumerate(texts):
    if not isinstance(text, str):
      where = f'; q[{number}]' if isinstance(q, list) else '; it'
      raise BadQueryError(f'q must be a string or a list of strings{where} is {_seen(text)}')
  if any('\ud800' <= c <= '\udfff' for text in texts for c in text):
    raise BadQueryError('q must be Unicode; it holds half of a surrogate pair')
  if (form := fields.get('format') or 'text') != 'text':
    raise BadQueryError(f"format must be 'text', others are not supported; it is {_seen(form)}")
  alternatives = fields.get('alternatives') or 0
  if isinstance(alternatives, str) and re.fullmatch('[0-9]{1,9}', alternatives):
    alternatives = int(alternatives)
  if isinstance(alternatives, bool) or not isinstance(alternatives, int) or alternatives < 0:
    raise BadQueryError(f'alternatives must be a number of translations, 0 or more; it is {_seen(alternatives)}')
  source, target = (_language(fields, name) for name in ('source', 'target'))
  texts = [text.replace('\r\n', '\n').split('\n') for text in texts]
  return Query(texts, isinstance(q, list), None if source == 'auto' else source, target, alternatives)


def _seen(value: Any) -> str:
  """A value as JSON has it, or its kind where it may be long."""
  if isinstance(value, list | dict):
    return 'an object' if isinstance(value, dict) else 'a list'
  return json.dumps(value)[:60]


def _json(body: bytes) -> dict[str, Any]:
  try:
    fields = json.loads(body)
  except (ValueError, RecursionError) as e:  # bad UTF-8 too
    reason = 'it is nested too deeply' if isinstance(e, RecursionError) else e
    raise BadQueryError(f'the body must be JSON, with Content-Type: application/json; {reason}') from None
  if not isinstance(fields, dict):
    raise BadQueryError('the body must be a JSON object, such as {"q": "Guten Tag.", "source": "de", "target": "en"}')
  return fields


def _pairs(text: bytes) -> list[tuple[str, str]]:
  try:
    return urllib.parse.parse_qsl(text.decode(), keep_blank_values=True, errors='strict', max_num_fields=_MOST_FIELDS)
  except UnicodeDecodeError:
    raise BadQueryError('a form must be UTF-8') from None
  except ValueError:
    raise BadQueryError(f'a form has at most {_MOST_FIELDS} fields') from None


def _multipart(body: bytes, content_type: str) -> list[tuple[str, str]]:
  """Fields of multipart/form-data (RFC 7578); a file is read as a field."""
  header = email.message.Message()
  header['Content-Type'] = content_type
  boundary = str(header.get_param('boundary', '')).encode(errors='surrogateescape')
  first, *parts = (b'\r\n' + body).split(b'\r\n--' + boundary, _MOST_FIELDS)
  if not boundary or not parts or not parts[-1].startswith(b'--'):
    raise BadQueryError('the multipart body is cut off, or its boundary is not that of its Content-Type')
  pairs = []
  for part in parts[:-1]:
    head, _, value = part.partition(b'\r\n\r\n')
    name = re.search(rb'[; ]name="?([^";\r\n]*)', head)
    try:
      pairs.append((name[1].decode() if name else '', value.decode()))
    except UnicodeDecodeError:
      raise BadQueryError('a form must be UTF-8') from None
  return pairs


def _language(fields: dict[str, Any], name: str) -> str | None:
  language = fields.get(name) or None
  if language is not None and not isinstance(language, str):
    raise BadQueryError(f'{name} must be the code of a language, a string; it is {_seen(language)}')
  return language
