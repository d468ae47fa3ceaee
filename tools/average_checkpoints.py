#!/usr/bin/env python
"""python tools/average_checkpoints.py: the command `lingvo-moe average`; see lingvo_moe/commands/average.py, or --help."""

from lingvo_moe.commands import average

if __name__ == '__main__':
  average.command()
