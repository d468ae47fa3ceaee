"""Messages: what they quote of values and of TensorFlow's errors."""

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


FIELDS = ('model_dim', 'learning_rate', 'beam_size', 'batch_tokens', 'source_vocab', 'num_heads', 'weight_decay', 'kv')


@pytest.mark.parametrize(
  ('name', 'found'),
  [
    ('lr', 'learning_rate'),
    ('bs', 'beam_size'),
    ('bt', 'batch_tokens'),
    ('WD', 'weight_decay'),
    ('batch_size', 'beam_size, batch_tokens'),
    ('vocab', 'source_vocab'),
    ('heads', 'num_heads'),
    ('lrngrate', 'learning_rate'),
    ('wdcy', 'weight_decay'),
    ('modeldim', 'model_dim'),
  ],
)
def test_names_that_are_close_by_initials_likeness_or_letters_are_suggested(name, found):
  assert errors.closest(name, FIELDS) == f'closest: {found}'


@pytest.mark.parametrize('name', ['x', 'epochs', '', '_', 'rl'])
def test_where_none_is_close_the_first_names_are_listed(name):
  assert errors.closest(name, FIELDS) == f'known: {", ".join(sorted(FIELDS))}'
  assert errors.closest(name, ()) == 'known: none'


@pytest.mark.parametrize(
  ('message', 'as_flags', 'as_fields'),
  [
    (
      'use n_best=4, or a larger beam_size=',
      'use --n_best=4, or a larger --beam_size',
      'use n_best=4, or a larger beam_size',
    ),
    ('which: target=, one of de', 'which: --target, one of de', 'which: target, one of de'),
    ("saw target='de': leave it out", "saw --target='de': leave it out", "saw target='de': leave it out"),
    ('lingvo-moe decode RUN --target=de, for model=x', *['lingvo-moe decode RUN --target=de, for model=x'] * 2),
    ('a folder a/target=1, x.target=2, 1 == 2', *['a folder a/target=1, x.target=2, 1 == 2'] * 2),
  ],
)
def test_arguments_of_python_are_flags_or_fields_to_others(message, as_flags, as_fields):
  assert errors.respelled(message, {'n_best', 'beam_size', 'target'}, '--') == as_flags
  assert errors.respelled(message, None) == as_fields
