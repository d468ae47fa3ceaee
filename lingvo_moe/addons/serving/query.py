"""Body of a POST request as LibreTranslate has it: fields in JSON or a form, and the query of /translate."""

import contextlib
import email.message
import json
import re
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

from lingvo_moe.addons.documents.document_files import Document, Lines
from lingvo_moe.addons.documents.formats import HTML
from lingvo_moe.addons.documents.markup import MarkedUp
from lingvo_moe.search.request import is_half

_MOST_FIELDS = 10_000  # of a form
_NAME, _FILE_NAME = (re.compile(rb'[; ]%s="?((?<=")[^"\r\n]*|[^";\r\n]*)' % name) for name in (b'name', b'filename'))
_URLENCODED, _MULTIPART = 'application/x-www-form-urlencoded', 'multipart/form-data'
_TAKEN = f'send JSON with Content-Type: application/json, or a form ({_URLENCODED} or {_MULTIPART})'


class BadQueryError(Exception):
  """Request that is no query; the message says why, and `status` is that of the answer in HTTP."""

  def __init__(self, message: str, status: int = 400):
    super().__init__(message)
    self.status = status


class File(NamedTuple):
  """File of a form."""

  name: str
  data: bytes


class Fields(dict[str, Any]):
  """Fields of a body by name, as JSON values; those that may be left out may be null, false or empty too.

  `seen` is what has them, in words.
  """

  def __init__(self, fields: dict[str, Any], seen: str):
    super().__init__(fields)
    self._seen = seen

  def texts(self, name: str, about: str) -> list[str]:
    """A field that is a string or a list of strings."""
    if name not in self:
      names = ', '.join(sorted(self))
      raise BadQueryError(
        f'missing {name}: {about}, a string or a list of strings; {self._seen} has {names or "nothing":.100}'
      )
    texts = self[name] if isinstance(self[name], list) else [self[name]]
    for number, text in enumerate(texts):
      if not isinstance(text, str):
        where = f'; {name}[{number}]' if isinstance(self[name], list) else '; it'
        raise BadQueryError(f'{name} must be a string or a list of strings{where} is {_seen(text)}')
    if any(map(is_half, texts)):
      raise BadQueryError(f'{name} must be Unicode; it holds half of a surrogate pair')
    return texts

  def count(self, name: str, about: str) -> int:
    """A field that is a number, 0 or more."""
    count = self.get(name) or 0
    if isinstance(count, str) and re.fullmatch('[0-9]{1,9}', count):
      count = int(count)
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
      raise BadQueryError(f'{name} must be a number of {about}, 0 or more; it is {_seen(count)}')
    return count

  def numbers(self, names: Iterable[str]) -> dict[str, Any]:
    """Those of the fields that are given; a number of a form is text."""
    values = {name: self[name] for name in names if self.get(name) is not None}
    for name, value in values.items():
      with contextlib.suppress(ValueError):
        values[name] = json.loads(value) if isinstance(value, str) and len(value) < 40 else value
    return values

  def language(self, name: str) -> str | None:
    """A field that is the code of a language; None: not said."""
    language = self.get(name) or None
    if language is not None and not isinstance(language, str):
      raise BadQueryError(f'{name} must be the code of a language, a string; it is {_seen(language)}')
    return language


class Query(NamedTuple):
  """Query of /translate."""

  documents: list[Document]  # the texts
  is_list: bool  # whether q was a list, and so the answer is
  unit: str  # of the documents, in words
  alternatives: int
  alignments: bool  # whether they are in the answer


def query(fields: Fields) -> Query:
  """The query of a body; raises BadQueryError."""
  texts = fields.texts('q', 'the text to translate')
  if (form := fields.get('format') or 'text') not in ('text', 'html'):
    raise BadQueryError(f"format must be 'text' or 'html'; it is {_seen(form)}")
  alternatives = fields.count('alternatives', 'translations')
  is_list, aligned = isinstance(fields['q'], list), bool(fields.get('alignments'))
  if form == 'html':
    return Query([MarkedUp(text, HTML) for text in texts], is_list, 'paragraph', alternatives, aligned)
  return Query([Lines(text.replace('\r\n', '\n')) for text in texts], is_list, 'line', alternatives, aligned)


def parse(body: bytes, content_type: str = 'application/json', url_query: str = '') -> Fields:
  """The fields of a body; raises BadQueryError.

  As LibreTranslate has it, JSON is taken alone, and fields of a form are joined to those of the URL.

  Args:
    body: the body.
    content_type: header of that name; JSON where there is none, but a body.
    url_query: text after ? in the URL.
  """
  kind = content_type.partition(';')[0].strip().lower() or ('application/json' if body else _URLENCODED)
  if kind == 'application/json' or re.fullmatch(r'application/.+\+json', kind):
    return Fields(_json(body), 'the JSON object')
  pairs: list[tuple[str, Any]] = _pairs(url_query.encode(errors='surrogateescape'))
  if body and kind not in (_URLENCODED, _MULTIPART):
    raise BadQueryError(f'a body of Content-Type {kind:.60} is not read: {_TAKEN}', 415)
  if body:
    pairs += _pairs(body) if kind == _URLENCODED else _multipart(body, content_type)
  fields = dict(reversed(pairs))  # the first of a name
  texts = [value for name, value in pairs if name == 'q']
  if len(texts) > 1:
    fields['q'] = texts
  if not fields.keys() & {'q', 'prompt', 'file'} and body.lstrip()[:1] in (b'{', b'['):
    raise BadQueryError(f'the body is JSON, but its Content-Type says {kind}: send Content-Type: application/json')
  return Fields(fields, 'the form')


def _seen(value: Any) -> str:
  """A value as JSON has it, or its kind where it may be long."""
  if isinstance(value, list | dict | File):
    return {dict: 'an object', list: 'a list', File: 'a file'}[type(value)]
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


def _multipart(body: bytes, content_type: str) -> list[tuple[str, str | File]]:
  """Fields of multipart/form-data (RFC 7578)."""
  header = email.message.Message()
  header['Content-Type'] = content_type
  boundary = str(header.get_param('boundary', '')).encode(errors='surrogateescape')
  first, *parts = (b'\r\n' + body).split(b'\r\n--' + boundary, _MOST_FIELDS)
  if not boundary or not parts or not parts[-1].startswith(b'--'):
    raise BadQueryError('the multipart body is cut off, or its boundary is not that of its Content-Type')
  pairs = []
  for part in parts[:-1]:
    head, _, value = part.partition(b'\r\n\r\n')
    name, file = _NAME.search(head), _FILE_NAME.search(head)
    try:
      taken = File(file[1].decode(), value) if file else value.decode()
      pairs.append((name[1].decode() if name else '', taken))
    except UnicodeDecodeError:
      raise BadQueryError('a form must be UTF-8') from None
  return pairs
