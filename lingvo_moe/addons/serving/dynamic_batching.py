"""Dynamic batching: a thread that computes parts of lines of concurrent requests together."""

import bisect
import collections
import contextlib
import dataclasses
import math
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent import futures
from typing import Any

from lingvo_moe.text.translator import Answers

_LONGEST_RETRY = 60  # seconds


class QueueFullError(Exception):
  """Refusal of a request, as too many lines wait; in `retry_after` seconds there should be room."""

  def __init__(self, waiting: int, retry_after: int):
    super().__init__(f'{waiting} lines are waiting: try again in {retry_after} s')
    self.retry_after = retry_after


@dataclasses.dataclass(eq=False)
class _Request:
  """Parts of a request's lines, how many were taken into a batch, and their answers by part."""

  parts: Sequence[Any]
  ends: Sequence[int]  # parts of all lines up to each one
  key: Hashable
  taken: int = 0
  hypotheses: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
  truncated: list[int] = dataclasses.field(default_factory=list)
  cut: list[int] = dataclasses.field(default_factory=list)
  lost: list[int] = dataclasses.field(default_factory=list)
  future: futures.Future[Answers] = dataclasses.field(default_factory=futures.Future)

  @property
  def left(self) -> int:
    """Number of parts that wait."""
    return len(self.parts) - self.taken

  @property
  def waiting(self) -> int:
    """Number of lines with parts that wait."""
    return len(self.ends) - bisect.bisect_right(self.ends, self.taken)


@dataclasses.dataclass(eq=False)
class Batcher:
  """Computes lines of requests in batches, in a thread of its own.

  A line has one part or several, its sentences. A batch begins when a part is there, and waits a little for others. It
  takes a part of each request of one key in turn, so that neither many lines nor a long one hold up short requests.
  Parts that arrive while a batch is computed are in the next.
  """

  # (parts, key) -> hypotheses and truncated, as TextModel.answer_parts does; called by one thread
  answer: Callable[[list[str], Any], Answers]
  _: dataclasses.KW_ONLY
  max_lines: int = 64  # parts of a batch, at most
  wait: float = 0.005  # seconds that a batch waits for more parts after the first has arrived
  max_waiting: int = 1000  # lines that may wait; a request beyond is refused
  # called after each batch with its number of parts and the seconds it took
  observe: Callable[[int, float], object] = lambda lines, seconds: None

  def __post_init__(self):
    self._requests: list[_Request] = []  # those with lines that wait
    self._first_arrival = 0.0
    self._closed = False
    self._parts_per_second = 0.0
    self._changed = threading.Condition()
    self._thread = threading.Thread(target=self._run, name='batcher', daemon=True)
    self._thread.start()

  @property
  def waiting(self) -> int:
    """Number of lines that wait."""
    with self._changed:  # which the thread that has it may enter again
      return sum(request.waiting for request in self._requests)

  @property
  def _left(self) -> int:
    """Number of parts that wait."""
    return sum(request.left for request in self._requests)

  def submit(self, parts: Sequence[Any], key: Hashable, ends: Sequence[int] | None = None) -> futures.Future[Answers]:
    """Queues the parts of a request's lines; only those of equal keys are computed together. Answers are of parts.

    Cancelling the future takes parts that still wait out of the queue.

    Args:
      parts: of all lines.
      key: of the request.
      ends: number of parts of all lines up to each one; None: each is a line.

    Raises:
      QueueFullError: there is no room for so many lines, or the batcher is closed.
    """
    request = _Request(parts, range(1, len(parts) + 1) if ends is None else ends, key)
    if not parts:
      request.future.set_result(Answers([], []))
      return request.future
    with self._changed:
      waiting = self.waiting
      if self._closed or waiting + len(request.ends) > self.max_waiting:
        seconds = math.ceil(self._left / self._parts_per_second) if self._parts_per_second else 1
        raise QueueFullError(waiting, min(max(seconds, 1), _LONGEST_RETRY))
      if not self._requests:
        self._first_arrival = time.monotonic()
      self._requests.append(request)
      self._changed.notify()
    request.future.add_done_callback(lambda _: self._forget(request))
    return request.future

  def close(self) -> None:
    """Answers what waits, takes no more, and ends the thread."""
    with self._changed:
      self._closed = True
      self._changed.notify()
    self._thread.join()

  def _forget(self, request: _Request) -> None:
    """Takes the parts of a request that is done, or was cancelled, out of the queue."""
    with self._changed, contextlib.suppress(ValueError):
      self._requests.remove(request)

  def _run(self) -> None:
    while batch := self._next_batch():
      begin = time.monotonic()
      self._compute(batch)
      seconds = time.monotonic() - begin
      pace = len(batch) / max(seconds, 1e-6)
      with self._changed:
        self._parts_per_second = 0.9 * self._parts_per_second + 0.1 * pace if self._parts_per_second else pace
      self.observe(len(batch), seconds)

  def _next_batch(self) -> list[tuple[_Request, int]]:
    """Parts of the next batch, (request, number of the part) each; empty when closed and done."""
    with self._changed:
      while True:
        self._changed.wait_for(lambda: self._requests or self._closed)
        enough = lambda: self._left >= self.max_lines or self._closed or not self._requests
        self._changed.wait_for(enough, self._first_arrival + self.wait - time.monotonic())
        if self._requests or self._closed:  # else all were cancelled
          return self._take()

  def _take(self) -> list[tuple[_Request, int]]:
    batch: list[tuple[_Request, int]] = []
    alike = collections.deque(request for request in self._requests if request.key == self._requests[0].key)
    while len(batch) < self.max_lines and alike:
      request = alike.popleft()
      batch.append((request, request.taken))
      request.taken += 1
      if request.left:
        alike.append(request)
    served = {request for request, _ in batch}  # they come last next time
    self._requests = sorted((request for request in self._requests if request.left), key=served.__contains__)
    self._first_arrival = 0.0  # what is left has waited
    return batch

  def _compute(self, batch: list[tuple[_Request, int]]) -> None:
    """Answers the parts of a batch; where that fails, those of each request alone, so that one request fails."""
    batch = [(request, i) for request, i in batch if not request.future.done()]
    if not batch:
      return
    requests = list(dict.fromkeys(request for request, _ in batch))
    try:
      answered = self.answer([request.parts[i] for request, i in batch], batch[0][0].key)
    except Exception as e:
      if len(requests) == 1:
        _settle(requests[0].future.set_exception, e)
        return
      for request in requests:
        self._compute([(r, i) for r, i in batch if r is request])
      return
    for number, (request, i) in enumerate(batch):
      request.hypotheses[i] = answered.hypotheses[number]
      request.truncated += [i] * (number in answered.truncated)
      request.cut += [i] * (number in answered.cut)
      request.lost += [i] * answered.lost.count(number)
    for request in requests:
      if len(request.hypotheses) == len(request.parts):
        hypotheses = [request.hypotheses[i] for i in range(len(request.parts))]
        notices = sorted(request.truncated), sorted(request.cut), sorted(request.lost)
        _settle(request.future.set_result, Answers(hypotheses, *notices))


def _settle(set_value: Callable[[Any], None], value: Any) -> None:
  with contextlib.suppress(futures.InvalidStateError):  # it was cancelled meanwhile
    set_value(value)
