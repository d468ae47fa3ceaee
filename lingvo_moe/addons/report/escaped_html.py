"""HTML in which text is escaped unless it is Html, so that nothing a run has written becomes a part of the page."""

import base64
import hashlib
import html
import re
from collections.abc import Iterable
from typing import Any

# Characters that HTML does not allow: controls, halves of surrogate pairs, noncharacters.
_FORBIDDEN = re.compile('[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]')
_VOID_HTML = {'meta', 'br', 'input'}  # elements without content
_VOID = _VOID_HTML | {'rect', 'path', 'circle', 'line', 'polyline'}
_OPEN = {'tr', 'td', 'th', 'dt', 'dd', 'li', 'thead', 'tbody'}  # HTML lets their end tags out, which saves a fifth


class Html(str):
  """HTML, which is not escaped again."""


def escape(text: Any) -> Html:
  """A text as HTML; characters that HTML does not allow become U+FFFD."""
  return Html(html.escape(_FORBIDDEN.sub('\ufffd', str(text))))


def allowed(source: str) -> str:
  """What a Content-Security-Policy calls a script or style sheet that stands in the page: its hash."""
  return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"


def join(parts: Iterable[Any]) -> Html:
  """Parts one after the other; each is escaped unless it is Html, and None is nothing."""
  return Html(''.join(part if isinstance(part, Html) else escape(part) for part in parts if part is not None))


def tag(name: str, /, *children: Any, **attributes: Any) -> Html:
  """An element.

  Args:
    name: of it.
    *children: texts, which are escaped, and Html.
    **attributes: by name, with _ for - and no last _ (class_, aria_label); None leaves one out, True has no value.
  """
  written = [name]
  for key, value in attributes.items():
    key = key.rstrip('_').replace('_', '-')
    if value is True:
      written.append(key)
    elif value is not None and value is not False:
      written.append(f'{key}="{escape(value)}"')
  opening = ' '.join(written)
  if name in _VOID:
    return Html(f'<{opening}>' if name in _VOID_HTML else f'<{opening}/>')
  return Html(f'<{opening}>{join(children)}' + ('' if name in _OPEN else f'</{name}>'))
