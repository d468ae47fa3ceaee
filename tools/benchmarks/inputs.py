"""Benchmark of the input pipeline: the speed at which one core makes training batches from text."""

import collections
import contextlib
import dataclasses
import itertools
import math
import os
import tempfile
from collections.abc import Iterator

from benchmarks.clock import Clock, Timing
from lingvo_moe.corpora.cldr import corpus as cldr_corpus
from lingvo_moe.inputs.feed import Feed
from lingvo_moe.inputs.mt_input import TrainInput
from lingvo_moe.tasks.mt import run_vocabs
from lingvo_moe.tasks.mt.mt_config import MtConfig

_TEMPERATURE = 5.0  # used if the model's own is 1, which keeps the natural shares of languages
_SAMPLE = 32  # batches from which the mean number of examples per batch is taken


def measure(config: MtConfig, clock: Clock, data_dir: str = '') -> list[Timing]:
  """Times the stream of batches that the trainer reads, on one core, with temperature sampling.

  A call makes as many batches as a window of examples fills, so that sampling, shuffling and packing the window are
  fully included. Vocabularies and the token cache, which a run makes once, are made before.

  Args:
    config: the model whose batches are made.
    clock: number of calls.
    data_dir: a corpus; '' for the default corpus of 16 languages.

  Returns:
    One result: the Timing, with tokens_per_s (of both sides, without padding), batches_per_s, padding (its share),
    temperature, and the number of pairs.
  """
  with tempfile.TemporaryDirectory() as folder:
    if config.temperature == 1:
      config = dataclasses.replace(config, temperature=_TEMPERATURE)
    if not data_dir:
      data_dir = os.path.join(folder, 'data')
      cldr_corpus.make_corpus(data_dir, cldr_corpus.QUICKSTART_LANGUAGES)
      config = dataclasses.replace(config, pairs='', split_files=())
    config = dataclasses.replace(config, data_dir=data_dir)
    config = run_vocabs.prepare(config, os.path.join(folder, 'vocab'), resumed=False)
    with one_core():
      train_input = TrainInput(config, run_vocabs.load(config), os.path.join(folder, 'cache'), Feed(quiet=True))
      examples = [int(train_input.batch(step)['src_segments'].max(axis=1).sum()) for step in range(_SAMPLE)]
      batches = math.ceil(config.window_size * _SAMPLE / sum(examples))  # of a window
      stream, counts = iter(train_input.dataset()), collections.Counter()

      def read_window():
        counts['windows'] += 1
        for batch in itertools.islice(stream, batches):
          for segments_BT in (batch[name].numpy() for name in ('src_segments', 'tgt_segments')):
            counts['tokens'] += int((segments_BT > 0).sum())
            counts['positions'] += segments_BT.size

      timing = clock.time(read_window)
  return [
    {
      **timing,
      'tokens_per_s': round(counts['tokens'] / counts['windows'] / timing['median_s'], 1),
      'batches_per_s': round(batches / timing['median_s'], 1),
      'padding': round(1 - counts['tokens'] / counts['positions'], 4),
      'temperature': config.temperature,
      'pairs': len(train_input.shares),
    }
  ]


@contextlib.contextmanager
def one_core() -> Iterator[None]:
  """Pins all threads of this process, and those started in the block, to one core."""
  cores = os.sched_getaffinity(0)
  _pin({min(cores)})
  try:
    yield
  finally:
    _pin(cores)


def _pin(cores: set[int]) -> None:
  for thread in os.listdir('/proc/self/task'):
    with contextlib.suppress(ProcessLookupError):  # the thread has ended
      os.sched_setaffinity(int(thread), cores)
