"""Parts of results that an interrupted job has left: what is taken up again, and what is begun anew."""

from __future__ import annotations

import pytest

from lingvo_moe.core import files
from lingvo_moe.run import kept_parts
from lingvo_moe.run.kept_parts import KeptParts

SETTINGS = {'beam_size': 4, 'checkpoint': 'abc'}


@pytest.fixture
def path(tmp_path):
  return str(tmp_path / 'scores.unfinished.jsonl')


def keep(path, parts, settings=SETTINGS, **more):
  with KeptParts(path, 7, settings, parts) as kept:
    kept.update(more)
  return kept


def test_parts_are_there_as_soon_as_they_are_set(path):
  with KeptParts(path, 7, SETTINGS, {}) as kept:
    assert not files.exists(path)  # of a job that keeps nothing
    for count, value in enumerate(([1, 'ü\u2028'], None, 0.1), start=1):
      kept[f'part {count}'] = value
      assert kept_parts.read(path, SETTINGS) == kept.data and len(kept) == count
  assert kept_parts.read(path, SETTINGS) == {'part 1': [1, 'ü\u2028'], 'part 2': None, 'part 3': 0.1}


def test_a_job_goes_on_after_a_line_that_is_cut_short(path):
  keep(path, {}, a=1, b=2)
  with open(path, 'r+b') as f:
    f.truncate(len(f.read()) - 5)
  parts = kept_parts.read(path, SETTINGS)
  assert parts == {'a': 1}
  assert keep(path, parts, c=3).data == kept_parts.read(path, SETTINGS) == {'a': 1, 'c': 3}


def test_other_settings_and_damage_begin_anew(path, capsys):
  assert kept_parts.read(path, SETTINGS) == {} and capsys.readouterr().err == ''
  keep(path, {}, a=1, b=2)
  assert kept_parts.read(path, {**SETTINGS, 'beam_size': 1}) == {}
  assert capsys.readouterr().err == f'{path} was left by a job with other settings, and is begun anew\n'
  text = files.read(path).decode()
  for damaged in (text.replace('"a"', '"b"'), text.replace('"name": "a", ', ''), 'x\n' + text, text.split('\n', 1)[1]):
    files.write(path, damaged)
    assert kept_parts.read(path, SETTINGS) == {}
    assert ' is begun anew' in capsys.readouterr().err
