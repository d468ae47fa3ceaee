#!/usr/bin/env python
"""python tools/interop_fixtures.py tests/data/interop [SEED]

Makes tiny models of public families with random weights, as folders of the hub, with what their own implementation
computes: the fixtures of tests/addons/interop. Needs an environment of its own, without this package:

  pip install torch==2.13.0 transformers==4.57.1 sentencepiece==0.2.3 safetensors==0.8.0 protobuf
"""

import json
import os
import pathlib
import shutil
import sys

import numpy as np
import sentencepiece
import torch
import transformers

TEXT = """Ein Hund läuft über die Wiese.\nA dog runs across the meadow.\nZwei Kinder spielen im Garten.
Two children are playing in the garden.\nDie Frau liest ein Buch am Fenster.\nThe woman reads a book by the window.
Wo ist der Bahnhof?\nWhere is the station?\nIch habe heute keine Zeit.\nI have no time today.
Der Zug fährt um acht Uhr ab.\nThe train leaves at eight o'clock.\nEr trinkt jeden Morgen Kaffee.
He drinks coffee every morning.\nDas Wasser ist sehr kalt.\nThe water is very cold.\nSie singt ein altes Lied.
She sings an old song.\nWir gehen morgen in die Stadt.\nWe are going to town tomorrow.""".split('\n')
LINES = [*TEXT[0::2], 'Ein alter Zug, 12 Uhr: läuft!', 'Die 犬 und  zwei   Kinder', '', 'u']
MANY = [
  *TEXT,
  *'Un chien court dans le pré.\nСобака бежит по лугу.\n一只狗跑过草地。\nأين المحطة؟\nएक कुत्ता दौड़ता है।'.split('\n'),
]
SIZES = dict(d_model=8, dropout=0.0)
MARIAN = dict(
  encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
  decoder_ffn_dim=12, max_position_embeddings=64, attention_dropout=0.0, activation_dropout=0.0, scale_embedding=True,
)  # fmt: skip
T5 = dict(d_model=8, d_kv=4, d_ff=12, num_layers=2, num_decoder_layers=2, num_heads=2, dropout_rate=0.0)


def train(folder, name, lines, size, **options):
  """Trains a SentencePiece model."""
  prefix = str(folder / name.partition('.')[0])
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(lines), model_prefix=prefix, vocab_size=size, hard_vocab_limit=False,
    character_coverage=1.0, normalization_rule_name='identity', minloglevel=2, **options,
  )  # fmt: skip
  os.remove(prefix + '.vocab')
  os.rename(prefix + '.model', folder / name)
  return sentencepiece.SentencePieceProcessor(str(folder / name))


def randomised(model, seed):
  """The model with random weights, biases and scales too."""
  torch.manual_seed(seed)
  with torch.no_grad():
    for name, weight in model.named_parameters():
      if 'embed_positions' not in name:
        noise = torch.randn_like(weight)
        weight.copy_(weight + noise * 0.1 if weight.ndim == 1 else noise * 0.2)
    if hasattr(model, 'final_logits_bias'):
      model.final_logits_bias.normal_(0, 0.3)
  return model.eval()


def marian(folder):
  source, target = train(folder, 'source.spm', TEXT[0::2], 70), train(folder, 'target.spm', TEXT[1::2], 70)
  pieces = {s.id_to_piece(i): None for s in (source, target) for i in range(s.get_piece_size())}
  names = ['</s>', '<unk>', '>>deu<<', '>>nld<<', *(p for p in pieces if not p.startswith('<'))]
  names.remove(source.id_to_piece(40))  # a piece of the source that the vocabulary lacks
  ids = {piece: i for i, piece in enumerate([*names, '<pad>'])}
  (folder / 'vocab.json').write_text(json.dumps(ids, ensure_ascii=False))
  config = transformers.MarianConfig(
    vocab_size=len(ids), pad_token_id=ids['<pad>'], eos_token_id=0, decoder_start_token_id=ids['<pad>'],
    forced_eos_token_id=0, activation_function='swish', bos_token_id=None, **SIZES, **MARIAN,
  )  # fmt: skip
  model = transformers.MarianMTModel(config)
  model.generation_config.bad_words_ids = [[ids['<pad>']]]
  tokenizer = transformers.MarianTokenizer(*(str(folder / n) for n in ('source.spm', 'target.spm', 'vocab.json')))
  return model, lambda line: tokenizer('>>deu<< ' + line)['input_ids'], tokenizer


