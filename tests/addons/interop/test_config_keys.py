"""Keys of config.json and of the side files of a public folder: understood as the class does, or refused in a line."""

import itertools
import json
import shutil
import time
import types

import pytest
from imported_model import FIXTURES

from lingvo_moe.addons.interop import config_keys, families, importing, mixtral, sparse_layers
from lingvo_moe.addons.interop.hub_folder import HubFolder
from lingvo_moe.core.errors import UserError

KEYS = {name: keys for family in families.FAMILIES for name, keys in family.CLASSES.items()}
ODD = (None, 'x', '', [], ['x'], [[]], {}, {'a': []}, True, -1, 0.5, 10**7, 10**30, 1e300, '\ud800', 'a\0b')
SIDE_FILES = {
  'generation_config.json': 'num_beams bad_words_ids length_penalty suppress_tokens repetition_penalty '
  'no_repeat_ngram_size early_stopping',
  'tokenizer_config.json': 'additional_special_tokens added_tokens_decoder extra_ids language_codes tokenizer_class',
  'special_tokens_map.json': 'additional_special_tokens',
  'tokenizer.json': 'added_tokens',
  'vocab.json': '</s> <pad>',
}


@pytest.fixture
def copy(tmp_path):
  def copy(name):
    shutil.copytree(FIXTURES / name, tmp_path / name, copy_function=shutil.copyfile)
    return tmp_path / name

  return copy


def config_of(name):
  return json.loads((FIXTURES / name / 'config.json').read_text())


def write(folder, config, file='config.json'):
  (folder / file).write_text(json.dumps(config))


def read(folder):
  """What an import makes of a folder, or a refusal of one line, in less than a second."""
  started = time.process_time()
  try:
    return importing.read(str(folder))[1:]
  except UserError as e:
    assert '\n' not in str(e)
    return str(e)
  finally:
    assert time.process_time() - started < 1


@pytest.mark.parametrize(
  ('name', 'changes', 'message'),
  [
    ('marian', {'share_encoder_decoder_embeddings': False}, 'share_encoder_decoder_embeddings of a marian'),
    ('marian', {'activation_function': []}, "activation_function of a marian model must be 'relu' or .*; saw \\[\\]"),
    ('marian', {'activation_function': 'gelu'}, 'activation_function'),
    ('marian', {'d_model': None}, 'd_model of a marian model must be a whole number from 2 .*; saw None'),
    ('marian', {'d_model': [8]}, 'd_model'),
    ('marian', {'d_model': True}, 'd_model'),
    ('marian', {'hidden_size': 16}, 'hidden_size of a marian model must be 8'),
    ('marian', {'decoder_layers': 10_000_000}, 'decoder_layers'),
    ('marian', {'decoder_layers': 1_000_000}, "no tensor 'model.decoder.layers.2.self_attn.q_proj.weight'"),
    ('marian', {'vocab_size': 1_000_000}, r"'model.shared.weight' has shape \[107, 8\].* vocab_size=1000000"),
    ('marian', {'tie_word_embeddings': False}, "no tensor 'lm_head.weight'"),
    ('marian', {'tokenizer_class': 'BertTokenizer'}, "tokenizer_class of a marian model must be None or 'MarianTok"),
    ('marian', {'model_type': 'bart'}, 'model_type'),
    ('marian', {'pad_token_id': 5}, 'pad_token_id=5, which is not <pad>'),
    ('marian', {'eos_token_id': 5}, 'eos_token_id=5, which is not </s>'),
    ('marian', {'decoder_start_token_id': 5}, 'decoder_start_token_id=5, which is not <pad> or <s>'),
    ('marian', {'architectures': [['MarianMTModel']]}, "must name an architecture .*; saw \\['MarianMTModel'\\]"),
    ('m2m100', {'tie_word_embeddings': False}, 'tie_word_embeddings of a m2m_100 model must be True'),
    ('m2m100', {'quantization_config': {'bits': 4}}, 'quantization_config'),
    ('nllb', {'tie_encoder_decoder': True}, 'tie_encoder_decoder'),
    ('nllb_moe', {'second_expert_policy': 'random'}, "second_expert_policy of a nllb-moe model must be 'all'"),
    ('nllb_moe', {'moe_eval_capacity_token_fraction': 0.1}, 'moe_eval_capacity_token_fraction'),
    ('nllb_moe', {'num_experts': 1_000_000}, "no tensor .*expert_4.fc1.weight'"),
    ('nllb_moe', {'encoder_sparse_step': 0}, 'no tensor|not known'),
    ('t5', {'tokenizer_class': 'ByT5Tokenizer'}, "tokenizer_class of a t5 model must be None or 'T5Tokenizer'"),
    ('t5', {'dense_act_fn': 'gelu'}, 'dense_act_fn'),
    ('t5', {'feed_forward_proj': 'gated-relu', 'is_gated_act': True}, 'no tensor .*wi_0'),
    ('t5', {'is_gated_act': True}, 'no tensor .*wi_0'),
    ('t5_v1_1', {'is_gated_act': False}, 'no tensor .*wi.weight'),
    ('t5_v1_1', {'dense_act_fn': 'relu'}, 'feed-forward layers with a gated relu'),
    ('switch', {'feed_forward_proj': 'gated-gelu'}, 'feed_forward_proj of a switch_transformers model must be .relu'),
    ('switch', {'is_gated_act': True}, 'is_gated_act of a switch_transformers model must be False'),
    ('switch', {'expert_capacity': 1}, 'expert_capacity of a switch_transformers model must be a whole number from 64'),
    ('mixtral', {'sliding_window': 4}, 'sliding_window of a mixtral model must be None'),
    ('mixtral', {'hidden_act': 'gelu'}, 'hidden_act'),
    ('mixtral', {'rope_scaling': {'type': 'linear', 'factor': 2.0}}, 'rope_scaling'),
    ('mixtral', {'rope_parameters': {'rope_type': 'yarn', 'rope_theta': 10.0}}, 'rope_parameters'),
  ],
)  # fmt: skip
def test_a_key_at_a_value_that_would_make_another_model_is_refused_by_name(name, changes, message, copy):
  folder = copy(name)
  write(folder, config_of(name) | changes)
  started = time.process_time()
  with pytest.raises(UserError, match=message):
    importing.import_folder(str(folder), str(folder.parent / 'run'))
  assert time.process_time() - started < 1  # whatever sizes it states
  assert not (folder.parent / 'run').exists()


