"""Fields of configurations: what their one line says, and what checks it."""

import dataclasses
import math

import pytest

from lingvo_moe.config import fields
from lingvo_moe.config.fields import changeable, field
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
from lingvo_moe.tasks.lm.lm_config import LmConfig
from lingvo_moe.tasks.mt.mt_config import MtConfig


@dataclasses.dataclass(frozen=True)
class Cake:
  layers: int = field(2, 'Layers of the cake.', at_least=1)
  sugar: float = field(0.5, 'Share of sugar.', at_least=0, below=1, way_out='0.5 is sweet', may_change=True)
  heat: float = field(200.0, 'Of the oven.', above=0)
  fat: float = field(0.98, 'Share of fat.', at_least=0.9, at_most=1)
  icing: str = field('plain', 'Icing.', choices=('plain', 'lemon'))
  name: str = changeable('', 'Name.')
  baked: bool = field(False, 'Whether it is baked.')
  liked: bool | None = field(None, 'Whether it is liked; None: nobody has tried.')
  candles: int | None = field(None, 'Candles; None: as many as years.', at_least=1)
  guests: tuple[int, ...] = field((), 'Guests a day.')
  wishes: tuple[tuple[str, str], ...] = field((), '(guest, wish) pairs.', way_out="e.g. (('Eve', 'lemon'),)")

  def __post_init__(self):
    fields.check(self)


@dataclasses.dataclass(frozen=True)
class Tall(Cake):
  layers: int = 9


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(layers=0), 'layers must be at least 1; saw 0'),
    (dict(layers=2.0), 'layers must be an integer; saw 2.0'),
    (dict(layers=True), 'layers must be an integer; saw True'),
    (dict(sugar=1), 'sugar must be at least 0 and below 1; saw 1.0: 0.5 is sweet'),
    (dict(sugar=-0.1), 'sugar must be at least 0 and below 1; saw -0.1: 0.5 is sweet'),
    (dict(sugar='much'), "sugar must be a number; saw 'much': 0.5 is sweet"),
    (dict(sugar=False), 'sugar must be a number; saw False: 0.5 is sweet'),
    (dict(heat=0), 'heat must be above 0; saw 0.0'),
    (dict(heat=float('inf')), 'heat must be a finite number; saw inf'),
    (dict(heat=float('nan')), 'heat must be a finite number; saw nan'),
    (dict(fat=1.1), 'fat must be from 0.9 to 1; saw 1.1'),
    (dict(fat=0.8), 'fat must be from 0.9 to 1; saw 0.8'),
    (dict(icing='beef'), "icing must be one of plain, lemon; saw 'beef'"),
    (dict(name=3), 'name must be a string; saw 3'),
    (dict(baked=1), 'baked must be True or False; saw 1'),
    (dict(liked=0), 'liked must be True, False or None; saw 0'),
    (dict(candles=0), 'candles must be at least 1; saw 0'),
    (dict(candles=2.0), 'candles must be an integer or None; saw 2.0'),
    (dict(candles=True), 'candles must be an integer or None; saw True'),
    (dict(candles='None'), "candles must be an integer or None; saw 'None'"),
    (dict(guests=3), 'guests must be of type tuple[int, ...]; saw 3'),
    (dict(guests=(3, True)), 'guests must be of type tuple[int, ...]; saw (3, True)'),
    (
      dict(wishes=(('Eve',),)),
      "wishes must be of type tuple[tuple[str, str], ...]; saw (('Eve',),): e.g. (('Eve', 'lemon'),)",
    ),
  ],
)
@pytest.mark.parametrize('cls', [Cake, Tall])
def test_a_value_out_of_type_or_range_is_refused_in_a_subclass_too(cls, values, message):
  with pytest.raises(UserError) as caught:
    cls(**values)

  assert str(caught.value) == message


def test_an_integer_that_no_float_can_hold_is_refused():
  with pytest.raises(UserError, match='heat must be a finite number; saw 1000'):
    Cake(heat=10**400)


def test_numbers_become_floats_and_lists_and_dicts_become_tuples():
  cake = Cake(heat=180, guests=[3, 4], wishes={'Eve': 'lemon'})

  assert type(cake.heat) is float
  assert (cake.guests, cake.wishes) == ((3, 4), (('Eve', 'lemon'),))
  assert Cake(wishes=[['Eve', 'lemon']]).wishes == cake.wishes


def test_the_ends_of_a_range_are_allowed_where_they_belong_to_it():
  cake = Cake(layers=1, sugar=0, fat=1)

  assert (cake.layers, cake.sugar, cake.fat, Cake(fat=0.9).fat) == (1, 0, 1, 0.9)


def test_a_subclass_that_states_a_default_keeps_the_rest_of_the_line():
  assert Tall().layers == 9
  assert fields.specs(Tall)['layers'] == fields.specs(Cake)['layers']
  assert fields.specs(Tall)['layers'].text == 'Layers of the cake. At least 1.'


