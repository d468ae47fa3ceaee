#!/usr/bin/env python
"""python tools/bench.py: the command `lingvo-moe bench`; see lingvo_moe/commands/bench.py, or --help."""

from lingvo_moe.commands import bench

if __name__ == '__main__':
  bench.command()
