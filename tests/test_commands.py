"""tools/test and tools/quickstart: what they install, and what they answer before anything is installed."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
COMMANDS = ('tools/test', 'tools/quickstart')


def _run(command: pathlib.Path, *args: str, **env: str) -> subprocess.CompletedProcess:
  env = {'PATH': os.environ['PATH'], **env}
  return subprocess.run([command, *args], env=env, capture_output=True, text=True, timeout=60)


@pytest.fixture
def checkout(tmp_path) -> pathlib.Path:
  """A checkout with the commands alone, so that no environment of ours is found or made."""
  shutil.copytree(ROOT / 'tools', tmp_path / 'tools', ignore=shutil.ignore_patterns('__pycache__'))
  return tmp_path


def _fake_python(folder: pathlib.Path, version: str, supported: bool) -> pathlib.Path:
  """A Python that reports a version and can do nothing else."""
  path = folder / 'fake_python'
  path.write_text(f"""#!/bin/sh
case "$2" in
  *python_version*) echo {version} ;;
  *version_info*) exit {int(not supported)} ;;
  *) exit 1 ;;
esac
""")
  path.chmod(0o755)
  return path


@pytest.mark.parametrize('command', [*COMMANDS, '.ci/run'])
def test_command_is_executable(command):
  assert os.access(ROOT / command, os.X_OK)


@pytest.mark.parametrize('command', COMMANDS)
def test_help_needs_no_environment(command, checkout):
  done = _run(checkout / command, '--help', VIRTUAL_ENV='', PYTHON='none')
  assert done.returncode == 0
  assert 'virtual environment' in done.stdout and '#' not in done.stdout


@pytest.mark.parametrize('command', COMMANDS)
def test_unsupported_python_is_named(command, checkout):
  python = _fake_python(checkout, '3.9.1', supported=False)
  done = _run(checkout / command, *_logdir(command, checkout), VIRTUAL_ENV='', PYTHON=str(python))
  assert done.returncode == 1
  assert f'needs Python 3.11, 3.12 or 3.13, but {python} here is 3.9.1.' in done.stderr


def test_missing_venv_module_is_answered_with_the_package_to_install(checkout):
  python = _fake_python(checkout, '3.11.2', supported=True)
  done = _run(checkout / 'tools/test', VIRTUAL_ENV='', PYTHON=str(python))
  assert done.returncode == 1
  assert '(3.11.2) cannot make virtual environments' in done.stderr
  assert 'python3-venv' in done.stderr


def test_unsupported_active_environment_is_named(checkout):
  (checkout / 'env' / 'bin').mkdir(parents=True)
  _fake_python(checkout, '3.14.0', supported=False).rename(checkout / 'env' / 'bin' / 'python')
  done = _run(checkout / 'tools/test', VIRTUAL_ENV=str(checkout / 'env'))
  assert done.returncode == 1
  assert f'environment {checkout}/env has 3.14.0: deactivate it' in done.stderr


def test_quickstart_answers_an_unknown_argument_with_those_it_knows(checkout):
  done = _run(checkout / 'tools/quickstart', '--max_step=3')
  assert done.returncode == 1
  assert 'unknown argument --max_step=3' in done.stderr and '--max_steps=N' in done.stderr


@pytest.fixture
def environment(checkout) -> pathlib.Path:
  """An active virtual environment, whose Python notes what pip is asked for and succeeds at everything."""
  python = checkout / 'env' / 'bin' / 'python'
  python.parent.mkdir(parents=True)
  python.write_text(f"""#!/bin/sh
case "$*" in
  *python_version*) echo 3.11.2 ;;
  *sys.prefix*) echo {checkout}/env ;;
  *lingvo_moe.params*) echo {checkout}/params/__init__.py ;;
  *'pip install'*) for last; do :; done; echo "$last" >> {checkout}/installed ;;
esac
""")
  python.chmod(0o755)
  (checkout / 'setup.py').write_text('first version')
  return checkout / 'env'


def _installed_by(command: str, environment: pathlib.Path) -> list[str]:
  """What the command asked pip for."""
  checkout = environment.parent
  log = checkout / 'installed'
  log.write_text('')
  done = _run(checkout / command, *_logdir(command, checkout), VIRTUAL_ENV=str(environment))
  assert done.returncode == 0, done.stderr
  return log.read_text().split()


def test_quickstart_installs_no_test_tools_and_nothing_twice(environment):
  assert _installed_by('tools/quickstart', environment) == ['.']
  assert _installed_by('tools/quickstart', environment) == []


def test_an_environment_with_the_test_extra_serves_the_quickstart_too(environment):
  assert _installed_by('tools/quickstart', environment) == ['.']
  assert _installed_by('tools/test', environment) == ['.[test]']
  assert _installed_by('tools/quickstart', environment) == []
  assert _installed_by('tools/test', environment) == []


def test_a_changed_setup_is_installed_again(environment):
  assert _installed_by('tools/test', environment) == ['.[test]']
  (environment.parent / 'setup.py').write_text('second version')
  assert _installed_by('tools/quickstart', environment) == ['.']
  assert _installed_by('tools/test', environment) == ['.[test]']


def test_files_that_run_alone_exist():
  listed = re.findall(r'^  (tests/\S+\.py)$', (ROOT / 'tools/test').read_text(), flags=re.MULTILINE)
  assert len(listed) > 5
  assert [name for name in listed if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize('job', ['trainer', 'decoder', 'translate'])
def test_help_of_a_job_has_the_flags_that_jobs_share(job):
  command = [sys.executable, '-m', f'lingvo_moe.{job}', '--help']
  said = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
  assert '--logdir' in said and '--mesh' in said and ('--beam_size' in said) == (job != 'trainer')


def _logdir(command: str, checkout: pathlib.Path) -> list[str]:
  return [f'--logdir={checkout}/run'] if command.endswith('quickstart') else []
