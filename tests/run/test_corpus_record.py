"""Record of a run's corpus: a change is said, file by file, and accepted only when told to."""

import dataclasses
import json
import os
import shutil

import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.run import corpus_record
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.tasks.mt.mt_config import MtConfig
from lingvo_moe.tasks.task import task_of


@pytest.fixture
def world(tmp_path):
  folder = tmp_path / 'data' / 'de-en'
  folder.mkdir(parents=True)
  for split in ('train', 'dev'):
    (folder / f'{split}.de').write_text('eins\nzwei\ndrei\n')
    (folder / f'{split}.en').write_text('one\ntwo\nthree\n')
  return tmp_path, MtConfig(data_dir=str(tmp_path / 'data')), []


def check(world, begun=True, accept=False, config=None):
  root, own, said = world
  (root / 'config.json').unlink(missing_ok=True)
  if begun:
    (root / 'config.json').touch()
  corpus_record.check(RunDir(str(root)), config or own, str(root / 'cache'), accept, said.append)
  return said


def turn(path):
  lines = path.read_text().splitlines(keepends=True)
  stat = os.stat(path)
  path.write_text(''.join(reversed(lines)))
  os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_lines_in_another_order_are_said_with_file_and_split(world):
  check(world, begun=False)
  assert check(world) == []
  turn(world[0] / 'data' / 'de-en' / 'train.en')
  message = r'de-en/train.en \(train of de-en\) has other text: put it back, or go on with it .*--accept_changed_corpus'
  for _ in range(2):
    with pytest.raises(UserError, match=message):
      check(world)
  assert check(world, accept=True) == ['going on with another corpus: de-en/train.en (train of de-en) has other text']
  assert check(world) == world[2]  # from now on it is this one


def test_files_that_come_and_go_are_said(world):
  check(world, begun=False)
  root = world[0]
  shutil.copytree(root / 'data' / 'de-en', root / 'data' / 'fr-en')
  (root / 'data' / 'fr-en' / 'train.de').rename(root / 'data' / 'fr-en' / 'train.fr')
  (root / 'data' / 'fr-en' / 'dev.de').rename(root / 'data' / 'fr-en' / 'dev.fr')
  with pytest.raises(UserError, match=r'fr-en/dev.en \(dev of fr-en\) is new; fr-en/dev.fr .*; fr-en/train.fr'):
    check(world)
  shutil.rmtree(root / 'data' / 'fr-en')
  (root / 'data' / 'de-en' / 'dev.de').rename(root / 'data' / 'de-en' / 'dev.de.gz')
  with pytest.raises(
    UserError, match=r'de-en/dev.de \(dev of de-en\) is gone; de-en/dev.de.gz \(dev of de-en\) is new'
  ):
    check(world)


def test_a_corpus_may_move_and_its_files_be_touched(world):
  check(world, begun=False)
  root, config, _ = world
  (root / 'data').rename(root / 'moved')
  os.utime(root / 'moved' / 'de-en' / 'train.en')
  assert check(world, config=dataclasses.replace(config, data_dir=str(root / 'moved'))) == []


def test_a_run_without_a_record_gets_one_and_one_of_another_run_does_not_count(world):
  assert check(world) == []
  record = json.loads((world[0] / 'corpus.json').read_text())
  assert sorted(record['parts']) == ['dev of de-en', 'train of de-en']
  turn(world[0] / 'data' / 'de-en' / 'dev.de')
  assert check(world, begun=False) == []


def test_a_damaged_record_is_named(world):
  check(world, begun=False)
  path = world[0] / 'corpus.json'
  path.write_text(path.read_text().replace('de-en', 'de-em'))
  with pytest.raises(
    UserError, match='corpus.json is not a record of a corpus .*remove it, and the corpus is taken as'
  ):
    check(world)


def test_tasks_of_text_name_their_files_too(tmp_path):
  from lingvo_moe.tasks.denoising.denoising_config import DenoisingConfig
  from lingvo_moe.tasks.lm.lm_config import LanguageConfig

  for name in ('train-0.txt', 'train-1.txt', 'dev.txt'):
    (tmp_path / name).write_text(name)
  for cls in (LanguageConfig, DenoisingConfig):
    config = cls(data_dir=str(tmp_path))
    assert task_of(config).corpus_files() == {
      'train': [f'{tmp_path}/train-0.txt', f'{tmp_path}/train-1.txt'],
      'dev': [f'{tmp_path}/dev.txt'],
    }
