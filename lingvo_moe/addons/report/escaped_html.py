"""HTML in which text is escaped unless it is Html, so that nothing a run has written becomes a part of the page."""

import html
import re
from collections.abc import Iterable
from typing import Any

# Characters that HTML does not allow: controls, halves of surrogate pairs, noncharacters.
_FORBIDDEN = re.compile('[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]')
_VOID = {'meta', 'br', 'rect', 'path', 'circle', 'line', 'polyline'}  # elements without content, of HTML and SVG
_OPEN = {'tr', 'td', 'th', 'dt', 'dd', 'li', 'thead', 'tbody'}  # HTML lets their end tags out, which saves a fifth


class Html(str):
  """HTML, which is not escaped again."""


def escape(text: Any) -> Html:
  """A text as HTML; characters that HTML does not allow become U+FFFD."""
  return Html(html.escape(_FORBIDDEN.sub('\ufffd', str(text))))


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
    return Html(f'<{opening}>' if name in ('meta', 'br') else f'<{opening}/>')
  return Html(f'<{opening}>{join(children)}' + ('' if name in _OPEN else f'</{name}>'))