def test_the_text_tells_meaning_range_and_whether_a_run_may_change_it():
  assert fields.specs(Cake)['sugar'].text == 'Share of sugar. At least 0 and below 1. A run may change it.'
  assert fields.specs(Cake)['icing'].text == 'Icing. One of plain, lemon.'
  assert fields.specs(Cake)['baked'].text == 'Whether it is baked.'


def test_what_may_change_is_read_from_the_fields():
  assert fields.may_change(Tall) == ['sugar', 'name']


def test_the_fields_a_translation_run_may_change():
  assert sorted(fields.may_change(MtConfig)) == sorted(
    # where the text lies
    'data_dir source_vocab target_vocab '
    # how far and how closely watched a run goes
    'max_steps log_every eval_every save_every keep_checkpoints keep_every patience eval_sentences eval_batch_tokens '
    # what is computed when, which changes results by rounding alone
    'scan_layers remat pipeline_repeats micro_batches dispatch round_capacity_factor capacity_chunks '
    # decoding
    'repetition_penalty no_repeat_ngram_size '
    'beam_size length_norm_alpha length_norm_k early_stopping decode_ratio decode_extra several_sentences long_line '
    'alignment_layer best_by best_by_sentences search sample_temperature top_k top_p sample_seed mbr_samples '
    'guided_by'.split()
  )


def test_the_capacity_factor_is_a_number_auto_or_none():
  assert MtConfig(capacity_factor=None).capacity_factor is None
  assert isinstance(MtConfig(capacity_factor=2).capacity_factor, float)
  for wrong in ('none', True):
    with pytest.raises(UserError, match=f"capacity_factor must be a number, 'auto' or None; saw {wrong!r}"):
      MtConfig(capacity_factor=wrong)
  with pytest.raises(UserError, match=r'capacity_factor must be above 0; saw 0.0'):
    MtConfig(capacity_factor=0)


def test_an_integer_or_none_may_be_either():
  assert (Cake().candles, Cake(candles=1).candles) == (None, 1)
  assert fields.specs(Cake)['candles'].text.startswith('Candles; None: as many as years. At least 1')


def test_every_field_of_a_translation_model_has_a_meaning_and_a_default_in_range():
  MtConfig()

  for name, spec in fields.specs(MtConfig).items():
    assert spec.meaning.endswith('.') and len(spec.meaning) > 5, name


@pytest.mark.parametrize(
  'body, message',
  [
    ({'__annotations__': {'layer': 'int'}, 'layer': 3}, r'Odd.layer overrides no field: closest: layers; a new one is'),
    ({'__annotations__': {'layer': 'int'}, 'layer': dataclasses.field(default=3)}, 'Odd.layer overrides no field'),
    ({'layers': 3}, 'Odd.layers overrides a field and needs its type: write layers: <type> = ...'),
  ],
)
def test_an_override_that_python_would_ignore_is_an_error(body, message):
  with pytest.raises(ValueError, match=message):
    fields.check_overrides(type('Odd', (Cake,), body))


def test_a_subclass_may_declare_fields_of_its_own():
  body = {'__annotations__': {'layers': 'int', 'nuts': 'int'}, 'layers': 3, 'nuts': field(0, 'Nuts.', at_least=0)}
  nutty = type('Nutty', (Cake,), body)

  fields.check_overrides(nutty)
  nutty = dataclasses.dataclass(frozen=True)(nutty)

  with pytest.raises(UserError, match='nuts must be at least 0; saw -1'):
    nutty(nuts=-1)


@pytest.mark.parametrize(
  'values, message',
  [
    (dict(layers=2**31), 'layers must be at most 2147483647; saw 2147483648'),
    (dict(guests=(3, 2**40)), 'guests must be at most 2147483647; saw (3, 1099511627776)'),
    (dict(layers=16**5000), 'layers must be at most 2147483647; saw <int too long to show>'),
    (dict(heat=1e39), 'heat must be from -3.4028234e+38 to 3.4028234e+38, as float32 has it; saw 1e+39'),
  ],
)
def test_a_number_that_is_too_large_for_a_device_is_refused(values, message):
  with pytest.raises(UserError) as caught:
    Cake(**values)

  assert str(caught.value) == message


@pytest.mark.parametrize('cls', [MtConfig, LmConfig, DenoisingConfig])
def test_no_field_takes_infinity_or_a_number_beyond_every_size(cls):
  for name, hint in fields.types(cls).items():
    for value in {int: [10**20, -(10**20)], float: [math.inf, -math.inf, math.nan], float | None: [math.inf]}.get(
      hint, []
    ):
      with pytest.raises(UserError, match=f'{name} must be .*; saw '):
        cls(**{name: value})


def test_a_field_that_a_subclass_declares_anew_has_the_rules_and_the_type_of_the_nearest():
  @dataclasses.dataclass(frozen=True)
  class Wide(Cake):
    layers: float = field(1.5, 'Layers, also half ones.', at_least=0.5)

  @dataclasses.dataclass(frozen=True)
  class Wider(Wide):
    layers: float = 2.5

  assert fields.types(Wider)['layers'] is float and fields.types(Cake)['layers'] is int
  assert fields.specs(Wider)['layers'].text == 'Layers, also half ones. At least 0.5.'
