"""Settings without effect: a field says with which values of others it has one, and what is set without one is refused.

The kind: a value that a user types, and that no part of the program reads in the configuration it is typed for.
"""

import ast
import dataclasses
import functools
import json
import pathlib

import pytest

import lingvo_moe
from lingvo_moe.config import configuration, fields, registry
from lingvo_moe.config.fields import ON, field
from lingvo_moe.core.errors import UserError
from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
from lingvo_moe.tasks.lm.lm_config import LmConfig, RecurrentConfig
from lingvo_moe.tasks.mt.mt_config import MtConfig

TINY, SCHEDULES = 'mt.cldr.Tiny', ('inverse_sqrt', 'warmup_inverse_sqrt', 'warmup_linear', 'cosine', 'wsd', 'constant')
WITHOUT_EFFECT = [
  *(['choices=4', f'gate={gate}'] for gate in ('top2', 'switch', 'soft')),
  *(['final_rate=0.1', f'schedule={schedule}'] for schedule in SCHEDULES if schedule not in ('cosine', 'wsd')),
  *(['decay_share=0.5', f'schedule={schedule}'] for schedule in SCHEDULES if schedule != 'wsd'),
  ['warmup_steps=7', 'schedule=constant'],
  ['lora_alpha=32'],
  ['lora_matrices=wq'],
  ['second_choice=always', 'gate=top_k'],
  ['second_choice_threshold=0.3', 'gate=top_k'],
  ['second_choice_threshold=0.3', 'second_choice=always'],
  *(['adam_beta2=0.9', f'optimizer={name}'] for name in ('adafactor',)),
  *(['weight_decay=0.2', f'optimizer={name}'] for name in ('adam', 'adafactor')),
  *(['beta2_cap=0.9', f'optimizer={name}'] for name in ('adam', 'adamw')),
  *([value, 'num_experts=0'] for value in ('gate=switch', 'capacity_factor=1.5', 'moe_every=1', 'experts_in=encoder')),
  *([value, 'num_experts=0'] for value in ('expert_dim=9', 'expert=gelu', 'shared_experts=1', 'router_jitter=0.1')),
  *([value, 'num_experts=0'] for value in ('aux_loss_weight=0.5', 'router_z_loss_weight=0.1', 'dispatch=einsum')),
  ['gate_init_scale=0.5', 'init_scale=0.1'],
  ['aux_loss_weight=0.5', 'gate=soft'],
  ['capacity_factor=1.5', 'gate=soft'],
  ['chosen_groups=2', 'gate=top_k'],
  ['groups_of_experts=2', 'gate=top2'],
  ['balance_over=batch', 'gate=noisy_top_k'],
  ['router_score=sigmoid', 'gate=top2'],
  ['activation=gelu', 'moe_every=1'],
  ['ffn_dropout=0.1', 'moe_every=1'],
  ['ff_dim=99', 'moe_every=1', 'expert_dim=64'],
  ['num_experts=4', 'moe_every=0'],
  ['relative_buckets=8'],
  ['shared_relative=True'],
  ['position_offset=2', 'positions=relative'],
  ['position_endpoint=False', 'positions=relative'],
  ['target_vocab_size=99', 'shared_vocab=True'],
  ['source_normalization=nfkc', 'shared_vocab=True'],
  ['sampling_nbest=4'],
  ['sampling_alpha=0.5', "source_sampling={'dropout': 0.1}"],
  ['best_by_sentences=5'],
  ['guided_weight=0.5'],
  *([value, 'source_vocab=a', 'target_vocab=b'] for value in ('vocab_by_corpus=True', 'character_coverage=1')),
  ['vocab_sentences=9', 'source_vocab=a', 'target_vocab=b'],
]


@pytest.mark.parametrize('settings', WITHOUT_EFFECT, ids=' '.join)
def test_a_value_that_is_set_and_has_no_effect_is_refused_by_name(settings):
  name = settings[0].partition('=')[0]
  for given in (settings, settings[::-1]):
    with pytest.raises(
      UserError, match=rf'^{TINY}: {name} must be left out with \w+=.*no effect; saw .*: it is for \w'
    ):
      configuration.resolve(TINY, settings=given)


def test_gin_bindings_are_refused_as_well(tmp_path):
  (tmp_path / 'a.gin').write_text('Tiny.choices = 4\n')
  for given in (dict(gin_bindings=['Tiny.choices = 4']), dict(gin_files=[str(tmp_path / 'a.gin')])):
    with pytest.raises(UserError) as refused:
      configuration.resolve(TINY, **given)
    assert str(refused.value) == (
      f"{TINY}: choices must be left out with gate='top2', with which it has no effect; saw 4: it is for gate=top_k or "
      'top_k_unnormalised or noisy_top_k or hierarchical or by_target or by_pair'
    )


