"""README and docs/: every snippet runs, every command, model, flag, link and path in them exists.

`python tests/test_docs.py FILE` runs the Python blocks of a document, in order and in one namespace. A block whose
first line is a path, such as `# harbour.py`, is a file: it is written to an empty folder, in which all blocks run. What
a block prints must be what the comments behind its `print` calls say.
"""

import contextlib
import functools
import inspect
import itertools
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
from typing import NamedTuple

import forks
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [f'docs/{path.relative_to(ROOT / "docs")}' for path in sorted((ROOT / 'docs').rglob('*.md'))]
DOCUMENTS = ['README.md', 'CONTRIBUTING.md', *PAGES]
QUICKSTART_TIME = '6.5 minutes on two cores'
ANYWHERE = {
  'cd',
  'curl',
  'docker',
  'echo',
  'git',
  'jupyter',
  'jupytext',
  'pip',
  'python3',
  'ruff',
  'source',
}  # commands that are not ours


class Block(NamedTuple):
  """Fenced block, without its common indent."""

  language: str
  text: str


def fenced(document: str) -> list[Block]:
  text = (ROOT / document).read_text(encoding='utf-8')
  found = re.findall(r'^( *)```(\w+)\n(.*?)^ *```$', text, flags=re.DOTALL | re.MULTILINE)
  return [Block(language, re.sub(rf'^{indent}', '', text, flags=re.MULTILINE)) for indent, language, text in found]


def blocks(document: str, language: str) -> list[str]:
  """The fenced blocks of a language."""
  return [block.text for block in fenced(document) if block.language == language]


def module_path(block: str) -> str | None:
  """The path in the first line of a block that is a module."""
  match = re.match(r'# (\S+\.py)\n', block)
  return match and match[1]


def commands(document: str) -> list[list[str]]:
  """The commands of its sh blocks, one for each side of a pipe or an `&&`."""
  return commands_of('\n'.join(blocks(document, 'sh')))


def commands_of(block: str) -> list[list[str]]:
  found = []
  for line in block.replace('\\\n', ' ').splitlines():
    found += [shlex.split(part, comments=True) for part in re.split(r'\s(?:\||&&)\s', line)]
  return [command for command in found if command]


def own_commands(document: str) -> list[list[str]]:
  """What it runs of this repository with Python: that of lingvo-moe launch's processes, too."""
  found = []
  for command in commands(document):
    if command[:2] == ['lingvo-moe', 'launch']:
      assert command[2].isdecimal() and command[3] == '--', command
      command = command[4:]
    if command[0] == 'lingvo-moe':
      command = ['python', '-m', 'lingvo_moe.cli.commands.main', *command[1:]]
    if command[0] == 'python':
      found.append(command)
  return found


OWN = [(document, command) for document in DOCUMENTS for command in own_commands(document)]
IDS = [' '.join(command)[:80] for _, command in OWN]


def registered_by(document: str) -> set[str]:
  """The models that modules in a document register."""
  found = set()
  for block in blocks(document, 'python'):
    if path := module_path(block):
      module = path.removesuffix('.py')
      for own in r'^@registry\.register\nclass (\w+)', r'^(\w+) = registry\.tiny\(':
        found |= {f'{module}.{name}' for name in re.findall(own, block, flags=re.MULTILINE)}
  return found


def prose(document: str) -> str:
  """A document without its fenced blocks."""
  text = (ROOT / document).read_text(encoding='utf-8')
  return re.sub(r'^ *```.*?^ *```$', '', text, flags=re.DOTALL | re.MULTILINE)


@functools.cache
def names() -> list[str]:
  from lingvo_moe.config import registry

  return registry.names()


# Python


@pytest.mark.parametrize('document', [d for d in DOCUMENTS if blocks(d, 'python')])
def test_python_blocks_run_and_print_what_they_say(document):
  done = forks.run([__file__, document], cwd=ROOT, timeout=300)
  assert done.returncode == 0, done.stderr[-3000:]


def test_a_print_with_another_result_and_a_failing_block_are_found(tmp_path):
  for line in ('print(1 + 1)  # 3', 'print(1 + 1)', 'assert False'):
    (tmp_path / 'document.md').write_text(f'```python\n{line}\n```\n')
    done = forks.run([__file__, tmp_path / 'document.md'])
    assert done.returncode == 1 and 'AssertionError' in done.stderr


