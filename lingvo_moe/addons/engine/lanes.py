"""Lanes: copies of a model's graphs that compute batches side by side, each on its share of the cores.

A step of the decoder has parts that one core computes, so two lanes of 16 sentences take less time than one of 32 on
all cores. The encoder and the search of a lane run beside the decoder of another. Few sentences get all cores.
"""

import functools
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from lingvo_moe.addons.engine import stages

Result = TypeVar('Result')

_LANES = 2  # memory has the weights of each, but experts once
_LEAST_ROWS = 16  # fewer sentences are one batch: each step reads all weights, however few rows there are


class Lanes:
  """Lanes of an export; may be used from several threads.

  Args:
    folder: of the export.
    names: of its graphs, the largest first: loading takes more memory for a while.
    threads: number of threads of all lanes.
  """

  def __init__(self, folder: str, names: Sequence[str], threads: int) -> None:
    self._threads, self._loading, self._idle = threads, threading.Lock(), {}
    experts = functools.cache(lambda path: stages.ExportedExperts(path, max(1, threads // _LANES)))
    self._load = lambda threads: [stages.load(folder, name, threads, experts) for name in names]
    self._folder, self._expected = folder, None

  def expect(self, width: int, symbols: int) -> None:
    """Lets graphs be refused when they are loaded, unless the first is a step of so many hypotheses and symbols."""
    self._expected = width, symbols

  def batches(self, lengths: Sequence[int], tokens: int) -> list[list[int]]:
    """Numbers of the texts that have a length, longest first, in batches: so many tokens with padding in all lanes."""
    order = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
    lanes = min(_LANES, self._threads) if len(order) >= _LEAST_ROWS else 1
    most, made_batches = -(-len(order) // lanes), []
    while order:
      rows = min(most, max(1, tokens // lanes // lengths[order[0]]))
      made_batches.append(order[:rows])
      order = order[rows:]
    return made_batches

  def run(
    self, function: Callable[..., Result], batches: Sequence[Sequence[int]]
  ) -> Iterator[tuple[Sequence[int], Result]]:
    """Each batch with function(batch, *graphs), in order; all lanes compute. What is left is not, once closed."""
    lanes = min(_LANES, self._threads, max(1, len(batches)))
    idle, pool = self._lanes(lanes), ThreadPoolExecutor(lanes)

    def on_an_idle_lane(batch):
      graphs = idle.get()
      try:
        return function(batch, *graphs)
      finally:
        idle.put(graphs)

    try:
      yield from zip(batches, pool.map(on_an_idle_lane, batches))
    finally:
      pool.shutdown(cancel_futures=True)

  def _lanes(self, count: int) -> queue.SimpleQueue[list[stages.StagedGraph]]:
    """Graphs of those of so many lanes that are idle, loaded at the first call."""
    with self._loading:
      if count not in self._idle:
        loaded = [self._load(self._threads // count) for _ in range(count)]
        for graphs in loaded if self._expected else ():
          stages.check(self._folder, *graphs, *self._expected)
        self._idle[count] = queue.SimpleQueue()
        for graphs in loaded:
          self._idle[count].put(graphs)
    return self._idle[count]
