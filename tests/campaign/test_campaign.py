"""A short campaign of faults; see __main__.py for longer ones."""

import pathlib
import subprocess
import sys
import types

import pytest

from tests.campaign import __main__
from tests.campaign.world import Result

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent


def test_each_case_is_printed_as_it_ends(monkeypatch, capsys):
  def cases(*_):
    yield Result('log/config.json', 'bit 3 of byte 7', 'refused')
    assert 'refused: log/config.json, bit 3 of byte 7' in capsys.readouterr().out
    raise KeyboardInterrupt

  monkeypatch.setattr(__main__.world, 'make', lambda root: types.SimpleNamespace(seconds=1.0))
  monkeypatch.setattr(__main__.flips, 'campaign', cases)
  monkeypatch.setattr(sys, 'argv', ['campaign', '--kills=0', '--full_disks=0'])
  with pytest.raises(KeyboardInterrupt):
    __main__.main()
  unclean = Result('corpus/*', 'bit 1 of byte 2', 'ANOTHER RESULT', '3')
  monkeypatch.setattr(__main__.flips, 'campaign', lambda *_: iter([unclean]))
  assert __main__.main() == 1
  assert capsys.readouterr().out.endswith('\nANOTHER RESULT: corpus/*, bit 1 of byte 2\n3\n')


@pytest.mark.slow
def test_a_short_campaign_finds_nothing():
  command = [sys.executable, '-m', 'tests.campaign', '--seed=1', '--flips=36', '--kills=2', '--full_disks=1']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
