"""Marian models and OPUS-MT (Helsinki-NLP/opus-mt-*): Transformers with normalisation last, as of 2017."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lingvo_moe.addons.interop import fairseq, vocabulary
from lingvo_moe.addons.interop.config_keys import ACTIVATIONS, FLAG, SHARE, SIZE, TOKEN, Keys, of, one_of
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.addons.interop.tensor_table import Imported, Symbols, TensorEntry

CLASSES = {
  'MarianMTModel': Keys(
    'marian',
    ('MarianTokenizer',),
    fairseq.HONOURED
    | of(SIZE, vocab_size=58_101)
    | of(one_of(*ACTIVATIONS), activation_function='gelu')
    | of(SHARE, attention_dropout=0.0)
    | of(FLAG, scale_embedding=False, tie_word_embeddings=True)
    | of(TOKEN, decoder_start_token_id=58_100, pad_token_id=58_100, eos_token_id=0),
    only={'is_encoder_decoder': True, 'share_encoder_decoder_embeddings': True},
    inert=f'{fairseq.INERT} decoder_vocab_size',  # that of a decoder with an embedding of its own
    aliases=fairseq.ALIASES,
  )
}
TOKENISER = ('source.spm', 'target.spm', 'vocab.json')
_LANGUAGE = re.compile(r'>>(\S+)<<')


def convert(folder: HubFolder, config: Mapping[str, Any]) -> Imported:
  folder.need(*TOKENISER)
  source, target = (vocabulary.read(folder.file(name)) for name in TOKENISER[:2])
  ids = vocabulary.ids(folder.json('vocab.json', TOKEN), config, begin=('<pad>', '<s>'))
  pieces = {i: piece for piece, i in ids.items()}
  tags = {piece: match[1] for piece in ids if (match := _LANGUAGE.fullmatch(piece))}
  vocabulary.check_added(folder, ids, tags)
  # Pieces of the source without an id are unknown.
  special = (*vocabulary.pad_and_begin(config), ids['</s>'], ids['<unk>'])
  more = [piece.piece for piece in source.pieces if piece.piece not in ids and piece.type == vocabulary.NORMAL]
  symbols = Symbols(special, config['vocab_size'], len(more))
  names = [pieces.get(i, '') for i in symbols.theirs[: len(symbols.theirs) - len(more)]]
  return Imported(
    model='mt.opus.Base',
    values={**values(config), 'tag_target': bool(tags)},
    entries=list(entries(config)),
    symbols=symbols,
    vocabularies={
      'source_vocab': vocabulary.reordered(source, names + more, tags),
      'target_vocab': vocabulary.reordered(target, names + [''] * len(more), tags),
    },
    tokeniser=TOKENISER,
    computed=dict.fromkeys((f'model.{stack}.embed_positions.weight' for stack in ('encoder', 'decoder')), _sinusoids),
  )


def values(config: Mapping[str, Any]) -> dict[str, Any]:
  return {**fairseq.sizes(config), 'norm_first': False, 'position_endpoint': False, 'logit_bias': True}


def form(ours: Any, models: Mapping[str, bytes]) -> dict[str, Any]:
  """Files of a folder without weights, by a configuration and vocabularies here: the inverse of `convert`."""
  pieces = vocabulary.pieces(models['source_vocab'])
  names = [f'>>{tag[1]}<<' if (tag := vocabulary.TAG.fullmatch(piece)) else piece for piece in pieces]
  config = {'architectures': [*CLASSES], 'model_type': 'marian', **fairseq.form(ours)}
  files = {'config.json': config, 'vocab.json': {name: i for i, name in enumerate(names)}}
  return files | {'source.spm': models['source_vocab'], 'target.spm': models['target_vocab']}


def entries(config: Mapping[str, Any]) -> Iterator[TensorEntry]:
  yield fairseq.embedding(config)
  output = 'target_embedding' if config['tie_word_embeddings'] else 'output_embedding'
  if output == 'output_embedding':
    yield TensorEntry('lm_head.weight', 'output_embedding/table', 'symbols')
  yield TensorEntry('final_logits_bias', f'{output}/bias', 'symbols')
  yield from fairseq.layers(config)


def _sinusoids(shape: Sequence[int]) -> np.ndarray:
  """Positions [positions, features], which a folder may hold, and the class then reads: sines, then cosines."""
  rates = 10_000.0 ** (-2 * np.arange(shape[1] // 2) / shape[1])
  angles = np.arange(shape[0])[:, np.newaxis] * rates
  return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
