"""A user's own models, from files outside the package: every command takes them, and nothing else is executed."""

import json
import os
import pathlib
import shutil

import forks
import pytest
import toy_run

import lingvo_moe
from lingvo_moe.core.errors import UserError

FILES = pathlib.Path(__file__).parent / 'data' / 'own'
LINGVO_MOE = ['-m', 'lingvo_moe.cli.commands.main']
SIZES = ['source_vocab_size=296', 'target_vocab_size=296', 'max_length=16', 'encoder_layers=1', 'decoder_layers=1']
SIZES += ['experts_in=decoder']
SIZES = [
  f'--set={value}' for value in ('pairs=de-en', *SIZES, 'moe_every=1', 'model_dim=16', 'ff_dim=16', 'eval_every=2')
]


def lingvo_moe_in(folder, *arguments, **options):
  """A command as typed in a folder, without our checkout on the path of modules."""
  return forks.run([*LINGVO_MOE, *arguments], cwd=folder, **options)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A user's folder, with harbour.py, a corpus and a run of it."""
  root = tmp_path_factory.mktemp('user')
  shutil.copy(FILES / 'harbour.py', root)
  toy_run.write_corpus(root / 'corpus')
  for language in ('de', 'en'):
    shutil.copy(root / f'corpus/de-en/dev.{language}', root / f'corpus/de-en/test.{language}')
  train = ['train', '--import=harbour.py', '--model=harbour.Tiny', '--data_dir=corpus', '--logdir=runs/x']
  done = lingvo_moe_in(root, *train, *SIZES, '--max_steps=1')
  assert done.returncode == 0, done.stderr
  return root


@pytest.mark.long('the first test of the file trains its run by a command')
def test_a_run_records_the_name_and_a_checksum_and_no_path(folder):
  text = (folder / 'runs/x/config.json').read_text()
  written = json.loads(text)
  assert written['model'] == 'harbour.Tiny' and len(written['source']) == 64
  assert 'harbour.py' not in text and written['values']['gate_temperature'] == 2.0


@pytest.mark.parametrize(
  'command',
  [
    ['translate', 'runs/x'],
    ['decode', 'runs/x', '--once'],
    ['train', '--logdir=runs/x', '--max_steps=2'],
  ],
  ids=lambda command: command[0],
)
def test_a_run_is_opened_with_import_alone(folder, command):
  done = lingvo_moe_in(folder, *command, input='Ein Hund läuft.\n')
  line = done.stderr.splitlines()[-1]
  assert done.returncode == 1 and line.startswith('error: ') and 'runs/x/config.json' in line
  assert line.endswith('a model of your own needs the file or module that registers it: --import=harbour.py)')
  assert 'Traceback' not in done.stderr and not done.stdout
  if command[0] == 'decode':  # tests below go on with a run, and translate with it
    done = lingvo_moe_in(folder, *command, '--import=harbour.py')
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize('command', [['report', 'runs/x'], ['average', 'runs/x', '--last=1', '--out=mean']])
def test_what_computes_nothing_with_the_model_needs_no_import(folder, command):
  done = lingvo_moe_in(folder, *command)
  assert done.returncode == 0, done.stderr
  if command[0] == 'average':
    source = lambda path: json.loads((folder / path / 'config.json').read_text())['source']
    assert source('mean') == source('runs/x')


def test_an_export_needs_no_import_and_translates_as_the_run(folder):
  done = lingvo_moe_in(
    folder, 'export', 'runs/x', 'float32', '--format=litert', '--weights=float32', '--import=harbour.py'
  )
  assert done.returncode == 0, done.stderr
  lines = 'Ein Hund läuft.\nZwei Kinder singen.\n'
  of_run = lingvo_moe_in(folder, 'translate', 'runs/x', '--import=harbour.py', input=lines)
  of_export = lingvo_moe_in(folder, 'translate', 'float32', input=lines)
  assert of_run.returncode == of_export.returncode == 0, of_export.stderr
  assert of_run.stdout == of_export.stdout and of_run.stdout.count('\n') == 2


def test_python_loads_a_run_by_imports(folder):
  with pytest.raises(UserError, match=r'--import=harbour.py'):
    lingvo_moe.load(str(folder / 'runs/x'))
  run = lingvo_moe.load(str(folder / 'runs/x'), imports=[str(folder / 'harbour.py')])
  assert run.model == 'harbour.Tiny' and len(run.translate(['Ein Hund läuft.'])) == 1


@pytest.mark.compiled
@pytest.mark.slow  # tests/addons/analysis has both commands with models of the package
def test_meshes_agree_with_one_device_and_every_tensor_is_split(folder):
  own = ['--import=harbour.py', '--model=harbour.Tiny', '--set=encoder_layers=1', '--set=decoder_layers=1']
  own += ['--set=moe_every=1', '--set=experts_in=decoder']
  done = lingvo_moe_in(folder, 'parity', *own, '--meshes=expert:2,data:2', timeout=600)
  assert done.returncode == 0 and 'all agree with one device' in done.stdout, done.stdout + done.stderr
  done = lingvo_moe_in(folder, 'lint', *own, '--mesh=data:2,expert:2', timeout=600)
  assert done.returncode == 0, done.stdout + done.stderr


# Nothing of a stranger's is executed.

HOSTILE = "import pathlib\npathlib.Path('executed').touch()\n" + (FILES / 'harbour.py').read_text()


