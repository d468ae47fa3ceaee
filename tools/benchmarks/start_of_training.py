"""Time and memory of a training job's start, for corpora of many lines that are tokenised already.

  python tools/benchmarks/start_of_training.py --lines=1000000000

Makes a corpus of sparse text files, and a token cache whose shards are links to one real shard of a million lines, in a
temporary folder; then reads statistics and the first batches, in a process of its own.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from unittest import mock

import numpy as np
from absl import app, flags

_LINES = flags.DEFINE_integer('lines', 10**7, 'Lines of the corpus.')
_SHUFFLE_LINES = flags.DEFINE_integer('shuffle_lines', 1, 'The field: consecutive lines that stay together.')
_BATCHES = flags.DEFINE_integer('batches', 10, 'Batches to read.')
_FOLDER = flags.DEFINE_string('folder', None, 'Made corpus to read; for the process that is measured.')
_SHARD_LINES = 10**6


class _Vocab:
  """Vocabulary that nobody asks for ids."""

  size, fingerprint, tag_id = 32000, 'none', None


def _config(folder: str):
  from lingvo_moe.inputs.data_config import DataConfig

  values = {'batch_tokens': 8192, 'tag_target': False, 'shuffle_lines': _SHUFFLE_LINES.value}
  return DataConfig(data_dir=os.path.join(folder, 'data'), **values)


def _make(folder: str, lines: int) -> None:
  from lingvo_moe.corpora import parallel
  from lingvo_moe.inputs import pair_caches as cache
  from lingvo_moe.inputs import token_cache
  from lingvo_moe.storage import json_files

  os.makedirs(os.path.join(folder, 'data', 'de-en'))
  for split, size in (('train', 128 * lines), ('dev', 128)):
    for language in ('de', 'en'):
      with open(os.path.join(folder, 'data', 'de-en', f'{split}.{language}'), 'wb') as f:
        f.truncate(size)
  rng = np.random.default_rng(0)
  pairs = [pair for split in ('train', 'dev') for pair in parallel.find_pairs(_config(folder).data_dir, split=split)]
  entries = cache._entries(pairs, (_Vocab(), _Vocab()), [None] * 2)
  cache_dir = os.path.join(folder, 'cache')
  for path, entry in zip(token_cache.folders_of(entries, cache_dir), entries, strict=True):
    total = lines if '.train.' in entry.name else 100
    shard_lines = min(total, _SHARD_LINES)
    count = total // shard_lines
    os.makedirs(path)
    lengths = rng.integers(3, 40, shard_lines)
    part = token_cache.FilePart(entry.files[0])
    first = token_cache._Shard(token_cache._shard_path(path, 0), part, entry)
    first.write(iter([(rng.integers(4, 32000, lengths.sum()), lengths)]))
    for number in range(1, count):
      for ending in ('tokens', 'offsets', 'json'):
        os.link(f'{first.path}.{ending}', f'{token_cache._shard_path(path, number)}.{ending}')
    meta = {'shards': [[0, 0, 0, shard_lines, int(lengths.sum())]] * count, 'files': list(entry.files)}
    with open(os.path.join(path, 'meta.json'), 'w') as f:
      f.write(json_files.dump({**meta, 'vocab': _Vocab.fingerprint}))


def _measure(folder: str) -> None:
  import tensorflow as tf  # noqa: F401, so that it counts as no part of the start

  from lingvo_moe.inputs import pair_caches as cache
  from lingvo_moe.inputs.feed import Feed
  from lingvo_moe.inputs.mt_input import HeldOutInput, TrainInput

  config, cache_dir, start = _config(folder), os.path.join(folder, 'cache'), time.monotonic()
  before = _memory()
  # The entries were made without a function that tokenises.
  with mock.patch.object(cache, '_tokenised'):
    train = TrainInput(config, (_Vocab(), _Vocab()), cache_dir, Feed(quiet=True))
    HeldOutInput(config, (_Vocab(), _Vocab()), cache_dir, Feed(quiet=True))
  opened = time.monotonic() - start
  for step in range(_BATCHES.value):
    train.batch(step)
  found = {'opened_s': opened, 'first_batches_s': time.monotonic() - start - opened}
  print(json.dumps({**found, 'mib': _memory(), 'mib_before': before, 'train': str(train.stats)}))


def _memory() -> dict[str, int]:
  """MiB of memory: the peak, and now in arrays and in maps of files."""
  with open('/proc/self/status', encoding='ascii') as f:
    values = dict(line.split(':', 1) for line in f)
  return {name: int(values[name].split()[0]) // 1024 for name in ('VmHWM', 'RssAnon', 'RssFile')}


def main(argv) -> None:
  del argv
  if _FOLDER.value:
    _measure(_FOLDER.value)
    return
  with tempfile.TemporaryDirectory() as folder:
    _make(folder, _LINES.value)
    for _ in range(2):
      subprocess.run([sys.executable, *sys.argv, f'--folder={folder}'], check=True)


if __name__ == '__main__':
  app.run(main)
