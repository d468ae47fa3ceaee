"""What a wheel holds, and what stays out of it."""

from __future__ import annotations

import importlib.util
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

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


def test_wheel_has_no_params_tools_or_tests_of_its_own(wheel):
  tops = {name.split('/')[0] for name in wheel.namelist()}
  assert {top for top in tops if not top.endswith('.dist-info')} == {'lingvo_moe'}


def test_gin_files_travel_with_their_models(wheel):
  assert 'lingvo_moe/params/mt/planted.gin' in wheel.namelist()


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
