"""Page to try a server in a browser: page.html with page.css and page.js in it, and nothing from elsewhere."""

import base64
import hashlib
import importlib.resources

_FOLDER = importlib.resources.files(__package__)
_STYLE, _SCRIPT = ('\n' + _FOLDER.joinpath(name).read_text(encoding='utf-8') for name in ('page.css', 'page.js'))

HTML = _FOLDER.joinpath('page.html').read_text(encoding='utf-8').format(_STYLE=_STYLE, _SCRIPT=_SCRIPT)


def _hash(text: str) -> str:
  return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
  'Content-Security-Policy': (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
  ),
  'X-Content-Type-Options': 'nosniff',
}
