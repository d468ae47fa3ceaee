"""From a name and gin bindings to a configuration, and what mistakes get."""

import dataclasses
import json

import gin
import pytest

from lingvo_moe.config import configuration, registry
from lingvo_moe.core.errors import UserError

TINY = 'mt.m4mini.Tiny'


@pytest.fixture(autouse=True)
def _no_bindings_left():
  yield
  gin.clear_config()


def test_values_come_from_the_class_then_gin_then_the_caller():
  config = configuration.resolve(TINY, (), ['Tiny.ff_dim = 48\nTiny.max_steps = 7', 'Tiny.seed = 2'], max_steps=9)

  assert (config.model_dim, config.ff_dim, config.max_steps, config.seed) == (32, 48, 9, 2)


def test_a_gin_file_binds_and_bindings_win_over_it(tmp_path):
  path = tmp_path / 'a.gin'
  path.write_text('Tiny.ff_dim = 48\nTiny.model_dim = 16\nTiny.split_files = (("dev", "val"),)\n')

  config = configuration.resolve(TINY, [str(path)], ['Tiny.ff_dim = 80'])

  assert (config.ff_dim, config.model_dim, config.split_files) == (80, 16, (('dev', 'val'),))


def test_a_dict_is_bound_saved_and_loaded(tmp_path):
  config = configuration.resolve(TINY, (), ["Tiny.weights = {'de-en': 3, 'fr-en': 0.5}"])
  assert config.weights == (('de-en', 3.0), ('fr-en', 0.5))

  configuration.save(TINY, config, str(tmp_path / 'config.json'))

  assert configuration.load(str(tmp_path / 'config.json')) == (TINY, config)
  with pytest.raises(UserError, match=f'^{TINY}: weights must be finite numbers above 0; saw'):
    configuration.resolve(TINY, (), ["Tiny.weights = {'de-en': 0}"])


def test_bindings_do_not_outlive_the_call_that_gave_them():
  configuration.resolve(TINY, (), ['Tiny.ff_dim = 48'])

  assert configuration.resolve(TINY).ff_dim == 64


def test_classes_of_the_same_name_elsewhere_make_no_binding_ambiguous():
  registry.names()  # imports mt.cldr.Tiny and mt.multi30k.Tiny

  assert configuration.resolve(TINY, (), ['Tiny.ff_dim = 48']).ff_dim == 48
  assert configuration.resolve('mt.cldr.Tiny', (), ['  Tiny.ff_dim = 40']).ff_dim == 40
  assert configuration.resolve('mt.cldr.Tiny', (), ['mt.cldr.Tiny.ff_dim = 24']).ff_dim == 24


@pytest.mark.parametrize(
  'binding, answer',
  [
    ('Tiny.max_step = 3', "Tiny has no field 'max_step'; closest: max_steps"),
    (
      'MoE8E.ff_dim = 3',
      'MoE8E.ff_dim is bound, a value of mt.m4mini.MoE8E, but the model is mt.m4mini.Tiny, '
      'of which mt.m4mini.MoE8E is no parent: write Tiny.ff_dim = 3$',
    ),
    (
      'mt.m4mini.Dense.ff_dim = 3',
      'Dense.ff_dim is bound, a value of mt.m4mini.Dense, but the model is mt.m4mini.Tiny, '
      'for which Tiny sets ff_dim: write Tiny.ff_dim = 3$',
    ),
    (
      'Nobody.ff_dim = 3',
      "^'Nobody' is not the chosen model; its bindings are written Tiny.<field>: write Tiny.ff_dim = 3$",
    ),
    ('Tiny.ff_dim 3', r"^gin could not read a binding: .*saw 'Tiny.ff_dim 3' \(bindings .* Tiny.max_steps = 100, .*\)"),
    ('Tiny.ff_dim = 64.0', f'^{TINY}: ff_dim must be an integer; saw 64.0$'),
    ("Tiny.ff_dim = '64'", f"^{TINY}: ff_dim must be an integer; saw '64'$"),
    ('Tiny.ff_dim = True', f'^{TINY}: ff_dim must be an integer; saw True$'),
    ('Tiny.packing = 1', f'^{TINY}: packing must be True or False; saw 1$'),
    ('Tiny.pairs = 3', f'^{TINY}: pairs must be a string; saw 3$'),
    ('Tiny.ff_dim = 0', f'^{TINY}: ff_dim must be at least 1; saw 0$'),
    ('Tiny.num_experts = 1', f'^{TINY}: num_experts must be 2 or more, or 0 for a dense model; saw 1$'),
    ('Tiny.moe_every = 5', f'^{TINY}: moe_every must be at most 2, the layers of .*; saw 5: num_experts = 0 makes a'),
    ('Tiny.residual_dropout = 1.0', f'^{TINY}: residual_dropout must be at least 0 and below 1; saw 1.0$'),
    ('Tiny.learning_rate = 0.0', f'^{TINY}: learning_rate must be above 0; saw 0.0$'),
    ('Tiny.temperature = 0', f'^{TINY}: temperature must be above 0; saw 0.0: 1 keeps the natural shares'),
    ("Tiny.optimizer = 'sgd'", f"^{TINY}: optimizer must be one of .*adam, .*; saw 'sgd'$"),
    ("Tiny.activation_dtype = 'float16'", "activation_dtype must be one of float32, bfloat16; saw 'float16'$"),
    ('ff_dim = 3', '^ff_dim binds no value of the model: write Tiny.ff_dim = 3$'),
    ('train/Tiny.ff_dim = 3', '^train/Tiny.ff_dim binds no value of the model: write Tiny.ff_dim = 3$'),
    ('import nosuchmodule', "^bindings bind values and import nothing; saw 'import nosuchmodule': take it out$"),
    ('Tiny.batch_tokens = 10', f'^{TINY}: batch_tokens must hold num_groups rows of max_length; saw batch_tokens=10'),
  ],
)
def test_a_bad_binding_gets_the_rule_the_value_and_the_way_out(binding, answer):
  with pytest.raises(UserError, match=answer) as caught:
    configuration.resolve(TINY, (), [binding])

  assert '\n' not in str(caught.value)


