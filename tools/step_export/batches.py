"""Batches of translation pairs in one compressed file, which train.py unpacks with NumPy alone.

Every sentence is stored once, and a batch as the numbers of its sentences: some 10 MB for 6,000 batches of Multi30k,
where the arrays would take half a gigabyte.
"""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np

from lingvo_moe.core.errors import UserError
from lingvo_moe.models.batches import BATCH_KEYS


def save(path: str, batches: Iterable[Mapping[str, np.ndarray]], begin: int, count: int) -> None:
  """Writes batches begin, ..., begin + count - 1 of a stream that starts with `begin`.

  Raises:
    UserError: batches of another task, or that hold more than pairs of sentences (loss factors, alignments).
  """
  numbers: dict[str, dict[bytes, int]] = {'source': {}, 'target': {}}
  examples: dict[str, list[int]] = {'source': [], 'target': []}
  in_row, lengths = [], set()
  for batch in itertools.islice(batches, count):
    if set(batch) != set(BATCH_KEYS):
      raise UserError(
        f'batches of pairs of sentences alone go to another machine; saw arrays {", ".join(sorted(batch))}: '
        'use a translation model without loss factors and guided alignment'
      )
    lengths.add((batch['src_ids'].shape[1], batch['tgt_labels'].shape[1]))
    in_row.append(batch['src_segments'].max(1))
    begin_symbol = batch['tgt_inputs'][0, 0]
    for side, ids, segments in (('source', 'src_ids', 'src_segments'), ('target', 'tgt_labels', 'tgt_segments')):
      known = numbers[side]
      examples[side] += [known.setdefault(text, len(known)) for text in _sentences(batch[ids], batch[segments])]
  if len(lengths) > 1:
    saw = ', '.join(f'{source} and {target}' for source, target in sorted(lengths)[:3])
    raise UserError(
      f'an exported step has one shape of batches; saw rows of {saw} tokens: begin a run with packing=True'
    )
  [(source_length, target_length)] = lengths
  arrays = {}
  for side, known in numbers.items():
    sentences = [np.frombuffer(text, np.int32) for text in known]
    arrays[f'{side}_ids'] = _small(np.concatenate(sentences))
    arrays[f'{side}_ends'] = np.cumsum([0, *map(len, sentences)])
    arrays[f'{side}_examples'] = np.array(examples[side], np.int32)
  np.savez_compressed(
    path,
    **arrays,
    source_length=source_length,
    target_length=target_length,
    begin=begin,
    begin_symbol=begin_symbol,
    examples_in_row=np.array(in_row),
  )


def _sentences(ids_BT: np.ndarray, segments_BT: np.ndarray) -> list[bytes]:
  """Ids of each segment, row by row."""
  rows, columns = segments_BT.nonzero()
  segments = segments_BT[rows, columns]
  begins = np.flatnonzero(np.diff(rows, prepend=-1) | np.diff(segments, prepend=0))
  return [part.tobytes() for part in np.split(ids_BT[rows, columns], begins[1:])]


def _small(ids: np.ndarray) -> np.ndarray:
  return ids.astype(np.uint16 if ids.max() < 1 << 16 else np.int32)
