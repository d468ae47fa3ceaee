#!/usr/bin/env python
"""python tools/random_folder.py marian|nllb|mixtral OUT

Writes a folder as the hub lays it out, of a model of published size with random weights in shards of 1 GB: to measure
lingvo-moe import, export and bench without the network. The tokeniser is that of tests/data/interop/NAME with made-up
pieces up to the size of the vocabulary.

  marian   OPUS-MT's Transformer Base, 73.9M weights, 0.3 GB
  nllb     NLLB-200 of 24 + 24 layers, 1.37B weights, 5.5 GB
  mixtral  12 layers of 8 experts, an eighth of Mixtral's layer, 1.15B weights, 4.6 GB
"""

import json
import math
import os
import pathlib
import shutil

import numpy as np
from sentencepiece import sentencepiece_model_pb2

from lingvo_moe.addons.interop import families, hub_export
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.cli import app
from lingvo_moe.config import configuration
from lingvo_moe.core import weights
from lingvo_moe.core.errors import UserError
from lingvo_moe.run import checkpoint
from lingvo_moe.storage import new_folder

FIXTURES = pathlib.Path(__file__).parents[1] / 'tests' / 'data' / 'interop'
BOTH_STACKS = ('layers', 'ffn_dim', 'attention_heads')
SHARD_BYTES = 1 << 30


def stacks(layers, ffn_dim, heads):
  """Values of both stacks."""
  values = zip(BOTH_STACKS, (layers, ffn_dim, heads), strict=True)
  return {f'{stack}_{name}': value for name, value in values for stack in ('encoder', 'decoder')}


SIZES = {
  'marian': dict(d_model=512, max_position_embeddings=512, **stacks(6, 2048, 8)),
  'nllb': dict(d_model=1024, max_position_embeddings=1024, vocab_size=256_206, **stacks(24, 8192, 16)),
  'mixtral': dict(
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=4,
    num_local_experts=8,
    max_position_embeddings=4096,
    vocab_size=32_000,
  ),
}
PIECES = {'marian': 29_067, 'nllb': 256_000, 'mixtral': 32_000}


def enlarge(path: pathlib.Path, size: int) -> list[str]:
  """Adds made-up pieces to a SentencePiece model; returns all of its pieces."""
  proto = sentencepiece_model_pb2.ModelProto.FromString(path.read_bytes())
  for i in range(len(proto.pieces), size):
    proto.pieces.add(piece=f'▁{path.name[0]}{i}', score=-30 - i / size)
  proto.trainer_spec.vocab_size = size
  path.write_bytes(proto.SerializeToString())
  return [piece.piece for piece in proto.pieces]


@app.command(arguments=True)
def main(argv):
  if len(argv) != 3 or argv[1] not in SIZES:
    raise UserError(f'a form, {", ".join(SIZES)}, and a new folder are given; saw {argv[1:]}')
  _, name, out = argv
  new_folder.check(out, 'a folder of weights', 'OUT')
  folder = pathlib.Path(out)
  folder.mkdir(parents=True)
  for path in (FIXTURES / name).iterdir():
    if not path.name.startswith(('model.', 'expected', 'training')):
      shutil.copy(path, folder)
  config = json.loads((folder / 'config.json').read_text()) | SIZES[name]
  pieces = {path.name: enlarge(path, PIECES[name]) for path in folder.iterdir() if path.suffix in ('.spm', '.model')}
  if name == 'marian':
    known = json.loads((folder / 'vocab.json').read_text())
    names = dict.fromkeys([*known, *(piece for of_file in pieces.values() for piece in of_file if piece[:1] != '<')])
    names = [piece for piece in names if piece != '<pad>'][:58_100] + ['<pad>']
    (folder / 'vocab.json').write_text(json.dumps({piece: i for i, piece in enumerate(names)}))
    pad = len(names) - 1
    config |= dict(vocab_size=len(names), pad_token_id=pad, decoder_start_token_id=pad)
    generation = json.loads((folder / 'generation_config.json').read_text())
    generation |= dict(bad_words_ids=[[pad]], pad_token_id=pad, decoder_start_token_id=pad)
    (folder / 'generation_config.json').write_text(json.dumps(generation))
  (folder / 'config.json').write_text(json.dumps(config))

  imported = families.convert(HubFolder(out))
  sizes = dict.fromkeys((f'{field}_size' for field in ('source_vocab', 'target_vocab', 'vocab')), 0)
  values = {**imported.values} | {
    key: len(imported.symbols.theirs) for key in sizes if key[:-5] in imported.vocabularies
  }
  model = configuration.resolve(imported.model, (), (), **values).model()
  specs = weights.flatten(model.weights())
  kinds = {}
  for entry in imported.entries:
    if not entry.ours:
      kinds[entry.theirs] = ('F32', config['d_model'])
    else:
      kinds[entry.theirs] = ('F32', *entry.shape_there(specs[entry.ours], imported.symbols))
  rng = np.random.default_rng(0)

  def parts(tensor):
    _, *shape = kinds[tensor]
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.02
    for rows, *_ in checkpoint.blocks(shape, checkpoint.PART_BYTES // 4):
      block = rng.standard_normal([rows.stop - rows.start, *shape[1:]], np.float32) * np.float32(scale)
      yield block + np.float32(1) if 'norm' in tensor and tensor.endswith('weight') else block

  hub_export._SHARD_BYTES = SHARD_BYTES
  hub_export._save(out, kinds, parts)
  total = sum(math.prod(shape) for _, *shape in kinds.values())
  print(f'{out}: {imported.model}, {total:,} weights, {sum(map(os.path.getsize, folder.iterdir())) / 1e9:.2f} GB')


if __name__ == '__main__':
  main()