def test_a_value_that_is_there_already_or_is_inherited_is_no_mistake():
  assert configuration.resolve(TINY, settings=['choices=2', 'lora_alpha=16']).choices == 2
  top4 = registry.get('mt.cldr_gates.Top4')
  assert top4.choices == 4
  assert configuration.resolve('mt.cldr_gates.Top4', settings=['gate=top2']).choices == 4  # of the class, not the user
  assert configuration.resolve(TINY, num_experts=0).gate == 'top2'


def test_a_line_of_a_registered_class_is_refused_and_one_of_its_parent_is_not(monkeypatch):
  monkeypatch.setattr(registry, '_models', dict(registry.registered()))
  parent = registry.get(TINY)
  body = {'__doc__': 'A.', '__module__': 'effects', '__annotations__': {'choices': int, 'max_steps': int}}
  registry.register(type('Odd', (parent,), body | {'choices': 4, 'max_steps': 3}))
  child = {'__doc__': 'B.', '__module__': 'effects', '__annotations__': {'max_steps': int}, 'max_steps': 4}
  registry.register(type('Child', (registry.get('effects.Odd'),), child))
  with pytest.raises(UserError, match=r"^effects.Odd: choices must be left out with gate='top2'"):
    configuration.resolve('effects.Odd')
  with pytest.raises(UserError, match=r"^effects.Odd: choices must be left out with gate='top2'"):
    configuration.resolve('effects.Odd', max_steps=9)
  assert configuration.resolve('effects.Odd', settings=['gate=top_k']).choices == 4
  assert configuration.resolve('effects.Child').choices == 4


@pytest.mark.parametrize('name', registry.names())
def test_no_line_of_the_zoo_is_without_effect(name):
  configuration.resolve(name)


def test_a_run_of_an_earlier_version_with_such_a_value_still_loads_and_its_command_still_stands(tmp_path):
  path = tmp_path / 'config.json'
  path.write_text(json.dumps({'model': TINY, 'values': {'choices': 4, 'weight_decay': 0.5}}))
  name, old = configuration.load(str(path))
  assert (old.choices, old.weight_decay) == (4, 0.5)
  assert configuration.resolve(name, settings=['choices=4'], base=old) == old
  with pytest.raises(UserError, match='choices must be left out'):
    configuration.resolve(name, settings=['choices=5'], base=old)


@dataclasses.dataclass(frozen=True)
class Cake:
  layers: int = field(2, 'Layers.')
  cream: str = field('', 'Cream between layers.', when={'layers': range(2, 9)})
  candles: int = field(0, 'Candles.')
  matches: int = field(1, 'Matches.', when=({'candles': ON}, {'cream': ('flambé',)}))


def test_a_field_says_when_it_has_an_effect_and_its_text_says_it_too():
  blockers = lambda name, **values: fields.specs(Cake)[name].blockers(Cake(**values))
  assert not blockers('layers') and not blockers('cream') and not blockers('matches', candles=1)
  assert blockers('cream', layers=1) == {'layers': range(2, 9)}
  assert blockers('matches') == {'cream': ('flambé',)} and not blockers('matches', cream='flambé')
  assert fields.specs(Cake)['matches'].text == 'Matches. Only with candles, or cream=flambé.'
  fields.check_effects(Cake(layers=1), ['layers'])
  fields.check_effects(Cake(layers=1), ['cream'], {'layers'})
  with pytest.raises(UserError, match=r'^cream must be left out with layers=1, .*; saw .x.: it is for layers=2 or 3'):
    fields.check_effects(Cake(1, 'x'), ['cream'])


# The grid: where a field says that it has an effect, another value of it makes another program, and nowhere else.

