"""pytest plugin for tools/mutants.py: a mutant's tests in order of their seconds, a minute of them at most.

Most mutants are caught by a test of milliseconds; without an order, one of half a minute may come first.
"""

import itertools
import json
import os
import pathlib

_AT_MOST = 60  # seconds


def pytest_collection_modifyitems(config, items) -> None:
  mutant = os.environ.get('MUTANT_UNDER_TEST', 'none')  # '': the tests before any mutant; else what mutmut is doing
  if mutant and '__mutmut_' not in mutant:
    return
  seconds = json.loads(pathlib.Path('mutmut-stats.json').read_text(encoding='utf-8'))['duration_by_test']
  items.sort(key=lambda item: seconds.get(item.nodeid, 0))
  total = itertools.accumulate(seconds.get(item.nodeid, 0) for item in items)
  within = max(1, sum(t <= _AT_MOST for t in total))
  config.hook.pytest_deselected(items=items[within:])
  items[:] = items[:within]
