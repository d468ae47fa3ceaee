#!/usr/bin/env python
"""python tools/parity.py: the command `lingvo-moe parity`; see lingvo_moe/commands/parity.py, or --help."""

from lingvo_moe.commands import parity

if __name__ == '__main__':
  parity.command()