def test_every_document_is_linked_from_the_index_and_the_index_from_the_readme():
  index = (ROOT / 'docs' / 'README.md').read_text(encoding='utf-8')
  pages = [d.removeprefix('docs/') for d in DOCUMENTS if d.startswith('docs/') and d != 'docs/README.md']
  assert [page for page in pages if f'({page})' not in index] == []
  assert '(docs/README.md)' in (ROOT / 'README.md').read_text(encoding='utf-8')


# Commands


def test_the_readme_fits_150_lines_and_begins_with_the_two_commands():
  assert len((ROOT / 'README.md').read_text(encoding='utf-8').splitlines()) <= 150
  assert shlex.split(blocks('README.md', 'sh')[0], comments=True) == ['tools/quickstart', 'tools/test']


@pytest.mark.parametrize('document', DOCUMENTS)
def test_shell_commands_exist(document):
  for command in commands(document):
    program = command[0]
    assert program in ANYWHERE | {'python', 'lingvo-moe'} or os.access(ROOT / program, os.X_OK), command


@pytest.mark.parametrize(('document', 'command'), OWN, ids=IDS)
def test_a_command_takes_its_flags(document, command):
  del document
  done = forks.run([*command[1:], '--only_check_args'], cwd=ROOT, timeout=60)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(('document', 'command'), OWN, ids=IDS)
def test_models_and_bindings_of_a_command_exist(document, command):
  from lingvo_moe.config import configuration

  own = registered_by(document)
  models = [m for word in command if word.startswith('--model=') for m in word.partition('=')[2].split(',')]
  models = [model for model in models if '/' not in model]  # a public folder
  assert [model for model in models if model not in own and model not in names()] == []
  bindings = [word.partition('=')[2] for word in command if word.startswith('--gin_bindings=')]
  settings = [value for flag, value in itertools.pairwise(command) if flag == '--set']
  if models and (bindings or settings):
    (model,) = models
    configuration.resolve(model, [], bindings, settings)  # refuses what is no field of it, or no value


def test_the_readmes_command_for_one_model_runs():
  command = ['lingvo-moe', 'models', '--model=mt.starter.MoE8E']
  assert command in commands('README.md')
  command = ['-m', 'lingvo_moe.cli.commands.main', *command[1:]]
  done = forks.run(command, cwd=ROOT, timeout=120)
  assert done.returncode == 0 and 'mt.starter.MoE8E' in done.stdout


