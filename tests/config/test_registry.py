"""Models by name."""

import dataclasses
import pickle

import forks
import gin
import pytest

from lingvo_moe.config import fields, registry
from lingvo_moe.core.errors import UserError


def test_a_name_is_the_module_below_params_and_the_class():
  cls = registry.get('mt.m4mini.MoE8E')

  assert (cls.__module__, cls.__name__) == ('lingvo_moe.params.mt.m4mini', 'MoE8E')
  assert registry.name_of(cls) == 'mt.m4mini.MoE8E'


@pytest.mark.parametrize('name', ['mt.m4.MoE2048E36L', 'mt.m4mini.Tiny', 'mt.cldr.Dense', 'mt.multi30k.Tiny'])
def test_names_lists_every_module(name):
  assert name in registry.names()


def test_names_are_sorted_and_unique():
  names = registry.names()

  assert names == sorted(set(names))


@pytest.mark.parametrize(
  'name, close',
  [
    ('mt.m4mini.Tniy', 'mt.m4mini.Tiny'),
    ('mt.m4mini.moe8e', 'mt.m4mini.MoE8E'),
    ('mt.m4.MoE2048E36', 'mt.m4.MoE2048E36L'),
    ('mt.m5.T96L', 'mt.m4.T96L'),
    ('MoE128E12L', 'mt.m4.MoE128E12L'),
  ],
)
def test_an_unknown_name_is_answered_with_the_closest_ones(name, close):
  with pytest.raises(UserError, match=f"no model is called '{name}'; closest: .*{close}.*lingvo-moe models lists all"):
    registry.get(name)


NOT_NAMES = ['', '.', 'mt', 'mt.m4', 'mt.m4.', '..m4.T96L', 'mt.m4.MtConfig', 'mt.m4._M4', '../../etc', 'os.path']


@pytest.mark.parametrize('name', NOT_NAMES)
def test_what_is_not_a_registered_name_is_refused(name):
  with pytest.raises(UserError, match='no model is called'):
    registry.get(name)


@pytest.mark.parametrize('module, first', [('mt.harbour', 'mt'), ('lm', 'lm'), ('lingvo_moe.layers.x', 'lingvo_moe')])
def test_a_name_that_begins_like_the_zoos_cannot_be_registered(module, first):
  body = {'__module__': module, '__doc__': 'For a test.'}
  with pytest.raises(ValueError, match=rf'{module}.Stray begins as names of the zoo do \({first}\.\)'):
    registry.register(type('Stray', (registry.get('mt.m4mini.Tiny'),), body))


def model(name, parent, **values):
  """A class as a params module would state it."""
  annotations = dict.fromkeys(values, 'int')
  body = {'__module__': 'lingvo_moe.params.mt.m4mini', '__annotations__': annotations, '__doc__': 'For a test.'}
  return type(name, (parent,), body | values)


@pytest.fixture
def unregistered(monkeypatch):
  """Registers into a copy of the table of models."""
  monkeypatch.setattr(registry, '_models', dict(registry._models))


def test_one_decorator_makes_a_frozen_dataclass_that_gin_binds(unregistered):
  cls = registry.register(model('Wide', registry.get('mt.m4mini.Tiny'), ff_dim=96))

  assert registry.get('mt.m4mini.Wide') is cls
  with pytest.raises(dataclasses.FrozenInstanceError):
    cls().ff_dim = 3
  gin.parse_config('mt.m4mini.Wide.model_dim = 48')
  try:
    assert (cls().ff_dim, cls().model_dim, cls(model_dim=16).model_dim) == (96, 48, 16)
  finally:
    gin.clear_config()


def test_two_classes_of_one_name_are_refused():
  with pytest.raises(ValueError, match=r'two classes are called mt.m4mini.Tiny'):
    registry.register(model('Tiny', registry.get('mt.m4mini.Dense')))


def test_a_misspelt_override_cannot_be_registered():
  with pytest.raises(ValueError, match=r'Misspelt.ff_dims overrides no field: closest: ff_dim'):
    registry.register(model('Misspelt', registry.get('mt.m4mini.Dense'), ff_dims=3))
  assert 'mt.m4mini.Misspelt' not in registry.registered()


def test_a_tiny_sibling_is_a_subclass_with_other_sizes():
  giant, tiny = registry.get('mt.m4.T96L'), registry.get('mt.m4.T96LTiny')

  assert issubclass(tiny, giant) and (tiny.__module__, tiny.__qualname__) == (giant.__module__, 'T96LTiny')
  assert (tiny().ff_dim, tiny().remat) == (64, giant().remat)
  assert fields.specs(tiny) == fields.specs(giant)
  assert pickle.loads(pickle.dumps(tiny(seed=3))) == tiny(seed=3)


def test_a_tiny_sibling_with_a_misspelt_size_cannot_be_made():
  with pytest.raises(ValueError, match=r'Moe16Tiny.ff_dims overrides no field: closest: ff_dim'):
    registry.tiny(registry.get('mt.bench_s.Moe16'), '1k weights', ff_dims=3)


RUN = 'Run:     lingvo-moe train --model={} --logdir=DIR --data_dir=CORPUS'


@pytest.mark.parametrize(
  'name, ends_with',
  [
    ('mt.m4mini.MoE8E', ['', RUN, 'Result:  not yet run']),
    ('mt.m4.T96LTiny', ['', RUN]),
    ('mt.bench_s.Tiny', ['', 'Run:     python tools/bench.py --model=mt.bench_s.Tiny --calls=1']),
  ],
)
def test_what_is_said_of_a_model_ends_with_how_to_run_it_and_what_came_of_it(name, ends_with):
  said = registry.about(name).splitlines()

  assert said[-len(ends_with) :] == [line.format(name) for line in ends_with]
  assert said[0] == registry.get(name).__doc__.strip().splitlines()[0]


def test_only_the_module_asked_for_is_imported():
  code = (
    'import sys; from lingvo_moe.config import registry; registry.get("mt.m4mini.Tiny");'
    'print([m for m in sys.modules if m.startswith("lingvo_moe.params.mt.")],'
    ' sorted(registry.registered()))'
  )

  out = forks.run(['-c', code], check=True).stdout

  siblings = [f'mt.m4mini.{n}' for n in ('Dense', 'FromEnglishDense')]
  assert out.startswith("['lingvo_moe.params.mt.m4mini'] ")
  assert all(name in out for name in siblings)


def test_a_name_of_thousands_of_parts_is_unknown_like_any_other():
  with pytest.raises(UserError, match=r"^no model is called 'a\.a\..*\.\.\.; known: ") as caught:
    registry.get('.'.join(['a'] * 3000))

  assert len(str(caught.value)) < 600
