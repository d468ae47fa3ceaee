"""Every registered model: it builds, its numbers are the paper's, and the tiny ones learn."""

import collections
import dataclasses
import inspect
import re

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.config import registry
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.layers.attention import Now
from lingvo_moe.models import sizes
from lingvo_moe.tasks.task import task_of

NAMES = registry.names()
TINIES = [n for n in NAMES if n.endswith('Tiny')]
GIANTS = [n for n in NAMES if n.startswith('mt.m4.') and n not in TINIES]
LM_GIANTS = ['lm.grok.Grok1', 'lm.glam.Glam64B64E']
# Table 9 of Switch Transformers; of Base as table 8 prints it, with more digits.
SWITCH = {'Base': 7410e6, 'Large': 26e9, 'XXL': 395e9, 'C': 1571e9}
# Of the releases of NLLB-200 and M2M100.
MULTILINGUAL = {
  'nllb.Dense600M': 615e6,
  'nllb.Dense1B': 1.37e9,
  'nllb.Dense3B': 3.34e9,
  'nllb.MoE54B': 54.5e9,
  'm2m100.M418M': 484e6,
  'm2m100.M1B': 1.24e9,
}

# Table 1 of GShard, T(96L) of section 4.2 and T(128L) of footnote 11: (weights, experts in all).
TABLE_1 = {
  'MoE2048E36L': (600e9, 2048 * 18),  # printed as 36684
  'MoE2048E12L': (200e9, 2048 * 6),  # printed as 12228
  'MoE512E36L': (150e9, 512 * 18),
  'MoE512E12L': (50e9, 512 * 6),
  'MoE128E36L': (37e9, 128 * 18),
  'MoE128E12L': (12.5e9, 128 * 6),
  'MoE2048E60L': (1e12, 2048 * 30),
  'T96L': (2.3e9, 0),
  'T128L': (6.0e9, 0),
}


def used_by_a_token(config, specs):
  return sizes.short(sizes.count_per_token(specs, config.moe_gate.experts_per_token(config.num_experts)))


def specs_of(name):
  return registry.get(name)().model().weights()


@pytest.mark.parametrize('name', TABLE_1)
def test_weights_and_experts_are_those_of_table_1(name):
  weights, experts = TABLE_1[name]
  specs = specs_of(f'mt.m4.{name}')

  assert weights_lib.count(specs) == pytest.approx(weights, rel=0.075)
  assert sizes.count_experts(specs) == experts


def test_glam_has_the_weights_of_its_table_4():
  specs = specs_of('lm.glam.Glam64B64E')

  assert f'{weights_lib.count(specs):.1e}' == '1.2e+12'
  assert sizes.count_per_token(specs) == pytest.approx(96.6e9, rel=0.002)
  assert sizes.count_experts(specs) == 32 * 64


@pytest.mark.parametrize('name', SWITCH)
def test_switch_transformers_have_their_published_weights(name):
  assert weights_lib.count(specs_of(f'switch.c4.{name}')) == pytest.approx(SWITCH[name], rel=0.02)


@pytest.mark.parametrize('name', MULTILINGUAL)
def test_multilingual_models_have_the_weights_of_their_releases(name):
  assert weights_lib.count(specs_of(f'mt.{name}')) == pytest.approx(MULTILINGUAL[name], rel=0.002)


def test_switch_transformers_count_otherwise_as_table_9_prints_two_of_them():
  count = lambda name, **sizes: weights_lib.count(registry.get(name)(**sizes).model().weights()) / 1e9

  assert f'{count("switch.c4.Large", ff_dim=2816, activation="geglu", expert="geglu"):.1f}' == '27.1'  # printed: 26
  assert f'{count("switch.c4.XXL", num_experts=64):.0f}' == '201'  # printed: 395


@pytest.mark.parametrize('experts, billions', [(16, '1.1'), (32, '2.0'), (64, '3.8'), (128, '7.4'), (256, '14.7')])
def test_switch_base_has_the_weights_of_table_7_at_any_number_of_experts(experts, billions):
  specs = registry.get('switch.c4.Base')(num_experts=experts).model().weights()

  assert f'{weights_lib.count(specs) / 1e9:.1f}' == billions


