"""Progress of long work: a bar that moves every second on a terminal, and elsewhere a plain line now and then."""

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tqdm

Advance = Callable[[int], object]  # called with the units, such as lines or bytes, done since the last call

LINE_SECONDS = 30.0  # between two plain lines
_TICK_SECONDS = 1.0
_NARROW = 79  # columns of a terminal that does not say how many it has

_doing: list[tuple[Callable[[], str], float]] = []  # what runs that no unit counts, the innermost last; when it began


@contextlib.contextmanager
def doing(what: Callable[[], str]) -> Iterator[None]:
  """Says what runs in a block, such as 'compiling', for a Progress to show while its units stand still."""
  entry = what, time.monotonic()
  _doing.append(entry)
  try:
    yield
  finally:
    _doing.remove(entry)


def _now_doing(at_least: float = 0.0) -> str:
  """What runs, for how long already: 'tracing decoder/layer_03, 41 s'; '' if for less than `at_least` seconds."""
  running = list(_doing)
  seconds = time.monotonic() - running[0][1] if running else -1.0
  return f'{running[-1][0]()}, {duration(seconds)}' if seconds >= at_least else ''


class Progress(contextlib.AbstractContextManager):
  """Progress of `total` units of work, written to stderr.

  On a terminal it is a bar; a thread redraws it every second, so that the time moves while a unit takes long. In a log
  file, which keeps every state of a bar, it is a line of its own after the first unit, now and then, and last. Both
  have what `doing` says. The `label` heads it; `initial` units were done before.
  """

  def __init__(self, total: int, unit: str, *, initial: int = 0, label: str = '', quiet: bool = False):
    self._total, self._unit, self._label, self._quiet = total, unit, label, quiet
    self._done = self._printed = initial
    self._started, self._printed_at = time.monotonic(), None
    self._first: tuple[float, int] | None = None  # time, and units done by then: the first takes longer than others
    self._figures: dict[str, str] = {}
    self._bar, self._stack = None, contextlib.ExitStack()
    if not quiet and sys.stderr.isatty():
      columns = _columns()
      width = {'ncols': None if columns else _NARROW, 'dynamic_ncols': bool(columns)}
      about = {'total': total, 'initial': initial, 'desc': label or None, 'unit': unit}
      self._bar = tqdm.tqdm(**about, **width, mininterval=0.5, miniters=1)
      self._stack.callback(self._bar.close)
      self._stack.enter_context(_repeating(self._redraw, _TICK_SECONDS))
    elif not quiet:
      self._stack.enter_context(_repeating(self._say_doing, LINE_SECONDS))

  def update(self, units: int = 1) -> None:
    self._done += units
    if self._bar is not None:
      self._bar.update(units)
      return
    now = time.monotonic()
    self._first = self._first or (now, self._done)
    if self._printed_at is None or now - self._printed_at >= LINE_SECONDS:
      self._print_line(now)

  def show(self, **figures: str) -> None:
    """Sets the figures shown after the progress."""
    self._figures = figures
    if self._bar is not None:
      self._bar.set_postfix(figures, refresh=False)

  def write(self, text: str) -> None:
    """Prints a line, above the bar if there is one."""
    if self._bar is not None:
      self._bar.write(text, file=sys.stderr)
    elif not self._quiet:
      print(text, file=sys.stderr, flush=True)

  def close(self) -> None:
    """Shows the last state; nothing is shown after that."""
    if self._bar is None and self._done != self._printed:
      self._print_line(time.monotonic())
    self._stack.close()
    self._bar, self._quiet = None, True

  def __exit__(self, *error) -> None:
    self.close()

  def _redraw(self) -> None:
    figures = ', '.join(f'{name}={value}' for name, value in self._figures.items())
    self._bar.set_postfix_str(_now_doing() or figures)

  def _say_doing(self) -> None:
    if text := _now_doing(at_least=LINE_SECONDS / 10):
      print(text, file=sys.stderr, flush=True)

  def _print_line(self, now: float) -> None:
    self._printed_at, self._printed = now, self._done
    if self._quiet:
      return
    parts = [f'{self._unit} {self._done:,} of {self._total:,}', f'{duration(now - self._started)} so far']
    since, made = self._first or (now, self._done)
    if made < self._done < self._total:
      parts.append(f'{duration((now - since) / (self._done - made) * (self._total - self._done))} left')
    parts += [f'{name} {value}' for name, value in self._figures.items()]
    print(f'{self._label}: ' * bool(self._label) + ', '.join(parts), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
  """Seconds for people: '42 s', '3 min 20 s', '2 h 5 min', '3 d 4 h'."""
  whole = round(seconds)
  for large, small, size, part in ('d', 'h', 86400, 3600), ('h', 'min', 3600, 60), ('min', 's', 60, 1):
    if whole >= size:
      return f'{whole // size} {large} {whole % size // part} {small}'
  return f'{whole} s'


def bar(total: int, label: str, unit: str = 'it', quiet: bool = False) -> tqdm.tqdm:
  """Bar that only a terminal shows, and that goes away when it is done. The unit 'B' is bytes."""
  scale = unit == 'B'
  return tqdm.tqdm(total=total, desc=label, unit=unit, unit_scale=scale, disable=quiet or None, leave=False)


def over(items: Sequence[Any], unit: str) -> Iterable[Any]:
  """The items one by one, with a progress bar for five or more."""
  seconds = 0.5 if sys.stderr.isatty() else LINE_SECONDS
  return tqdm.tqdm(items, unit=unit, disable=len(items) < 5, leave=False, mininterval=seconds)


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
  """Prints what runs, such as 'compiling', while a block does not count its work: at once, and now and then again."""
  started, say = time.monotonic(), functools.partial(print, file=sys.stderr, flush=True)
  say(f'{what} ...')
  with _repeating(lambda: say(f'{what} ... {duration(time.monotonic() - started)} so far'), LINE_SECONDS):
    yield


@contextlib.contextmanager
def _repeating(call: Callable[[], object], seconds: float) -> Iterator[None]:
  """Calls a function now and then in a thread while a block runs."""
  ended = threading.Event()

  def repeat():
    while not ended.wait(seconds):
      call()

  thread = threading.Thread(target=repeat, name='progress', daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()


def _columns() -> int:
  """Columns of the terminal; 0 where it does not say."""
  try:
    return os.get_terminal_size(sys.stderr.fileno()).columns
  except (OSError, ValueError):
    return 0
