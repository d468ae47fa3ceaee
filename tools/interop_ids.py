#!/usr/bin/env python
"""python tools/interop_ids.py FOLDER [LINES]

Compares ids of text: tokenisers of transformers with the vocabularies that lingvo-moe import makes of their files.
FOLDER is a corpus of folders such as deu-en/train.deu.gz, of which 20 languages give 500 LINES each. Vocabularies are
trained on these lines. Prints a line for each family. Needs pip install -e '.[interop]' protobuf.
"""

import gzip
import itertools
import json
import pathlib
import sys
import tempfile

import sentencepiece
import transformers

from lingvo_moe.addons.interop import families
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.vocab.sentencepiece_vocab import TaggedVocab

LANGUAGES = 'ara bel ben bul cmn deu ell fra heb hin hun ita jpn kat nld pol por rus tur vie'.split()
SIZES = dict(
  d_model=8,
  encoder_ffn_dim=8,
  decoder_ffn_dim=8,
  encoder_layers=1,
  decoder_layers=1,
  encoder_attention_heads=1,
  decoder_attention_heads=1,
)


def lines_of(folder, count):
  """So many lines in each of 20 languages."""
  files = [path for code in LANGUAGES for path in pathlib.Path(folder).glob(f'{code}-en/train.{code}.gz')][:20]
  lines = []
  for path in files:
    with gzip.open(path, 'rt', encoding='utf-8') as f:
      lines += [line.rstrip('\n') for line in itertools.islice(f, count)]
  return len(files), lines


def train(path, lines, size=8000, **options):
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_prefix=str(path), vocab_size=size, minloglevel=2, **options
  )
  pathlib.Path(f'{path}.vocab').unlink()
  pathlib.Path(f'{path}.model').rename(path)
  pieces = sentencepiece.SentencePieceProcessor(model_file=str(path))
  return [pieces.id_to_piece(i) for i in range(pieces.get_piece_size())]


def marian(folder, lines, rule='identity'):
  pieces = train(folder / 'source.spm', lines, normalization_rule_name=rule, character_coverage=0.9995)
  (folder / 'target.spm').write_bytes((folder / 'source.spm').read_bytes())
  names = ['</s>', '<unk>', *(piece for piece in pieces if not piece.startswith('<')), '<pad>']
  (folder / 'vocab.json').write_text(json.dumps({name: i for i, name in enumerate(names)}))
  tokenizer = transformers.MarianTokenizer(*(str(folder / n) for n in ('source.spm', 'target.spm', 'vocab.json')))
  pad = len(names) - 1
  config = transformers.MarianConfig(
    vocab_size=len(names), pad_token_id=pad, decoder_start_token_id=pad, activation_function='swish', **SIZES
  )
  return tokenizer, config, 'MarianMTModel', (0, 1)


def m2m100(folder, lines):
  pieces = train(folder / 'sentencepiece.bpe.model', lines)
  ids = {piece: i for i, piece in enumerate(['<s>', '<pad>', '</s>', '<unk>', *pieces[3:]])}
  (folder / 'vocab.json').write_text(json.dumps(ids))
  paths = (str(folder / name) for name in ('vocab.json', 'sentencepiece.bpe.model'))
  tokenizer = transformers.M2M100Tokenizer(*paths, src_lang='de', tgt_lang='en')
  size = len(ids) + 100 + tokenizer.num_madeup_words
  return tokenizer, transformers.M2M100Config(vocab_size=size, **SIZES), 'M2M100ForConditionalGeneration', (1, 1)


def nllb(folder, lines, legacy=False):
  pieces = train(folder / 'sentencepiece.bpe.model', lines)
  languages = transformers.models.nllb.tokenization_nllb.FAIRSEQ_LANGUAGE_CODES
  added = enumerate([*languages, '<mask>'], len(pieces) + 1)
  tokenizer = transformers.NllbTokenizer(
    str(folder / 'sentencepiece.bpe.model'), src_lang='deu_Latn', tgt_lang='eng_Latn', legacy_behaviour=legacy,
    additional_special_tokens=languages,
    added_tokens_decoder={i: transformers.AddedToken(name, special=True) for i, name in added},
  )  # fmt: skip
  tokenizer.save_pretrained(folder)
  config = transformers.M2M100Config(vocab_size=len(tokenizer) + 2, **SIZES)
  return tokenizer, config, 'M2M100ForConditionalGeneration', (0, 2) if legacy else (1, 1)


def t5(folder, lines, **options):
  train(folder / 'spiece.model', lines, pad_id=0, eos_id=1, unk_id=2, bos_id=-1, **options)
  tokenizer = transformers.T5Tokenizer(str(folder / 'spiece.model'), extra_ids=100, legacy=False)
  config = transformers.T5Config(vocab_size=len(tokenizer), decoder_start_token_id=0)
  return tokenizer, config, 'T5ForConditionalGeneration', (0, 1)


def mixtral(folder, lines, legacy=False):
  train(folder / 'tokenizer.model', lines, model_type='bpe', byte_fallback=True)
  tokenizer = transformers.LlamaTokenizer(str(folder / 'tokenizer.model'), legacy=legacy)
  return tokenizer, transformers.MixtralConfig(vocab_size=len(tokenizer)), 'MixtralForCausalLM', (1, 0)


FAMILIES = {
  'Marian, identity': (marian, {}),
  'Marian, nmt_nfkc': (marian, {'rule': 'nmt_nfkc'}),
  'M2M100': (m2m100, {}),
  'NLLB-200': (nllb, {}),
  'NLLB-MoE (legacy_behaviour)': (nllb, {'legacy': True}),
  'T5, Switch': (t5, {}),
  'mT5 (byte_fallback)': (t5, {'byte_fallback': True}),
  'Mixtral': (mixtral, {}),
  'Mixtral, legacy': (mixtral, {'legacy': True}),
}


def compare(make, options, lines):
  """Numbers of ids, and of lines whose ids differ; the first of these."""
  with tempfile.TemporaryDirectory() as path:
    folder = pathlib.Path(path)
    tokenizer, config, architecture, special = make(folder, lines, **options)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    imported = families.convert(HubFolder(path))
    model = next(iter(imported.vocabularies.values()))
    (folder / 'ours.model').write_bytes(model)
    vocab, theirs_of = TaggedVocab(str(folder / 'ours.model')), imported.symbols.theirs
    count, odd = 0, []
    for line in lines:
      ids = tokenizer(line)['input_ids']
      ids = ids[special[0] : len(ids) - special[1]]
      count += len(ids)
      if [theirs_of[i] for i in vocab.encode([line])[0]] != ids:
        odd.append(line)
  return count, odd


def main(folder, count='500'):
  number, lines = lines_of(folder, int(count))
  print(f'{len(lines)} lines in {number} languages, transformers {transformers.__version__}', flush=True)
  for name, (make, options) in FAMILIES.items():
    ids, odd = compare(make, options, lines)
    print(f'{name:30} {ids:9,} ids {len(odd):6} lines differ {odd[:2] or ""}', flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
