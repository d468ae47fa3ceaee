"""Page to try a server in a browser: one file, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; font: 100%/1.5 system-ui, sans-serif; }
body { margin: 0 auto; max-width: 48rem; padding: 1rem; }
label { display: block; font-weight: 600; margin-top: 1rem; }
textarea, output { box-sizing: border-box; display: block; font: inherit; min-height: 7rem; padding: .5rem; width: 100%; }
output { border: 1px solid; white-space: pre-wrap; }
.languages { display: flex; flex-wrap: wrap; gap: 1rem; }
select, button { font: inherit; min-height: 2.75rem; padding: 0 .75rem; }
button { margin: 1rem 0; }
"""

_SCRIPT = """
const by = id => document.getElementById(id);
const languages = fetch('languages').then(r => r.json()).then(all => {
  const add = (select, language) => select.add(new Option(`${language.name} (${language.code})`, language.code));
  for (const language of all) if (language.targets.length) add(by('source'), language);
  const targets = new Set(all.flatMap(language => language.targets));
  for (const language of all) if (targets.has(language.code)) add(by('target'), language);
  by('target').disabled = !targets.size;
}).catch(() => { by('status').textContent = 'The list of languages could not be read.'; });
by('form').addEventListener('submit', async event => {
  event.preventDefault();
  const button = by('button'), status = by('status');
  button.disabled = true;
  status.textContent = 'Translating.';
  const query = {q: by('q').value, source: by('source').value};
  if (by('target').value) query.target = by('target').value;
  try {
    const begin = performance.now();
    const response = await fetch('translate', {
      method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(query)});
    const found = await response.json();
    by('result').textContent = found.translatedText ?? '';
    const seconds = ((performance.now() - begin) / 1000).toFixed(2);
    status.textContent = found.error ? `Error: ${found.error}` : [...(found.warnings ?? []), `${seconds} s`].join('. ');
  } catch (error) {
    status.textContent = 'The server did not answer.';
  }
  button.disabled = false;
});
by('q').addEventListener('keydown', event => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) by('form').requestSubmit();
});
"""

HTML = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Translate</title>
<style>{_STYLE}</style>
</head>
<body>
<main>
<h1>Translate</h1>
<form id="form">
<div class="languages">
<div><label for="source">From</label><select id="source"><option value="auto">any language</option></select></div>
<div><label for="target">Into</label><select id="target"></select></div>
</div>
<label for="q">Text, a sentence a line</label>
<textarea id="q" required autofocus aria-describedby="keys" dir="auto"></textarea>
<button id="button">Translate</button> <span id="keys">or Ctrl+Enter</span>
</form>
<label for="result">Translation</label>
<output id="result" for="q source target" dir="auto"></output>
<p id="status" role="status"></p>
<noscript><p>This page needs JavaScript; POST /translate does not.</p></noscript>
</main>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
  return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS = {
  'Content-Security-Policy': (
    f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_SCRIPT)}; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
  ),
  'X-Content-Type-Options': 'nosniff',
}
