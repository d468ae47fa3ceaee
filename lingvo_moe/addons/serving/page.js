const by = id => document.getElementById(id);
const say = text => { by('status').textContent = text; };
const post = (path, query, signal) => fetch(path, {
  method: 'POST', headers: {'Content-Type': 'application/json'}, body: JSON.stringify(query), signal});
const TYPING = 400;  // milliseconds without a key after which text is translated
let continues = false, settings = {}, limits = {}, stop = new AbortController(), timer = 0, shown = null;

// What the page is for

const setUp = async () => {
  const health = await fetch('health').then(r => r.json());
  ({limits} = health);
  continues = health.continues_text;
  if (continues) return generation();
  const all = await fetch('languages').then(r => r.json());
  settings = await fetch('frontend/settings').then(r => r.json());
  const add = (select, language) => select.add(new Option(language.name, language.code));
  const sources = all.filter(language => language.targets.length);
  const targets = all.filter(language => sources.some(source => source.targets.includes(language.code)));
  for (const language of sources) add(by('source'), language);
  for (const language of targets) add(by('target'), language);
  if (sources.length === 1) by('source').value = sources[0].code;
  by('target').disabled = !targets.length;
  const some = languages => languages.length > 3 ? `${languages.length} languages` : languages.map(l => l.name).join(', ');
  by('about').textContent = (targets.length ? `From ${some(sources)} into ${some(targets)}. ` : '') +
    'A machine translates; check what matters.';
  for (let n = 1; n <= settings.alternatives; n++) by('alternatives').add(new Option(n));
  by('files').hidden = false;
  by('file').accept = settings.supportedFilesFormat.join();
  by('hint').hidden = !settings.alignments;
};
const generation = () => {
  document.title = by('title').textContent = by('button').textContent = 'Continue';
  by('about').textContent = 'A machine writes; check what matters.';
  by('of_q').textContent = 'Prompt';
  by('of_result').textContent = 'Continuation';
  by('keys').textContent = 'Ctrl+Enter continues the text, Escape stops.';
  by('sampling').hidden = false;
  by('languages').hidden = true;
};

// Text