def test_a_mistake_in_a_gin_file_names_the_file(tmp_path):
  path = tmp_path / 'a.gin'
  path.write_text('Tiny.ff_dims = 48\n')

  with pytest.raises(UserError, match=f"^--gin_file={path}: Tiny has no field 'ff_dims'; closest: ff_dim"):
    configuration.resolve(TINY, [str(path)])


def test_a_gin_file_that_is_not_there_is_named():
  with pytest.raises(UserError, match='--gin_file=/no/such.gin: there is no such file'):
    configuration.resolve(TINY, ['/no/such.gin'])


def test_an_unknown_model_is_answered_with_the_closest_names():
  with pytest.raises(UserError, match='closest: .*mt.m4mini.Tiny'):
    configuration.resolve('mt.m4mini.Tniy')


def test_a_saved_configuration_comes_back_equal(tmp_path):
  path = str(tmp_path / 'config.json')
  bindings = [
    'Tiny.ff_dim = 48',
    "Tiny.pairs = 'größe-en'",
    'Tiny.boundaries = (64, 128)',
    'Tiny.split_files = {"dev": "val"}',
  ]
  saved = configuration.resolve(TINY, (), bindings)

  configuration.save(TINY, saved, path)

  assert configuration.load(path) == (TINY, saved)


def test_what_gin_says_now_does_not_reach_a_loaded_configuration(tmp_path):
  path = str(tmp_path / 'config.json')
  configuration.save(TINY, configuration.resolve(TINY), path)
  gin.parse_config('mt.m4mini.Tiny.ff_dim = 48')

  assert configuration.load(path)[1].ff_dim == 64


def test_a_field_that_is_new_since_takes_its_default(tmp_path):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({'model': TINY, 'values': {'ff_dim': 48}}))

  assert configuration.load(str(path)) == (TINY, dataclasses.replace(configuration.resolve(TINY), ff_dim=48))


@pytest.mark.parametrize(
  'text, answer',
  [
    ('{', 'is not a configuration written by the trainer'),
    ('[]', 'is not a configuration written by the trainer'),
    ('{"model": "mt.m4mini.Tiny"}', 'is not a configuration written by the trainer'),
    ('{"model": "mt.m4mini.Tiny", "values": {"ff_dims": 3}}', "has no field 'ff_dims' in this version; closest: ff_d"),
    (
      '{"model": "mt.m4mini.Tiny", "values": {"ff_dim": 0}}',
      'config.json: mt.m4mini.Tiny: ff_dim must be at least 1; saw 0$',
    ),
    ('{"model": "mt.m4mini.Tniy", "values": {}}', "no model is called 'mt.m4mini.Tniy'"),
  ],
)
def test_a_damaged_configuration_is_named(tmp_path, text, answer):
  path = tmp_path / 'config.json'
  path.write_text(text)

  with pytest.raises(UserError, match=answer):
    configuration.load(str(path))


def test_loading_where_there_is_no_run_says_so(tmp_path):
  with pytest.raises(UserError, match=f'there is no run in {tmp_path} .*train one there first'):
    configuration.load(str(tmp_path / 'config.json'))


def test_differences_name_the_field_and_both_values():
  old = configuration.resolve(TINY)
  new = dataclasses.replace(old, ff_dim=48, max_steps=5)

  assert configuration.differences(old, new, ignore=['max_steps']) == ['ff_dim=64, now 48']


def test_what_a_run_has_yet_to_settle_may_be_settled_but_not_changed():
  unset = configuration.resolve(TINY)  # as an earlier version wrote it, without such a field
  settled, other = (dataclasses.replace(unset, target_normalization=rule) for rule in ('nmt_nfkc', 'identity'))
  assert configuration.differences(unset, settled) == []
  assert configuration.differences(settled, other) == ["target_normalization='nmt_nfkc', now 'identity'"]
