"""M2M100 (arXiv 2010.11125), NLLB-200 (arXiv 2207.04672), and NLLB-MoE, which has experts."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from lingvo_moe.addons.interop import fairseq, sparse_layers, vocabulary
from lingvo_moe.addons.interop.config_keys import NUMBER, SHARE, SIZE, TOKEN, Keys, of
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.addons.interop.tensor_table import Imported, Symbols, TensorEntry, norm
from lingvo_moe.core.errors import UserError

_ONLY = {'is_encoder_decoder': True, 'tie_word_embeddings': True}
_M2M100 = Keys('m2m_100', ('M2M100Tokenizer', 'NllbTokenizer'), fairseq.HONOURED, _ONLY, fairseq.INERT, fairseq.ALIASES)
_ONLY_MOE = {'router_bias': False, 'router_dtype': 'float32', 'second_expert_policy': 'all'}
_NLLB_MOE = Keys(
  'nllb-moe',
  ('NllbTokenizer',),
  fairseq.HONOURED
  | of(SIZE, num_experts=128)
  | of(TOKEN, encoder_sparse_step=4, decoder_sparse_step=4)
  | of(SHARE, moe_token_dropout=0.2)
  | of(NUMBER, router_aux_loss_coef=0.001),
  _ONLY | _ONLY_MOE | {'moe_eval_capacity_token_fraction': 1.0},  # no token is dropped
  f'{fairseq.INERT} expert_capacity batch_prioritized_routing normalize_router_prob_before_dropping '
  'router_ignore_padding_tokens router_z_loss_coef output_router_logits',
  fairseq.ALIASES,
)
CLASSES = {'M2M100ForConditionalGeneration': _M2M100, 'NllbMoeForConditionalGeneration': _NLLB_MOE}
_PIECES, _IDS = 'sentencepiece.bpe.model', 'vocab.json'
_SETTINGS, _TOKENISER_JSON = 'tokenizer_config.json', 'tokenizer.json'
_SPECIAL_TOKENS = 'special_tokens_map.json'
TOKENISER = (_PIECES, _IDS, _TOKENISER_JSON)
_SPECIAL = ('<s>', '<pad>', '</s>', '<unk>')
_LANGUAGE = re.compile('[a-z]{3}_[A-Z][a-z]{3}')  # of NLLB-200
# Languages of M2M100, whose folders do not list them. Those of NLLB-200 are listed.
_LANGUAGES = {
  'm2m100': (
    'af am ar ast az ba be bg bn br bs ca ceb cs cy da de el en es et fa ff fi fr fy ga gd gl gu ha he hi hr ht hu hy '
    'id ig ilo is it ja jv ka kk km kn ko lb lg ln lo lt lv mg mk ml mn mr ms my ne nl no ns oc or pa pl ps pt ro ru '
    'sd si sk sl so sq sr ss su sv sw ta th tl tn tr uk ur uz vi wo xh yi yo zh zu'
  ),
  'wmt21': 'en ha is ja cs ru zh de',
}


def convert(folder: HubFolder, config: Mapping[str, Any]) -> Imported:
  folder.need(_PIECES)
  if 'num_experts' in config and config['is_of_5']:
    raise UserError(
      f'{folder.file("config.json")}: NLLB-MoE of transformers 5 sends tokens to other experts than the paper and '
      'transformers 4 do; saw transformers_version of 5 or later: make it 4.57.1 if the weights are of those rules'
    )
  settings = vocabulary.settings(folder)
  base, size = vocabulary.read(folder.file(_PIECES)), config['vocab_size']
  is_m2m100 = folder.has(_IDS)
  ids, tags = _of_m2m100(folder, settings) if is_m2m100 else _of_nllb(folder, settings, base)
  ids = vocabulary.ids(ids, config, begin=('</s>',))
  vocabulary.check_added(folder, ids, tags)
  special = tuple(ids[name] for name in ('<pad>', '<s>', '</s>', '<unk>'))
  more = [piece.piece for piece in base.pieces if piece.piece not in ids and piece.type == vocabulary.NORMAL]
  symbols = Symbols(special, size, len(more))
  names = {i: name for name, i in ids.items()}
  ordered = [names.get(i, '') for i in symbols.theirs[:size]] + more
  model = vocabulary.reordered(base, ordered, tags)
  sides = 'both_source_last' if settings.get('legacy_behaviour') else 'both'
  return Imported(
    model='mt.nllb.MoE54B' if 'num_experts' in config else f'mt.{"m2m100.M418M" if is_m2m100 else "nllb.Dense600M"}',
    values={**values(config), 'tag_target': True, 'tag_sides': sides, 'begin': 'eos'},
    entries=list(entries(config)),
    symbols=symbols,
    vocabularies={'source_vocab': model, 'target_vocab': model},
    tokeniser=TOKENISER,
    unused=[f'model.{stack}.embed_positions.weights' for stack in ('encoder', 'decoder')],
  )


def form(ours: Any, models: Mapping[str, bytes]) -> dict[str, Any]:
  """Files of a folder without weights, by a configuration and a vocabulary with tags here: of NLLB's form."""
  model = models['source_vocab']
  tags = {i: piece for i, piece in enumerate(vocabulary.pieces(model)) if vocabulary.TAG.fullmatch(piece)}
  names = [*tags.values()]
  config = fairseq.form(ours) | dict(architectures=[[*CLASSES][bool(ours.num_experts)]], model_type='m2m_100')
  config |= dict(bos_token_id=0, pad_token_id=1, decoder_start_token_id=2)
  if ours.num_experts:
    # Its policy 'random' drops second choices at inference too.
    config |= dict(model_type='nllb-moe', num_experts=ours.num_experts, second_expert_policy='all')
    config |= sparse_layers.steps(ours)
    config |= dict(moe_token_dropout=1 - ours.expert_output_scale, router_aux_loss_coef=ours.aux_loss_weight)
  settings = dict(tokenizer_class='NllbTokenizer', src_lang=names[0], tgt_lang=names[-1], mask_token=None)
  settings |= dict(legacy_behaviour=ours.tag_sides == 'both_source_last', additional_special_tokens=names)
  settings['added_tokens_decoder'] = {i: {'content': tag, 'special': True} for i, tag in tags.items()}
  return {'config.json': config, _SETTINGS: settings, _PIECES: vocabulary.of_fairseq(model)}


