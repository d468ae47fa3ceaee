"""Other random models than those of the fixtures, against their own implementation, which must be installed."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.slow
def test_models_of_another_seed_are_equal_too(tmp_path):
  pytest.importorskip('transformers')
  subprocess.run([sys.executable, ROOT / 'tools' / 'interop_fixtures.py', tmp_path, '2'], check=True)
  tests = [ROOT / 'tests' / 'interop' / f'test_{name}.py' for name in ('import', 'training', 'pickled')]
  command = [sys.executable, '-m', 'pytest', '-q', '-m', 'not slow and not compiled', *tests]
  done = subprocess.run(command, env={**os.environ, 'LINGVO_MOE_INTEROP': str(tmp_path)}, cwd=ROOT, check=False)
  assert done.returncode == 0
