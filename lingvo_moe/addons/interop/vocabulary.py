"""Vocabularies of imported models: SentencePiece models written anew, with the symbols in the order of this zoo.

Here the special symbols are 0 to 3 (pad, bos, eos, unk), and all others follow in the order that they have there. A
symbol that text is never encoded to is an unused piece, a language a tag.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.addons.interop.config_keys import FLAG, TOKEN, one_of
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import files
from lingvo_moe.storage.json_files import OBJECT, TEXT, Kind, by_name, list_of, optional

_SPECIAL = ('<pad>', '<s>', '</s>', '<unk>')
TAG = re.compile('<2([^>]+)>')  # which chooses a language
_KINDS = sentencepiece_model_pb2.ModelProto.SentencePiece
NORMAL = _KINDS.NORMAL

_CONTENT = Kind('an object with content', lambda value: OBJECT.fits(value) and TEXT.fits(value.get('content')))
_NAME = Kind('a string, or an object with one', lambda value: TEXT.fits(value) or _CONTENT.fits(value))
_NAMES = optional(list_of(_NAME))
_EXTRA = Kind(f'{_NAMES.name}, or an object of these', lambda value: by_name(_NAME).fits(value) or _NAMES.fits(value))
_BY_ID = Kind('an object of contents by id', lambda v: by_name(_CONTENT).fits(v) and all(map(str.isdecimal, v)))
LISTED = {'additional_special_tokens': _NAMES, 'extra_special_tokens': _EXTRA}
ADDED = optional(list_of(Kind('an object with id and content', lambda v: _CONTENT.fits(v) and TOKEN.fits(v.get('id')))))
# What is read of tokenizer_config.json, and what would change how text is encoded.
_SETTINGS = LISTED | {
  'added_tokens_decoder': optional(_BY_ID),
  'extra_ids': optional(TOKEN),
  'legacy_behaviour': optional(FLAG),
  'language_codes': one_of(None, 'm2m100', 'wmt21'),
  'separate_vocabs': one_of(None, False),
  'sp_model_kwargs': one_of(None, {}),
}


def read(path: str) -> sentencepiece_model_pb2.ModelProto:
  """A SentencePiece model; UserError where the file is none."""
  try:
    proto = sentencepiece_model_pb2.ModelProto.FromString(files.read(path))
  except Exception:  # google.protobuf's DecodeError, whose module is not public
    proto = None
  if proto is None or not proto.pieces:
    raise UserError(f'{path} is not a SentencePiece model: fetch it again')
  return proto


def settings(folder: HubFolder) -> dict[str, Any]:
  """Contents of tokenizer_config.json, if it is there."""
  return folder.json_if_any('tokenizer_config.json', **_SETTINGS)


def content(token: str | Mapping[str, Any]) -> str:
  """Text of a symbol, which a tokeniser's file may have as an object."""
  return token if isinstance(token, str) else token['content']


def ids(
  ids_by_piece: Mapping[str, int], config: Mapping[str, Any], begin: Sequence[str], pad: Sequence[str] = ('<pad>',)
) -> Mapping[str, int]:
  """Ids by piece as found in a folder, given those with which the decoder may begin, and that may be padding.

  Raises:
    ValueError: an id is beyond the vocabulary or that of two pieces, or a special symbol of config.json is another one.
  """
  if odd := next((piece for piece, i in ids_by_piece.items() if i >= config['vocab_size']), None):
    raise ValueError(f'{odd!r} has id {ids_by_piece[odd]}, beyond vocab_size={config["vocab_size"]}')
  if len({*ids_by_piece.values()}) < len(ids_by_piece):
    raise ValueError('pieces share an id')
  for name, known in (('pad', pad), ('decoder_start', begin), ('eos', ('</s>',))):
    if (i := config.get(key := f'{name}_token_id', -1)) not in (-1, *(ids_by_piece.get(piece) for piece in known)):
      raise ValueError(f'{key}={i}, which is not {" or ".join(known)}')
  return ids_by_piece


