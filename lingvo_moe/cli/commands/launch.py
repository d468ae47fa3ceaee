"""lingvo-moe launch N -- COMMAND

Starts a command as N processes of one run on this machine, with the flags --coordinator, --num_processes and
--process_id:

  lingvo-moe launch 2 -- lingvo-moe train --runtime=spmd --mesh=expert:4 --model=mt.cldr.MoE8E --logdir=RUN

If a process is lost, prints which one and why, and ends the others. SIGTERM, SIGINT and SIGHUP go to all processes.
"""

import math
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from lingvo_moe.cli import app
from lingvo_moe.core.errors import UserError, shown

_GRACE_SECONDS = 100  # for the other processes to notice the loss themselves and end
_SETTLE_SECONDS = 5  # within which processes that end for one mistake have all ended
_POLL_SECONDS = 0.2
_MISTAKE = 1  # exit status after a UserError
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_STOPPED = tuple(128 + number for number in _FORWARDED)  # exit status after a signal, when all have saved and stopped


def launch(command: Sequence[str], count: int) -> int:
  """Runs `command` as `count` processes of one run; returns the exit status of the one that was lost, else 0.

  Each gets --coordinator, --num_processes and --process_id. Process 0 has our stdin, stdout and stderr, the others only
  stderr. SIGTERM, SIGINT and SIGHUP are forwarded.

  Raises:
    UserError: there is no such command, or no room for `count` processes; those that have begun are ended.
  """
  address = f'127.0.0.1:{free_port()}'
  nothing = {'stdin': subprocess.DEVNULL, 'stdout': subprocess.DEVNULL}
  processes: list[subprocess.Popen] = []
  previous = {}
  for number in _FORWARDED:
    if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
      previous[number] = signal.signal(number, lambda n, _: [p.send_signal(n) for p in processes if p.poll() is None])
  try:
    for index in range(count):
      process_command = [*command, f'--coordinator={address}', f'--num_processes={count}', f'--process_id={index}']
      processes.append(subprocess.Popen(process_command, **({} if index == 0 else nothing)))
    return _wait(processes)
  except OSError as e:
    raise UserError(
      f'process {len(processes)} of {count} could not be started by {command[0]!r} ({e.strerror}): what follows -- is '
      'a command as typed in a shell'
    ) from None
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
    for process in processes:
      if process.poll() is None:
        process.kill()


def _wait(processes: Sequence[subprocess.Popen]) -> int:
  lost, since, said = None, math.inf, False  # lost: its number and exit status
  while True:
    running = [process for process in processes if process.poll() is None]
    if not said and time.monotonic() - since <= _GRACE_SECONDS:  # after that they are killed by us
      lost = _lost([process.returncode for process in processes])
      since = min(since, time.monotonic()) if lost else math.inf
    passed = time.monotonic() - since
    # A UserError is printed by the process that raised it, and all processes end with its status.
    alike = all(process.returncode in (None, _MISTAKE) for process in processes)
    stopped = all(process.returncode in (None, *_STOPPED) for process in processes)
    if lost and not said and not stopped and not (alike and (not running or passed < _SETTLE_SECONDS)):
      said = True
      print(
        f'process {lost[0]} of {len(processes)} was lost ({_how(lost[1])}): the others cannot go on without '
        'it and are ended; the last checkpoint stands, and the same command goes on from it',
        file=sys.stderr,
        flush=True,
      )
    if not running:
      return lost[1] if lost else 0
    if passed > _GRACE_SECONDS:
      for process in running:
        process.kill()
    time.sleep(_POLL_SECONDS)


def _lost(statuses: Sequence[int | None]) -> tuple[int, int] | None:
  """(number, exit status) of the process that was lost: of several that have ended, one that a signal killed.

  A process that loses its peer ends by itself with an exit status, or is aborted by JAX.
  """
  ended = [(i, status) for i, status in enumerate(statuses) if status]
  blame = lambda process: 0 if process[1] > 0 else 1 if process[1] == -signal.SIGABRT else 2
  return max(ended, key=blame, default=None)


def _how(status: int) -> str:
  if status >= 0:
    return f'exit status {status}'
  return f'killed by {signal.Signals(-status).name if -status in list(signal.Signals) else f"signal {-status}"}'


def free_port() -> int:
  """A port of this machine that nobody listens on."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def main() -> None:
  """The command as typed. It takes no flags of its own, as those of the command that it launches follow."""
  if len(sys.argv) < 4 or not re.fullmatch('[1-9][0-9]{0,3}', sys.argv[1]) or sys.argv[2] != '--':
    if any(argument in ('--help', '-h') for argument in sys.argv[1:2]):
      app.print_help(sys.modules[__name__])
      sys.exit(0)
    sys.exit(f'error: the form is N -- COMMAND, N up to 9999; saw {shown(sys.argv[1:])} (see --help)')
  try:
    status = launch(sys.argv[3:], int(sys.argv[1]))
  except UserError as e:
    sys.exit(f'error: {e}')
  sys.exit(status if status >= 0 else 128 - status)


if __name__ == '__main__':
  main()
