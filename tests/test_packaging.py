"""What a wheel holds, and what stays out of it."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from lingvo_moe.commands import main

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
  assert 'lingvo-moe = lingvo_moe.commands.main:main' in wheel.read(entry_points).decode()
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


def test_gin_files_travel_with_their_models(wheel):
  assert 'lingvo_moe/params/mt/planted.gin' in wheel.namelist()


def test_pages_travel_with_their_style_and_script(wheel):
  pages = {'serving/page.html', 'serving/page.css', 'serving/page.js', 'report/report.css'}
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
