"""Marian models and OPUS-MT (Helsinki-NLP/opus-mt-*): Transformers with normalisation last, as of 2017."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.core import json_files
from lingvo_moe.interop import fairseq, vocabulary
from lingvo_moe.interop.hub_folder import HubFolder
from lingvo_moe.interop.table import Entry, Imported, Symbols

ARCHITECTURES = ('MarianMTModel',)
_TOKENISER = ('source.spm', 'target.spm', 'vocab.json')
_LANGUAGE = re.compile(r'>>(\S+)<<')


def convert(folder: HubFolder) -> Imported:
  folder.need(*_TOKENISER)
  source, target = (vocabulary.read(folder.file(name)) for name in _TOKENISER[:2])
  ids = folder.json('vocab.json', json_files.INTEGER)
  pieces = {i: piece for piece, i in ids.items()}
  tags = {piece: match[1] for piece in ids if (match := _LANGUAGE.fullmatch(piece))}
  # Pieces of the source without an id are unknown.
  special = (*vocabulary.pad_and_begin(folder.config), ids['</s>'], ids['<unk>'])
  more = [piece.piece for piece in source.pieces if piece.piece not in ids and piece.type == vocabulary.NORMAL]
  symbols = Symbols(special, folder.config['vocab_size'], len(more))
  names = [pieces.get(i, '') for i in symbols.theirs[: len(symbols.theirs) - len(more)]]
  return Imported(
    model='mt.opus.Base',
    values={**values(folder.config), 'tag_target': bool(tags)},
    entries=list(entries(folder.config)),
    symbols=symbols,
    vocabularies={
      'source_vocab': vocabulary.reordered(source, names + more, tags),
      'target_vocab': vocabulary.reordered(target, names + [''] * len(more), tags),
    },
    tokeniser=_TOKENISER,
    computed=('embed_positions.weight', 'embed_tokens.weight', 'lm_head.weight'),
  )


def values(config: Mapping[str, Any]) -> dict[str, Any]:
  return {**fairseq.sizes(config), 'norm_first': False, 'position_endpoint': False, 'logit_bias': True}


def form(ours: Any, models: Mapping[str, bytes]) -> dict[str, Any]:
  """Files of a folder without weights, by a configuration and vocabularies here: the inverse of `convert`."""
  pieces = vocabulary.pieces(models['source_vocab'])
  names = [f'>>{tag[1]}<<' if (tag := vocabulary.TAG.fullmatch(piece)) else piece for piece in pieces]
  config = {'architectures': [*ARCHITECTURES], 'model_type': 'marian', **fairseq.form(ours)}
  files = {'config.json': config, 'vocab.json': {name: i for i, name in enumerate(names)}}
  return files | {'source.spm': models['source_vocab'], 'target.spm': models['target_vocab']}


def entries(config: Mapping[str, Any]) -> Iterator[Entry]:
  yield Entry('model.shared.weight', 'target_embedding/table', 'symbols')
  yield Entry('final_logits_bias', 'target_embedding/bias', 'symbols')
  yield from fairseq.layers(config)