@pytest.mark.parametrize('name', ['marian', 'm2m100', 'nllb_moe', 't5_v1_1', 'switch', 'mixtral'])
def test_a_missing_key_is_as_the_default_of_the_class(name, copy):
  folder, config = copy(name), config_of(name)
  keys = KEYS[config['architectures'][0]]
  compared = 0
  for key, (default, kind) in keys.honoured.items():
    if kind.fits(default):
      write(folder, config | {key: default})
      stated = read(folder)
      write(folder, {k: v for k, v in config.items() if k != key})
      missing = read(folder)
      assert (stated[1] if isinstance(stated, tuple) else stated) == (
        missing[1] if isinstance(missing, tuple) else missing
      )
      compared += isinstance(missing, tuple)
  assert compared > 3


def test_t5_folders_as_the_hub_has_them_are_read(copy):
  folder, config = copy('t5'), config_of('t5')
  expected = read(folder)[1]
  absent = (
    'relative_attention_max_distance',
    'feed_forward_proj',
    'dense_act_fn',
    'is_gated_act',
    'num_decoder_layers',
  )
  write(folder, {k: v for k, v in config.items() if k not in absent} | {'architectures': ['T5WithLMHeadModel']})
  assert read(folder)[1] == expected
  gated, config = copy('t5_v1_1'), config_of('t5_v1_1')
  expected = read(gated)[1]
  write(gated, {k: v for k, v in config.items() if k not in ('dense_act_fn', 'is_gated_act')})
  assert read(gated)[1] == expected and expected.activation == 'geglu'


@pytest.mark.parametrize('name', ['marian', 'nllb_moe', 'switch', 't5', 'mixtral'])
def test_a_value_of_an_odd_type_or_size_is_refused_in_a_line_within_a_second(name, copy):
  folder, config = copy(name), config_of(name)
  keys, refused = KEYS[config['architectures'][0]], 0
  for key, value in itertools.product([*keys.honoured, *keys.only], ODD):
    try:
      keys.resolve('config.json', config | {key: value})
    except UserError as e:
      assert key in str(e) and '\n' not in str(e)
      refused += 1
    else:
      write(folder, config | {key: value})
      read(folder)
  assert refused > 12 * len(keys.honoured)


