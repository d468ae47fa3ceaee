"""Dynamic batching: who shares a batch, what is refused, what a failure or a cancellation leaves."""

import threading
import time
from concurrent import futures

import pytest

from lingvo_moe.addons.serving.dynamic_batching import Batcher, QueueFullError
from lingvo_moe.text.translator import Answers


class Echo:
  """Answers by capitals, and truncates lines that begin with 'long'; the first batch waits for `go`."""

  def __init__(self, wait=True):
    self.batches, self.began, self.go = [], threading.Event(), threading.Event()
    if not wait:
      self.go.set()

  def __call__(self, lines, key):
    self.batches.append((lines, key))
    self.began.set()
    assert self.go.wait(30)
    if 'bad' in lines:
      raise ValueError('a bad line')
    return Answers([[line.upper()] for line in lines], [i for i, line in enumerate(lines) if line[:4] == 'long'])


@pytest.fixture
def echo():
  return Echo()


@pytest.fixture
def batcher(echo):
  batcher = Batcher(echo, max_lines=4, wait=0.0, max_waiting=10)
  yield batcher
  echo.go.set()
  batcher.close()


def begin(batcher, echo):
  """A request that is being computed, so that later ones queue."""
  first = batcher.submit(['first'], 'en')
  assert echo.began.wait(30)
  return first


def test_requests_that_wait_share_a_batch(echo, batcher):
  first = begin(batcher, echo)
  others = [batcher.submit([word], 'en') for word in ('a', 'b', 'c')]
  echo.go.set()
  assert first.result(30).hypotheses == [['FIRST']]
  assert [other.result(30).hypotheses for other in others] == [[['A']], [['B']], [['C']]]
  assert echo.batches == [(['first'], 'en'), (['a', 'b', 'c'], 'en')]


def test_a_batch_waits_for_others_that_come_soon():
  echo = Echo(wait=False)
  batcher = Batcher(echo, max_lines=2, wait=60.0, max_waiting=10)
  results = [batcher.submit([word], 'en') for word in ('a', 'b')]
  assert not futures.wait(results, 30).not_done  # a full batch does not wait
  assert echo.batches == [(['a', 'b'], 'en')]
  batcher.close()
  alone = Batcher(echo, max_lines=9, wait=0.05, max_waiting=10)
  assert alone.submit(['c'], 'en').result(30).hypotheses == [['C']]
  alone.close()


def test_only_equal_keys_share_a_batch_and_none_waits_for_ever(echo, batcher):
  begin(batcher, echo)
  keys = ('en', 'de', 'en', 'de')
  found = [batcher.submit([str(i)], key) for i, key in enumerate(keys)]
  echo.go.set()
  futures.wait(found, 30)
  assert echo.batches[1:] == [(['0', '2'], 'en'), (['1', '3'], 'de')]


def test_what_is_left_of_a_long_request_comes_after_requests_of_other_keys(echo, batcher):
  begin(batcher, echo)
  found = [batcher.submit(list('abcdef'), 'en'), batcher.submit(['x'], 'de')]
  echo.go.set()
  futures.wait(found, 30)
  assert echo.batches[1:] == [(list('abcd'), 'en'), (['x'], 'de'), (list('ef'), 'en')]


def test_a_long_request_leaves_room_for_short_ones_and_keeps_its_order(echo, batcher):
  begin(batcher, echo)
  long = batcher.submit([f'{i}' for i in range(7)], 'en')
  short = batcher.submit(['short'], 'en')
  echo.go.set()
  assert long.result(30).hypotheses == [[str(i)] for i in range(7)] and short.result(30).hypotheses == [['SHORT']]
  assert [lines for lines, _ in echo.batches[1:]] == [['0', 'short', '1', '2'], ['3', '4', '5', '6']]


def test_a_long_line_is_shared_and_counted_by_its_parts_and_lines(echo, batcher):
  begin(batcher, echo)
  long = batcher.submit(list('abcdefghijklm'), 'en', [12, 13])
  short = batcher.submit(['short'], 'en')
  assert batcher.waiting == 3
  with pytest.raises(QueueFullError, match='3 lines are waiting'):
    batcher.submit(['x'] * 8, 'en')
  echo.go.set()
  assert long.result(30).hypotheses == [[c] for c in 'ABCDEFGHIJKLM'] and short.result(30)
  assert [lines for lines, _ in echo.batches[1:3]] == [['a', 'short', 'b', 'c'], list('defg')]


def test_a_line_waits_until_its_last_part_is_taken_and_the_time_to_come_back_is_of_parts():
  waiting, echo = [], Echo(wait=False)

  def answer(parts, key):
    waiting.append(batcher.waiting)
    return echo(parts, key)

  batcher = Batcher(answer, max_lines=4, wait=0.0, max_waiting=2)
  batcher.submit(list('abcdefgh'), 'en', [4, 8]).result(30)
  batcher.close()
  assert waiting == [1, 0]
  blocked = Echo()
  batcher = Batcher(blocked, max_lines=4, wait=0.0, max_waiting=2)
  begin(batcher, blocked)
  batcher.submit(['x'] * 9, 'en', [9])
  batcher._parts_per_second = 2.0
  with pytest.raises(QueueFullError, match='1 lines are waiting: try again in 5 s'):
    batcher.submit(['y'] * 2, 'en')
  blocked.go.set()
  batcher.close()


