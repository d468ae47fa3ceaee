"""Entry point of every command: parses flags, runs main, and prints a UserError as one line with exit status 1."""

import functools
import inspect
import json
import logging
import math
import os
import pathlib
import re
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags

from lingvo_moe.cli import allocator
from lingvo_moe.cli.options import OptionGroup
from lingvo_moe.core import host_memory, quiet
from lingvo_moe.core.errors import PeerError, ProcessLostError, UserError, respelled, shown
from lingvo_moe.storage import files

_IMPORT = (
  'File, such as harbour.py, or installed module that registers models of your own: it is executed. Those of a run are '
  'never executed without this flag; may be repeated.'
)
_HELP = {'help', 'h', 'helpshort'}
# Flags whose values are paths, in any command.
_PATHS = {
  *('logdir', 'data_dir', 'cache_dir', 'out_dir', 'init_from', 'gin_file', 'path'),
  *('source', 'target', 'tsv', 'out', 'output', 'extend', 'json', 'markdown', 'against', 'dump'),
}
_FILES = {'json', 'markdown', 'dump'}  # flags whose values are files to write
_SCHEMES = dict.fromkeys(('logdir', 'init_from', 'data_dir', 'cache_dir', 'path'), files.SCHEMES)


def command(
  *options: type[OptionGroup],
  tensorflow: bool = True,
  arguments: bool = False,
  takes: Sequence[str] = (),
  usage: str = '',
  models: bool = True,
) -> Callable:
  """Decorator of a command's main: makes it a function without arguments, which runs the command as typed.

  Args:
    *options: classes whose flags it has, and whose values, in this order, are the arguments of main.
    tensorflow: whether it uses TensorFlow, which is then imported first, without its messages.
    arguments: whether it takes positional arguments; sys.argv without its flags is then the first argument of main.
    takes: names of flags, in order, of which each must be given, by the flag or by an argument.
    usage: how they are given, for the error where one is not; by default as for one run.
    models: whether it takes a model or a run, and so the flag --import of a user's own models.
  """
  return lambda main: functools.partial(_run, main, options, tensorflow, arguments, takes, usage, models)


def _run(
  main: Callable[..., int | None], options, tensorflow: bool, arguments: bool, takes, usage: str, models: bool
) -> None:
  """Parses absl flags and runs main, whose result is the exit status; prints UserError without a stack trace."""

  def call(argv):
    if takes:
      name = pathlib.Path(inspect.getfile(main)).stem.replace('decoder', 'decode')
      _take(argv, takes, usage or f'one run is given, by its log directory: lingvo-moe {name} runs/mine')
    elif len(argv) > 1 and not arguments:
      raise UserError(f'arguments are given as --flag=value; saw {" ".join(argv[1:])!r} (see --help)')
    logging.getLogger('tensorflow').setLevel(logging.ERROR)  # it warns of its own old functions
    allocator.keep_memory()
    if tensorflow:
      quiet.import_tensorflow()
    if models and (imported_files := flags.FLAGS['import'].value):
      from lingvo_moe.config import registry  # takes long, and an export needs none

      registry.install(imported_files)
    status = main(*[argv] * arguments, *(given.from_flags() for given in options))
    if sys.stdout is not None:
      _flush_stdout()
    return status

  module = sys.modules[main.__module__]
  module_name = sys.argv[0] if module.__name__ == '__main__' else module.__name__  # as absl names modules
  for given in options:
    given.define_flags(module_name)
  if models:
    flags.DEFINE_multi_string('import', [], _IMPORT, module_name=module_name)
  app.run(lambda argv: _status(call, argv), flags_parser=lambda argv: _parse(argv, module))


def _parse(argv: list[str], command: types.ModuleType) -> list[str]:
  """Parses the flags; returns the positional arguments. Exits after --help and after a mistake."""
  words = argv[1:]
  words = words[: words.index('--') if '--' in words else None]
  if any(word.startswith('-') and word.lstrip('-').partition('=')[0] in _HELP for word in words):
    print_help(command)
    sys.exit(0)
  if '--helpfull' in argv:
    return app.parse_flags_with_usage(argv)
  try:
    positional = flags.FLAGS(argv)
    _check_values()
    return positional
  except (flags.Error, UserError) as e:
    sys.exit(f'error: {_printable(_explained(e))} (see --help)')


