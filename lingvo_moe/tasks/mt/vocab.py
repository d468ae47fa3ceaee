"""A SentencePiece vocabulary: text to ids in the graph, ids to text in Python.

Every vocabulary has the same four special ids. A target language is asked for by its tag, `<2xx>`, which is one
symbol of the source vocabulary and is put before the sentence as an id, never as text.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import sentencepiece

from lingvo_moe.core.errors import UserError

if TYPE_CHECKING:
  import tensorflow as tf  # slow to import; making a vocabulary does not need it

PAD, BOS, EOS, UNK = 0, 1, 2, 3
SPECIAL = {'pad': PAD, 'bos': BOS, 'eos': EOS, 'unk': UNK}


def tag(language: str) -> str:
  """The symbol that asks for a target language: '<2de>'."""
  return f'<2{language}>'


class Vocab:
  """A SentencePiece .model file.

  Attributes:
    path: the file.
    size: the number of ids.
    model_bytes: its contents.
    fingerprint: their SHA-256, in hex.
  """

  def __init__(self, path: str):
    if not os.path.isfile(path):
      raise UserError(f'no vocabulary file {path!r}: make one with tools/train_vocab.py')
    self.path = path
    with open(path, 'rb') as f:
      self.model_bytes = f.read()
    self.fingerprint = hashlib.sha256(self.model_bytes).hexdigest()
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self._processor.LoadFromSerializedProto(self.model_bytes)
      self.size = self._processor.get_piece_size()
    except RuntimeError:
      self.size = 0
    if not self.size:
      raise UserError(f'{path} is not a SentencePiece model: give the .model file that tools/train_vocab.py wrote')
    self._check_special_ids()

  def _check_special_ids(self) -> None:
    saw = {name: getattr(self._processor, f'{name}_id')() for name in SPECIAL}
    if saw != SPECIAL:
      show = ', '.join(f'{name} {i}' for name, i in saw.items())
      raise UserError(
        f'a vocabulary must have the ids pad 0, bos 1, eos 2, unk 3; {self.path} has {show} (-1: none): '
        'train it with tools/train_vocab.py, or SentencePiece with --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3'
      )

  @functools.cached_property
  def _tokenizer(self):
    import tensorflow as tf
    import tensorflow_text

    with tf.init_scope():
      return tensorflow_text.SentencepieceTokenizer(self.model_bytes)

  def tokenize(self, strings: tf.Tensor) -> tf.RaggedTensor:
    """int32 ids of each string of a vector, in the graph; neither bos nor eos."""
    return self._tokenizer.tokenize(strings)

  def encode(self, lines: Sequence[str]) -> list[list[int]]:
    """The same ids as lists: by the same tokeniser, as sentencepiece's own resolves ties in another way."""
    import tensorflow as tf

    return self.tokenize(tf.constant(list(lines), tf.string)).to_list()

  def detokenize(self, rows: tf.RaggedTensor | Iterable[Iterable[int]]) -> list[str]:
    """One line of text for each row of ids, which ends at eos; pad, bos and ids beyond the vocabulary are skipped."""
    if hasattr(rows, 'to_list'):
      rows = rows.to_list()
    return [self._line(row) for row in rows]

  def _line(self, row) -> str:
    ids = []
    for i in map(int, row):
      if i == EOS:
        break
      if i not in (PAD, BOS) and i < self.size:
        ids.append(i)
    # Byte pieces can spell an end of line, which would shift every line after it.
    return self._processor.decode(ids).replace('\n', ' ').replace('\r', ' ')

  def normalize(self, line: str) -> str:
    """The text that tokenising and detokenising gives back."""
    return self._processor.normalize(line).replace('\u2581', ' ').strip(' ')

  def tags(self) -> list[str]:
    """The languages that there is a tag for, sorted."""
    matches = (re.fullmatch(r'<2(\S+)>', self._processor.id_to_piece(i)) for i in range(self.size))
    return sorted(m[1] for m in matches if m)

  def tag_id(self, language: str) -> int:
    """The id of a target language's tag."""
    i = self._processor.piece_to_id(tag(language))
    if i == UNK:
      raise UserError(
        f'with several target languages (or tag_target) the source vocabulary needs the symbol {tag(language)}; '
        f'{self.path} lacks it: train it with tools/train_vocab.py --tags'
      )
    return i
