"""Messages: what they quote of values and of TensorFlow's errors."""

from __future__ import annotations

import pytest

from lingvo_moe.core import errors


def test_a_value_is_shown_cut_where_it_is_long():
  assert errors.shown('de-en') == "'de-en'"
  assert errors.shown('x' * 100, most=4) == "'xxx..."
  assert errors.shown(16**5000) == '<int too long to show>'


@pytest.mark.parametrize(
  'message, first',
  [
    (
      '{{function_node __wrapped__SaveV2_dtypes_1_device_/job:localhost}} a/state.tempstate1; No space left on device '
      '[Op:SaveV2]',
      'a/state.tempstate1; No space left on device',
    ),
    ('{{node x}} {{node y}} two\nlines', 'two'),
    ('{{node x}}\nthe second', 'the second'),
    ('', 'OSError'),
  ],
)
def test_a_reason_has_no_names_of_a_graph(message, first):
  assert errors.reason(OSError(message)) == first


def test_a_name_of_any_length_is_compared_quickly():
  assert errors.closest('a' * 10**6, ['ab']).startswith('known')
