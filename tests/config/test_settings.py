"""Values of --set: how a field's text becomes its value, and what mistakes get."""

import pytest

from lingvo_moe.config import configuration
from lingvo_moe.core.errors import UserError

TINY = 'mt.m4mini.Tiny'


def resolved(*settings, **others):
  return configuration.resolve(TINY, settings=settings, **others)


@pytest.mark.parametrize(
  ('setting', 'value'),
  [
    ('max_steps=1_000', 1000),
    ('max_steps = 0x10', 16),
    ('Tiny.max_steps=7', 7),
    ('max_steps=7 # of a trial', 7),
    ('learning_rate=1e-3', 0.001),
    ('learning_rate=2', 2.0),
    ('packing=True', True),
    ('pairs=de-en,fr-en', 'de-en,fr-en'),
    ('pairs="de-en"', 'de-en'),
    ("pairs='*'", '*'),
    ('pairs=1,2', '1,2'),
    ('pairs=...', '...'),
    ('pairs=+1', '+1'),
    ('data_dir=C:\\a b=c', 'C:\\a b=c'),
    ('target_normalization=None', None),
    ('target_normalization=nmt_nfkc', 'nmt_nfkc'),
    ('warmup_steps=None', None),
    ('warmup_steps=20', 20),
    ('capacity_factor=auto', 'auto'),
    ('capacity_factor=1.5', 1.5),
    ('boundaries=(64, 128)', (64, 128)),
    ('boundaries=[64, 128]', (64, 128)),
    ('boundaries=()', ()),
    ("weights={'de-en': 3, 'fr-en': 0.5}", (('de-en', 3.0), ('fr-en', 0.5))),
    ("split_files=(('dev', 'val'),)", (('dev', 'val'),)),
  ],
)
def test_a_value_is_read_as_its_field_has_it(setting, value):
  field = setting.partition('=')[0].strip().removeprefix('Tiny.')
  assert getattr(resolved(setting), field) == value


@pytest.mark.parametrize(
  ('setting', 'answer'),
  [
    ('ff_dim', "^--set gives a field a value, such as --set batch_tokens=2048; saw 'ff_dim'$"),
    ('ff_dim=', "^--set gives a field a value, .*; saw 'ff_dim='$"),
    ('ff_dims=8', "^Tiny has no field 'ff_dims'; closest: ff_dim"),
    ('Dense.ff_dim=8', "^Tiny has no field 'Dense.ff_dim'; closest: ff_dim"),
    ('ff_dim=many', f"^{TINY}: ff_dim must be an integer; saw 'many'$"),
    ('ff_dim=64.0', f'^{TINY}: ff_dim must be an integer; saw 64.0$'),
    ('ff_dim=0', f'^{TINY}: ff_dim must be at least 1; saw 0$'),
    ('pairs=3', f'^{TINY}: pairs must be a string; saw 3$'),
    ('optimizer=adm', f"^{TINY}: optimizer must be one of .*adam, .*; saw 'adm'$"),
    ('boundaries=32,64', f"^{TINY}: boundaries must be of type tuple.*; saw '32,64'"),
    (
      "pairs='de-en",
      '^--set pairs takes a value as Python writes it, or text, in quotes where it begins with \'; saw "',
    ),
    ('boundaries=(32,', r"begins with \(; saw '\(32,': close quotes and brackets"),
    ('ff_dim=%size', "saw '%size': .* use macros in --gin_bindings$"),
    ('ff_dim=' + '(' * 3000, r'begins with \('),
    ('ff_dim=' + '9' * 5000, f"^{TINY}: ff_dim must be an integer; saw '999"),
  ],
)
def test_a_setting_that_gives_no_value_gets_the_rule_and_what_it_saw(setting, answer):
  with pytest.raises(UserError, match=answer) as caught:
    resolved(setting)

  assert '\n' not in str(caught.value) and len(str(caught.value)) < 400


def test_settings_count_more_than_bindings_and_the_last_of_two_counts():
  config = resolved('ff_dim=48', 'ff_dim=80', gin_bindings=['Tiny.ff_dim = 0', 'Tiny.seed = 5'])

  assert (config.ff_dim, config.seed) == (80, 5)


def test_a_setting_may_mend_a_value_that_another_makes_impossible():
  with pytest.raises(UserError, match='num_experts must be 2 or more'):
    resolved(gin_bindings=['Tiny.num_experts = 1'])
  assert resolved('num_experts=4', gin_bindings=['Tiny.num_experts = 1']).num_experts == 4