@pytest.mark.slow
def test_the_readmes_commands_train_decode_and_translate_a_users_own_text(tmp_path):
  number = 'null eins zwei drei vier fünf sechs sieben acht neun'.split()
  numeral = 'zero one two three four five six seven eight nine'.split()
  for language, words in ('de', number), ('en', numeral):
    lines = (' '.join(words[int(digit)] for digit in f'{7919 * i % 100_000}') + '\n' for i in range(840))
    (tmp_path / f'a.{language}').write_text(''.join(lines), encoding='utf-8')
  smaller = {'source_vocab_size': 300, 'batch_tokens': 512, 'max_length': 16}
  smaller |= {'model_dim': 16, 'ff_dim': 16, 'encoder_layers': 2, 'decoder_layers': 2, 'num_experts': 4}
  smaller = [f'--set={field}={value}' for field, value in smaller.items()]
  (own_text,) = [block for block in blocks('README.md', 'sh') if 'lingvo-moe prepare' in block]
  jobs = []
  for line in own_text.splitlines():
    job = (re.findall(r'lingvo-moe (\w+)', line) or [''])[0]
    if job in ('', 'serve'):  # which would not end
      continue
    line = line.partition('  #')[0].replace(
      'lingvo-moe', f'{shlex.quote(sys.executable)} -m lingvo_moe.cli.commands.main'
    )
    line += {'train': ' --max_steps=3 ' + shlex.join(smaller), 'prepare': ' --dev=20 --test=20'}.get(job, '')
    done = subprocess.run(['bash', '-c', line], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    jobs.append((job, done.stdout))

  assert [job for job, _ in jobs] == ['models', 'prepare', 'train', 'decode', 'translate']
  assert 'de-en' in jobs[3][1] and jobs[4][1].count('\n') == 1


def test_the_files_for_a_scheduler_are_well_formed_and_give_flags_that_exist():
  yaml = pytest.importorskip('yaml')
  document = 'docs/cluster.md'
  (manifest,) = blocks(document, 'yaml')
  kinds = {item['kind']: item for item in yaml.safe_load_all(manifest)}
  job = kinds['Job']['spec']
  pod = job['template']['spec']
  (container,) = pod['containers']
  assert job['completionMode'] == 'Indexed' and job['completions'] == job['parallelism']
  assert pod['subdomain'] == kinds['Service']['metadata']['name'] and kinds['Service']['spec']['clusterIP'] == 'None'
  assert kinds['Service']['spec']['selector'] == {'job-name': kinds['Job']['metadata']['name']}
  assert {mount['name'] for mount in container['volumeMounts']} == {volume['name'] for volume in pod['volumes']}

  scripts = blocks(document, 'bash')
  found = [[*container['command'], *container['args']]]
  for script in scripts:
    subprocess.run(['bash', '-n'], input=script, text=True, check=True)
    line = re.search(r'python -m lingvo_moe[^\n\']*', script.replace('\\\n', ' '))
    found.append(shlex.split(line[0]))
  assert len(found) == 3
  for command in found:
    done = forks.run([*command[1:], '--only_check_args'], cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr


# Links, paths and figures


@pytest.mark.parametrize('document', DOCUMENTS)
def test_relative_links_lead_somewhere(document):
  links = [link for link in re.findall(r'\]\(([^)\s]+)\)', prose(document)) if '://' not in link]
  assert [link for link in links if not (ROOT / document).parent.joinpath(link.partition('#')[0]).exists()] == []


def anchors(document: pathlib.Path) -> set[str]:
  """Anchors of a document's headings, as GitHub makes them."""
  headings = re.findall(r'^#+ (.*)$', re.sub(r'^```.*?^```$', '', document.read_text('utf-8'), flags=re.S | re.M), re.M)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


@pytest.mark.parametrize('document', [*DOCUMENTS, 'CHANGELOG.md'])
def test_anchors_of_links_are_headings(document):
  here = ROOT / document
  links = re.findall(r'\]\(([^)\s:]*\.md)?#([^)\s]+)\)', prose(document))
  assert [
    f'{page}#{anchor}' for page, anchor in links if anchor not in anchors(here.parent / page if page else here)
  ] == []


@pytest.mark.parametrize('document', PAGES)
def test_every_page_ends_with_where_to_go_next(document):
  if document != 'docs/README.md':
    assert re.findall(r'^## (.*)$', prose(document), re.M)[-1] == 'Next'


def test_lists_in_the_pages_are_those_of_the_code():
  from lingvo_moe.addons.interop import families
  from lingvo_moe.cli.commands import export, import_
  from lingvo_moe.layers.experts import EXPERTS
  from lingvo_moe.layers.gates.table import GATES

  def first_cells(document, heading):
    table = (ROOT / document).read_text(encoding='utf-8').partition(heading)[2].partition('\n\n')[0]
    return {
      name for row in table.splitlines() for name in re.findall(r'`(\w+)`', row.split('|')[1] if '|' in row else '')
    }

  assert first_cells('docs/gates.md', '| `gate` | class |') == {*GATES}
  assert first_cells('docs/gates.md', '| `expert` | what it is |') == {*EXPERTS}
  formats = (ROOT / 'docs' / 'export.md').read_text(encoding='utf-8').partition('\n## ')[0]
  assert [name for name in export.FORMATS if f'`--format={name}`' not in formats] == []
  assert [name for name in export.FORMATS if f'--format={name} ' not in export.__doc__] == []
  table = (ROOT / 'docs' / 'import.md').read_text(encoding='utf-8').partition('## Families')[2].partition('### ')[0]
  classes = [name for family in families.FAMILIES for name in family.CLASSES]
  assert sorted(set(re.findall(r'\w+For\w+|T5WithLMHeadModel|MarianMTModel', table))) == sorted(classes)
  names = re.findall(r'^\| ([^|]+) \| \w+(?:For|MT)', table, re.M)
  said = ' '.join(import_.__doc__.split())
  assert [name for row in names for name in row.split(', ') if name.replace('T5 v1.1', 'T5').strip() not in said] == []


@pytest.mark.parametrize('document', DOCUMENTS)
def test_paths_in_backticks_exist(document):
  written = {path for block in blocks(document, 'python') if (path := module_path(block))}
  quoted = {span.split()[0] for span in re.findall(r'`([^`]+)`', prose(document)) if span.strip()}
  tops = ('lingvo_moe/', 'params/', 'tools/', 'tests/', 'docs/', '.ci/')
  paths = {path for path in quoted if path.startswith(tops)} - written
  paths = {path.rstrip(':') for path in paths}
  assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
  # A name alone is a file somewhere in the package.
  alone = {path for path in quoted if re.fullmatch(r'\w+\.py', path)} - written - {'run.py', 'toy.py'}
  assert [name for name in sorted(alone) if not list((ROOT / 'lingvo_moe').rglob(name))] == []


def test_every_reading_of_the_paper_names_the_code_that_does_it():
  readings = prose('docs/paper.md').partition('## How we read the paper')[2].partition('\n### beta2')[0]
  found = [
    re.findall(r'`((?:lingvo_moe|tools)/[^`:]+): (\w+)`', re.sub(r'\s+', ' ', item))
    for item in readings.split('\n- ')[1:]
  ]
  assert len(found) > 10 and all(found)
  for path, name in (place for places in found for place in places):
    assert re.search(rf'(def|class) {name}\b', (ROOT / path).read_text(encoding='utf-8')), f'{path}: {name}'


@pytest.mark.parametrize('document', DOCUMENTS)
def test_models_in_backticks_are_registered(document):
  quoted = set(re.findall(r'`(mt(?:\.\w+)+)`', prose(document))) - registered_by(document)
  modules = {name.rpartition('.')[0] for name in names()}
  assert [name for name in sorted(quoted) if name not in names() and name not in modules] == []


@pytest.mark.parametrize('path', ['README.md', 'tools/quickstart', 'params/mt/cldr.py'])
def test_the_quickstart_takes_as_long_wherever_it_is_said(path):
  text = re.sub(r'\s+(?:# )?', ' ', (ROOT / path).read_text(encoding='utf-8'))
  assert QUICKSTART_TIME in text
  assert re.findall(r'[\w.]+ (?:to [\w.]+ )?min(?:utes)?\b', text.replace(QUICKSTART_TIME, '')) in (
    [],
    ['$((SECONDS / 60)) min'],
  )


@pytest.mark.parametrize(
  'path', ['README.md', 'CHANGELOG.md', 'tools/quickstart', 'lingvo_moe/cli/commands/cldr.py', 'params/mt/cldr.py']
)
def test_the_corpus_has_as_many_languages_wherever_it_is_said(path):
  from lingvo_moe.corpora.cldr import corpus

  text = (ROOT / path).read_text(encoding='utf-8')
  assert f'{len(corpus.LANGUAGES)} languages' in text
  said = re.findall(r'(\d+) languages', text)
  assert {int(number) for number in said} <= {len(corpus.LANGUAGES), len(corpus.QUICKSTART_LANGUAGES)}


def test_contributing_has_the_alphabet_of_axes():
  from lingvo_moe.core import axes

  style = prose('CONTRIBUTING.md').partition('A tensor wears its axes')[2].partition('Layers are pure')[0]
  letters = re.findall(r'\| `([A-Z])` ', style)
  assert sorted([*letters, '1']) == sorted(axes.AXES)


def test_results_of_the_readme_are_those_of_the_models_docstrings():
  from lingvo_moe.config import registry

  name, checked = '', 0
  for row in re.findall(r'^\|(.*)\|$', (ROOT / 'README.md').read_text(encoding='utf-8'), flags=re.MULTILINE):
    cells = [cell.strip() for cell in row.split('|')]
    name = cells[0].strip('`') or name
    if name in names() and len(cells) == 5:
      assert re.search(rf'\b{re.escape(cells[3])}\b', inspect.getdoc(registry.get(name))), f'{cells[3]} of {name}'
      checked += 1
  assert checked > 5


# The runner


def run_blocks(path: pathlib.Path) -> None:
  """Runs the Python blocks of a document; AssertionError where one prints what it does not say."""
  namespace = {'__name__': '__main__'}
  with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
    for block in blocks(str(path), 'python'):
      if name := module_path(block):
        pathlib.Path(name).write_text(block, encoding='utf-8')
        continue
      printed = []
      namespace['print'] = lambda *values, printed=printed: printed.append(' '.join(map(str, values)))
      exec(compile(block, str(path), 'exec'), namespace)
      said = re.findall(r'^print\(.*\)  # (.*)$', block, flags=re.MULTILINE)
      assert printed == said, f'{path}: a block prints {printed} and says {said}:\n{block}'


if __name__ == '__main__':
  os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
  run_blocks(pathlib.Path(sys.argv[1]).absolute())


def test_the_reading_path_of_the_tour_is_ten_files_that_one_can_read():
  text = (ROOT / 'docs' / 'tour.md').read_text(encoding='utf-8')
  section = text.partition('## The MoE Transformer in ten files')[2].partition('\n## ')[0]
  files = re.findall(r'^\| \d+ \| `(.+?)` ', section, re.MULTILINE)
  lines = sum(len((ROOT / file).read_text(encoding='utf-8').splitlines()) for file in files)
  assert len(files) == 10 and lines < 2500