def check_added(folder: HubFolder, ids_by_piece: Mapping[str, int], names: Collection[str] = ()) -> None:
  """Refuses a token that was added to a tokeniser, which takes it out of a text before SentencePiece reads it.

  What a family's vocabulary has by itself is no such token: special symbols, and these `names` of languages or
  sentinels, under the ids that they have.
  """
  config, special = settings(folder), folder.json_if_any('special_tokens_map.json', **LISTED)
  added = [(token['content'], int(i)) for i, token in (config.get('added_tokens_decoder') or {}).items()]
  tokens = folder.json_if_any('tokenizer.json', added_tokens=ADDED).get('added_tokens') or ()
  added += [(token['content'], token['id']) for token in tokens]
  if folder.has('added_tokens.json'):
    added += folder.json('added_tokens.json', TOKEN).items()
  for stated in (config, special):
    extra = stated.get('extra_special_tokens') or ()
    listed = [*(stated.get('additional_special_tokens') or ()), *(extra.values() if isinstance(extra, dict) else extra)]
    listed += [token for key, token in stated.items() if key.endswith('_token') and _NAME.fits(token)]
    added += [(name := content(token), ids_by_piece.get(name, -1)) for token in listed]
  for name, i in added:
    if name not in {*_SPECIAL, '<mask>', *names} or ids_by_piece.get(name) != i:
      raise UserError(
        f'{folder.path} adds {name!r} (id {i}) to its tokeniser, which finds it in a text before SentencePiece does; '
        'here special symbols, languages and sentinels alone may be added: take it out of tokenizer_config.json, '
        'tokenizer.json, added_tokens.json and special_tokens_map.json, and it is spelt in pieces'
      )


def pieces(model: bytes) -> list[str]:
  """Pieces of a SentencePiece model in the order of their ids."""
  return [piece.piece for piece in sentencepiece_model_pb2.ModelProto.FromString(model).pieces]


def of_fairseq(model: bytes) -> bytes:
  """A SentencePiece model with special symbols as in fairseq's: unk, bos, eos and no pad, so ids are one less."""
  proto = sentencepiece_model_pb2.ModelProto.FromString(model)
  _, bos, eos, unk, *others = proto.pieces
  del proto.pieces[:]
  proto.pieces.extend([unk, bos, eos, *others])
  spec = proto.trainer_spec
  spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = 0, 1, 2, -1
  return proto.SerializeToString()


def pad_and_begin(config: Mapping[str, Any]) -> tuple[int, int]:
  """Ids of pad, -1 where the decoder begins with it, and of the symbol with which the decoder begins."""
  begin = config['decoder_start_token_id']
  return -1 if config['pad_token_id'] == begin else config['pad_token_id'], begin


def reordered(
  base: sentencepiece_model_pb2.ModelProto, names: Sequence[str], tags: Mapping[str, str], symbols: Iterable[str] = ()
) -> bytes:
  """A SentencePiece model with the pieces of `base` in another order.

  Args:
    base: has the scores of the pieces, and how text is normalised.
    names: the piece of every id, of which the first four are special; one that `base` lacks is not used.
    tags: language of those names that choose one.
    symbols: names that stand for themselves in text, though `base` lacks them.
  """
  known = {piece.piece: piece for piece in base.pieces}
  written, symbols = sentencepiece_model_pb2.ModelProto(), set(symbols)
  written.CopyFrom(base)
  del written.pieces[:]
  for i, name in enumerate(names):
    piece = written.pieces.add(piece=name or f'<unused_{i}>', score=0.0, type=_KINDS.UNUSED)
    if i < len(_SPECIAL):
      piece.piece, piece.type = _SPECIAL[i], _KINDS.UNKNOWN if _SPECIAL[i] == '<unk>' else _KINDS.CONTROL
    elif name in tags:
      piece.piece, piece.type = f'<2{tags[name]}>', _KINDS.CONTROL
    elif name in symbols:
      piece.type = _KINDS.USER_DEFINED
    elif name in known and known[name].type not in (_KINDS.UNKNOWN, _KINDS.CONTROL):
      piece.CopyFrom(known[name])
  spec = written.trainer_spec
  spec.pad_id, spec.bos_id, spec.eos_id, spec.unk_id = range(4)
  spec.pad_piece, spec.bos_piece, spec.eos_piece, spec.unk_piece = _SPECIAL
  spec.vocab_size = len(names)
  return written.SerializeToString()