@pytest.mark.parametrize('name', ['marian', 'm2m100', 'nllb', 'nllb_moe', 't5'])
def test_side_files_of_odd_contents_are_refused_in_a_line_within_a_second(name, copy):
  folder, refused = copy(name), 0
  for file, keys in SIDE_FILES.items():
    there = (folder / file).exists()
    whole = json.loads((folder / file).read_text()) if there else {}
    for key, value in itertools.product(keys.split(), ODD if there or name.startswith('nllb') else ()):
      write(folder, whole | {key: value}, file)
      refused += isinstance(read(folder), str)
    if there:
      write(folder, whole, file)
    else:
      (folder / file).unlink(missing_ok=True)
  assert refused > 30


@pytest.mark.parametrize(
  ('key', 'value'),
  [
    ('num_beams', 0),
    ('num_beams', 10**9),
    ('length_penalty', 'x'),
    ('repetition_penalty', 0),
    ('no_repeat_ngram_size', -1),
    ('early_stopping', 'sometimes'),
  ],
)
def test_without_a_generation_config_search_is_that_of_config_json(key, value, copy, capsys):
  folder, config = copy('marian'), config_of('marian')
  (folder / 'generation_config.json').unlink()
  stated = {'num_beams': 6, 'length_penalty': 0.6, 'bad_words_ids': [[106], [9]], 'top_k': 50}
  write(folder, config | stated | {'repetition_penalty': 1.2, 'no_repeat_ngram_size': 3})
  _, found = read(folder)
  assert (found.beam_size, found.length_norm_alpha) == (6, 0.6) and not capsys.readouterr().err
  assert (found.repetition_penalty, found.no_repeat_ngram_size) == (1.2, 3)
  write(folder, config | {'num_beams': 1, 'length_penalty': None})
  _, found = read(folder)
  assert (found.beam_size, found.length_norm_alpha) == (1, 1.0)
  write(folder, config | {'early_stopping': True, 'num_return_sequences': 2, 'max_length': 512})
  assert read(folder)[1].early_stopping == 'first'
  assert 'config.json: without effect here: {"num_return_sequences": 2}' in capsys.readouterr().err
  write(folder, config | {key: value})
  assert f"'{key}' must be" in read(folder)


@pytest.mark.parametrize('key', ['decoder_start_token_id', 'eos_token_id', 'forced_bos_token_id'])
def test_symbols_of_a_search_that_differ_from_those_of_the_model_are_said(key, copy, capsys):
  folder = copy('marian')
  stated = json.loads((folder / 'generation_config.json').read_text())
  read(folder)
  assert not capsys.readouterr().err
  write(folder, stated | {key: 5}, 'generation_config.json')
  read(folder)
  assert f'without effect here: {{"{key}": 5}}' in capsys.readouterr().err


def test_keys_that_the_class_does_not_read_are_named_once(copy, capsys):
  folder = copy('marian')
  opus = {'normalize_before': True, 'add_bias_logits': False, 'static_position_embeddings': True}
  write(folder, config_of('marian') | opus | {'use_cache': False})
  importing.import_folder(str(folder), str(folder.parent / 'run'))
  (line,) = capsys.readouterr().err.splitlines()
  assert line.endswith(
    'not read here, as by the public class: add_bias_logits, normalize_before, static_position_embeddings'
  )


@pytest.mark.parametrize(
  ('sparse', 'layers', 'fields'),
  [
    (([1, 3], [1]), (4, 2), {'moe_every': 2, 'experts_in': 'both'}),
    (([3], []), (4, 2), {'moe_every': 4, 'experts_in': 'encoder'}),
    (([], [0, 1]), (3, 2), {'moe_every': 1, 'experts_in': 'decoder'}),
    (([], []), (3, 2), {'num_experts': 0}),
    (([3], [1]), (4, 2), None),
    (([1], []), (4, 2), None),
  ],
)
def test_layers_with_experts_are_every_nth_of_one_stack_or_both(sparse, layers, fields):
  by_stack = [dict(zip(sparse_layers.STACKS, values, strict=True)) for values in (sparse, layers)]
  if fields is None:
    with pytest.raises(ValueError, match='here they are in every n-th layer'):
      sparse_layers.fields(*by_stack)
  else:
    assert sparse_layers.fields(*by_stack) == fields


