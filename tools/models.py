#!/usr/bin/env python
"""python tools/models.py: the command `lingvo-moe models`; see lingvo_moe/commands/models.py, or --help."""

from lingvo_moe.commands import models

if __name__ == '__main__':
  models.command()