def test_switch_c_counted_by_hand():
  m, h, e, heads, layers = 2080, 6144, 2048, 32 * 64, 15
  attention, biases, moe = 4 * m * heads, 32 * 32, e * 2 * m * h + m * e
  encoder = layers * (attention + biases + moe + 2 * m) + m
  decoder = layers * (2 * attention + biases + moe + 3 * m) + m

  assert weights_lib.count(specs_of('switch.c4.C')) == 32_100 * m + encoder + decoder


def test_grok_1_counted_by_hand():
  m, h, heads, kv_heads, layers = 6144, 32_768, 48 * 128, 8 * 128, 64
  layer = 2 * m * heads + 2 * m * kv_heads + 8 * 3 * m * h + 8 * m + 4 * m
  counted = weights_lib.count(specs_of('lm.grok.Grok1'))

  assert counted == 131_072 * m + layers * layer + m
  assert counted == pytest.approx(314e9, rel=0.02)


# Tables 7 and 8 of arXiv 1701.06538: (millions of weights without embedding and softmax, billions in all).
MOE_LSTM = {
  'MoE4': (8.4, 0.8),
  'MoE32': (37.8, 0.9),
  'MoE256': (272.9, 1.1),
  'MoE256H': (272.9, 1.1),
  'MoE1024H': (1079.0, 1.9),
  'MoE4096H': (4303.4, 5.1),
  'MoE34M': (4313.9, 6.0),
  'MoE143M': (4371.1, 6.0),
  'NewsMoE32': (37.8, 0.1),
  'NewsMoE256H': (272.9, 0.4),
  'NewsMoE1024H': (1079.0, 1.2),
  'NewsMoE4096H': (4303.4, 4.4),
  'NewsMoE16384H': (17201.0, 17.3),
  'NewsMoE65536H': (68791.0, 68.9),
  'NewsMoE131072H': (137577.6, 137.7),
}


@pytest.mark.parametrize('name', MOE_LSTM)
def test_recurrent_models_have_the_weights_of_tables_7_and_8(name):
  millions, billions = MOE_LSTM[name]
  specs, config = specs_of(f'lm.moe_lstm.{name}'), registry.get(f'lm.moe_lstm.{name}')()
  counted = weights_lib.count(specs)
  embeddings = sum(count for part, count in sizes.parts(specs).items() if part.startswith('embeddings/'))

  assert f'{(counted - embeddings) / 1e6:.1f}' == str(millions)
  assert counted / 1e9 == pytest.approx(billions, abs=0.05, rel=0.011)
  assert sizes.count_experts(specs) == config.num_experts
  assert config.moe_gate.experts_per_token(config.num_experts) == 4  # a token visits four experts in every model