def test_a_strangers_folder_executes_nothing(folder, tmp_path):
  shutil.copytree(folder / 'runs/x', tmp_path / 'runs/x')
  (tmp_path / 'harbour').mkdir()
  for path in ('harbour.py', 'runs/x/harbour.py', 'harbour/__init__.py'):
    (tmp_path / path).write_text(HOSTILE)
  done = lingvo_moe_in(tmp_path, 'translate', 'runs/x', input='Ein Hund.\n')
  assert done.returncode == 1 and '--import=harbour.py' in done.stderr
  assert not [*tmp_path.rglob('executed')]


@pytest.fixture
def hostile(folder, tmp_path, monkeypatch):
  """A working directory, from which Python imports, of modules that are executed if they are; a run, x, is in it."""
  shutil.copytree(folder / 'runs/x', tmp_path / 'x')
  for path in ('evil.py', 'evil/__init__.py', 'evil/models.py'):
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(HOSTILE)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  yield tmp_path
  assert not [*tmp_path.rglob('executed')]


def write_name(folder, name):
  written = json.loads((folder / 'x/config.json').read_text())
  written = {'model': name, 'values': written['values'], 'files': written['files']}
  (folder / 'x/config.json').write_text(json.dumps(written))


@pytest.mark.parametrize('name', ['../evil.Tiny', 'evil', 'os.path', '__main__.Tiny', 'mt.evil.Tiny', 'evil.Tiny'])
def test_a_name_that_a_run_gives_is_looked_up_and_never_imported(hostile, name):
  write_name(hostile, name)
  with pytest.raises(UserError, match='no model is called'):
    lingvo_moe.load('x')


def test_a_command_imports_no_name_that_a_run_gives(hostile):
  write_name(hostile, 'evil.models.Tiny')
  done = lingvo_moe_in(hostile, 'translate', 'x', input='Ein Hund.\n')
  assert done.returncode == 1 and 'no model is called' in done.stderr.splitlines()[-1]


# A file that changes, and mistakes.


def test_a_file_that_has_changed_is_said_and_the_run_keeps_its_values(folder, tmp_path):
  shutil.copytree(folder / 'runs/x', tmp_path / 'x')
  source, before = (FILES / 'harbour.py').read_text(), (tmp_path / 'x/config.json').read_bytes()
  go_on = ['train', '--logdir=x', '--import=harbour.py', f'--data_dir={folder / "corpus"}', '--max_steps=1']

  (tmp_path / 'harbour.py').write_text(source.replace('num_experts: int = 4', 'num_experts: int = 6'))
  done = lingvo_moe_in(tmp_path, *go_on)
  assert done.returncode == 0 and done.stderr.count('x/config.json was written: the run keeps the values there') == 1
  after = json.loads((tmp_path / 'x/config.json').read_text())
  assert after['source'] == json.loads(before)['source'] and after['values']['num_experts'] == 4

  (tmp_path / 'harbour.py').write_text(source.replace('gate_temperature: float = field(', 'heat: float = field('))
  done = lingvo_moe_in(tmp_path, *go_on)
  line = done.stderr.splitlines()[-1]
  assert done.returncode == 1 and "harbour.Tiny has no field 'gate_temperature' in this version" in line
  (tmp_path / 'harbour.py').write_text(source.replace('class Tiny', 'class Small'))
  done = lingvo_moe_in(tmp_path, *go_on)
  assert done.returncode == 1 and "no model is called 'harbour.Tiny'; closest: harbour.Small" in done.stderr


def test_a_model_is_described_and_listed_first(folder):
  listed = lingvo_moe_in(folder, 'models', '--import=harbour.py').stdout.splitlines()
  assert listed[1].split()[0] == 'harbour.Tiny' and listed[1].endswith(
    "A gate, experts and a layer of a user's own: for tests."
  )
  described = lingvo_moe_in(folder, 'models', '--import=harbour.py', '--model=harbour.Tiny', '--set=gate_temperature=3')
  assert 'gate_temperature = 3' in described.stdout and 'lingvo-moe train --model=harbour.Tiny' in described.stdout


def test_an_installed_package_names_its_modules_by_entry_points(folder, tmp_path):
  (tmp_path / 'site/seaside-1.dist-info').mkdir(parents=True)
  (tmp_path / 'site/seaside-1.dist-info/METADATA').write_text('Metadata-Version: 2.1\nName: seaside\nVersion: 1\n')
  entry = '[lingvo_moe.models]\nany = seaside.models\n'
  (tmp_path / 'site/seaside-1.dist-info/entry_points.txt').write_text(entry)
  (tmp_path / 'site/seaside').mkdir()
  (tmp_path / 'site/seaside/__init__.py').touch()
  shutil.copy(FILES / 'harbour.py', tmp_path / 'site/seaside/models.py')
  env = {**os.environ, 'PYTHONPATH': str(tmp_path / 'site')}
  done = lingvo_moe_in(tmp_path, 'models', '--model=seaside.models.Tiny', env=env)
  assert done.returncode == 0 and done.stdout.startswith('seaside.models.Tiny'), done.stderr
  listed = lingvo_moe_in(tmp_path, 'models', env=env).stdout.splitlines()
  assert listed[1].split()[0] == 'seaside.models.Tiny'
  (tmp_path / 'site/seaside/models.py').write_text('import nothing_of_that_name\n')
  done = lingvo_moe_in(tmp_path, 'models', env=env)
  assert done.returncode == 0 and 'mt.cldr.MoE8E' in done.stdout
  assert done.stderr.endswith('seaside.models needs the module nothing_of_that_name, which is not installed\n')
  done = lingvo_moe_in(tmp_path, 'models', '--model=seaside.models.Tiny')
  assert done.returncode == 1 and 'no model is called' in done.stderr
