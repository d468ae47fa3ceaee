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
