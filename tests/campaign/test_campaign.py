"""A short campaign of faults; see __main__.py for longer ones."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_a_short_campaign_finds_nothing():
  command = [sys.executable, '-m', 'tests.campaign', '--seed=1', '--flips=36', '--kills=2', '--full_disks=1']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