def _of_m2m100(folder: HubFolder, settings: Mapping[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
  """Ids by piece, and languages by the piece that chooses one: `__de__`, behind all others."""
  ids = folder.json(_IDS, TOKEN)
  tags = {f'__{language}__': language for language in _LANGUAGES[settings.get('language_codes') or 'm2m100'].split()}
  return {**ids, **{tag: len(ids) + i for i, tag in enumerate(tags)}}, tags


def _of_nllb(folder: HubFolder, settings: Mapping[str, Any], base: Any) -> tuple[dict[str, int], dict[str, str]]:
  """Ids by piece, one more than in the SentencePiece model, and languages by their piece, as the tokeniser lists them.

  A piece is `deu_Latn`, or `<2de>` in an export of a model that was begun here.

  Raises:
    UserError: no file lists them.
  """
  pieces = [*_SPECIAL, *(piece.piece for piece in base.pieces[3:])]
  listed = settings.get('additional_special_tokens')
  listed = listed or folder.json_if_any(_SPECIAL_TOKENS, **vocabulary.LISTED).get('additional_special_tokens')
  known = {int(i): token['content'] for i, token in (settings.get('added_tokens_decoder') or {}).items()}
  if not known:
    added = folder.json_if_any(_TOKENISER_JSON, added_tokens=vocabulary.ADDED).get('added_tokens')
    known = {token['id']: token['content'] for token in added or ()}
  known = known or dict(enumerate([*map(vocabulary.content, listed or ()), '<mask>'], len(pieces)))
  added = {name: i for i, name in known.items() if i >= len(_SPECIAL)}
  tag_of = {name: vocabulary.TAG.fullmatch(name) for name in added}
  languages = {name: tag[1] if tag else name for name, tag in tag_of.items() if tag or _LANGUAGE.fullmatch(name)}
  if not languages:
    raise UserError(f'{folder.path} lists no languages: fetch its {_SETTINGS} and {_SPECIAL_TOKENS} too')
  added = {name: i for name, i in added.items() if name in languages or name == '<mask>'}
  return {name: i for i, name in enumerate(pieces)} | added, languages


def values(config: Mapping[str, Any]) -> dict[str, Any]:
  common = {**fairseq.sizes(config), 'position_offset': config['pad_token_id'] + 1}
  if 'num_experts' not in config:
    return common
  layers = {stack: config[f'{stack}_layers'] for stack in sparse_layers.STACKS}
  common |= {'num_experts': config['num_experts']} | sparse_layers.fields(_sparse(config), layers)
  return common | dict(
    gate='top2',
    expert=common['activation'],
    second_choice='always',
    expert_bias=True,
    expert_output_scale=1 - config['moe_token_dropout'],
    aux_loss_weight=config['router_aux_loss_coef'],
    num_groups=1,
    scan_layers=False,
    remat='none',
    activation_dtype='float32',
    dispatch='auto',
  )


def _sparse(config: Mapping[str, Any]) -> dict[str, list[int]]:
  """Layers that have experts, by stack."""
  steps = {stack: config[f'{stack}_sparse_step'] for stack in sparse_layers.STACKS}
  return {stack: [*range(step - 1, config[f'{stack}_layers'], step)] if step else [] for stack, step in steps.items()}


def entries(config: Mapping[str, Any]) -> Iterator[TensorEntry]:
  yield fairseq.embedding(config)
  if 'num_experts' in config:
    yield from fairseq.layers(config, 'cross_attention', 'ffn.', 'ff_layer_norm', _sparse(config))
  else:
    yield from fairseq.layers(config)
  for stack in ('encoder', 'decoder'):
    yield from norm(f'model.{stack}.layer_norm', f'{stack}/norm')
