"""Models by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from lingvo_moe.core import registry
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
  with pytest.raises(UserError, match=f"no model is called '{name}'; closest: .*{close}.*tools/models.py lists all"):
    registry.get(name)


NOT_NAMES = ['', '.', 'mt', 'mt.m4', 'mt.m4.', '..m4.T96L', 'mt.m4.MtConfig', 'mt.m4._M4', '../../etc', 'os.path']


@pytest.mark.parametrize('name', NOT_NAMES)
def test_what_is_not_a_registered_name_is_refused(name):
  with pytest.raises(UserError, match='no model is called'):
    registry.get(name)


def test_a_class_outside_params_cannot_be_registered():
  with pytest.raises(ValueError, match=r'Stray: registered models live in lingvo_moe.params.\*'):
    registry.register(dataclasses.dataclass(type('Stray', (), {})))


def test_only_the_module_asked_for_is_imported():
  code = (
    'import sys; from lingvo_moe.core import registry; registry.get("mt.m4mini.Tiny");'
    'print([m for m in sys.modules if m.startswith("lingvo_moe.params.mt.")],'
    ' sorted(registry.siblings("mt.m4mini.Tiny")))'
  )

  out = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout

  siblings = [f'mt.m4mini.{n}' for n in ('Dense', 'FromEnglishDense')]
  assert out.startswith("['lingvo_moe.params.mt.m4mini'] ")
  assert all(name in out for name in siblings)
