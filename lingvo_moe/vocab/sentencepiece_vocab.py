"""SentencePiece vocabularies: text to ids in the graph, ids to text in Python. All have the same special ids.

The target language of a translation is chosen by a tag, `<2xx>`, a symbol of the source vocabulary whose id is put
before the ids of the sentence. A corpus may have a symbol likewise, `<@bt>`. A sentence that has these characters has
them as text.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import sentencepiece
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.core import quiet
from lingvo_moe.core.errors import UserError, closest
from lingvo_moe.storage import files
from lingvo_moe.vocab import vocab as core_vocab
from lingvo_moe.vocab.vocab import BOS, EOS, PAD, UNK

if TYPE_CHECKING:
  import tensorflow as tf  # slow to import, and not needed to train a vocabulary
  import tensorflow_text

SPECIAL = {'pad': PAD, 'bos': BOS, 'eos': EOS, 'unk': UNK}
_TAG = re.compile(r'<2(\S+)>')


def tag(language: str) -> str:
  """Tag of a target language: '<2de>'."""
  return f'<2{language}>'


def corpus_tag(name: str) -> str:
  """Symbol before the sources of a corpus: '<@bt>'."""
  return f'<@{name}>'


class SentencePieceVocab(core_vocab.Vocab):
  """Vocabulary in a SentencePiece .model file."""

  def __init__(self, path: str):
    if not os.path.isfile(path):
      raise UserError(f'no vocabulary file {path!r}: make one with lingvo-moe vocab')
    self.path = path
    contents = files.read(path)
    self.fingerprint = hashlib.sha256(contents).hexdigest()  # of the file, whatever `_adapted` makes of it
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self._processor.LoadFromSerializedProto(contents)
      self.model_bytes = self._adapted(contents)  # as it is used
      self._processor.LoadFromSerializedProto(self.model_bytes)
      self.size = self._processor.get_piece_size()
    except RuntimeError:
      self.size = 0
    if not self.size:
      raise UserError(f'{path} is not a SentencePiece model: give the .model file that lingvo-moe vocab wrote')
    self._check_special_ids()

  def _adapted(self, model: bytes) -> bytes:
    """The model to use, given that of the file."""
    return model

  @property
  def normalization(self) -> str:
    """SentencePiece's name of the rule by which text is normalised; of rules of one's own 'user_defined'."""
    return sentencepiece_model_pb2.ModelProto.FromString(self.model_bytes).normalizer_spec.name

  def _check_special_ids(self) -> None:
    saw = {name: getattr(self._processor, f'{name}_id')() for name in SPECIAL}
    if saw != SPECIAL:
      show = ', '.join(f'{name} {i}' for name, i in saw.items())
      raise UserError(
        f'a vocabulary must have the ids pad 0, bos 1, eos 2, unk 3; {self.path} has {show} (-1: none): '
        'train it with lingvo-moe vocab, or SentencePiece with --pad_id=0 --bos_id=1 --eos_id=2 --unk_id=3'
      )

  @functools.cached_property
  def _tokenizer(self):
    import tensorflow as tf

    with tf.init_scope():
      return self.new_tokenizer()

  def new_tokenizer(self, name: str | None = None) -> tensorflow_text.SentencepieceTokenizer:
    """TensorFlow's tokeniser of the vocabulary, made without the messages of the SentencePiece in it."""
    import tensorflow_text

    with quiet.without_messages(re.compile(rb'\w+\.cc\(\d+\) LOG\(INFO\)')):
      return tensorflow_text.SentencepieceTokenizer(self.model_bytes, name=name)

  def tokenize(self, strings: tf.Tensor) -> tf.RaggedTensor:
    """Tokenises a vector of strings in the graph: int32 ids of each, without bos and eos."""
    return self._tokenizer.tokenize(strings)

  def encode(self, lines: Sequence[str]) -> list[list[int]]:
    """Ids of each line as lists, by `tokenize`, because the tokeniser of `sentencepiece` resolves ties differently."""
    import tensorflow as tf

    strings = tf.constant(list(lines), tf.string)
    try:
      return self.tokenize(strings).to_list()
    except tf.errors.NotFoundError:  # tf.random.set_seed frees what cached kernels own, and so the tokeniser's model
      self.__dict__.pop('_tokenizer', None)
      return self.tokenize(strings).to_list()

  def nbest(self, text: str, count: int) -> list[list[int]]:
    """The best segmentations of a text by a unigram vocabulary, the best first."""
    return self._processor.nbest_encode_as_ids(text, count)

  def detokenize(self, rows: Iterable[Iterable[int]]) -> list[str]:
    """Text of each row of ids; see `decode`."""
    return list(map(self.decode, rows))

  def pieces(self, ids: Iterable[int]) -> list[str]:
    """Pieces by their ids, special ones too: '<s>', '\u2581the', '</s>'."""
    return [self._processor.id_to_piece(int(i)) for i in ids]


