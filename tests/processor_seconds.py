"""Processor seconds of tests: of which files they are, and which fast tests take more than LIMIT.

A plugin of pytest, of conftest.py: where the environment's TEST_SECONDS names a file, each test adds a line to it. Then

  python tests/processor_seconds.py FILE

prints the ten files that took most, and runs each fast test above LIMIT again, alone, twice at most: on a busy machine,
or before others that use its imports, a test takes more. Exits with 1 if one still does. A test marked slow or compiled
is not fast; one marked long, with a reason, may take more. LIMIT is of a quiet machine that does standard_work in
STANDARD seconds. One whose host is busy takes up to BUSY times as long for the same work, from one second to the next,
so that no sample tells what a test met: a test is refused above BUSY times the LIMIT, or more on a slower machine.
"""

import collections
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import pytest

LIMIT = 10.0  # processor seconds of a fast test, with the fixtures that are made for it alone
STANDARD = 0.25  # processor seconds of standard_work on two cores of an Intel Xeon with AMX, while its host is quiet
BUSY = 2.0  # 0.25 to 0.55 s within a minute there
MARKS = ('slow', 'compiled', 'long')  # of a test that may take more
# Rows that are of no test; those of fixtures are called 'the fixture NAME'.
COLLECTING = 'imports, and the collection of tests'
STANDARD_WORK = 'standard work'
_shared = 0.0  # seconds of fixtures that the tests of a file or session share, which no test is charged with


@dataclasses.dataclass(frozen=True)
class Row:
  """What one test took."""

  test: str  # its name for pytest, 'tests/core/test_axes.py::test_x[1]', or one of the rows above
  seconds: float  # of processors: of its process, and of processes that it started
  is_fast: bool = False

  @property
  def file(self) -> str:
    return self.test.partition('::')[0]


def read(path: str | os.PathLike) -> list[Row]:
  """Rows that tests added to a file."""
  with open(path, encoding='utf-8') as f:
    return [Row(**json.loads(line)) for line in f]


def report(rows: Sequence[Row], count: int = 10) -> str:
  """Table of the files that took most, the first with their longest tests."""
  by_file = collections.defaultdict(list)
  for row in rows:
    by_file[row.file].append(row)
  seconds = {file: sum(row.seconds for row in of_file) for file, of_file in by_file.items()}
  count_of_tests = sum('::' in row.test for row in rows)
  total = sum(seconds.values())
  lines = [f'{count_of_tests} tests took {total:.0f} processor seconds; what took most:']
  for file in sorted(by_file, key=seconds.get, reverse=True)[:count]:
    longest = max(by_file[file], key=lambda row: row.seconds)
    name = longest.test.removeprefix(f'{file}::')
    at_most = f': {longest.seconds:.1f} of them {name}' if name != file else ''
    lines.append(f'{seconds[file]:8.1f} s  {file}{at_most}')
  return '\n'.join(lines)


def standard_work() -> float:
  """Processor seconds of some work in Python, as tracing is."""
  began = time.process_time()
  counts = collections.Counter(f'{i * 7919 % 1000}/{i % 13}' for i in range(600_000))
  sorted(counts.items(), key=lambda item: (-item[1], item[0]))
  return time.process_time() - began


def limit(seconds: Sequence[float]) -> float:
  """Processor seconds above which a fast test is refused, where the standard work took so long."""
  return LIMIT * max(BUSY, statistics.mean(seconds or [STANDARD]) / STANDARD)


def too_long(rows: Sequence[Row], at_most: float) -> list[Row]:
  """Fast tests above so many seconds, those that take most first."""
  return sorted((r for r in rows if r.is_fast and r.seconds > at_most), key=lambda row: -row.seconds)


def alone(test: str) -> Row:
  """What a test takes in a process of its own, without the imports of its file."""
  with tempfile.TemporaryDirectory(prefix='lingvo_moe.') as folder:
    path = os.path.join(folder, 'seconds')
    command = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', test]
    done = subprocess.run(command, env=os.environ | {'TEST_SECONDS': path}, capture_output=True, text=True)
    rows = [row for row in (read(path) if os.path.exists(path) else []) if row.test == test]
  if done.returncode or not rows:
    raise SystemExit(f'{test} fails alone:\n{done.stdout}{done.stderr}')
  return rows[0]


def main(path: str) -> int:
  """Prints the report of a file of rows; 1 if a fast test takes more than LIMIT alone, else 0."""
  rows = read(path)
  print(report(rows), flush=True)
  code = 0
  for row in too_long(rows, limit([row.seconds for row in rows if row.test == STANDARD_WORK])):
    at_most = limit([standard_work() for _ in range(3)])
    tries = (alone(row.test).seconds for _ in range(2))
    if not any((seconds := took) <= at_most for took in tries):
      code = 1
      print(
        f'a fast test takes at most {at_most:.0f} processor seconds here; {row.test} took {seconds:.1f} alone: make it '
        "cheaper, or mark it slow, compiled, or long with a reason, @pytest.mark.long('why')"
      )
  return code


def _now() -> float:
  """Processor seconds of this process and of its children, those that still run with theirs that ended."""
  times = os.times()
  return times.user + times.system + times.children_user + times.children_system + sum(map(_seconds_of, _children()))


def _children() -> Iterator[str]:
  for tasks in pathlib.Path('/proc/self/task').glob('*/children'):  # of each thread; none where there is no /proc
    try:
      yield from tasks.read_text().split()
    except OSError:  # a thread that has ended
      continue


def _seconds_of(process: str) -> float:
  try:
    fields = pathlib.Path(f'/proc/{process}/stat').read_text().rpartition(')')[2].split()
  except OSError:  # it has ended
    return 0.0
  return sum(map(int, fields[11:15])) / os.sysconf('SC_CLK_TCK')


def _add(row: Row) -> None:
  with open(os.environ['TEST_SECONDS'], 'a', encoding='utf-8') as f:
    f.write(json.dumps(dataclasses.asdict(row)) + '\n')  # at once, as another process may write too


def _is_fast(item: pytest.Item) -> bool:
  if (mark := item.get_closest_marker('long')) and not (mark.args and isinstance(mark.args[0], str)):
    raise pytest.UsageError(f"{item.nodeid}: the mark long must have its reason, as @pytest.mark.long('why')")
  return not any(map(item.get_closest_marker, MARKS))


def pytest_collection_finish(session: pytest.Session) -> None:
  if 'TEST_SECONDS' in os.environ and session.items:
    _add(Row(COLLECTING, time.process_time()))


def pytest_sessionfinish(session: pytest.Session) -> None:
  if 'TEST_SECONDS' in os.environ and session.testscollected:
    _add(Row(STANDARD_WORK, round(standard_work(), 3)))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
  global _shared
  is_fast = _is_fast(item)
  if 'TEST_SECONDS' not in os.environ:
    return (yield)
  began, _shared = _now(), 0.0
  try:
    return (yield)
  finally:
    _add(Row(item.nodeid, round(_now() - began - _shared, 3), is_fast))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef) -> Iterator[None]:
  global _shared
  if fixturedef.scope in ('function', 'class') or 'TEST_SECONDS' not in os.environ:
    return (yield)
  began, before = _now(), _shared
  try:
    return (yield)
  finally:
    took, of_others = _now() - began, _shared - before  # of fixtures that this one asked for while it was made
    _shared = before + took
    if took - of_others > 0.1:
      file = f'{fixturedef.baseid}::' if fixturedef.scope == 'module' else ''
      _add(Row(f'{file}the fixture {fixturedef.argname}', round(took - of_others, 3)))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1]))
