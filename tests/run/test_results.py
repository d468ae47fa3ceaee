"""Texts that an interrupted job has left: what is taken up again, and what is begun anew."""

import os

import pytest

from lingvo_moe.run import results
from lingvo_moe.run.results import UnfinishedTexts
from lingvo_moe.storage import files

SETTINGS = {'beam_size': 4, 'checkpoint': 'abc'}


@pytest.fixture
def path(tmp_path, monkeypatch):
  monkeypatch.setattr(results, '_UNFINISHED_SECONDS', 0.0)
  return str(tmp_path / 'scores.unfinished.jsonl')


def kept(path, settings=SETTINGS):
  return UnfinishedTexts(path, 7, settings)


def test_texts_are_in_the_file_for_the_next_job(path):
  texts = kept(path)
  assert not texts and not files.exists(path)  # of a job that keeps nothing
  for count, text in enumerate(('ü\u2028', '', '"\\'), start=1):
    texts[f'line {count}'] = text
    assert dict(kept(path)) == dict(texts) and len(texts) == count
  kept(path)['line 4'] = 'four'
  assert dict(kept(path)) == {'line 1': 'ü\u2028', 'line 2': '', 'line 3': '"\\', 'line 4': 'four'}


def test_they_are_written_now_and_then(path, monkeypatch):
  monkeypatch.setattr(results, '_UNFINISHED_SECONDS', 10.0)
  now = [0.0]
  monkeypatch.setattr(results.time, 'monotonic', lambda: now[0])
  texts = kept(path)
  for seconds, there in (
    (9.0, []),
    (10.0, ['9.0', '10.0']),
    (19.0, ['9.0', '10.0']),
    (21.0, list(map(str, (9.0, 10.0, 19.0, 21.0)))),
  ):
    now[0] = seconds
    texts[str(seconds)] = 'text'
    assert list(kept(path)) == there


@pytest.mark.parametrize(
  'damage', ['byte', 'cut', 'no name', 'no text', 'text of two lines', 'no first line', 'no JSON', 'folder']
)
def test_what_is_of_no_use_is_begun_anew(path, capsys, damage):
  kept(path).update(a='1', b='2')
  first, *lines = files.read(path).decode().splitlines(keepends=True)
  text = {
    'byte': first + lines[0].replace('"a"', '"b"') + lines[1],
    'cut': first[:-9] + lines[1],
    'no name': first + '{"step": 7, "text": "1"}\n' + lines[1],
    'no text': first + '{"step": 7, "name": "a", "text": 1}\n' + lines[1],
    'text of two lines': first + '{"step": 7, "name": "a", "text": "1\\n2"}\n' + lines[1],
    'no first line': ''.join(lines),
    'no JSON': 'x\n',
  }
  if damage == 'folder':
    os.remove(path)
    os.mkdir(path)
  else:
    files.write(path, text[damage])
  assert not kept(path)
  told = capsys.readouterr().err
  assert told.startswith(f'{path} is begun anew, as it is of no use: ') and told.count('\n') == 1


def test_other_settings_begin_anew(path, capsys):
  kept(path)['a'] = '1'
  assert not kept(path, {**SETTINGS, 'beam_size': 1})
  assert capsys.readouterr().err == f'{path} is begun anew, as it is of no use: its settings are others\n'


def test_a_job_goes_on_where_nothing_can_be_written(path, capsys, monkeypatch):
  def fails(*_):
    raise OSError(28, 'No space left on device', path)

  texts = kept(path)
  monkeypatch.setattr(results.files, 'write', fails)
  texts.update(a='1', b='2')
  assert dict(texts) == {'a': '1', 'b': '2'} and not files.exists(path)
  told = capsys.readouterr().err
  assert told.count('\n') == 1 and 'No space left on device' in told and 'if interrupted, the job begins anew' in told
