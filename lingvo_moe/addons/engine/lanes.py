"""Lanes: copies of a model's graphs that compute batches side by side, each on its share of the cores.

A step of the decoder has parts that one core computes, so two lanes of 16 sentences take less time than one of 32 on
all cores. The encoder and the search of a lane run beside the decoder of another. Few sentences get all cores.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lingvo_moe.addons.engine import stages

Result = TypeVar('Result')

_LANES = 2  # memory has the weights of each, but experts once
_LEAST_ROWS = 16  # fewer sentences are one batch: each step reads all weights, however few rows there are
# Tokens of a batch of more rows than these. Four times as many took as long, with twice the memory: two models of M=128
# and 256 on real text, a core of a Xeon.
_TOKENS = 512


class Lanes:
  """Lanes of an export; may be used from several threads.

  Args:
    folder: of the export.
    threads: number of threads of all lanes.
    check: called with the graphs of a lane by name when one is loaded; raises UserError where they do not fit.
  """

  def __init__(
    self, folder: str, threads: int, check: Callable[[Mapping[str, stages.StagedGraph]], object] = lambda graphs: None
  ) -> None:
    self._folder, self._threads, self._check = folder, threads, check
    self._loading, self._idle = threading.Lock(), {}
    self._experts = functools.cache(lambda path: stages.ExportedExperts(path, max(1, threads // _LANES)))

  def batches(self, lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Numbers of the texts that have a length, longest first, in batches of at most `tokens`, padding included."""
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    lanes = min(_LANES, self._threads) if len(order) >= _LEAST_ROWS else 1
    most, made_batches = -(-len(order) // lanes), []
    while order:
      length = lengths[order[0]]
      rows = min(most, max(1, tokens // lanes // length), max(_LEAST_ROWS, _TOKENS // length))
      made_batches.append(order[:rows])
      order = order[rows:]
    return made_batches

  def run(
    self, function: Callable[..., Result], batches: Sequence[Sequence[int]], names: Sequence[str]
  ) -> Iterator[tuple[Sequence[int], Result]]:
    """Each batch with function(batch, *graphs of these names), in order; all lanes compute.

    What is left is not, once closed. Graphs are loaded when they are first used: name the largest first, as loading
    takes more memory for a while.
    """
    lanes = min(_LANES, self._threads, max(1, len(batches)))
    idle = self._lanes(lanes)

    def on_an_idle_lane(batch):
      lane = idle.get()
      try:
        return function(batch, *self._graphs(lane, self._threads // lanes, names))
      finally:
        idle.put(lane)

    if lanes == 1:
      yield from ((batch, on_an_idle_lane(batch)) for batch in batches)
      return
    pool = ThreadPoolExecutor(lanes)
    try:
      yield from zip(batches, pool.map(on_an_idle_lane, batches))
    finally:
      pool.shutdown(cancel_futures=True)

  def _lanes(self, count: int) -> queue.SimpleQueue[dict[str, stages.StagedGraph]]:
    """Idle lanes where there are `count` in all: graphs by name, as far as they are loaded."""
    with self._loading:
      if count not in self._idle:
        self._idle[count] = queue.SimpleQueue()
        for _ in range(count):
          self._idle[count].put({})
    return self._idle[count]

  def _graphs(
    self, lane: dict[str, stages.StagedGraph], threads: int, names: Sequence[str]
  ) -> list[stages.StagedGraph]:
    missing = [name for name in names if name not in lane]
    if missing:
      with self._loading:
        loaded = {name: stages.load(self._folder, name, threads, self._experts) for name in missing}
      self._check({**lane, **loaded})
      lane |= loaded
    return [lane[name] for name in names]
