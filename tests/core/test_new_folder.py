"""A folder that appears whole or not at all, also where two commands write it."""

from __future__ import annotations

import os

import pytest

from lingvo_moe.core import new_folder
from lingvo_moe.core.errors import UserError


def test_it_appears_at_the_end_and_what_a_killed_command_left_is_not_in_it(tmp_path):
  (tmp_path / '.partial_out' / 'old').mkdir(parents=True)
  (tmp_path / '.partial_out' / 'file').write_text('old')
  with new_folder.writing(str(tmp_path / 'out')) as partial:
    assert os.listdir(tmp_path) == ['.partial_out'] and not os.listdir(partial)
    with open(os.path.join(partial, 'new'), 'w') as f:
      f.write('new')
  assert os.listdir(tmp_path) == ['out'] and os.listdir(tmp_path / 'out') == ['new']


def test_an_error_leaves_nothing(tmp_path):
  with pytest.raises(ValueError, match='mine'), new_folder.writing(str(tmp_path / 'out')) as partial:
    os.mkdir(os.path.join(partial, 'part'))
    raise ValueError('mine')
  assert not os.listdir(tmp_path)


def test_of_two_that_write_one_folder_the_second_is_refused(tmp_path):
  out = str(tmp_path / 'out')
  with new_folder.writing(out) as partial:
    with open(os.path.join(partial, 'first'), 'w') as f:
      f.write('first')
    with pytest.raises(UserError, match='another command is writing --out='), new_folder.writing(out):
      pass
  assert os.listdir(tmp_path) == ['out'] and os.listdir(tmp_path / 'out') == ['first']


@pytest.mark.parametrize('name', ['avg[1]', 'a\\b'])
def test_a_name_under_which_tensorflow_could_not_read_is_refused(tmp_path, name):
  with pytest.raises(UserError, match='choose another name'):
    new_folder.check(str(tmp_path / name), 'an average')
