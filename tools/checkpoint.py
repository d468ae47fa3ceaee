#!/usr/bin/env python
"""python tools/checkpoint.py: the command `lingvo-moe checkpoint`; see lingvo_moe/commands/checkpoint.py, or --help."""

from lingvo_moe.commands import checkpoint

if __name__ == '__main__':
  checkpoint.command()