_SIZES = dict(model_dim=8, ff_dim=12, max_steps=50, batch_tokens=4096, num_groups=2)
_MT = dict(source_vocab_size=40, target_vocab_size=30)
_GATES = [
  dict(gate='top2', num_experts=8),
  dict(gate='top2', num_experts=8, second_choice='always', experts_in='encoder', moe_every=1, expert_dim=6),
  dict(gate='top_k', num_experts=8, moe_every=1),
  dict(gate='top_k', num_experts=8, groups_of_experts=4, chosen_groups=2, capacity_factor=1.5),
  dict(gate='top_k_unnormalised', num_experts=8, init_scale=0.1, moe_every=1, expert_dim=6),
  dict(gate='switch', num_experts=8, experts_in='decoder'),
  dict(gate='noisy_top_k', num_experts=8),
  dict(gate='hierarchical', num_experts=16, groups_of_experts=4),
  dict(gate='expert_choice', num_experts=8, experts_in='encoder'),
  dict(gate='soft', num_experts=8, experts_in='encoder'),
  dict(num_experts=0),
  dict(num_experts=0, lora_rank=2, lora_matrices='w?'),
]
_TRAINED = [
  *(dict(schedule=schedule, optimizer=o) for schedule, o in zip(SCHEDULES, ['adafactor', 'adam', 'adamw'] * 2)),
]
_OTHER = {  # by class: configurations for the fields that it adds
  MtConfig: [dict(positions='relative'), dict(shared_vocab=True)],
  DenoisingConfig: [dict(positions='sinusoidal')],
  LmConfig: [dict(output_experts=2)],
  RecurrentConfig: [],
}
# Values that the program carries along where it does not use them: those without an effect stand there all the same.
_CARRIED = set(
  'second_choice_threshold chosen_groups gate_init_scale capacity_factor round_capacity_factor aux_loss_weight '
  'router_z_loss_weight moe_every activation ffn_dropout ff_dim guided_weight'.split()
)


def _another(config, name):
  """Another value of a field, which the configuration allows; None where there is no simple one."""
  value, spec = getattr(config, name), fields.specs(type(config))[name]
  candidates = [c for c in spec.choices if c != value]
  if isinstance(value, bool):
    candidates = [not value]
  elif isinstance(value, (int, float)):
    candidates = [value * 2, value / 2, value + 1, 0.5, 4, 2, 1, 0.01]
  elif name in ('capacity_factor', 'adam_beta2'):
    candidates = [0.75]
  elif name == 'masked_symbols':
    candidates = [(3,)]
  elif name == 'lora_matrices':
    candidates = ['wq']
  for candidate in candidates:
    try:
      candidate = fields.converted(candidate, fields.types(type(config))[name])
      if candidate != value:
        return dataclasses.replace(config, **{name: candidate})
    except (UserError, TypeError):
      continue
  return None


@functools.cache
def _grid(cls):
  """(configuration, field, whether it says that it has an effect, whether another value makes another program)."""
  own = _SIZES | (_MT if cls is MtConfig else {})
  has = {f.name for f in dataclasses.fields(cls)}
  rows = []
  for values in (*(_GATES if cls is MtConfig else (*_GATES[1:5], _GATES[-2])), *_TRAINED, *_OTHER[cls]):
    causal = values.get('experts_in') == 'encoder' and values.get('gate') == 'expert_choice' and 'experts_in' not in has
    if causal or ('lora_rank' in values and cls is RecurrentConfig):
      continue
    config = cls(**own | {name: value for name, value in values.items() if name in has})
    program = config.program()
    for name, spec in fields.specs(cls).items():
      of_training = 'schedule' in spec.when or 'optimizer' in spec.when
      if (values not in _TRAINED or of_training) and (other := _another(config, name)) is not None:
        rows.append((values, name, not spec.blockers(config), other.program() != program))
  return rows


@pytest.mark.parametrize('cls', _OTHER)
def test_a_field_of_a_program_says_that_it_has_an_effect_exactly_where_it_makes_another_program(cls):
  rows = _grid(cls)
  of_program = {name for _, name, _, differs in rows if differs}
  assert {'ff_dim', 'learning_rate', 'final_rate', 'choices', 'weight_decay', 'num_experts'} <= of_program
  idle = [(values, name) for values, name, says, differs in rows if name in of_program and says and not differs]
  assert {name for _, name in idle} <= {'max_steps'}, idle  # at which training ends, whatever the schedule
  refused = [(values, name) for values, name, says, differs in rows if differs and not says]
  assert {name for _, name in refused} <= _CARRIED, refused


@functools.cache
def _read():
  """Names of the attributes that the package reads."""
  trees = (ast.parse(path.read_text()) for path in pathlib.Path(lingvo_moe.__file__).parent.rglob('*.py'))
  nodes = [node for tree in trees for node in ast.walk(tree)]
  attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
  return attributes | {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


@pytest.mark.parametrize('cls', _OTHER)
def test_every_field_is_read(cls):
  of_program = {name for _, name, _, differs in _grid(cls) if differs}
  assert [name for name in fields.specs(cls) if name not in of_program | _read()] == []
