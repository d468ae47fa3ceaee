"""Gates by name: what each takes of the options, and how many experts a token visits."""

from __future__ import annotations

import pytest

from lingvo_moe.layers.gates import by_name
from lingvo_moe.layers.gates.expert_choice import ExpertChoice
from lingvo_moe.layers.gates.hierarchical import Hierarchical
from lingvo_moe.layers.gates.noisy_top_k import NoisyTopK
from lingvo_moe.layers.gates.soft_mixture import SoftMixture
from lingvo_moe.layers.gates.top2 import Top2
from lingvo_moe.layers.gates.top_k import TopK

OPTIONS = dict(k=2, second_choice='always', scale=0.1, capacity_factor=1.5, groups_of_experts=4, dispatch='gather')


@pytest.mark.parametrize(
  ('name', 'gate', 'choices'),
  [
    ('top2', Top2('always', scale=0.1), 2),
    ('top_k', TopK(2, True, scale=0.1), 2),
    ('top_k_unnormalised', TopK(2, False, scale=0.1), 2),
    ('switch', TopK(1, False, scale=0.1), 1),
    ('noisy_top_k', NoisyTopK(2), 2),
    ('hierarchical', Hierarchical(4, 2, 'gather'), 4),
    ('expert_choice', ExpertChoice(1.5, scale=0.1), 1.5),
    ('soft', SoftMixture(scale=0.1), 8),
  ],
)
def test_a_gate_takes_of_the_options_what_it_needs(name, gate, choices):
  assert by_name.make(name, **OPTIONS) == gate and name in by_name.GATES
  assert gate.choices(num_experts=8) == choices


def test_k_is_taken_where_it_is_a_choice():
  changed = {
    name for name in by_name.GATES if by_name.make(name, **{**OPTIONS, 'k': 3}) != by_name.make(name, **OPTIONS)
  }
  assert changed == set(by_name.TAKE_K)


def test_a_token_visits_no_more_experts_than_there_are():
  assert ExpertChoice(3.0).choices(num_experts=2) == 2


def test_expert_choice_needs_a_capacity_factor():
  with pytest.raises(ValueError, match='saw capacity_factor=None: give one'):
    by_name.make('expert_choice')
