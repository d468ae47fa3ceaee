"""What a wheel holds, and what stays out of it."""

import functools
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata

import forks
import pytest
import test_docs
import toy_run as toy

import lingvo_moe
from lingvo_moe.addons.engine import manifest
from lingvo_moe.addons.interop import pickled
from lingvo_moe.cli.commands import export, main

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDERS = ('lingvo_moe', 'params', 'tests', 'tools')


@pytest.fixture(scope='module')
def wheel(tmp_path_factory) -> zipfile.ZipFile:
  """A wheel of this checkout, built from a copy so that nothing is left behind in it."""
  for module in 'pip', 'setuptools', 'wheel':
    if importlib.util.find_spec(module) is None:
      pytest.skip(f'building a wheel needs {module}, which is not installed here')
  source = tmp_path_factory.mktemp('source')
  for name in FOLDERS:
    shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns('__pycache__'))
  for path in ROOT.iterdir():
    if path.is_file():
      shutil.copy(path, source)
  (source / 'params' / 'mt' / 'planted.gin').write_text('A.b = 1\n')
  out_dir = tmp_path_factory.mktemp('wheel')
  command = [sys.executable, '-m', 'pip', 'wheel', '--quiet', '--no-deps', '--no-build-isolation']
  done = subprocess.run([*command, '-w', out_dir, source], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  (path,) = out_dir.glob('*.whl')
  with zipfile.ZipFile(path) as opened:
    yield opened


def _modules(folder: str, prefix: str) -> set[str]:
  paths = (ROOT / folder).rglob('*.py')
  return {f'{prefix}/{path.relative_to(ROOT / folder).as_posix()}' for path in paths}


def test_wheel_holds_every_module_and_params_as_a_sub_package(wheel):
  held = {name for name in wheel.namelist() if name.endswith('.py')}
  assert held == _modules('lingvo_moe', 'lingvo_moe') | _modules('params', 'lingvo_moe/params')
  assert 'lingvo_moe/params/mt/__init__.py' in held


def test_wheel_has_the_command_and_every_module_that_it_calls(wheel):
  (entry_points,) = [name for name in wheel.namelist() if name.endswith('.dist-info/entry_points.txt')]
  assert 'lingvo-moe = lingvo_moe.cli.commands.main:main' in wheel.read(entry_points).decode()
  modules = {f'lingvo_moe/{module.replace(".", "/")}.py' for module, _ in main.COMMANDS.values()}
  assert modules <= set(wheel.namelist())


@pytest.mark.slow
def test_a_wheel_in_an_empty_environment_trains_and_translates_outside_any_checkout(wheel, tmp_path):
  environment, away = tmp_path / 'environment', tmp_path / 'away'
  subprocess.run([sys.executable, '-m', 'venv', environment], check=True)
  (site,) = environment.glob('lib/python*/site-packages')
  # What the package needs is taken from where the tests have it; lingvo_moe itself is not there to be found.
  needs = {str(pathlib.Path(importlib.util.find_spec(name).origin).parents[1]) for name in ('tensorflow', 'absl')}
  (site / 'needs.pth').write_text('\n'.join(sorted(needs)))
  install = [environment / 'bin/python', '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index', wheel.filename]
  subprocess.run(install, check=True, capture_output=True)
  away.mkdir()

  def moe(*words, **options):
    env = {name: value for name, value in os.environ.items() if name not in ('PYTHONPATH', 'TF_CPP_MIN_LOG_LEVEL')}
    command = [environment / 'bin/lingvo-moe', *words]
    done = subprocess.run(command, cwd=away, env=env, capture_output=True, text=True, timeout=600, **options)
    assert done.returncode == 0, done.stderr
    return done

  where = 'import lingvo_moe.params; print(lingvo_moe.params.__file__)'
  found = subprocess.run([environment / 'bin/python', '-c', where], cwd=away, capture_output=True, text=True).stdout
  assert found.startswith(str(site))
  assert 'mt.m4.MoE2048E36L ' in moe('models').stdout
  moe('cldr', '--out_dir=data', '--languages=de', '--max_pairs=200')
  sizes = ['--set=batch_tokens=512', '--set=source_vocab_size=400', '--set=target_vocab_size=400']
  moe('train', '--model=mt.cldr.Tiny', '--logdir=runs/mine', '--data_dir=data', '--max_steps=2', *sizes)
  translated = moe('translate', '--logdir=runs/mine', input='1 Tag\n')
  assert translated.stdout.count('\n') == 1 and translated.stderr == ''
  assert 'mean BLEU' in moe('decode', '--logdir=runs/mine', '--once', '--max_sentences=2').stdout


def test_wheel_has_no_params_tools_or_tests_of_its_own(wheel):
  tops = {name.split('/')[0] for name in wheel.namelist()}
  assert {top for top in tops if not top.endswith('.dist-info')} == {'lingvo_moe'}


def test_gin_files_and_data_travel_with_what_reads_them(wheel):
  assert {'lingvo_moe/params/mt/planted.gin', 'lingvo_moe/corpora/cldr/data.toml'} <= set(wheel.namelist())


def test_pages_travel_with_their_style_and_script(wheel):
  pages = {'addons/serving/page.html', 'addons/serving/page.css', 'addons/serving/page.js', 'addons/report/report.css'}
  assert {f'lingvo_moe/{name}' for name in pages} <= set(wheel.namelist())


def test_wheel_names_its_license_and_pythons(wheel):
  (metadata,) = [name for name in wheel.namelist() if name.endswith('.dist-info/METADATA')]
  text = wheel.read(metadata).decode()
  assert 'License: Apache-2.0' in text or 'License-Expression: Apache-2.0' in text
  (pythons,) = [line for line in text.splitlines() if line.startswith('Requires-Python: ')]
  assert '>=3.11' in pythons and '<3.14' in pythons
  assert any(name.endswith('/LICENSE') for name in wheel.namelist())


def test_packages_have_an_init_file_each():
  for top in 'lingvo_moe', 'params':
    folders = {path.parent for path in (ROOT / top).rglob('*.py')}
    missing = [str(folder) for folder in folders if not (folder / '__init__.py').exists()]
    assert not missing, f'without __init__.py these are left out of the wheel: {missing}'


def test_dockerfile_is_clean_and_takes_what_a_wheel_needs():
  dockerfile = ROOT / 'tools' / 'Dockerfile'
  copied = [word for line in re.findall(r'^COPY (.*) \S+$', dockerfile.read_text(), re.M) for word in line.split()]
  assert sorted(copied) == sorted(['lingvo_moe', 'params', 'setup.py', 'pyproject.toml', 'README.md', 'LICENSE'])
  hadolint = shutil.which('hadolint', path=os.pathsep.join([os.path.dirname(sys.executable), os.environ['PATH']]))
  if not hadolint:
    pytest.skip('hadolint is not installed here')
  done = subprocess.run([hadolint, dockerfile], capture_output=True, text=True)
  assert done.returncode == 0, done.stdout


def _needed(names, found) -> dict[str, metadata.Distribution]:
  """Distributions of these names and all that they need, by name."""
  for requirement in names:
    name = re.match(r'[\w.-]+', requirement)[0]
    if 'extra ==' not in requirement and 'Windows' not in requirement and name not in found:
      found[name] = metadata.distribution(name)
      _needed(found[name].requires or [], found)
  return found


@pytest.fixture(scope='module')
def small(wheel, toy_run, tmp_path_factory) -> tuple[pathlib.Path, pathlib.Path]:
  """(Python of an environment with this package and what an export's requirements.txt names alone, the export)."""
  folder = tmp_path_factory.mktemp('small')
  export.export(export.Options(toy_run.path, out=str(folder / 'out'), format='litert', weights='float32'))
  subprocess.run([sys.executable, '-m', 'venv', '--without-pip', folder / 'env'], check=True)
  (site,) = (folder / 'env').glob('lib/python3*/site-packages')
  wheel.extractall(site)
  requirements = (folder / 'out' / 'requirements.txt').read_text().splitlines()
  for distribution in _needed(requirements, {}).values():
    for file in distribution.files:
      path = pathlib.Path(distribution.locate_file(file))
      if '..' not in file.parts and '__pycache__' not in file.parts and path.is_file():
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        os.link(path, site / file) if path.stat().st_dev == site.stat().st_dev else shutil.copy(path, site / file)
  return folder / 'env' / 'bin' / 'python', folder / 'out'


@pytest.mark.long('it exports a run, and another Python imports the engine')
def test_an_export_translates_in_an_environment_under_150_megabytes_without_tensorflow(small, toy_run):
  python, out = small
  files = [path for path in python.parent.parent.rglob('*') if path.is_file() and not path.is_symlink()]
  assert 100e6 < sum(path.stat().st_size for path in files) < 150e6
  lines = [source for source, _ in toy.sentences()]
  command = [python, '-m', 'lingvo_moe.cli.commands.main', 'translate', out]
  done = subprocess.run(command, input='\n'.join(lines) + '\n', capture_output=True, text=True, env={'HOME': '/'})
  assert done.returncode == 0, done.stderr
  assert done.stderr.splitlines() == ['using the checkpoint of ' + lingvo_moe.load(str(out)).checkpoint]
  assert done.stdout.splitlines() == lingvo_moe.load(toy_run.path).translate(lines)


def test_a_log_directory_needs_tensorflow_and_the_message_says_so(small, toy_run):
  command = [small[0], '-m', 'lingvo_moe.cli.commands.main', 'translate', toy_run.path]
  done = subprocess.run(command, capture_output=True, text=True, env={'HOME': '/'})
  assert done.returncode == 1
  assert done.stderr.count('\n') == 1 and 'a log directory needs TensorFlow, which is not installed' in done.stderr


USES = """
import json, sys
import lingvo_moe
model = lingvo_moe.load(sys.argv[1])
model.score([('Ein Hund', 'A dog')])
from lingvo_moe import serve, translate
from lingvo_moe.addons.serving import http_app
serve.load(serve.Options(sys.argv[1]))
heavy = {'tensorflow', 'tensorflow_text', 'jax', 'gin', 'sacrebleu'}
print(json.dumps(sorted(heavy & {name.partition('.')[0] for name in sys.modules})))
"""


def test_an_export_is_loaded_and_served_without_the_import_of_tensorflow_or_jax(small):
  done = subprocess.run([sys.executable, '-c', USES, small[1]], capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert json.loads(done.stdout) == []


def test_versions_that_read_hostile_files_safely_are_the_least_that_are_installed():
  setup = (ROOT / 'setup.py').read_text()
  least = {name: re.search(rf"'{name}>=([\d.]+)", setup)[1] for name in ('sentencepiece', 'aiohttp', 'torch')}
  as_numbers = {name: tuple(map(int, version.split('.'))) for name, version in least.items()}
  assert as_numbers['sentencepiece'] >= (0, 2, 3) and as_numbers['aiohttp'] >= (3, 13, 4)
  assert as_numbers['torch'] == pickled._SAFE and pickled._SAFE >= (2, 10)
  assert f'torch {least["torch"]} or later' in (ROOT / 'docs' / 'import.md').read_text()
  assert f'sentencepiece>={least["sentencepiece"]}' in manifest.REQUIREMENTS


PAGE = 'docs/add_a_model.md'


@pytest.fixture
def typed(wheel, tmp_path):
  """Function that types the page's commands of these names, in an empty folder with a wheel."""
  folder = tmp_path / 'empty'
  wheel.extractall(tmp_path / 'site')
  command_file = tmp_path / 'bin' / 'lingvo-moe'
  command_file.parent.mkdir()
  command_file.write_text('import sys\nfrom lingvo_moe.cli.commands.main import main\nsys.exit(main())\n')
  for corpus in ('MULTI30K', 'HARBOUR'):
    toy.write_corpus(folder / corpus)
  run = functools.partial(forks.run, cwd=folder, timeout=600, installed=tmp_path / 'site')
  shallow = [f'--set={field}=1' for field in ('encoder_layers', 'decoder_layers', 'moe_every')]
  shallow += ['--set=experts_in=decoder']
  small = [
    *shallow,
    '--max_steps=1',
    '--set=batch_tokens=512',
    '--set=max_length=32',
    '--set=model_dim=32',
    '--set=pairs=de-en',
  ]
  small += ['--set=source_vocab_size=296', '--set=target_vocab_size=296', '--set=label_smoothing=0.0']
  assert run(['-c', 'print(__import__("lingvo_moe").__file__)']).stdout.startswith(str(tmp_path))

  def typed(*names):
    said = []
    for block in test_docs.fenced(PAGE):
      if path := test_docs.module_path(block.text):
        (folder / path).write_text(block.text)
      for command in test_docs.commands_of(block.text) if block.language == 'sh' else ():
        assert command[0] == 'lingvo-moe'
        if command[1] in names:
          more = {'train': small, 'parity': shallow, 'lint': shallow}.get(command[1], [])
          if 'mt.multi30k.MoE8E' in ' '.join(command) and command[1] == 'train':
            more = [*more, '--set=split_files=()']
          done = run([command_file, *command[1:], *more], input='Ein Hund.\n')
          assert done.returncode == 0, f'{command}: {done.stderr[-3000:]}'
        said.append(command[1])
    assert said == ['models', 'train', 'train', 'models', 'models', 'train', 'translate', 'parity', 'lint']
    return run

  yield typed
  assert not [*(tmp_path / 'site').rglob('harbour*')]


@pytest.mark.compiled
def test_the_page_on_models_is_typed_in_an_empty_folder_with_a_wheel(typed):
  run = typed('models', 'train', 'translate')
  done = run([ROOT / 'tests' / 'test_docs.py', ROOT / PAGE])
  assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.compiled
@pytest.mark.slow
def test_models_of_the_page_agree_on_meshes_and_every_tensor_is_split(typed):
  typed('parity', 'lint')
