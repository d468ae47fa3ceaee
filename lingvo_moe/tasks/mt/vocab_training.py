"""Training of SentencePiece vocabularies on parallel corpora, with languages mixed as in training."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tqdm

from lingvo_moe.core import files
from lingvo_moe.core import json_files
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel
from lingvo_moe.corpora import sampling
from lingvo_moe.corpora import text
from lingvo_moe.tasks import sentencepiece_training
from lingvo_moe.tasks.lock import lock
from lingvo_moe.tasks.mt import unwritten
from lingvo_moe.tasks.mt import vocab as vocab_lib
from lingvo_moe.tasks.mt.data_config import DataConfig

NORMALIZATION = {'source': 'nmt_nfkc', 'target': 'identity', 'shared': 'identity'}  # nobody reads sources back


def train_vocab(
  pairs: Sequence[parallel.Pair],
  output: str,
  vocab_size: int,
  *,
  side: str = 'shared',
  temperature: float = 1.0,
  weights: Sequence[float] = (),
  max_sentences: int = 1_000_000,
  character_coverage: float = 0.9995,
  tags: bool | None = None,
  normalization: str | None = None,
  seed: int = 1,
  overwrite: bool = False,
  exact_size: bool = True,
  quiet: bool = False,
) -> str:
  """Trains a vocabulary: writes `output`.model and `output`.vocab. Equal arguments and corpus give equal bytes.

  Args:
    pairs: pairs to read, normally of the train split.
    output: path without '.model'.
    vocab_size: number of pieces, including the 4 special ids, 256 bytes and the tags.
    side: 'source', 'target' or 'shared' (both sides of every pair).
    temperature: temperature of the sampling over pairs. A pair whose share exceeds its lines repeats them.
    weights: factor of each pair's share; none: all alike.
    max_sentences: most lines of either side to use.
    character_coverage: share of all characters that get pieces; the others are written as bytes.
    tags: True to add the symbols `<2xx>` of the target languages; None to add them if there are several.
    normalization: one of SentencePiece's rules (sentencepiece_training.RULES); None: as NORMALIZATION has it.
    seed: seed of the choice of lines.
    overwrite: True to replace existing files.
    exact_size: True to raise an error if the corpus gives fewer pieces; False to accept a smaller vocabulary.
    quiet: True for no progress bar.

  Returns:
    Path of the .model file.

  Raises:
    UserError: the corpus is damaged, it cannot give a vocabulary of that size, or the output exists.
  """
  if side not in NORMALIZATION:
    raise UserError(f'side must be one of {", ".join(NORMALIZATION)}; saw {side!r}')
  if max_sentences < 1:
    raise UserError(f'max_sentences must be at least 1; saw {max_sentences}')
  sentencepiece_training.check_output(output, overwrite)
  targets = sorted({pair.target for pair in pairs})
  symbols = [vocab_lib.tag(t) for t in targets] if (len(targets) > 1 if tags is None else tags) else []
  sizes = [_count(pair) for pair in tqdm.tqdm(pairs, desc='counting lines', disable=quiet or None, leave=False)]
  total = min(max_sentences, sum(sizes))
  wanted = sampling.quotas(sizes, temperature, max(total, len(pairs)), weights)
  with tqdm.tqdm(total=sum(wanted), desc='reading sentences', disable=quiet or None, leave=False) as bar:
    lines = _lines(pairs, sizes, wanted, side, seed, bar)
    path = sentencepiece_training.train(
      lines,
      output,
      vocab_size,
      character_coverage=character_coverage,
      normalization=normalization or NORMALIZATION[side],
      symbols=symbols,
      exact_size=exact_size,
    )
  if side != 'source' and (said := unwritten.remark(vocab_lib.Vocab(path), pairs)):
    print(said, file=sys.stderr)
  return path


def _count(pair: parallel.Pair) -> int:
  sources, targets = ([text.count_lines(f) for f in side] for side in (pair.source_files, pair.target_files))
  return parallel.check_counts(pair, sources, targets)


def _lines(pairs, sizes, wanted, side, seed, bar) -> Iterator[bytes]:
  """Yields the chosen lines in the order of the files: `wanted` of each pair, each line equally often to within one."""
  for pair, size, n in zip(pairs, sizes, wanted, strict=True):
    files = list(pair.source_files) if side == 'source' else list(pair.target_files)
    if side == 'shared':
      files = [*pair.source_files, *pair.target_files]
    every, some = divmod(n, size)
    key = sampling.fold(seed, 'vocab', pair.name)
    number = 0
    for path in files:
      for batch in text.line_batches(path):
        index = (number + np.arange(len(batch))) % size
        times = every + (sampling.permute(index, size, key) < some)
        number += len(batch)
        for i in np.flatnonzero(times):
          for _ in range(times[i]):
            yield batch[i]
    bar.update(n)
  bar.set_description('training (SentencePiece, no news until done)')


def ensure_vocabs(config: DataConfig, vocab_dir: str, *, quiet: bool = False) -> tuple[str, str]:
  """Paths of the source and target vocabularies; trains those that the configuration does not name.

  They are written to `vocab_dir`, where the next call finds them. Of several processes that share the folder, one
  trains them while the others wait; processes that do not share it train equal ones.

  Raises:
    UserError: a vocabulary in `vocab_dir` was made with other settings.
  """
  if config.source_vocab and config.target_vocab:
    return config.source_vocab, config.target_vocab
  if config.shared_vocab:
    if given := config.source_vocab or config.target_vocab:
      return given, given
    path = _ensure(config, 'shared', config.source_vocab_size, vocab_dir, quiet)
    return path, path
  return (
    config.source_vocab or _ensure(config, 'source', config.source_vocab_size, vocab_dir, quiet),
    config.target_vocab or _ensure(config, 'target', config.target_vocab_size, vocab_dir, quiet),
  )


def _ensure(config: DataConfig, side: str, size: int, vocab_dir: str, quiet: bool) -> str:
  output = os.path.join(vocab_dir, side)
  settings = {
    'pairs': config.pairs,
    'vocab_size': size,
    'temperature': config.temperature,
    'weights': [list(weight) for weight in config.weights],
    'max_sentences': config.vocab_sentences,
    'character_coverage': config.character_coverage,
    'tag_target': config.tag_target,
    'seed': config.seed,
  }
  with lock(vocab_dir):
    made = settings_of(output)
    if made is not None and _is_whole(output + '.model', made):
      made = {**made, 'normalization': vocab_lib.Vocab(output + '.model').normalization}
      for name, value in {**settings, 'normalization': config.normalization(side) or made['normalization']}.items():
        if made.get(name) not in (None, value):  # an earlier version kept fewer settings, or left one open
          raise UserError(
            f'a vocabulary keeps the settings it was made with; {output}.model has {name}={made.get(name)!r}, now '
            f'{name}={value!r}: set it back, or start in another folder'
          )
      return output + '.model'
    if made is None and os.path.exists(output + '.model'):  # a user's, or of a trainer that was killed here
      kept = files.set_aside(output + '.model')
      print(f'{output}.model was not made for this run; it is kept as {kept}', file=sys.stderr)
    pairs = parallel.find_pairs(config.data_dir, config.pairs, 'train', config.split_files)
    tags = config.tags({pair.target for pair in pairs}) and side != 'target'
    train_vocab(
      pairs,
      output,
      size,
      side=side,
      temperature=config.temperature,
      weights=config.weights_of([pair.name for pair in pairs]),
      max_sentences=config.vocab_sentences,
      character_coverage=config.character_coverage,
      tags=tags,
      normalization=config.normalization(side),
      seed=config.seed,
      overwrite=True,
      exact_size=False,
      quiet=quiet,
    )
    made = {**settings, 'fingerprint': files.sha256(output + '.model')}
    files.write(output + '.json', json_files.dump(made, indent=2))
  return output + '.model'


def settings_of(output: str) -> dict[str, Any] | None:
  """Settings that the vocabulary `output`.model was made with; None where they are not there, or damaged, with a line."""
  try:
    return {'weights': [], **json_files.read(output + '.json', 'the settings of a vocabulary', 'it is not used')}
  except FileNotFoundError:
    return None
  except UserError as e:
    print(e, file=sys.stderr)
    return None


def _is_whole(model: str, made: Mapping[str, Any]) -> bool:
  """Whether a vocabulary's file is there, as it was made."""
  if not os.path.exists(model):
    return False
  if made.get('fingerprint') in (None, files.sha256(model)):  # an earlier version kept none
    return True
  print(f'{model} is not as it was made; it is made again', file=sys.stderr)
  return False
