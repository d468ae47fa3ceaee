"""Combinations of scan, rematerialisation, dispatch, experts, gates and micro-batches; see scan_grid.py."""

import pytest
import scan_grid

from lingvo_moe.layers.experts import EXPERTS
from lingvo_moe.layers.gates.table import GATES

SCANNED = {'scan_layers': True, 'remat': 'none', 'dispatch': 'grouped', 'micro_batches': 1}


@pytest.mark.parametrize('expert, bias', [('gelu', False), ('geglu', True), ('deep', False), ('deep', True)])
def test_a_scanned_stack_trains_experts_of_each_kind_on_rows_of_their_own(expert, bias):
  combination = {'expert': expert, 'expert_bias': bias, 'gate': 'top2', **SCANNED}
  assert scan_grid.check(combination) == ('refused' if expert == 'deep' and bias else 'equal')


def test_a_scanned_stack_trains_a_gate_of_two_levels_by_einsums():
  combination = {'expert': 'relu', 'expert_bias': False, 'gate': 'hierarchical', **SCANNED, 'dispatch': 'einsum'}
  assert scan_grid.check(combination) == 'equal'


def test_pairs_of_values_are_all_among_the_combinations_that_are_tried():
  chosen = scan_grid.pairwise()
  for expert in EXPERTS:
    for gate in GATES:
      assert any(c['expert'] == expert and c['gate'] == gate for c in chosen)


@pytest.mark.slow
@pytest.mark.parametrize('combination', scan_grid.pairwise(), ids=lambda c: '-'.join(map(str, c.values())))
def test_a_scanned_stack_trains_as_the_unrolled_one_or_is_refused(combination):
  scan_grid.check(combination, traced=True)