def test_moe_256_h_counted_by_hand():
  m, h, e, groups = 512, 1024, 256, 16
  lstm = 4 * (m * m + m * m + m)
  gates = 2 * (m * groups + groups * m * (e // groups))

  assert weights_lib.count(specs_of('lm.moe_lstm.MoE256H')) == 2 * 793_471 * m + 2 * lstm + gates + e * 2 * m * h


def test_a_projected_lstm_counted_by_hand():
  m, h = 1024, 4096

  assert sizes.parts(specs_of('lm.moe_lstm.MoE143M'))['decoder/lstm'] == 2 * (4 * (2 * m * h + h) + h * m)


def test_the_dense_recurrent_model_multiplies_with_as_many_weights_a_token():
  used = lambda name: sizes.parts(specs_of(name))
  moe, dense = used('lm.moe_lstm.Shakespeare32'), used('lm.moe_lstm.ShakespeareDense')

  assert moe['decoder/experts'] * 4 // 32 == dense['decoder/feed_forward']
  assert moe['decoder/lstm'] == dense['decoder/lstm']


@pytest.mark.parametrize('name', SWITCH)
def test_a_tiny_switch_transformer_differs_from_its_giant_in_sizes_only(name):
  giant, tiny = registry.get(f'switch.c4.{name}')(), registry.get(f'switch.c4.{name}Tiny')()
  differing = {f.name for f in dataclasses.fields(giant) if getattr(giant, f.name) != getattr(tiny, f.name)}

  counts = {'num_groups', 'num_heads', 'num_experts', 'encoder_layers', 'decoder_layers', 'vocab_size', 'sentinels'}
  assert differing <= counts | {'inputs_length', 'batch_tokens', 'model_dim', 'ff_dim', 'head_dim', 'max_steps'}
  assert giant.num_groups % giant.num_experts == 0 and giant.rows_of_batch() % giant.num_groups == 0


def test_moe128e12l_counted_by_hand():
  m, h, e, heads = 1024, 8192, 128, 16 * 128
  attention = 4 * m * heads + 2 * heads + m  # no bias on keys
  ffn, moe, norm = 2 * m * h + h + m, e * 2 * m * h + m * e, 2 * m
  encoder = 6 * (attention + 2 * norm) + 3 * ffn + 3 * moe + norm
  decoder = 6 * (2 * attention + 3 * norm) + 3 * ffn + 3 * moe + norm

  assert weights_lib.count(specs_of('mt.m4.MoE128E12L')) == (64_000 + 32_000) * m + encoder + decoder


def test_a_token_uses_two_experts_a_layer_one_source_row_and_the_whole_softmax():
  specs = specs_of('mt.m4.MoE128E12L')
  idle = 6 * (128 - 2) * 2 * 1024 * 8192 + (64_000 - 1) * 1024

  assert sizes.count_per_token(specs) == weights_lib.count(specs) - idle


def test_a_dense_model_with_one_vocabulary_uses_all_it_has():
  specs = specs_of('mt.multi30k.EnDe')

  assert sizes.count_per_token(specs) == weights_lib.count(specs)


@pytest.mark.parametrize('name', ['mt.m4.MoE128E12LTiny', 'mt.m4.T96LTiny', 'mt.multi30k.EnDe'])
def test_parts_are_where_they_are_said_to_be(name):
  config = registry.get(name)()
  parts = sizes.parts(config.model().weights())
  moe_layers = config.encoder_layers // 2 if config.num_experts else 0
  m, h = config.model_dim, config.ff_dim

  symbols = config.source_vocab_size if config.shared_vocab else config.target_vocab_size
  assert parts['embeddings/target'] == symbols * m
  assert ('embeddings/source' in parts) != config.shared_vocab
  assert parts.get('encoder/gates', 0) == moe_layers * m * config.num_experts
  assert parts.get('decoder/experts', 0) == moe_layers * config.num_experts * 2 * m * h
  assert parts['encoder/feed_forward'] == (config.encoder_layers - moe_layers) * (2 * m * h + m + h)
  assert parts['decoder/attention'] == 2 * parts['encoder/attention']
  assert parts['decoder/norms'] == (3 * config.decoder_layers + 1) * 2 * m


@pytest.mark.parametrize(
  'number, text',
  [
    (0, '0'),
    (999, '999'),
    (585_400, '585k'),
    (18_949_000, '18.9M'),
    (1_400_000_000, '1.4B'),
    (1_032_212_709_376, '1.03T'),
  ],
)
def test_counts_are_shortened_to_three_digits(number, text):
  assert sizes.short(number) == text


@pytest.mark.parametrize('name', NAMES)
def test_every_registered_model_builds_and_its_docstring_tells_the_truth(name):
  cls = registry.get(name)
  config = cls()  # checks types and ranges
  specs = config.program().model.weights()
  doc = registry.about(name)

  assert cls.__doc__ and doc.splitlines()[0].endswith('.')
  assert f'--model={name} ' in doc or 'tools/quickstart' in doc, 'it says how to run it'
  assert re.search(r'^Result:  +\S', doc, re.MULTILINE) or name.endswith('Tiny'), 'it says what came of it'
  assert sum(sizes.parts(specs).values()) == weights_lib.count(specs)
  for weights, used in re.findall(r'([\d.]+[kMBT]) weights, ([\d.]+[kMBT]) used by a token', doc):
    assert (weights, used) == (sizes.short(weights_lib.count(specs)), used_by_a_token(config, specs))


@pytest.mark.parametrize('name', [n for n in NAMES if n.startswith(('mt.m4.', 'mt.m4mini.'))])
def test_the_first_docstring_line_gives_the_weights(name):
  assert re.search(r' weights, [\d.]+[kMBT] used by a token\.', inspect.getdoc(registry.get(name)).splitlines()[0])


def test_every_module_has_a_tiny_model():
  by_module = collections.defaultdict(list)
  for name in NAMES:
    by_module[name.rpartition('.')[0]].append(name)

  assert all(any(n in TINIES for n in names) for names in by_module.values())


SIZES = {'batch_tokens', 'num_groups', 'model_dim', 'ff_dim', 'num_heads', 'head_dim', 'num_experts', 'max_steps'}
MT_SIZES = SIZES | {'source_vocab_size', 'target_vocab_size', 'max_length', 'encoder_layers', 'decoder_layers'}
LM_SIZES = SIZES | {'vocab_size', 'window', 'num_layers', 'num_kv_heads'}


@pytest.mark.parametrize('name, sizes', [*((n, MT_SIZES) for n in GIANTS), *((n, LM_SIZES) for n in LM_GIANTS)])
def test_a_tiny_sibling_differs_from_its_giant_in_sizes_only(name, sizes):
  giant, tiny = registry.get(name)(), registry.get(name + 'Tiny')()
  assert {f.name for f in dataclasses.fields(giant) if getattr(giant, f.name) != getattr(tiny, f.name)} <= sizes
  assert weights_lib.count(tiny.model().weights()) < 1e6
  assert bool(giant.num_experts) == bool(tiny.num_experts)


@pytest.mark.parametrize('name', [n for n in TINIES if n != 'mt.multi30k.Tiny'])
def test_meshes_of_2_and_4_divide_every_tiny_model(name):
  config = registry.get(name)()

  assert not any(n % 4 for n in (config.num_groups, getattr(config, 'num_heads', 0), config.num_experts))


@pytest.mark.parametrize('name', GIANTS)
def test_meshes_of_the_papers_sizes_divide_every_giant(name):
  config = registry.get(name)()
  devices = config.num_experts or 128

  assert config.num_groups % devices == 0
  assert config.batch_tokens // config.max_length % config.num_groups == 0  # a batch is whole groups, of equal size


@pytest.mark.parametrize('name', [n for n in NAMES if re.search(r'\.MoE\d+E$', n)])
def test_a_dense_twin_multiplies_with_as_many_weights_a_token(name):
  def used(name):
    # Gates and biases apart: a gate is E of thousands of columns, biases are added.
    flat = weights_lib.flatten(specs_of(name))
    matrices = {k: s for k, s in flat.items() if len(s.shape) > 1 and not k.endswith('/gate')}
    return sizes.count_per_token(matrices)

  assert used(name) == used(f'{name.rpartition(".")[0]}.Dense')


def random_batch(config, length=4, seed=0):
  rng = np.random.default_rng(seed)
  rows = 2 * config.num_groups
  target_vocab = config.source_vocab_size if config.shared_vocab else config.target_vocab_size
  segments, positions = np.ones((rows, length), np.int32), np.tile(np.arange(length, dtype=np.int32), (rows, 1))
  segments[0, length // 2 :] = 0
  ids = lambda size: rng.integers(4, size, (rows, length), np.int32) * (segments > 0)
  batch = {'src_ids': ids(config.source_vocab_size), 'tgt_inputs': ids(target_vocab), 'tgt_labels': ids(target_vocab)}
  for side in ('src', 'tgt'):
    batch |= {f'{side}_segments': segments, f'{side}_positions': positions}
  return {name: tf.constant(value, tf.int32) for name, value in batch.items()}


def small(name):
  """A tiny model's configuration with few symbols and layers and, of pairs of sentences, two rows a group."""
  cls = registry.get(name)
  sizes = {'source_vocab_size': 40, 'target_vocab_size': 30, 'vocab_size': 40}
  if hasattr(cls, 'moe_every'):  # as many layers as repeat
    sizes |= dict.fromkeys(('encoder_layers', 'decoder_layers', 'num_layers'), cls.moe_every)
  if hasattr(cls, 'target_vocab_size'):
    sizes['batch_tokens'] = 2 * cls.num_groups * cls.max_length
  return cls(**{field: size for field, size in sizes.items() if hasattr(cls, field)})


def marks_of(name):
  """Of siblings of two models of GShard that differ from them in the numbers of experts and of layers."""
  if not name.startswith('mt.m4.MoE') or name.endswith(('MoE2048E60LTiny', 'MoE2048E12LTiny')):
    return []
  return pytest.mark.compiled if name.endswith('12LTiny') else pytest.mark.slow


@pytest.mark.parametrize('name', [pytest.param(name, marks=marks_of(name)) for name in TINIES])
def test_every_tiny_model_takes_a_training_step(name):
  config = small(name)
  program = config.program()
  state = program.init()
  batch = {key: tf.constant(value) for key, value in task_of(config).random_batch(full=False).items()}

  after, metrics = program.train_step(state, batch)

  assert int(after['step']) == 1
  assert np.isfinite(metrics['loss']) and metrics['grad_norm'] > 0
  stacks = [
    getattr(config, field) for field in ('encoder_layers', 'decoder_layers', 'num_layers') if hasattr(config, field)
  ]
  moe_layers = sum(layers // config.moe_every for layers in stacks) if stacks else 1  # a recurrent stack has one
  assert len(metrics['routing']) == (config.num_experts and moe_layers)
  changed = [np.any(after['weights'][k] != state['weights'][k]) for k in state['weights']]
  assert np.mean(changed) > 0.95
  assert all(w.dtype == tf.float32 and np.all(np.isfinite(w)) for w in after['weights'].values())


@pytest.mark.parametrize('dispatch', ['einsum', 'gather'])
def test_bfloat16_activations_give_nearly_the_loss_and_gradients_of_float32(dispatch):
  def step(dtype):
    config = registry.get('mt.m4.MoE2048E60LTiny')(
      source_vocab_size=40,
      target_vocab_size=30,
      encoder_layers=2,
      decoder_layers=2,
      scan_layers=False,
      remat='none',
      num_experts=8,
      dispatch=dispatch,
      activation_dtype=dtype,
    )
    program = config.program()
    return program.train_step(program.init(), random_batch(config))[1]

  half, full = step('bfloat16'), step('float32')

  assert half['loss'] != full['loss']
  assert float(half['loss']) == pytest.approx(float(full['loss']), rel=0.01)
  assert float(half['grad_norm']) == pytest.approx(float(full['grad_norm']), rel=0.05)


def test_bfloat16_activations_decode_with_a_bfloat16_cache():
  config = registry.get('mt.m4.MoE2048E60LTiny')(
    source_vocab_size=40, target_vocab_size=30, encoder_layers=2, decoder_layers=2
  )
  model = config.model()
  theta = weights_lib.unflatten(config.program().init()['weights'])
  batch = random_batch(config)
  memory, _ = model.encode(theta, batch)
  cache = model.init_cache(theta, memory, 2)
  first = batch['tgt_inputs'][:, :1]

  now = Now(tf.constant(0), tf.constant(0), tf.constant([[[1.0, 0.0]]]))
  logits, cache = model.decode_step(theta, first, now, batch['src_segments'], cache)

  whole, _ = model.logits(theta, batch)
  assert logits.dtype == whole.dtype == tf.float32
  assert {t.dtype for t in tf.nest.flatten(cache)} == {tf.bfloat16}
  np.testing.assert_allclose(logits[:, 0], whole[:, 0], atol=0.1)
