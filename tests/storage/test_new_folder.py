"""A folder that appears whole or not at all, also where two commands write it."""

import errno
import os
import pathlib

import killed
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage import new_folder


def test_it_appears_at_the_end_and_what_a_killed_command_left_is_not_in_it(tmp_path):
  (tmp_path / '.partial_out' / 'old').mkdir(parents=True)
  (tmp_path / '.partial_out' / 'file').write_text('old')
  with new_folder.writing(str(tmp_path / 'out')) as partial:
    assert os.listdir(tmp_path) == ['.partial_out'] and not os.listdir(partial)
    with open(os.path.join(partial, 'new'), 'w') as f:
      f.write('new')
  assert os.listdir(tmp_path) == ['out'] and os.listdir(tmp_path / 'out') == ['new']


@pytest.mark.parametrize('replace', [False, True])
def test_all_of_it_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch, replace):
  out, synced = tmp_path / 'out', []
  at = lambda path: (os.stat(path).st_dev, os.stat(path).st_ino)
  monkeypatch.setattr(os, 'fsync', lambda fd: synced.append((at(fd), out.exists() and (out / 'a').exists())))
  if replace:
    out.mkdir()
  with new_folder.writing(str(out), replace=replace) as folder:
    os.makedirs(os.path.join(folder, 'b', 'c'))
    for name in ('a', 'b/c/d'):
      pathlib.Path(folder, name).write_text(name)
    os.symlink('nowhere', os.path.join(folder, 'link'))
  before = {place for place, is_there in synced if not is_there}
  assert before == {at(path) for path in (out, out / 'a', out / 'b', out / 'b' / 'c', out / 'b' / 'c' / 'd')}
  assert [place for place, is_there in synced if is_there] == [at(tmp_path)]


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
    with pytest.raises(UserError, match='another command is writing .*out: wait'), new_folder.writing(out):
      pass
  assert os.listdir(tmp_path) == ['out'] and os.listdir(tmp_path / 'out') == ['first']


@pytest.mark.parametrize('name', ['avg[1]', 'a\\b'])
def test_a_name_under_which_tensorflow_could_not_read_is_refused(tmp_path, name):
  with pytest.raises(UserError, match='choose another name'):
    new_folder.check(str(tmp_path / name), 'an average')


def write_folder(out, text):
  with new_folder.writing(str(out), replace=True) as partial:
    for name in ('a', 'b'):
      with open(os.path.join(partial, name), 'w') as f:
        f.write(text)


def texts(folder):
  return {path.read_text() for path in folder.iterdir()} if folder.exists() else None


@pytest.mark.parametrize('exchanges', [True, False])
@pytest.mark.parametrize('there', [True, False])
def test_a_kill_at_any_point_leaves_the_old_or_the_new_folder_and_the_next_command_nothing_else(
  tmp_path, monkeypatch, exchanges, there
):
  if not exchanges:

    def refuse(a, b):
      raise OSError(errno.EINVAL, 'not on this file system')

    monkeypatch.setattr(new_folder, '_rename_exchange', refuse)
  out, seen = tmp_path / 'out', []

  def look(number):
    found = texts(out)
    seen.append(found)
    if found is None and there:  # between two renames, without an exchange
      assert not exchanges and texts(tmp_path / '.replaced_out') == {'old'}
    write_folder(out, 'old')
    assert os.listdir(tmp_path) == ['out'] and texts(out) == {'old'}
    if not there:
      (out / 'a').unlink()
      (out / 'b').unlink()
      out.rmdir()

  if there:
    write_folder(out, 'old')
  assert killed.at_every_point(lambda: write_folder(out, 'new'), look) >= 4
  assert texts(out) == {'new'} and os.listdir(tmp_path) == ['out']
  assert all(found in ({'old'}, {'new'}, None) for found in seen)
  assert (None in seen) == (not there or not exchanges)
  assert ({'new'} in seen) == there  # killed while the old folder was being removed


def test_what_was_moved_aside_by_a_killed_command_comes_back(tmp_path):
  (tmp_path / '.replaced_out').mkdir()
  with pytest.raises(ValueError), new_folder.writing(str(tmp_path / 'out'), replace=True):
    raise ValueError
  assert os.listdir(tmp_path) == ['out']


def test_a_link_in_place_of_the_hidden_folder_is_not_followed(tmp_path):
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'file').write_text('mine')
  os.symlink(tmp_path / 'mine', tmp_path / '.partial_out')
  with pytest.raises(UserError, match='out could not be written'), new_folder.writing(str(tmp_path / 'out')):
    pass
  assert (tmp_path / 'mine' / 'file').read_text() == 'mine'
