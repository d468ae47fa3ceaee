"""Training of a SentencePiece vocabulary on lines: unigram pieces, bytes for rare characters, fixed special ids."""

import collections
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

import sentencepiece

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files
from lingvo_moe.vocab.sentencepiece_vocab import SPECIAL

_LINE_BYTES = 4192  # SentencePiece's own default: of sentence pairs, longer ones are hardly sentences
_LISTED_FIRST = b'<pad>\t0\n<s>\t0\n</s>\t0\n<unk>\t0\n'  # the special ids, in every .vocab that is written here
RULES = ('identity', 'nfkc', 'nfkc_cf', 'nmt_nfkc', 'nmt_nfkc_cf')  # of normalisation, by SentencePiece's names


def check_output(output: str, overwrite: bool) -> None:
  """Makes the folder of `output`.model; UserError if it cannot, or if the file exists, unless `overwrite`."""
  for path in (output + '.model', output + '.vocab'):
    if os.path.isdir(path):
      raise UserError(f'a vocabulary is two files, and {path} is a folder: give another output')
    if os.path.exists(path) and not overwrite and not _is_half_written(output):
      raise UserError(f'{path} exists and is not replaced: give another output, or --overwrite')
  try:
    os.makedirs(os.path.dirname(output) or '.', exist_ok=True)
  except OSError as e:
    raise UserError(f'cannot make the folder of {output}.model ({e.strerror}): give another output') from None


def _is_half_written(output: str) -> bool:
  """Whether `output`.vocab is there alone, as a command leaves it that is killed between its two files."""
  if os.path.exists(output + '.model'):
    return False
  try:
    return files.read(output + '.vocab', len(_LISTED_FIRST)) == _LISTED_FIRST
  except OSError:
    return False


def train(
  lines: Iterable[bytes],
  output: str,
  vocab_size: int,
  *,
  character_coverage: float = 0.9995,
  normalization: str = 'identity',
  symbols: Sequence[str] = (),
  exact_size: bool = True,
  max_line_bytes: int = _LINE_BYTES,
) -> str:
  """Writes `output`.model and `output`.vocab, and returns the path of the first. Equal lines give equal bytes.

  Args:
    lines: the text.
    output: path without '.model'.
    vocab_size: number of pieces, including the 4 special ids, 256 bytes and the symbols.
    character_coverage: share of all characters that get pieces; the others are written as bytes.
    normalization: one of RULES.
    symbols: pieces that no text is encoded to, and that are decoded to none.
    exact_size: True to raise an error if the text gives fewer pieces; False to accept a smaller vocabulary.
    max_line_bytes: longer lines are left out, and a line on stderr says how many.
  """
  model, failures, counts = io.BytesIO(), [], collections.Counter()

  def guarded() -> Iterator[bytes]:  # SentencePiece hides what goes wrong here
    try:
      for line in lines:
        counts['all'] += 1
        counts['long'] += len(line) > max_line_bytes
        yield line
    except UserError as e:
      failures.append(e)

  try:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=guarded(),
      model_writer=model,
      vocab_size=vocab_size,
      model_type='unigram',
      byte_fallback=True,
      character_coverage=character_coverage,
      normalization_rule_name=normalization,
      control_symbols=list(symbols),
      hard_vocab_limit=exact_size,
      max_sentence_length=max_line_bytes,
      num_threads=16,  # fixed, because the order of its sums, and so the result, depends on it
      minloglevel=2,
      **{f'{name}_id': i for name, i in SPECIAL.items()},
    )
  except (RuntimeError, OSError) as e:
    failures.append(_explain(str(e), vocab_size))
  if failures:
    raise failures[0]
  path = write(output, model.getvalue())
  if counts['long']:
    print(
      f'{counts["long"]:,} of {counts["all"]:,} lines for {output}.model are over {max_line_bytes:,} bytes and were '
      'left out',
      file=sys.stderr,
    )
  return path


def _explain(message: str, vocab_size: int) -> UserError:
  """Translates an error message of SentencePiece to a UserError with the rule, the values and the way out."""
  if m := re.search(r'too high.*<= (\d+)', message):
    return UserError(
      f'the corpus must hold as many different pieces as the vocabulary; saw vocab_size={vocab_size}, and it gives at '
      f'most {m[1]}: use that, or more text'
    )
  if m := re.search(r'required_chars\. (\d+) vs (\d+)', message):
    return UserError(
      f'every covered character, byte, tag and special id needs a piece; saw vocab_size={vocab_size} and {m[2]} of '
      f'them: use a larger vocabulary, or a lower character_coverage'
    )
  if 'sentences_.empty()' in message or 'Input corpus' in message:
    return UserError(
      'a vocabulary needs text; every line that was read is empty, or too long to be a sentence: check the corpus'
    )
  return UserError(f'SentencePiece made no vocabulary of {vocab_size} pieces: {message}')


def write(output: str, model: bytes) -> str:
  """Writes `output`.model and `output`.vocab, and returns the path of the first."""
  processor = sentencepiece.SentencePieceProcessor(model_proto=model)
  listing = [f'{processor.id_to_piece(i)}\t{processor.get_score(i):g}\n' for i in range(processor.get_piece_size())]
  try:
    # Both are on disk before either takes its place; the .model, which alone is read, comes last.
    with files.replacing(output + '.model', binary=True) as f, files.replacing(output + '.vocab') as g:
      f.write(model)
      f.flush()
      g.writelines(listing)
  except OSError as e:
    raise UserError(f'cannot write {output}.model ({e.strerror}): give another output') from None
  return output + '.model'