@pytest.mark.parametrize('file', ['config.json', 'tokenizer_config.json'])
def test_a_tokeniser_is_that_of_the_class_fast_or_not(file, copy):
  folder = copy('t5')
  whole = json.loads((folder / file).read_text())
  for name in ('T5Tokenizer', 'T5TokenizerFast', None):
    write(folder, whole | {'tokenizer_class': name}, file)
    assert not isinstance(read(folder), str)
  write(folder, whole | {'tokenizer_class': 'ByT5Tokenizer'}, file)
  (folder / 'spiece.model').unlink()
  assert f'{file}: tokenizer_class of a t5 model must be' in read(folder)


@pytest.mark.parametrize(
  ('name', 'key', 'expert'),
  [('nllb_moe', 'activation_function', 'gelu'), ('switch', 'dense_act_fn', 'gelu'), ('mixtral', 'hidden_act', 'geglu')],
)
def test_experts_have_the_activation_that_the_configuration_says(name, key, expert, copy):
  folder = copy(name)
  write(folder, config_of(name) | {key: 'gelu_new'})
  assert read(folder)[1].expert == expert


def test_positions_of_m2m100_begin_behind_the_id_of_pad(copy):
  folder, ids = copy('m2m100'), json.loads((FIXTURES / 'm2m100' / 'vocab.json').read_text())
  assert read(folder)[1].position_offset == 2
  other = next(piece for piece, i in ids.items() if i == 5)
  write(folder, ids | {'<pad>': 5, other: 1}, 'vocab.json')
  assert 'pad_token_id=1, which is not <pad>' in read(folder)
  write(folder, config_of('m2m100') | {'pad_token_id': 5})
  assert read(folder)[1].position_offset == 6


@pytest.mark.parametrize(
  ('change', 'message'), [({'u': 5}, 'pieces share an id'), ({'u': 238}, "'u' has id 238, beyond")]
)
def test_ids_of_pieces_are_within_the_vocabulary_and_of_one_piece_each(change, message, copy):
  folder = copy('m2m100')
  write(folder, json.loads((folder / 'vocab.json').read_text()) | change, 'vocab.json')
  assert message in read(folder)


def test_kinds_hold_their_bounds_and_true_is_no_number():
  fits = lambda kind, values: [value for value in values if kind.fits(value)]
  assert fits(config_keys.whole(2, 6, step=2), [True, 0, 2, 3, 4.0, 6, 8, None]) == [2, 6]
  assert fits(config_keys.number(1, 3), [True, 0.9, 1, 2.5, 3, float('nan'), '2']) == [1, 2.5]
  assert fits(config_keys.one_of(1.0, 'x'), [1, True, 'x', 'y', None, []]) == [1, 'x']
  assert fits(config_keys.one_of(False), [0, 0.0, None, True]) == []


def test_every_key_has_one_column():
  for keys in KEYS.values():
    columns = [*keys.honoured, *keys.only, *keys.inert.split(), *keys.aliases, *config_keys._ONLY, *config_keys._INERT]
    assert len(columns) == len({*columns})
    assert keys.column('d_modell') == '' and {keys.column(name) for name in columns} == {'honoured', 'only', 'inert'}
  assert HubFolder(str(FIXTURES / 't5')).config['model_type'] == KEYS['T5ForConditionalGeneration'].model_type


STATED = [({}, 3), ({'head_dim': None}, 3), ({'head_dim': 6}, 6), ({'head_dim': 2}, 2)]


@pytest.mark.parametrize('stated, head_dim', STATED)
def test_heads_of_mixtral_have_the_stated_size_or_their_share_of_the_features(stated, head_dim):
  sizes = {'hidden_size': 12, 'num_attention_heads': 4, 'num_key_value_heads': 2}
  config = KEYS['MixtralForCausalLM'].resolve('config.json', sizes | stated)
  assert mixtral.values(config)['head_dim'] == head_dim


def test_a_family_that_cannot_be_exported_is_not_passed_over(monkeypatch):
  monkeypatch.setattr(families, 'FAMILIES', (types.SimpleNamespace(CLASSES={}),))
  with pytest.raises(AttributeError, match='form'):
    list(families.forms(types.SimpleNamespace()))
