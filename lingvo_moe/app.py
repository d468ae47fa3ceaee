"""Entry point of every command: parses flags, runs main, and prints a UserError as one line with exit status 1."""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from collections.abc import Callable

from absl import app
from absl import flags

from lingvo_moe.core.errors import ProcessLostError
from lingvo_moe.core.errors import ToldElsewhereError
from lingvo_moe.core.errors import UserError

# TensorFlow's messages at start-up would hide the one line that matters.
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def _parse_flags(argv):
  try:
    return flags.FLAGS(argv)
  except flags.Error as e:
    print(f'error: {e} (see --help)', file=sys.stderr)
    sys.exit(1)


def run(main: Callable[[list[str]], int | None], tensorflow: bool = True, arguments: bool = False) -> None:
  """Parses absl flags and runs main(argv); prints UserError without a stack trace.

  Args:
    main: the command; what it returns is the exit status.
    tensorflow: whether it uses TensorFlow, which is then imported first, without its messages.
    arguments: whether it takes positional arguments, in argv[1:].
  """

  def guarded(argv):
    if len(argv) > 1 and not arguments:
      raise UserError(f'arguments are given as --flag=value; saw {" ".join(argv[1:])!r} (see --help)')
    if tensorflow:
      import_tensorflow_quietly()
    return main(argv)

  def shielded(argv):
    try:
      return guarded(argv)
    except ProcessLostError as e:
      print(f'error: {e}', file=sys.stderr, flush=True)
      os._exit(1)  # JAX would wait for the lost process at the end, and then abort with a stack trace
    except ToldElsewhereError:
      return 1
    except UserError as e:
      message = str(e).split('\n  In call to configurable')[0]  # gin appends a line about its own call
    except BrokenPipeError:
      os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
      return 1
    except KeyboardInterrupt:
      print('interrupted', file=sys.stderr)
      return 130
    except OSError as e:
      message = f'{e.filename or "input or output"}: {e.strerror or e}'
    # Out here the frames of the error are gone, and with them progress bars that would share its line.
    print(f'error: {message}', file=sys.stderr)
    return 1

  app.run(shielded, flags_parser=_flags_parser)


def claim_stdout() -> None:
  """Reserves stdout for what Python prints; what native code writes to it, such as Gloo's messages, goes to stderr."""
  sys.stdout.flush()
  own = os.dup(1)
  os.dup2(2, 1)
  sys.stdout = open(own, 'w', encoding='utf-8', newline='\n', buffering=1 if os.isatty(own) else -1)


def _flags_parser(argv):
  # absl handles --help, and we handle a bad flag.
  if any(a in ('--help', '-h', '-help', '--helpfull', '--helpshort') for a in argv[1:]):
    return app.parse_flags_with_usage(argv)
  return _parse_flags(argv)


def import_tensorflow_quietly() -> None:
  """Imports TensorFlow with stderr redirected to a file, as no log level turns off all of its messages.

  If the import fails, they are printed.
  """
  with tempfile.TemporaryFile() as held:
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(held.fileno(), 2)
    try:
      importlib.import_module('tensorflow')
    except BaseException:
      held.seek(0)
      os.write(stderr, held.read())
      raise
    finally:
      os.dup2(stderr, 2)
      os.close(stderr)
