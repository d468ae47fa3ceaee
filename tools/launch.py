#!/usr/bin/env python
"""python tools/launch.py: the command `lingvo-moe launch`; see lingvo_moe/commands/launch.py, or --help."""

from lingvo_moe.commands import launch

if __name__ == '__main__':
  launch.command()