def _status(call: Callable[[list[str]], int | None], argv: list[str]) -> int | None:
  """Exit status of a call; an error of a user's is printed as one line."""
  try:
    return call(argv)
  except ProcessLostError as e:
    print(f'error: {_printable(str(e))}', file=sys.stderr, flush=True)
    os._exit(1)  # JAX would wait for the lost process at the end, and then abort with a stack trace
  except PeerError:
    return 1
  except UserError as e:
    message = str(e).split('\n  In call to configurable')[0]  # gin appends a line about its own call
    message = respelled(message, flags.FLAGS, '--')
  except BrokenPipeError:
    _drop_stdout()
    return 1
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  except OSError as e:
    message = f'{e.filename or "input or output"}: {e.strerror or e}'
  except UnicodeEncodeError as e:
    # Python keeps bytes of a file's name that are no UTF-8 as halves of surrogate pairs.
    message = f'names and text are written as {e.encoding}; saw {shown(e.object)}, which it cannot hold: rename it'
  except Exception as e:
    if type(e).__name__ != 'ResourceExhaustedError':  # TensorFlow's, which need not have been imported
      raise
    saw = (re.search(r'tensor with shape\[[\d,]*\] and type \w+', str(e)) or ['tensor'])[0]
    size = f'{host_memory.size() / 2**30:.1f} GiB on this host'
    message = f'a batch must fit into memory, {size}; no room for a {saw}: use smaller batches, or a smaller model'
  # Out here the frames of the error are gone, and with them progress bars that would share its line.
  print(f'error: {_printable(message)}', file=sys.stderr)
  return 1


def _take(argv: list[str], names: Sequence[str], usage: str) -> None:
  """Gives flags the values of the arguments, in order; UserError unless each is given once."""
  left, taken = [*filter(None, argv[1:])], [flags.FLAGS[name] for name in names]
  given = [*left, *filter(None, (flag.value for flag in taken))]
  if len(given) != len(names):
    raise UserError(f'{usage}; saw {" ".join(given) or "none"!r}')
  for flag in taken:
    flag.value = flag.value or left.pop(0)
    if flag.name in _SCHEMES:
      files.check_scheme('a log directory', flag.value, _SCHEMES[flag.name])


def print_help(module: types.ModuleType) -> None:
  """Prints a command's docstring and its flags; a reader may close the pipe before the end."""
  text = inspect.cleandoc(module.__doc__)
  flags_help = flags.FLAGS.module_help(module).strip().partition('\n')[2]  # without the line that names the module
  print_whole(f'{text}\n\nflags:\n\n{flags_help}' if flags_help else text)


def print_whole(text: str) -> None:
  """Prints a text, whose reader may close the pipe before its end; exits with an error where it cannot be written."""
  try:
    print(text, flush=True)
  except BrokenPipeError:
    _drop_stdout()
  except OSError as e:
    _drop_stdout()
    sys.exit(f'error: standard output: {e.strerror}')


def write_json(path: str | None, value: Any) -> None:
  """Writes what a command has found to the file that its flag --json names, if any."""
  if path:
    pathlib.Path(path).write_text(json.dumps(value, indent=2), encoding='utf-8')


def claim_stdout() -> None:
  """Reserves stdout for what Python prints; what native code writes to it, such as Gloo's messages, goes to stderr."""
  if sys.stdout is None:
    raise UserError('what is translated goes to standard output, which is closed: give it a file or a pipe')
  sys.stdout.flush()
  stdout_copy = os.dup(1)
  os.dup2(2, 1)
  sys.stdout = open(stdout_copy, 'w', encoding='utf-8', newline='\n', buffering=1 if os.isatty(stdout_copy) else -1)


def _printable(text: str) -> str:
  """Text in which characters that could command a terminal are escaped; a message may quote any file."""
  return ''.join(c if c.isprintable() or c == '\n' else ascii(c)[1:-1] for c in text)


def _check_values() -> None:
  """Refuses numbers that are not finite, paths of file systems that are not mounted, and files that cannot be made."""
  for name in flags.FLAGS:
    value = flags.FLAGS[name].value
    if isinstance(value, float) and not math.isfinite(value):
      raise UserError(f'--{name} must be a finite number; saw {value}')
    if name in _FILES and isinstance(value, str):
      _check_file(name, value)
    if name in _PATHS:
      for path in value if isinstance(value, list) else [value] * isinstance(value, str):
        files.check_scheme(f'--{name}', path, _SCHEMES.get(name, ()))


def _check_file(name: str, path: str) -> None:
  if os.path.isdir(path):
    raise UserError(f'--{name} is a file to write; saw the folder {path}: add a name')
  folder = os.path.dirname(path) or '.'
  if not files.scheme(path) and not os.path.isdir(folder):
    raise UserError(f'--{name} is a file to write in a folder that is there; saw {path}: make the folder {folder}')


def _explained(e: flags.Error) -> str:
  """absl's message; of a flag that is lacking, its name and meaning instead."""
  lacking = re.match(r'flag --(\w+)=None: Flag --\w+ must have a value other than None', str(e))
  if not lacking:
    return str(e)
  meaning = flags.FLAGS[lacking[1]].help
  return f'--{lacking[1]} must be given. {meaning}'


def _flush_stdout() -> None:
  """Writes what is buffered now, as an error at the interpreter's end would be a stack trace."""
  try:
    sys.stdout.flush()
  except BrokenPipeError:
    raise
  except OSError as e:
    _drop_stdout()
    raise OSError(e.errno, e.strerror, 'standard output') from None


def _drop_stdout() -> None:
  """Discards pending output, as its reader is gone."""
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
