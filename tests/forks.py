"""Python commands of tests, each in a fork of a process that has imported TensorFlow and what the jobs share.

The one import takes 5 seconds, the other half a second.

A test of what a command imports, or of an environment variable that Python or TensorFlow reads when it starts,
calls subprocess.run instead.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping, Sequence

_lock = threading.Lock()


def run(
  words: Sequence[str | os.PathLike],
  cwd: str | os.PathLike | None = None,
  env: Mapping[str, str] | None = None,
  timeout: float = 300,
  check: bool = False,
  input: str = '',
  installed: str | os.PathLike = '',
) -> subprocess.CompletedProcess:
  """Result of subprocess.run([sys.executable, *words], capture_output=True, text=True, ...), by a fork.

  words: `FILE ARGUMENTS`, `-m MODULE ARGUMENTS` or `-c CODE ARGUMENTS`.
  installed: folder of another lingvo_moe, which is taken in place of this one.
  """
  words = [os.fspath(word) for word in words]
  with _lock, tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    given.write(input.encode())
    given.flush()
    files = [f'/proc/{os.getpid()}/fd/{f.fileno()}' for f in (given, out, err)]
    process = _server(os.fspath(installed))
    ask = {'words': words, 'cwd': os.fspath(cwd or os.getcwd()), 'env': dict(os.environ if env is None else env)}
    process.stdin.write(json.dumps(ask | {'files': files}) + '\n')
    pid = int(process.stdout.readline())
    began = time.monotonic()
    end = threading.Timer(timeout, os.kill, (pid, signal.SIGKILL))
    end.start()
    try:
      code = int(process.stdout.readline())
    finally:
      end.cancel()
    out.seek(0)
    err.seek(0)
    done = subprocess.CompletedProcess([sys.executable, *words], code, out.read().decode(), err.read().decode())
  if code == -signal.SIGKILL and time.monotonic() - began >= timeout:
    raise subprocess.TimeoutExpired(done.args, timeout, done.stdout, done.stderr)
  if check:
    done.check_returncode()
  return done


@functools.cache
def _server(installed: str) -> subprocess.Popen:
  """The process that forks; it ends when its standard input is closed, that is, with this one."""
  return subprocess.Popen(
    [sys.executable, __file__],
    env=os.environ | ({'PYTHONPATH': installed} if installed else {}),
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    bufsize=1,
  )


def _serve() -> None:
  """Forks for every line of standard input; writes the fork's number and, when it has ended, its exit status."""
  import quick_tensorflow
  import sacrebleu  # noqa: F401

  import lingvo_moe  # noqa: F401  (makes the import of TensorFlow quiet)

  quick_tensorflow.load()
  import tensorflow_text  # noqa: F401

  for name in ('cli.checkpoint_flags', 'cli.model_flags', 'run.evaluation', 'run.results', 'tasks.mt.mt_task'):
    importlib.import_module(f'lingvo_moe.{name}')

  gc.freeze()  # a collection in a fork would copy the pages of all that was imported
  requests = os.fdopen(os.dup(0), 'rb', 0)
  answers = os.fdopen(os.dup(1), 'wb', 0)
  for line in iter(requests.readline, b''):
    pid = os.fork()
    if not pid:
      requests.close()
      answers.close()
      _become(**json.loads(line))
    answers.write(b'%d\n' % pid)
    answers.write(b'%d\n' % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _become(words: list[str], cwd: str, env: dict[str, str], files: list[str]) -> None:
  """Does in this process what python with these words does."""
  for number, file in enumerate(files):
    opened = os.open(file, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_APPEND)
    os.dup2(opened, number)
    os.close(opened)
  os.chdir(cwd)
  os.environ.clear()
  os.environ.update(env)
  what = words[0] if words[0] in ('-c', '-m') else ''
  program, *arguments = words[1:] if what else words
  sys.argv = [what or program, *arguments]
  sys.path[0] = {'-c': '', '-m': cwd}.get(what, os.path.dirname(os.path.abspath(program)))
  sys.path[1:1] = [path for path in env.get('PYTHONPATH', '').split(os.pathsep) if path and path not in sys.path]
  code = 0
  try:
    if what == '-m':
      runpy.run_module(program, run_name='__main__', alter_sys=True)
    elif what == '-c':
      exec(compile(program, '<string>', 'exec'), {'__name__': '__main__'})
    else:
      runpy.run_path(program, run_name='__main__')
  except SystemExit as e:
    code = e.code
  except BaseException:
    code = 1
    traceback.print_exc()
  if code is not None and not isinstance(code, int):
    print(code, file=sys.stderr)
    code = 1
  threading._shutdown()
  atexit._run_exitfuncs()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code or 0)  # to take the interpreter down costs 2 seconds, as it touches all that was imported


if __name__ == '__main__':
  _serve()
