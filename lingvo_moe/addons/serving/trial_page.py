"""Page to try a server in a browser: page.html with page.css and page.js in it, and nothing from elsewhere."""

import importlib.resources

from lingvo_moe.addons.report.escaped_html import allowed

_FOLDER = importlib.resources.files(__package__)
_STYLE, _SCRIPT = ('\n' + _FOLDER.joinpath(name).read_text(encoding='utf-8') for name in ('page.css', 'page.js'))

HTML = _FOLDER.joinpath('page.html').read_text(encoding='utf-8').format(_STYLE=_STYLE, _SCRIPT=_SCRIPT)
HEADERS = {
  'Content-Security-Policy': (
    f"default-src 'none'; style-src {allowed(_STYLE)}; script-src {allowed(_SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
  ),
  'X-Content-Type-Options': 'nosniff',
}
