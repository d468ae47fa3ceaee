"""lingvo-moe launch 2 -- lingvo-moe train --runtime=spmd --mesh=expert:4 --model=mt.cldr.MoE8E --logdir=DIR --data_dir=DATA

Launches a command as several processes of one run on this machine, with the flags --coordinator, --num_processes and
--process_id. If a process is lost, prints which one and why, and ends the others. SIGTERM, SIGINT and SIGHUP are
forwarded to all.
"""

from __future__ import annotations

import re
import sys

from lingvo_moe import app
from lingvo_moe import launcher
from lingvo_moe.core.errors import UserError
from lingvo_moe.core.errors import shown


def command() -> None:
  """The command as typed. It takes no flags of its own, as those of the command that it launches follow."""
  if len(sys.argv) < 4 or not re.fullmatch('[1-9][0-9]{0,3}', sys.argv[1]) or sys.argv[2] != '--':
    if any(argument in ('--help', '-h') for argument in sys.argv[1:2]):
      app.print_help(sys.modules[__name__])
      sys.exit(0)
    print(f'error: the form is N -- COMMAND, N up to 9999; saw {shown(sys.argv[1:])} (see --help)', file=sys.stderr)
    sys.exit(1)
  try:
    status = launcher.launch(sys.argv[3:], int(sys.argv[1]))
  except UserError as e:
    print(f'error: {e}', file=sys.stderr)
    sys.exit(1)
  sys.exit(status if status >= 0 else 128 - status)


if __name__ == '__main__':
  command()
