#!/usr/bin/env python
"""python tools/cost.py: the command `lingvo-moe cost`; see lingvo_moe/commands/cost.py, or --help."""

from lingvo_moe.commands import cost

if __name__ == '__main__':
  cost.command()