def m2m100(folder):
  pieces = train(folder, 'sentencepiece.bpe.model', MANY, 130)
  names = [pieces.id_to_piece(i) for i in range(3, pieces.get_piece_size())]
  names.remove(pieces.id_to_piece(40))  # a piece that the vocabulary lacks
  ids = {piece: i for i, piece in enumerate(['<s>', '<pad>', '</s>', '<unk>', *names])}
  (folder / 'vocab.json').write_text(json.dumps(ids, ensure_ascii=False))
  files = (str(folder / name) for name in ('vocab.json', 'sentencepiece.bpe.model'))
  tokenizer = transformers.M2M100Tokenizer(*files, src_lang='de', tgt_lang='en')
  size = len(ids) + 100 + tokenizer.num_madeup_words
  config = transformers.M2M100Config(vocab_size=size, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **SIZES, **MARIAN)
  return transformers.M2M100ForConditionalGeneration(config), lambda line: tokenizer(line)['input_ids'], tokenizer


def nllb_tokenizer(folder, languages, **options):
  """A tokenizer with its symbols in the order of the release: the languages, then the mask."""
  pieces = train(folder, 'sentencepiece.bpe.model', MANY, 130)
  added = enumerate([*languages, '<mask>'], pieces.get_piece_size() + 1)
  return transformers.NllbTokenizer(
    str(folder / 'sentencepiece.bpe.model'),
    src_lang='deu_Latn',
    tgt_lang='eng_Latn',
    additional_special_tokens=languages,
    added_tokens_decoder={i: transformers.AddedToken(name, special=True) for i, name in added},
    **options,
  )


def nllb(folder):
  languages = transformers.models.nllb.tokenization_nllb.FAIRSEQ_LANGUAGE_CODES
  tokenizer = nllb_tokenizer(folder, languages)
  (folder / 'special_tokens_map.json').write_text(json.dumps({'additional_special_tokens': languages}))
  config = transformers.M2M100Config(
    vocab_size=len(tokenizer) + 2, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **SIZES, **MARIAN
  )
  return transformers.M2M100ForConditionalGeneration(config), lambda line: tokenizer(line)['input_ids'], tokenizer


def nllb_moe(folder):
  tokenizer = nllb_tokenizer(folder, ['deu_Latn', 'eng_Latn', 'zho_Hans'], legacy_behaviour=True)
  tokenizer.save_pretrained(folder)
  config = transformers.NllbMoeConfig(
    vocab_size=len(tokenizer) + 2, num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, expert_capacity=64,
    router_aux_loss_coef=0.1, encoder_layerdrop=0.0, decoder_layerdrop=0.0, **SIZES, **MARIAN | {'encoder_layers': 4},
  )  # fmt: skip
  return transformers.NllbMoeForConditionalGeneration(config), lambda line: tokenizer(line)['input_ids'], tokenizer