class TaggedVocab(SentencePieceVocab):
  """SentencePiece vocabulary that may have tags.

  Args:
    path: of the .model file.
    begins: characters after `<` of the model's tags: '2' of a model with tags of languages, '@' of corpora.
  """

  def __init__(self, path: str, begins: str = '2@'):
    self._tag = re.compile(rf'<[{begins}](\S+)>' if begins else r'(?!)')
    super().__init__(path)

  def _adapted(self, model: bytes) -> bytes:
    """The model with its tags as control symbols, to which no text is encoded; user-defined ones are found in text."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model)
    kinds = sentencepiece_model_pb2.ModelProto.SentencePiece
    tags = [piece for piece in proto.pieces if piece.type == kinds.USER_DEFINED and self._tag.fullmatch(piece.piece)]
    for piece in tags:
      piece.type = kinds.CONTROL
    return proto.SerializeToString() if tags else model

  def tags(self) -> list[str]:
    """Languages with a tag in the vocabulary, sorted."""
    return sorted(match[1] for piece in self.pieces(range(self.size)) if (match := _TAG.fullmatch(piece)))

  def tag_id(self, language: str) -> int:
    """Id of the tag of a target language; UserError if the vocabulary lacks it."""
    way_out = 'train it with lingvo-moe vocab --tags'
    if tags := self.tags():
      way_out = (
        f'{closest(language, tags)} (a corpus is named by these), or, for a new run with --init_from, add it: '
        f'lingvo-moe vocab --extend={self.path} --languages={language}'
      )
    return self._symbol(tag(language), 'several target languages (or tag_target)', way_out)

  def corpus_tag_id(self, name: str) -> int:
    """Id of the symbol before the sources of a corpus; UserError if the vocabulary lacks it."""
    return self._symbol(corpus_tag(name), 'a tag in corpora', f'train it with lingvo-moe vocab --corpus_tags={name}')

  def _symbol(self, symbol: str, what: str, way_out: str) -> int:
    i = self._processor.piece_to_id(symbol)
    if i == UNK:
      raise UserError(f'with {what} the source vocabulary needs the symbol {symbol}; {self.path} lacks it: {way_out}')
    return i


def check_size(vocab: Any, field: str, size: int, path: str) -> None:
  """Raises UserError unless a vocabulary, read from a path, has as many symbols as a field of the model says."""
  if vocab.size != size:
    raise UserError(
      f'a model has as many embeddings as its vocabulary has symbols; saw {field}={size}, but {path} has {vocab.size}: '
      f'bind {field} = {vocab.size}, or give another vocabulary'
    )


def own_copy(path: str, run_path: str, resumed: bool, read: Callable[[str], Any], field: str) -> str:
  """Copies the vocabulary at `path` to `own`, the run's copy, and returns its path.

  Args:
    path: of the vocabulary; it may be the copy itself.
    own: path of the copy.
    resumed: whether the run has its copy from before, which then must be there and equal the vocabulary.
    read: reads a vocabulary from a path; raises UserError for other files.
    field: field of the configuration that names the vocabulary.
  """
  if os.path.abspath(path) == os.path.abspath(run_path):
    return run_path
  vocab = read(path)
  if resumed and not os.path.exists(run_path):
    raise UserError(
      f"{run_path}, the run's copy of {field}, is gone: restore it (cp {path} {run_path}, if that is the same file)"
    )
  if resumed and vocab.fingerprint != read(run_path).fingerprint:
    raise UserError(
      f'{field}={path} is not the vocabulary that the run in {os.path.dirname(os.path.dirname(run_path))} began with '
      f'({run_path}): leave it out, or choose another --logdir'
    )
  os.makedirs(os.path.dirname(run_path), exist_ok=True)
  files.write(run_path, files.read(path))
  return run_path
