"""Training of SentencePiece vocabularies on parallel corpora, with languages mixed as in training."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core import progress
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import parallel, temperature_sampling, text
from lingvo_moe.corpora.parallel import Pair
from lingvo_moe.vocab import sentencepiece_training
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab, corpus_tag, tag

NORMALIZATION = {'source': 'nmt_nfkc', 'target': 'identity', 'shared': 'identity'}  # nobody reads sources back


def train_vocab(
  pairs: Sequence[Pair],
  output: str,
  vocab_size: int,
  *,
  side: str = 'shared',
  temperature: float = 1.0,
  weights: Sequence[float] = (),
  max_sentences: int = 1_000_000,
  character_coverage: float = 0.9995,
  tags: bool | None = None,
  tag_sides: str = 'source',
  corpus_tags: Sequence[str] = (),
  normalization: str | None = None,
  seed: int = 1,
  overwrite: bool = False,
  exact_size: bool = True,
) -> str:
  """Trains a vocabulary: writes `output`.model and `output`.vocab. Equal arguments and corpus give equal bytes.

  Args:
    pairs: pairs to read, normally of the train split.
    output: path without '.model'.
    vocab_size: number of pieces, tags included; this, character_coverage and exact_size are those of
      sentencepiece_training.train.
    side: 'source', 'target' or 'shared' (both sides of every pair).
    temperature: temperature of the sampling over pairs. A pair whose share exceeds its lines repeats them.
    weights: factor of each pair's share; none: all alike.
    max_sentences: most lines of either side to use.
    tags: True to add the symbols `<2xx>` of the languages that have tags; None to add them if there are several.
    tag_sides: which these are: by 'source' those of targets, else those of both sides; one of language_tags.SIDES.
    corpus_tags: names of symbols for the sources of corpora; see mixture.py.
    normalization: one of SentencePiece's rules (sentencepiece_training.RULES); None: as NORMALIZATION has it.
    seed: seed of the choice of lines.
    overwrite: True to replace existing files.

  Returns:
    Path of the .model file.

  Raises:
    UserError: the corpus is damaged, it cannot give a vocabulary of that size, or the output exists.
  """
  sentencepiece_training.check_output(output, overwrite)
  sides = ('target',) if tag_sides == 'source' else ('source', 'target')
  languages = sorted({getattr(pair, side) for pair in pairs for side in sides})
  tagged = languages if (len(languages) > 1 if tags is None else tags) else []
  sizes = [parallel.count_lines(pair) for pair in progress.over(pairs, 'pair')]
  total = min(max_sentences, sum(sizes))
  wanted = temperature_sampling.quotas(temperature_sampling.shares(sizes, temperature, weights), max(total, len(pairs)))
  with progress.bar(sum(wanted), 'reading sentences') as bar:
    path = sentencepiece_training.train(
      _lines(pairs, sizes, wanted, side, seed, bar),
      output,
      vocab_size,
      character_coverage=character_coverage,
      normalization=normalization or NORMALIZATION[side],
      symbols=[*map(tag, tagged), *map(corpus_tag, corpus_tags)],
      exact_size=exact_size,
    )
  return path


def extend_vocab(
  base: TaggedVocab, output: str, languages: Sequence[str], more: TaggedVocab | None, overwrite: bool
) -> str:
  """Writes a vocabulary with all pieces of another under their ids, then tags of languages, then further pieces.

  These are less likely than all others, so that other text keeps most of its ids; `more` has them.
  """
  sentencepiece_training.check_output(output, overwrite)
  model = sentencepiece_model_pb2.ModelProto.FromString(base.model_bytes)
  kinds, known = sentencepiece_model_pb2.ModelProto.SentencePiece, {piece.piece for piece in model.pieces}
  lowest = min(piece.score for piece in model.pieces if piece.type == kinds.NORMAL)
  more_pieces = sentencepiece_model_pb2.ModelProto.FromString(more.model_bytes).pieces if more else ()
  new = {tag(language): (0.0, kinds.CONTROL) for language in languages}
  new |= {piece.piece: (piece.score + lowest, kinds.NORMAL) for piece in more_pieces if piece.type == kinds.NORMAL}
  for piece, (score, kind) in new.items():
    if piece not in known:
      model.pieces.add(piece=piece, score=score, type=kind)
  if len(model.pieces) == base.size:
    raise UserError(f'{base.path} has all these symbols and pieces: use it as it is')
  model.trainer_spec.vocab_size = len(model.pieces)
  return sentencepiece_training.write(output, model.SerializeToString())


def _lines(pairs, sizes, wanted, side, seed, bar) -> Iterator[bytes]:
  """Yields the chosen lines in the order of the files: `wanted` of each pair, each line equally often to within one."""
  for pair, size, n in zip(pairs, sizes, wanted, strict=True):
    files = {'source': pair.source_files, 'target': pair.target_files}.get(side, pair.source_files + pair.target_files)
    every, some = divmod(n, size)
    key = temperature_sampling.fold(seed, 'vocab', pair.name)
    number = 0
    for path in files:
      for batch in text.line_batches(path):
        index = (number + np.arange(len(batch))) % size
        times = every + (temperature_sampling.permute(index, size, key) < some)
        number += len(batch)
        for i in np.flatnonzero(times):
          yield from itertools.repeat(batch[i], times[i])
    bar.update(n)
  bar.set_description('training (SentencePiece, no news until done)')