def t5(folder, **options):
  train(folder, 'spiece.model', TEXT, 90, pad_id=0, eos_id=1, unk_id=2, bos_id=-1)
  tokenizer = transformers.T5Tokenizer(str(folder / 'spiece.model'), extra_ids=4, legacy=False)
  (folder / 'tokenizer_config.json').write_text(json.dumps({'extra_ids': 4}))
  size = -(-len(tokenizer) // 8) * 8
  config = transformers.T5Config(vocab_size=size, decoder_start_token_id=0, **T5, **options)
  return transformers.T5ForConditionalGeneration(config), lambda line: tokenizer(line)['input_ids'], tokenizer


def t5_v1_1(folder):
  return t5(folder, feed_forward_proj='gated-gelu', tie_word_embeddings=False)


def switch(folder):
  _, encode, tokenizer = t5(folder)
  size = -(-len(tokenizer) // 8) * 8
  config = transformers.SwitchTransformersConfig(
    vocab_size=size, decoder_start_token_id=0, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    expert_capacity=64, **T5,
  )  # fmt: skip
  return transformers.SwitchTransformersForConditionalGeneration(config), encode, tokenizer


def mixtral(folder):
  train(folder, 'tokenizer.model', TEXT, 350, model_type='bpe', byte_fallback=True)
  tokenizer = transformers.LlamaTokenizer(str(folder / 'tokenizer.model'), legacy=False)
  config = transformers.MixtralConfig(
    vocab_size=len(tokenizer), hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, num_local_experts=4, max_position_embeddings=64,
  )  # fmt: skip
  return transformers.MixtralForCausalLM(config), lambda line: tokenizer(line)['input_ids'], tokenizer


def with_router_logits(model, run):
  """What `run` returns, and the logits of every router meanwhile, by its name."""
  logits, hooks = {}, []
  for name, module in model.named_modules():
    if name.endswith('router.classifier'):
      hooks.append(module.register_forward_hook(lambda _, inputs, out, name=name: logits.update({name: out})))
  result = run()
  for hook in hooks:
    hook.remove()
  return result, logits


def balance_loss(logits):
  """GShard's auxiliary loss, Algorithm 1, line 13 times E^2, of rows that are a group each; 1 at perfect balance."""
  chosen = torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).float()
  return logits.shape[-1] * (chosen.mean(1) * logits.softmax(-1).mean(1)).sum(-1).mean()


def repetition(model, **options):
  """What greedy and beam search find under limits on repetition."""
  searches = {'greedy': {'num_beams': 1}, 'beam': {'num_beams': 4, 'length_penalty': 0.0, 'early_stopping': False}}
  limits = {'penalty': {'repetition_penalty': 1.5}, 'ngrams': {'no_repeat_ngram_size': 2}}
  limits['both'] = limits['penalty'] | {'no_repeat_ngram_size': 3}
  options = {'max_new_tokens': 12, 'do_sample': False, **options}
  return {f'{s}_{n}': model.generate(**options, **searches[s], **limits[n]) for s in searches for n in limits}


def expected(model, encode, tokenizer):
  """What the model computes, of two sentences of different length with random targets."""
  lines = MANY[len(TEXT) :] if hasattr(tokenizer, 'src_lang') else []
  ids = [encode(line) for line in [*LINES, *lines]]
  rng, size = np.random.default_rng(0), model.config.vocab_size
  if not model.config.is_encoder_decoder:
    rows = torch.tensor(rng.integers(3, size, (2, 7)))
    out = model(input_ids=rows, labels=rows, output_router_logits=True)
    bad = [[i] for i in (0, model.config.bos_token_id)]
    found = repetition(model, input_ids=rows, attention_mask=torch.ones_like(rows), bad_words_ids=bad)
    return ids, dict(ids=rows.numpy(), logits=out.logits, aux_loss=out.aux_loss, **found)
  sources = [ids[0], ids[3]]
  longest = max(map(len, sources))
  pad = lambda row, fill: row + [fill] * (longest - len(row))
  src = torch.tensor([pad(row, model.config.pad_token_id) for row in sources])
  mask = torch.tensor([pad([1] * len(row), 0) for row in sources])
  targets = torch.tensor(rng.integers(4, size - 1, (2, 6)))
  forced = {}
  if hasattr(tokenizer, 'src_lang'):
    get_id = getattr(tokenizer, 'get_lang_id', tokenizer.convert_tokens_to_ids)
    forced = {'forced_bos_token_id': get_id(tokenizer.tgt_lang)}
    targets[:, 0] = forced['forced_bos_token_id']
  begin = torch.full((2, 1), model.config.decoder_start_token_id)
  inputs = torch.cat([begin, targets[:, :-1]], dim=1)
  out, routers = with_router_logits(model, lambda: model(input_ids=src, attention_mask=mask, decoder_input_ids=inputs))
  loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
  bad = [[i] for i in {model.config.pad_token_id, model.config.bos_token_id} - {None}]
  options = dict(max_new_tokens=12, do_sample=False, bad_words_ids=bad, **forced)
  greedy = model.generate(input_ids=src, attention_mask=mask, num_beams=1, **options)
  beam = model.generate(
    input_ids=src, attention_mask=mask, num_beams=4, length_penalty=0.0, early_stopping=False, **options
  )
  mean = model.generate(  # ranked by log p / length; the heuristic by which theirs stops sooner is off
    input_ids=src, attention_mask=mask, num_beams=4, length_penalty=1.0, early_stopping='never', **options
  )
  limited = repetition(model, input_ids=src, attention_mask=mask, bad_words_ids=bad, **forced)
  arrays = dict(
    **limited, encoder=out.encoder_last_hidden_state, logits=out.logits, loss=loss, greedy=greedy, beam=beam, mean=mean
  )
  nllb_moe = model.config.model_type == 'nllb-moe'
  experts = {name: logits.topk(2).indices for name, logits in routers.items() if nllb_moe}
  return ids, dict(src=src, mask=mask, inputs=inputs, targets=targets, **arrays, **experts)


def training(model):
  """Batches, and what the model learns from them: gradients of the first, experts, losses of 20 steps of Adam.

  A gradient is its norm and its product with cos(0, 1, ...), by sorted names of the weights. Marian's rows have padding
  and are also computed one by one, without it.
  """
  for module in model.modules():
    if isinstance(module, torch.nn.Embedding):
      module.padding_idx = None  # else the row of pad, with which Marian's decoder begins, is not trained as an input
  rng, size, rows = np.random.default_rng(2), model.config.vocab_size, (4, 4, 7)
  saved, options = {'targets': rng.integers(4, size - 1, rows)}, {'output_router_logits': True}
  if model.config.is_encoder_decoder:
    lengths = rng.integers(3, 8, rows[:2]) if model.config.model_type == 'marian' else np.full(rows[:2], 7)
    saved['mask'] = (np.arange(7) < lengths[..., None]).astype(np.int64)
    saved['src'] = rng.integers(4, size - 1, rows)
    begin = np.full((4, 4, 1), model.config.decoder_start_token_id)
  else:
    begin = rng.integers(4, size - 1, (4, 4, 1))
  saved['inputs'] = np.concatenate([begin, saved['targets'][..., :-1]], axis=-1)
  if model.config.model_type == 'marian':
    options = {}

  def run(step, rows=slice(None), length=None):
    data = {name: torch.tensor(array[step % 4][rows, :length]) for name, array in saved.items()}
    targets = data.pop('targets')
    if 'src' in data:
      data = dict(input_ids=data['src'], attention_mask=data['mask'], decoder_input_ids=data['inputs'])
      labels = {'labels': targets} if model.config.model_type == 'nllb-moe' else {}  # else it has no auxiliary loss
      out = model(**data, **options, **labels)
    else:
      out = model(input_ids=data['inputs'], **options)
    return out, torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), targets.flatten())

  results = {'losses': []}
  weights = {name: weight for name, weight in sorted(model.named_parameters()) if weight.requires_grad}
  if model.config.model_type == 'marian':
    alone = [run(0, slice(row, row + 1), length)[0].logits[0] for row, length in enumerate(lengths[0])]
    results['alone'] = torch.cat(alone).detach()
  optimizer = torch.optim.Adam(weights.values(), lr=1e-2, betas=(0.9, 0.98), eps=1e-9)
  for step in range(20):
    (out, loss), routers = with_router_logits(model, lambda step=step: run(step))
    if model.config.model_type == 'nllb-moe':
      # Theirs is of weights after normalisation; here, the loss of its paper.
      logits = [layer.view(4, 7, -1) for layer in routers.values()]
      aux = sum(map(balance_loss, logits))
      loss = loss + model.config.router_aux_loss_coef * aux
      results.setdefault('aux_loss', aux.detach())
      results.setdefault('experts', torch.stack([layer.topk(2).indices for layer in logits]))
      results.setdefault('their_aux_loss', torch.stack([out.encoder_aux_loss, out.decoder_aux_loss]).detach())
    if model.config.model_type == 'switch_transformers':
      aux, z = out.encoder_aux_loss + out.decoder_aux_loss, out.encoder_z_loss + out.decoder_z_loss
      loss = loss + model.config.router_aux_loss_coef * aux + model.config.router_z_loss_coef * z
      results.setdefault('aux_loss', aux.detach())
      logits = [
        layer[0] for layer in (*out.encoder_router_logits, *out.decoder_router_logits) if len(layer[0].shape) > 1
      ]
      results.setdefault('experts', torch.stack([layer.argmax(-1, keepdim=True) for layer in logits]))
    if model.config.model_type == 'mixtral':
      k, number = model.config.num_experts_per_tok, model.config.num_local_experts
      balance = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func
      by_layer = [balance((layer,), number, k).detach() for layer in out.router_logits]
      results.setdefault('aux_loss', torch.stack(by_layer))
      results.setdefault('experts', torch.stack([layer.topk(k).indices.view(4, 7, k) for layer in out.router_logits]))
    results['losses'].append(loss.item())
    for weight in weights.values():
      weight.grad = torch.zeros_like(weight)  # of an expert without tokens too, which moves on by Adam's momentum
    loss.backward()
    if not step:
      grads = [weight.grad.flatten() for weight in weights.values()]
      results['grads'] = torch.stack([torch.stack([g.norm(), g @ torch.arange(len(g)).cos()]) for g in grads])
    optimizer.step()
  return {**saved, **results, 'names': list(weights)}


def numpy_arrays(values):
  return {k: v.detach().numpy() if isinstance(v, torch.Tensor) else v for k, v in values.items()}


def main(out, seed=1):
  for make in (marian, m2m100, nllb, nllb_moe, t5, t5_v1_1, switch, mixtral):
    folder = pathlib.Path(out) / make.__name__
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model, encode, tokenizer = make(folder)
    model = randomised(model, int(seed))
    model.save_pretrained(folder)
    ids, arrays = expected(model, encode, tokenizer)
    np.savez_compressed(folder / 'expected.npz', **numpy_arrays(arrays))
    if make in (marian, switch, nllb_moe, mixtral):
      np.savez_compressed(folder / 'training.npz', **numpy_arrays(training(model)))
    versions = {'transformers': transformers.__version__, 'torch': torch.__version__}
    lines = [*LINES, *MANY[len(TEXT) :]][: len(ids)]
    (folder / 'expected.json').write_text(
      json.dumps({'versions': versions, 'lines': lines, 'ids': ids}, ensure_ascii=False)
    )
    print(folder, sum(f.stat().st_size for f in folder.iterdir()) // 1024, 'KiB')


if __name__ == '__main__':
  main(*sys.argv[1:])
