"""Weight specs: shapes, names, counts and initial values."""

import math

import numpy as np
import pytest

from lingvo_moe.core import weights
from lingvo_moe.core.weights import WeightSpec


def test_flatten_joins_names_and_unflatten_splits_them():
  nested = {'decoder': {'layer_01': {'moe': {'wi': 1, 'wo': 2}}}, 'norm': 3}
  flat = {'decoder/layer_01/moe/wi': 1, 'decoder/layer_01/moe/wo': 2, 'norm': 3}
  assert weights.flatten(nested) == flat
  assert weights.unflatten(flat) == nested


def test_count_does_not_overflow_and_allocates_nothing():
  spec = WeightSpec((2048, 1024, 8192), 'EMH', weights.Constant(0.0))
  assert weights.count({'wi': spec, 'wo': spec}) == 2 * 2**34


def test_a_shape_needs_one_axis_letter_a_size():
  with pytest.raises(ValueError, match=r"weight of shape \(2, 3\) needs 2 axis letters, not 'M'"):
    WeightSpec((2, 3), 'M', weights.Constant(0.0))


def test_an_axis_letter_outside_the_alphabet_is_named():
  with pytest.raises(ValueError, match="axis letter 'y' of 'My' is not in the alphabet"):
    WeightSpec((2, 3), 'My', weights.Constant(0.0))


@pytest.mark.parametrize('factored', ['M', 'MV', 'EMH'])
def test_factored_axes_are_two_of_the_weights_own(factored):
  with pytest.raises(ValueError, match='must be two of the axes'):
    WeightSpec((2, 3, 4), 'EMH', weights.Constant(0.0), factored=factored)


def test_an_initial_value_depends_on_seed_and_name_and_nothing_else():
  spec = WeightSpec((3, 4), 'MH', weights.Normal(1.0))
  alone = weights.initialize({'b': spec}, 5)
  among = weights.initialize({'a': spec, 'b': spec, 'c': {'b': spec}}, 5)
  np.testing.assert_array_equal(alone['b'], among['b'])
  assert np.all(among['a'] != among['b']) and np.all(among['c/b'] != among['b'])
  assert np.all(weights.initialize({'b': spec}, 6)['b'] != alone['b'])


def test_initial_values_have_the_spread_they_promise():
  drawn = weights.initialize(
    {
      'normal': WeightSpec((100, 100), 'MH', weights.Normal(0.5)),
      'uniform': WeightSpec((100, 100), 'MH', weights.glorot_uniform(20, 30)),
      'constant': WeightSpec((3,), 'M', weights.Constant(1.5)),
    },
    seed=1,
  )
  assert abs(np.std(drawn['normal']) - 0.5) < 0.02
  limit = math.sqrt(6 / 50)
  assert np.all(np.abs(drawn['uniform']) <= limit) and np.max(drawn['uniform']) > 0.99 * limit
  assert abs(np.var(drawn['uniform']) - 2 / 50) < 0.002
  np.testing.assert_array_equal(drawn['constant'], [1.5] * 3)


def test_stacked_layers_are_named_one_by_one():
  assert weights.names_by_layer('encoder/layers_1of2/moe/wi', 3) == [
    f'encoder/layer_{n}/moe/wi' for n in ('01', '03', '05')
  ]
  assert weights.names_by_layer('encoder/layers_0of1/ffn/wi', 2) == [
    'encoder/layer_00/ffn/wi',
    'encoder/layer_01/ffn/wi',
  ]
  assert weights.names_by_layer('encoder/layer_01/moe/wi', 3) is None


def test_a_stack_of_layers_begins_with_the_values_of_each():
  spec = WeightSpec((3, 4), 'MH', weights.Uniform(1.0))
  stacked = weights.stack({'ffn': {'wi': spec}}, 3)
  assert stacked['ffn']['wi'].shape == (3, 3, 4) and stacked['ffn']['wi'].dims == 'LMH'
  together = weights.initialize({weights.stack_name(1, 2): stacked}, 5)['layers_1of2/ffn/wi']
  alone = weights.initialize({weights.layer_name(n): {'ffn': {'wi': spec}} for n in (1, 3, 5)}, 5)
  np.testing.assert_array_equal(together, np.stack(list(alone.values())))
