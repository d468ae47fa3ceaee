const by = id => document.getElementById(id);
const say = text => { by('status').textContent = text; };
const post = (path, query, signal) => fetch(path, {
  method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(query), signal});
let continues = false, stop = null;

const translation = async () => {
  const all = await fetch('languages').then(r => r.json());
  const add = (select, language) => select.add(new Option(`${language.name} (${language.code})`, language.code));
  for (const language of all) if (language.targets.length) add(by('source'), language);
  const targets = new Set(all.flatMap(language => language.targets));
  for (const language of all) if (targets.has(language.code)) add(by('target'), language);
  by('target').disabled = !targets.size;
  const {alternatives} = await fetch('frontend/settings').then(r => r.json());
  for (let n = 1; n <= alternatives; n++) by('alternatives').add(new Option(n));
};
const generation = () => {
  continues = true;
  document.title = by('title').textContent = by('button').textContent = 'Continue';
  by('of_q').textContent = 'Prompt';
  by('of_result').textContent = 'Continuation';
  by('q').required = by('sampling').hidden = false;
  by('languages').hidden = true;
};
fetch('health').then(r => r.json()).then(health => {
  by('model').textContent = `${health.model}, ${health.checkpoint}`;
  return health.continues_text ? generation() : translation();
}).catch(() => say('The server could not be asked about its model.'));

const translate = async () => {
  const query = {q: by('q').value, source: by('source').value, alternatives: Number(by('alternatives').value)};
  if (by('target').value) query.target = by('target').value;
  const found = await (await post('translate', query, stop.signal)).json();
  by('result').textContent = found.translatedText ?? '';
  by('others').replaceChildren(...(found.alternatives ?? []).map(text => {
    const item = document.createElement('li');
    item.textContent = text;
    return item;
  }));
  const {language} = found.detectedLanguage ?? {};
  return [...(found.error ? [`Error: ${found.error}`] : []), ...(found.warnings ?? []),
    ...(language ? [`The text seems to be in ${language}`] : [])];
};
const proceed = async () => {
  const query = {prompt: by('q').value, stream: true};
  if (by('temperature').value) query.sample_temperature = Number(by('temperature').value);
  if (by('tokens').value) query.max_new_tokens = Number(by('tokens').value);
  const response = await post('generate', query, stop.signal);
  if (!response.ok) return [`Error: ${(await response.json()).error}`];
  by('result').textContent = '';
  let rest = '', last = {};
  for (const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();;) {
    const {done, value} = await reader.read();
    if (done) break;
    const events = (rest + value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      last = JSON.parse(event.slice('data: '.length));
      by('result').textContent += last.text ?? '';
    }
  }
  return [last.error ? `Error: ${last.error}` : `Seed ${last.sample_seed ?? 'not used'}`];
};
by('form').addEventListener('submit', async event => {
  event.preventDefault();
  stop = new AbortController();
  by('button').disabled = true;
  by('stop').hidden = false;
  say('Working.');
  const begin = performance.now();
  try {
    const notes = await (continues ? proceed() : translate());
    say([...notes, `${((performance.now() - begin) / 1000).toFixed(2)} s`].join('. '));
  } catch (error) {
    say(error.name === 'AbortError' ? 'Stopped.' : 'The server did not answer.');
  }
  by('button').disabled = false;
  by('stop').hidden = true;
});
by('stop').addEventListener('click', () => stop.abort());
by('swap').addEventListener('click', () => {
  const [source, target] = [by('source').value, by('target').value];
  const has = (select, code) => [...select.options].some(option => option.value === code);
  if (has(by('source'), target)) by('source').value = target;
  if (has(by('target'), source)) by('target').value = source;
  if (by('result').textContent) by('q').value = by('result').textContent;
  by('result').textContent = '';
  by('others').replaceChildren();
});
by('copy').addEventListener('click', async () => {
  try {
    await navigator.clipboard.writeText(by('result').textContent);
    say('Copied.');
  } catch {
    getSelection().selectAllChildren(by('result'));
    say('The text is selected: press Ctrl+C.');
  }
});
by('q').addEventListener('keydown', event => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) by('form').requestSubmit();
});
