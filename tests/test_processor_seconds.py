"""The report of processor seconds, and the limit of a fast test, held against tests that are written here."""

import os
import pathlib
import subprocess
import sys

import processor_seconds
import pytest
from processor_seconds import Row

HERE = pathlib.Path(__file__).parent
TESTS = """
import subprocess, sys, time
import pytest

BUSY = 'import time\\nwhile time.process_time() < 0.3: pass'

@pytest.fixture(scope='session')
def shared():
  exec(BUSY.replace('0.3', f'{time.process_time() + 0.5}'))

@pytest.fixture(scope='module')
def of_the_file(request):
  request.getfixturevalue('shared')
  exec(BUSY.replace('0.3', f'{time.process_time() + 0.5}'))

@pytest.fixture
def own():
  exec(BUSY.replace('0.3', f'{time.process_time() + 0.5}'))

def test_in_this_process(own): pass
def test_in_another(): subprocess.run([sys.executable, '-c', BUSY], check=True)
def test_of_what_all_share(of_the_file): pass
def test_that_sleeps(): time.sleep(0.5)
@pytest.mark.slow
def test_slow(own): pass
@pytest.mark.long('for a reason')
def test_long(): pass
"""


def run(folder, text, *more):
  """(what pytest printed, rows) of a file of tests."""
  (folder / 'test_written_here.py').write_text(text)
  path = folder / 'seconds'
  env = os.environ | {'TEST_SECONDS': str(path), 'PYTHONPATH': str(HERE)}
  command = [sys.executable, '-m', 'pytest', '-p', 'processor_seconds', '-p', 'no:cacheprovider', *more]
  done = subprocess.run([*command, 'test_written_here.py'], cwd=folder, env=env, capture_output=True, text=True)
  rows = processor_seconds.read(path) if path.exists() else []
  return done.stdout + done.stderr, {row.test.rpartition('::')[2]: row for row in rows}


def test_a_test_is_charged_with_its_fixtures_and_processes_and_not_with_those_of_all(tmp_path):
  _, rows = run(tmp_path, TESTS)
  seconds = {name: row.seconds for name, row in rows.items()}
  assert min(seconds['test_in_this_process'], seconds['the fixture shared'], seconds['the fixture of_the_file']) >= 0.45
  assert rows['the fixture of_the_file'].file == 'test_written_here.py' and seconds['the fixture of_the_file'] < 0.95
  assert seconds['test_in_another'] >= 0.25
  assert max(seconds['test_of_what_all_share'], seconds['test_that_sleeps']) < 0.25
  assert seconds[processor_seconds.COLLECTING] > 0 < seconds[processor_seconds.STANDARD_WORK] and len(rows) == 10
  assert {name for name, row in rows.items() if row.is_fast} == {
    name for name in rows if name.startswith('test_') and name not in ('test_slow', 'test_long')
  }


def test_a_long_test_without_a_reason_is_refused(tmp_path):
  said, _ = run(tmp_path, 'import pytest\n@pytest.mark.long\ndef test_x(): pass\n')
  assert "test_x: the mark long must have its reason, as @pytest.mark.long('why')" in said


ROWS = [Row('a.py::test_x', 21.0, True), Row('a.py::test_y', 0.5, True), Row('b.py::test_z', 12.0), Row('c.py::t', 1.0)]


def test_the_report_has_the_files_that_took_most_first():
  assert processor_seconds.report(ROWS, 2).splitlines() == [
    '4 tests took 34 processor seconds; what took most:',
    '    21.5 s  a.py: 21.0 of them test_x',
    '    12.0 s  b.py: 12.0 of them test_z',
  ]
  assert processor_seconds.too_long(ROWS, 10.0) == ROWS[:1]


@pytest.mark.parametrize(
  'alone, then, now, status',  # how long the test takes alone, and the standard work in the run and now
  [([21.0, 22.0], 1, 1, 1), ([19.0], 1, 1, 0), ([21.0, 19.0], 1, 1, 0), ([21.0], 1, 2.5, 0), ([], 2.2, 1, 0)],
)
def test_a_fast_test_above_the_limit_of_a_machine_is_refused_if_it_takes_as_much_alone(
  monkeypatch, capsys, alone, then, now, status
):
  standard = Row(processor_seconds.STANDARD_WORK, processor_seconds.STANDARD * then)
  monkeypatch.setattr(processor_seconds, 'read', lambda path: [*ROWS, standard])
  monkeypatch.setattr(processor_seconds, 'standard_work', lambda: processor_seconds.STANDARD * now)
  monkeypatch.setattr(processor_seconds, 'alone', lambda test: Row(test, alone.pop(0), True))
  assert processor_seconds.main('') == status and not alone
  assert ('a.py::test_x took 22.0 alone' in capsys.readouterr().out) == bool(status)


def test_a_test_is_run_again_alone(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('PYTEST_ADDOPTS', '-p processor_seconds')
  monkeypatch.setenv('PYTHONPATH', str(HERE))
  (tmp_path / 'test_written_here.py').write_text(TESTS)
  row = processor_seconds.alone('test_written_here.py::test_in_another')
  assert row.is_fast and 0.25 <= row.seconds < 5
  with pytest.raises(SystemExit, match='test_gone fails alone:'):
    processor_seconds.alone('test_written_here.py::test_gone')
