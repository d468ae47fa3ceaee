"""Partitioned operators: equal to those on one device, with the collectives that GShard's Table 4 and A.4 name."""

import dataclasses
import importlib.util
import random

import pytest
import tensorflow as tf

pytest.importorskip('jax')

from lingvo_moe.runtime.chips import Topology
from paper import operator_tables, operators, partitioned
from paper.listing import LISTING
from paper.operators import AA, AG, AR, CP, OPERATORS, TABLE_4

pytestmark = pytest.mark.compiled

name_of = lambda operator: f'{operator.name} {operator.split}'.replace(' ', '_')


@pytest.mark.parametrize('operator', LISTING + OPERATORS, ids=name_of)
def test_four_devices_agree_with_one_and_talk_as_expected(operator):
  measured = partitioned.measure(operator, 4)
  assert measured.difference < 1e-6
  assert measured.collectives == operator.collectives


@pytest.mark.parametrize('operator', TABLE_4, ids=name_of)
def test_a_partition_scales_as_the_paper_says(operator):
  measured = [partitioned.measure(operator, devices) for devices in (2, 8)]
  growth = lambda figure: partitioned.growth([getattr(m, figure) for m in measured], (2, 8))
  assert all(m.difference < 1e-6 for m in measured)
  assert growth('flops') == operator.compute
  communication = operator.communication.split(' ')[0]
  # Of the AllToAll, hops are what grows: the bytes of a device do not.
  assert growth('bytes') == ('O(1)' if 'AA' in operator.communication else communication)


@pytest.mark.parametrize('seed', range(12))
def test_halos_of_any_window_agree_with_one_device(seed):
  rng = random.Random(seed)
  # A result has another size than its image, so each partition needs other rows before and after its own.
  window = {'strides': rng.choice([1, 1, 2, 3]), 'base': rng.choice([1, 1, 2, 3]), 'window': rng.choice([1, 1, 2])}
  window['padding'] = rng.randint(0, 3), rng.randint(0, 3)
  devices, short, kernel = rng.choice([2, 3, 4]), rng.randint(0, 3), rng.randint(1, 6)
  operator = operators.Operator(
    'Convolution',
    'A.4',
    f'{window}',
    operators._dilated(**window),
    operators._image(lambda d: 16 * d - short, kernel),
    1,
    {},
    reference=operators._dilated_by_zeros(**window),
  )
  assert partitioned.measure(operator, devices).difference < 1e-6


def test_collectives_are_counted_by_hand():
  contracting = TABLE_4[1]
  measured = partitioned.measure(contracting, 2)
  assert contracting.split == 'B' and measured.collectives == {AR: 1}
  assert measured.bytes == 16 * 16 * 4  # [A, C] of float32


def test_a_difference_from_one_device_is_told():
  other = lambda x, y: x - y if tf.executing_eagerly() else x + y  # eagerly on one device, traced for several
  assert partitioned.measure(dataclasses.replace(TABLE_4[0], function=other), 2).difference > 0.1


def test_an_uneven_size_is_split_into_parts_of_which_the_last_is_short():
  placed = partitioned._Placed(next(o for o in OPERATORS if o.split == 'A, uneven'), 4)
  (argument,) = placed.arguments
  assert argument.shape == (61, 3)
  (array,) = placed.put([tf.ones(argument.shape).numpy()])
  assert array.shape == (64, 3) and float(array.sum()) == 61 * 3
  assert {part.data.shape for part in array.addressable_shards} == {(16, 3)}


@pytest.mark.parametrize(
  'values, told',
  [((0, 0), '0'), ((5, 5), 'O(1)'), ((5, 5.5), 'O(1)'), ((3, 6), 'O(sqrt D)'), ((3, 12), 'O(D)'), ((1, 8), 'O(D^1.5)')],
)
def test_growth_from_2_to_8_devices(values, told):
  assert partitioned.growth(values, (2, 8)) == told


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler, libtpu, is not installed')
def test_the_tpu_compiler_gathers_a_small_operand_and_passes_a_large_one_round():
  unmatched = next(operator for operator in TABLE_4 if operator.split == 'A, B')
  topology = Topology.parse('v3:2x2')
  assert partitioned.compile_only(unmatched, topology) == {AG: 1}
  assert set(partitioned.compile_only(operators.large(unmatched), topology)) == {CP}


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='the TPU compiler, libtpu, is not installed')
def test_the_tpu_compiler_makes_only_alltoalls_of_the_listing_once_combine_weights_are_split():
  printed, split_weights = (partitioned.compile_only(operator, Topology.parse('v3:2x2')) for operator in LISTING)
  assert printed.get(AG, 0) > 0 and split_weights == {AA: 2}


def test_a_row_has_the_paper_beside_what_was_found(monkeypatch):
  monkeypatch.setattr(operator_tables, '_on_tpu', lambda operator: 'AR')
  name, split, *cells, difference, note = operator_tables._scaling(TABLE_4[1])
  assert (name, split) == ('Matmul(AB,BC->AC)', 'B')
  assert cells == ['O(1)', 'O(1)', 'O(1) AR', 'O(1) 1 AR', 'AR']
  assert 0 <= float(difference) < 1e-6
