"""tools/test, tools/quickstart and lingvo-moe: what they install, answer before any work, and say for --help."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import forks
import pytest

import lingvo_moe
from lingvo_moe.cli.commands import main
from lingvo_moe.core import errors

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
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


FAST = '-m not slow and not compiled --numprocesses=2 --dist=loadfile --no-loadscope-reorder'


@pytest.mark.parametrize(
  ('arguments', 'runs'),
  [
    (
      [],
      [
        f'{FAST} tests/core/ tests/layers/',
        f'{FAST} tests/tasks/',
        f'{FAST} tests/test_a.py tests/test_b.py tests/test_c.py tests/test_d.py',
        f'{FAST} tests/test_z.py',
      ],
    ),
    (
      ['--rest'],
      ['-m compiled and not slow tests/test_a.py', '-m compiled and not slow tests/test_b.py tests/test_d.py'],
    ),
    (['tests/test_a.py', '-k', 'x'], ['tests/test_a.py -k x']),
  ],
)
def test_files_marked_compiled_are_left_to_the_rest_where_each_of_them_has_a_process(arguments, runs, environment):
  checkout, python = environment.parent, environment / 'bin' / 'python'
  for folder in 'core', 'layers', 'tasks':
    (checkout / 'tests' / folder).mkdir(parents=True)
  marked = '@pytest.mark.compiled'
  for name, text in {'a': 'pytestmark = pytest.mark.compiled', 'b': marked, 'c': '', 'd': marked, 'z': ''}.items():
    (checkout / 'tests' / f'test_{name}.py').write_text(text)
  with python.open('a') as f:
    f.write(f'case "$*" in "-m pytest "*) echo "$*" >> {checkout}/ran;; esac\n')
    f.write('case "$*" in *test_b.py*) exit 3;; esac\n')
  done = _run(checkout / 'tools/test', *arguments, VIRTUAL_ENV=str(environment))
  assert sorted((checkout / 'ran').read_text().splitlines()) == [f'-m pytest {words}' for words in runs]
  assert (done.returncode != 0) == any('test_b.py' in words for words in runs)  # that file fails
  assert ('(tools/test --rest)' in done.stdout) == (not arguments)


@pytest.mark.parametrize('job', ['trainer', 'decoder', 'translate'])
def test_help_of_a_job_has_the_flags_that_jobs_share(job):
  command = ['-m', f'lingvo_moe.{job}', '--help']
  said = forks.run(command, timeout=60).stdout
  assert '--logdir' in said and '--mesh' in said and ('--beam_size' in said) == (job != 'trainer')


def _logdir(command: str, checkout: pathlib.Path) -> list[str]:
  return [f'--logdir={checkout}/run'] if command.endswith('quickstart') else []


# lingvo-moe


def _moe(*words: str, **options) -> subprocess.CompletedProcess:
  """lingvo-moe, as its entry point runs it."""
  command = ['-m', 'lingvo_moe.cli.commands.main', *words]
  return forks.run(command, timeout=300, **options)


# Modules that take seconds to import.
SLOW_MODULES = {'tensorflow', 'jax', 'sacrebleu', 'keras', 'matplotlib'}


@pytest.mark.parametrize('name', main.COMMANDS)
def test_every_subcommand_has_help_that_imports_nothing_slow(name):
  command = [sys.executable, '-X', 'importtime', '-m', 'lingvo_moe.cli.commands.main', name, '--help']
  done = subprocess.run(command, capture_output=True, text=True, timeout=60)
  assert (
    done.returncode == 0
    and f'lingvo-moe {name}' in done.stdout
    and 'python -m lingvo_moe.cli.commands' not in done.stdout
  )
  imported = {line.rpartition('|')[2].strip().split('.')[0] for line in done.stderr.splitlines() if '|' in line}
  slow = SLOW_MODULES | {'numpy'} if name in ('compare', 'average') else SLOW_MODULES  # these have quick help
  assert 'absl' in imported and not imported & slow


@pytest.mark.parametrize('module', sorted({module for module, _ in main.COMMANDS.values()}))
def test_a_module_of_a_subcommand_run_by_python_does_not_end_in_silence(module):
  done = forks.run(['-m', f'lingvo_moe.{module}', '--no_such_flag'], timeout=60)
  assert done.returncode == 1 and 'no_such_flag' in done.stderr


def test_lingvo_moe_lists_its_subcommands_and_its_version():
  done = _moe('--help')
  assert done.returncode == 0 and [name for name in main.COMMANDS if f'\n  {name} ' not in done.stdout] == []
  assert _moe().returncode == 1
  assert _moe('--version').stdout == f'lingvo-moe {lingvo_moe.__version__}\n'


def test_an_unknown_subcommand_is_answered_with_the_closest():
  done = _moe('tran')
  assert done.returncode == 1 and "there is no command 'tran'; closest: train" in done.stderr


@pytest.mark.parametrize('job', ['trainer', 'decoder', 'translate'])
def test_help_of_a_job_succeeds_whatever_reads_it(job):
  done = subprocess.run(
    f'set -o pipefail; {sys.executable} -m lingvo_moe.{job} --help | head -c 1',
    shell=True, executable='/bin/bash', capture_output=True, text=True, timeout=60,
  )  # fmt: skip
  assert done.returncode == 0 and done.stderr == ''


def test_a_flag_that_is_lacking_is_answered_with_its_meaning():
  done = _moe('lint', '--mesh=data:2')
  assert done.returncode == 1 and done.stderr == 'error: --model must be given. A registered model. (see --help)\n'


@pytest.mark.parametrize('command', ['decode', 'translate', 'serve', 'average', 'checkpoint'])
@pytest.mark.parametrize(('words', 'saw'), [('', 'none'), ('runs/a --FLAG=runs/b', 'runs/a runs/b'), ('a b', 'a b')])
def test_a_command_of_one_run_says_how_it_is_given(command, words, saw):
  done = _moe(command, *words.replace('FLAG', 'path' if command == 'checkpoint' else 'logdir').split())
  answer = f'error: one run is given, by its log directory: lingvo-moe {command} runs/mine; saw {saw!r}\n'
  assert done.returncode == 1 and done.stderr == answer


@pytest.mark.parametrize('command', ['decode --once', 'translate', 'average --last=1', 'checkpoint'])
def test_a_run_may_be_an_argument(command, tmp_path):
  done = _moe(*command.split(), 'mine', cwd=tmp_path)
  assert done.returncode == 1 and re.match('error: .*mine', done.stderr), done.stderr


def test_importing_tensorflow_is_as_quiet_as_in_a_command():
  code = 'import lingvo_moe, sys; assert "tensorflow" not in sys.modules\n'
  code += 'import tensorflow as tf; print(tf.add(1, 1).numpy())'
  env = {name: value for name, value in os.environ.items() if name != 'TF_CPP_MIN_LOG_LEVEL'}
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120, env=env)
  assert (done.stdout, done.stderr) == ('2\n', '')


def test_what_is_no_message_of_tensorflows_start_up_is_still_printed(tmp_path):
  (tmp_path / 'tensorflow.py').write_text(
    'import os, sys\nos.write(2, b"I0000 00:00:1795397392.395817   10288 port.cc:153] oneDNN\\n")\n'
    'os.write(2, b"a fault\\n")\nif "fail" in sys.argv: raise ImportError("no such library")\n'
  )
  code = 'import sys, lingvo_moe\nsys.path.insert(0, sys.argv[1])\nimport tensorflow'
  run = lambda *words: (
    subprocess.run([sys.executable, '-c', code, tmp_path, *words], capture_output=True, text=True).stderr
  )
  assert run() == 'a fault\n'
  assert 'oneDNN\na fault\n' in run('fail') and 'no such library' in run('fail')


def test_a_checkout_finds_its_models_when_another_copy_is_installed(tmp_path):
  """In a clone the working directory comes first, and what pip install . installed is not looked at."""
  for folder in 'lingvo_moe', 'params':
    shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns('__pycache__'))
  code = f'import sys; others = [p for p in sys.path if "__editable__" not in p and p != {str(ROOT)!r}]\n'
  code += f'sys.path = [{str(tmp_path)!r}, *others]\n'
  code += 'sys.meta_path = [f for f in sys.meta_path if "__editable__" not in str(f)]\n'
  code += 'from lingvo_moe.config import registry\nprint(sys.modules[registry.get("mt.cldr.Tiny").__module__].__file__)'
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
  assert done.stdout.strip() == str(tmp_path / 'params/mt/cldr.py'), done.stderr
  shutil.rmtree(tmp_path / 'params')
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
  assert 'run this elsewhere, or install the checkout that you are in, with pip install -e .' in done.stderr


def test_an_extra_is_answered_with_a_line_that_works_anywhere():
  assert errors.install_line('figures') == "pip install 'matplotlib>=3.9' 'scipy>=1.13'"
  assert errors.install_line('spmd').startswith("pip install 'jax") and 'lingvo_moe[' not in errors.install_line('spmd')
  assert errors.install_line('nonesuch') == "pip install -e '.[nonesuch]' in a checkout of lingvo_moe"


@pytest.mark.parametrize(
  'command',
  [
    'train --model=mt.cldr.Tiny --logdir=s3://b/run',
    'train --model=mt.cldr.Tiny --logdir=run --cache_dir=s3://b/cache',
    'decode --logdir=run --out=gs://b/out',
    'prepare --source=a.de --target=a.en --out=gs://b/corpus',
    'cldr --out_dir=hdfs://b/corpus',
    'vocab --data_dir=s3://b/corpus --output=v',
    'checkpoint --path=s3://b/run',
    'models --model=mt.cldr.Tiny --gin_file=gs://b/a.gin',
  ],
)
def test_a_path_with_a_scheme_is_refused_before_anything_is_made(command, tmp_path):
  done = _moe(*command.split(), cwd=tmp_path)

  assert done.returncode == 1 and done.stderr.count('\n') == 1
  assert re.match(
    r"error: --\w+ is a path of a file system that is mounted on this machine .*; saw '\w+://b", done.stderr
  )
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize('command', ['average gs://b/run --last=2', 'export runs/mine gs://b/out'])
def test_what_is_made_on_mounted_file_systems_alone_is_refused_in_a_line(command, tmp_path):
  done = _moe(*command.split(), cwd=tmp_path)

  assert done.returncode == 1 and done.stderr.count('\n') == 1
  assert re.match('error: .* mounted .*saw .*gs://b/.*: (copy|mount) ', done.stderr)
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
  ('words', 'closed', 'answer'),
  [
    ('--help', '>/dev/full', 'error: .*put: No space left on device\n'),
    ('translate --logdir=.', '<&-', 'error: what is to be translated comes from standard input, which is closed'),
    ('translate --logdir=.', '>&-', 'error: what is translated goes to standard output, which is closed'),
  ],
)
def test_streams_that_are_closed_or_full_are_told_in_one_line(words, closed, answer, tmp_path):
  command = f'{sys.executable} -m lingvo_moe.cli.commands.main {words} {closed}'
  done = subprocess.run(command, shell=True, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=300)
  assert done.returncode == 1 and re.match(answer, done.stderr) and done.stderr.count('\n') == 1


def test_a_result_that_a_full_disk_does_not_take_is_told_in_one_line():
  code = 'import os, runpy, sys; os.dup2(os.open("/dev/full", os.O_WRONLY), 1); sys.argv[1:] = ["models"]\n'
  code += 'runpy.run_module("lingvo_moe.cli.commands.main", run_name="__main__")'
  done = forks.run(['-c', code])
  assert done.returncode == 1 and re.fullmatch('error: .*put: No space left on device\n', done.stderr)


@pytest.mark.parametrize(
  ('command', 'answer'),
  [
    ('lint --model=mt.cldr.Tiny --mesh=data:2 --limit_mib=inf', '--limit_mib must be a finite number; saw inf'),
    ('decode --logdir=. --poll_seconds=nan', '--poll_seconds must be a finite number; saw nan'),
    ('decode --logdir=. --poll_seconds=1e30', 'poll_seconds'),
    ('decode . --split=/etc/a', "--split is the prefix of files in --data_dir, such as test; saw '/etc/a'"),
    ('serve . --batch_wait_ms=nan', '--batch_wait_ms must be a finite number; saw nan'),
    ('prepare --tsv=a --pair=a-b --out=d --columns=1,' + '1' * 5000, 'columns are two different numbers'),
    (
      'compare . . --json=none/a.json',
      '--json is a file to write in a folder that is there; saw none/a.json: make the folder none',
    ),
    ('vocab --data_dir=. --output=v --vocab_size=1000000000000', 'vocab_size=1000000000000'),
    ('vocab --data_dir=. --output=folder/', '--output is a path without .model; saw the folder folder/'),
    (
      'average --logdir=. --steps=' + '9' * 5000,
      "--steps are numbers with commas between, e.g. --steps=1000,2000; saw '9",
    ),
    ('compare . . --metric=', '--metric must be of BLEU, chrF2, chrF++; saw none'),
    ('compare . . --json=folder', '--json is a file to write; saw the folder folder: add a name'),
    ('export . out --split=dev', 'say on what text experts are chosen: add --keep_experts'),
  ],
)
def test_a_mistake_in_a_flag_gets_one_line_and_nothing_is_made(command, answer, tmp_path):
  (tmp_path / 'folder').mkdir()
  done = _moe(*command.split(), cwd=tmp_path)
  assert done.returncode == 1 and done.stderr.count('\n') == 1 and answer in done.stderr
  assert os.listdir(tmp_path) == ['folder'] and not os.listdir(tmp_path / 'folder')