const count = () => {
  const text = by('q').value, bytes = new TextEncoder().encode(JSON.stringify(text)).length;
  const over = continues ? text.length > limits.prompt : bytes > limits.body;
  const most = continues ? `${limits.prompt.toLocaleString()} characters` : `${Math.floor(limits.body / 1024)} KiB`;
  by('count').textContent = `${[...text].length.toLocaleString()} characters` +
    (over || bytes > limits.body / 2 || continues ? `, at most ${most}` : '');
  by('count').className = over ? 'over' : '';
  by('button').disabled = over;
  return !over;
};
const show = text => {
  by('result').textContent = text;
  by('result').className = '';
  by('word').textContent = '';
  shown = null;
};
const translate = async signal => {
  const query = {q: by('q').value, source: by('source').value, alternatives: Number(by('alternatives').value)};
  if (by('target').value) query.target = by('target').value;
  const response = await post('translate', query, signal);
  const found = await response.json();
  if (found.error) return [`Error: ${found.error}`];
  show(found.translatedText);
  shown = {...query, text: found.translatedText, alternatives: 0};
  by('others').replaceChildren(...(found.alternatives ?? []).map(text => {
    const item = document.createElement('li');
    item.textContent = text;
    return item;
  }));
  const {language} = found.detectedLanguage ?? {};
  const name = [...by('source').options].find(option => option.value === language)?.text;
  by('detected').textContent = name ? `It seems to be ${name}.` : '';
  return found.warnings ?? [];
};
const proceed = async signal => {
  const query = {prompt: by('q').value, stream: true};
  if (by('temperature').value) query.sample_temperature = Number(by('temperature').value);
  if (by('tokens').value) query.max_new_tokens = Number(by('tokens').value);
  const response = await post('generate', query, signal);
  if (!response.ok) return [`Error: ${(await response.json()).error}`];
  show('');
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
const run = async work => {  // the last call wins: one that is under way is given up
  clearTimeout(timer);
  stop.abort();
  const mine = stop = new AbortController(), begin = performance.now();
  by('stop').hidden = false;
  by('result').className = 'old';
  say('Working.');
  let notes;
  try {
    notes = await work(mine.signal);
  } catch (error) {
    notes = [error.name === 'AbortError' ? 'Stopped.' : 'The server did not answer.'];
  }
  if (mine !== stop) return;
  by('stop').hidden = true;
  by('result').className = '';
  say([...notes, `${((performance.now() - begin) / 1000).toFixed(1)} s`].join(' · '));
};
const begin = () => { if (count()) by('q').value || continues ? run(continues ? proceed : translate) : clear(); };
const clear = () => {
  stop.abort();
  stop = new AbortController();
  show('');
  by('others').replaceChildren();
  by('detected').textContent = '';
  by('stop').hidden = true;
  say('');
};
const soon = () => {
  clearTimeout(timer);
  if (count() && !continues) timer = setTimeout(begin, TYPING);
};

// Words: which of the text a word of the translation comes from, asked when somebody first points at one

const align = async () => {
  if (!settings.alignments || !shown || shown.words) return;
  const asked = shown, {text, ...query} = asked;
  asked.words = [];
  by('word').textContent = 'Looking for the words.';
  const found = await post('translate', {...query, alignments: true}).then(r => r.json()).catch(() => ({}));
  if (asked !== shown) return;
  by('word').textContent = '';
  if (found.translatedText !== text) return;
  const sources = asked.q.split(/\r?\n/), lines = text.split('\n');
  by('result').replaceChildren(...lines.flatMap((line, number) => [
    ...(number ? ['\n'] : []), ...words(asked, [...line], [...(sources[number] ?? '')], found.alignments[number])]));
};
const words = (asked, line, source, {target_spans, source_spans, pairs}) => {
  const from = target_spans.map(() => []);
  for (const pair of pairs.split(' ').filter(Boolean)) {
    const [i, j] = pair.split('-').map(Number);
    from[j]?.push(source_spans[i]);
  }
  const nodes = [];
  let end = 0;
  for (const part of line.join('').matchAll(/\s+|\S+/g)) {
    const begin = end;
    end += [...part[0]].length;
    const mine = target_spans.flatMap(([a, b], j) => a < end && b > begin ? from[j] : []);
    if (/\s/.test(part[0]) || !mine.length) { nodes.push(part[0]); continue; }
    const mark = document.createElement('span');
    mark.textContent = part[0];
    asked.words.push({mark, from: whole(source, mine)});
    nodes.push(mark);
  }
  return nodes;
};
const whole = (source, spans) => {  // the words of the text that the spans lie in, in order, once
  const found = new Map();
  for (let [begin, end] of spans) {
    if (!source.slice(begin, end).join('').trim()) continue;
    while (/\s/.test(source[begin])) begin++;
    while (begin > 0 && /\S/.test(source[begin - 1])) begin--;
    while (end < source.length && /\S/.test(source[end])) end++;
    found.set(begin, source.slice(begin, end).join('').trim());
  }
  return [...found].sort(([a], [b]) => a - b).map(([, word]) => word).join(' ');
};
const point = index => {
  const {words = []} = shown ?? {};
  words.forEach(({mark}, i) => mark.classList.toggle('at', i === index));
  by('result').querySelectorAll('mark').forEach(old => old.replaceWith(...old.childNodes));
  if (!words[index]) return;
  const mark = document.createElement('mark');
  mark.append(...words[index].mark.childNodes);
  words[index].mark.append(mark);
  by('word').textContent = `${words[index].mark.textContent} ← ${words[index].from}`;
  shown.at = index;
};
by('result').addEventListener('pointerenter', align);
by('result').addEventListener('focus', align);
by('result').addEventListener('pointerover', event =>
  point((shown?.words ?? []).findIndex(({mark}) => mark.contains(event.target))));
by('result').addEventListener('keydown', event => {
  const by_key = {ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1}[event.key];
  if (!by_key || !shown?.words?.length) return;
  event.preventDefault();
  const {length} = shown.words;
  point(((shown.at ?? (by_key > 0 ? -1 : 0)) + by_key + length) % length);
});

// Files

const sendFile = file => run(async signal => {
  if (file.size > limits.file) return [`Error: ${file.name} has more than ${Math.floor(limits.file / 1024)} KiB`];
  const form = new FormData();
  form.append('file', file);
  form.append('source', by('source').value);
  if (by('target').value) form.append('target', by('target').value);
  by('fetch').hidden = true;
  const found = await (await fetch('translate_file', {method: 'POST', body: form, signal})).json();
  if (found.error) return [`Error: ${found.error}`];
  by('link').setAttribute('href', new URL(found.translatedFileUrl).pathname.replace(/^.*(?=download_file)/, ''));
  by('link').textContent = `Save the translation of ${file.name}`;
  by('fetch').hidden = false;
  by('link').focus();
  return [`${file.name} is translated`];
});
by('file').addEventListener('change', () => { if (by('file').files.length) sendFile(by('file').files[0]); });
for (const name of ['dragover', 'dragleave', 'drop']) {
  document.addEventListener(name, event => {
    if (continues || !event.dataTransfer?.types.includes('Files')) return;
    event.preventDefault();
    by('main').classList.toggle('drop', name === 'dragover');
    if (name === 'drop' && event.dataTransfer.files.length) sendFile(event.dataTransfer.files[0]);
  });
}

// Controls

by('form').addEventListener('submit', event => { event.preventDefault(); begin(); });
by('q').addEventListener('input', soon);
for (const id of ['source', 'target', 'alternatives']) by(id).addEventListener('change', begin);
by('stop').addEventListener('click', () => stop.abort());
by('swap').addEventListener('click', () => {
  const [source, target] = [by('source').value, by('target').value];
  const has = (select, code) => [...select.options].some(option => option.value === code);
  if (has(by('source'), target)) by('source').value = target;
  if (has(by('target'), source)) by('target').value = source;
  if (by('result').textContent) by('q').value = by('result').textContent;
  begin();
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
document.addEventListener('keydown', event => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) by('form').requestSubmit();
  if (event.key === 'Escape') stop.abort();
});
by('main').hidden = false;
by('q').focus();
setUp().then(count).catch(() => say('The server does not say what it translates.'));