def test_parts_of_a_line_that_is_cancelled_leave_the_queue(echo, batcher):
  begin(batcher, echo)
  gone = batcher.submit(list('abcdefghi'), 'en', [9])
  assert batcher.waiting == 1 and gone.cancel() and batcher.waiting == 0
  stays = batcher.submit(['stays'], 'en')
  echo.go.set()
  assert stays.result(30).hypotheses == [['STAYS']] and echo.batches[1:] == [(['stays'], 'en')]


def test_truncated_lines_are_numbered_within_their_request(echo, batcher):
  begin(batcher, echo)
  first, second = batcher.submit(['a', 'long b'], 'en'), batcher.submit(['long c'], 'en')
  echo.go.set()
  assert (first.result(30).truncated, second.result(30).truncated) == ([1], [0])


def test_requests_beyond_a_batch_wait_once_and_come_next():
  waiting, echo = [], Echo()

  def answer(lines, key):
    found = echo(lines, key)
    waiting.append(batcher.waiting)
    return found

  batcher = Batcher(answer, max_lines=4, wait=0.0, max_waiting=10)
  begin(batcher, echo)
  asked = [batcher.submit([word], 'en') for word in 'abcdefghij']
  echo.go.set()
  assert [one.result(30).hypotheses for one in asked] == [[[word]] for word in 'ABCDEFGHIJ']
  batcher.close()
  assert waiting == [10, 6, 2, 0]
  assert [lines for lines, _ in echo.batches[1:]] == [list('abcd'), list('efgh'), list('ij')]


def test_a_full_queue_refuses_and_says_when_to_come_back(echo, batcher):
  begin(batcher, echo)
  batcher.submit(['x'] * 8, 'en')
  with pytest.raises(QueueFullError, match='8 lines are waiting: try again in 1 s') as refused:
    batcher.submit(['y'] * 3, 'en')
  assert refused.value.retry_after == 1 and batcher.waiting == 8
  assert batcher.submit(['y'] * 2, 'en') and batcher.waiting == 10


def test_a_request_that_is_cancelled_leaves_the_queue(echo, batcher):
  begin(batcher, echo)
  gone, stays = batcher.submit(['gone'] * 5, 'en'), batcher.submit(['stays'], 'en')
  assert gone.cancel() and batcher.waiting == 1
  echo.go.set()
  assert stays.result(30).hypotheses == [['STAYS']]
  assert echo.batches[1:] == [(['stays'], 'en')]


def test_a_request_that_is_cancelled_while_it_is_computed_harms_no_other(echo, batcher):
  first = begin(batcher, echo)
  assert first.cancel()
  echo.go.set()
  assert batcher.submit(['next'], 'en').result(30).hypotheses == [['NEXT']]


def test_of_a_batch_that_fails_only_the_request_to_blame_fails(echo, batcher):
  begin(batcher, echo)
  good, bad, other = (batcher.submit([word], 'en') for word in ('good', 'bad', 'other'))
  echo.go.set()
  assert good.result(30).hypotheses == [['GOOD']] and other.result(30).hypotheses == [['OTHER']]
  with pytest.raises(ValueError, match='a bad line'):
    bad.result(30)


def test_closing_answers_what_waits_and_takes_no_more(echo, batcher):
  begin(batcher, echo)
  waits = batcher.submit(['waits'] * 6, 'en')
  closing = threading.Thread(target=batcher.close)
  closing.start()
  while not batcher._closed:
    time.sleep(0.001)
  with pytest.raises(QueueFullError):
    batcher.submit(['late'], 'en')
  echo.go.set()
  assert len(waits.result(30).hypotheses) == 6
  closing.join(30)
  assert not closing.is_alive()


def test_an_empty_request_is_answered_at_once(echo, batcher):
  assert batcher.submit([], 'en').result(0).hypotheses == [] and echo.batches == []


def test_many_threads_lose_no_line():
  echo = Echo(wait=False)
  seen = []
  batcher = Batcher(echo, max_lines=8, wait=0.001, max_waiting=10**6, observe=lambda lines, seconds: seen.append(lines))

  def client(number):
    for i in range(30):
      lines = [f'{number} {i} {j}' for j in range(i % 5)]
      future = batcher.submit(lines, number % 2)
      if i % 7 == 3:
        future.cancel()
      else:
        assert future.result(30).hypotheses == [[line.upper()] for line in lines]
    return True

  with futures.ThreadPoolExecutor(16) as pool:
    assert all(pool.map(client, range(16)))
  batcher.close()
  assert batcher.waiting == 0 and max(seen) <= 8 and sum(seen) / len(seen) > 1


def test_placeholders_are_counted_as_often_as_a_part_has_lost_some():
  answer = lambda parts, key: Answers(
    [[p] for p in parts], [], [], [i for i, p in enumerate(parts) for _ in range(int(p))]
  )
  batcher = Batcher(answer, max_lines=4, wait=0.0, max_waiting=10)
  assert batcher.submit(['0', '2', '1', '0', '3'], 'en').result(30).lost == [1, 1, 2, 4, 4, 4]
  batcher.close()
