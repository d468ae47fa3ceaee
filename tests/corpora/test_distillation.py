"""A corpus whose target side is translated: shards that processes share, and what is left after an interruption."""

import errno
import functools
import gzip
import itertools
import json
import multiprocessing
import os
import pathlib
import shutil
from collections.abc import Callable

import killed
import pytest
from text_lines import write

from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora import distillation, parallel
from lingvo_moe.storage import claims, files, new_folder
from lingvo_moe.text.translator import Answers, Hypothesis

LINES = [f'Satz {i}' for i in range(25)]
SETTINGS = {'weights': 'abc', 'beam_size': 4, 'n_best': 1}


@pytest.fixture(autouse=True)
def _shards_of_ten_lines(monkeypatch):
  monkeypatch.setattr(distillation, '_SHARD_LINES', 10)
  monkeypatch.setattr(claims, 'WAIT_SECONDS', 0.01)


@pytest.fixture
def corpus(tmp_path):
  write(tmp_path / 'corpus' / 'de-en' / 'train.de', LINES)
  write(tmp_path / 'corpus' / 'de-en' / 'train.en', ['a reference'] * 25)
  write(tmp_path / 'corpus' / 'de-en' / 'dev.de', ['Hund'])
  write(tmp_path / 'corpus' / 'de-en' / 'dev.en', ['dog'])
  return tmp_path / 'corpus'


class Teacher:
  """Says a line in capitals; notes the lines that it is asked, in memory and in a file that processes share."""

  def __init__(self, log: pathlib.Path | None = None, meet: Callable[[], object] = lambda: None) -> None:
    self.asked, self._log, self._meet = [], log, meet

  def __call__(self, pair, lines, progress):
    self._meet()
    for line in lines:
      self.asked.append(line)
      if self._log:
        with open(self._log, 'a') as f:
          f.write(f'{os.getpid()} {line}\n')
      progress(1)
    return Answers([[Hypothesis(line.upper(), 0.0, 0.0)] for line in lines], [])


def distill(corpus, translate, out='out', **settings):
  pairs = parallel.find_pairs(str(corpus))
  return distillation.distill(str(corpus.parent / out), pairs, {**SETTINGS, **settings}, translate)


def contents(folder):
  """Bytes of all files by path."""
  return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob('*')) if p.is_file()}


def lines_of(path):
  return path.read_text(encoding='utf-8').split('\n')[:-1]


def test_the_target_side_of_train_is_translated_and_all_else_is_as_it_was(corpus):
  (corpus / 'de-en' / 'test.de.gz').write_bytes(packed := gzip.compress(b'Katze\n'))
  write(corpus / 'de-en' / 'train.fr', ['of another language'])
  before = contents(corpus)
  record = distill(corpus, Teacher())
  out = contents(corpus.parent / 'out')
  assert out.pop('distillation.json')
  assert out.pop('de-en/train.en').decode() == ''.join(line.upper() + '\n' for line in LINES)
  kept = ('de-en/train.de', 'de-en/dev.de', 'de-en/dev.en', 'de-en/test.de.gz')
  assert out == {name: before[name] for name in kept} and out['de-en/test.de.gz'] == packed
  assert {name: record[name] for name in ('lines', 'pairs', 'too_long', 'untranslated')} == {
    'lines': 25,
    'pairs': 25,
    'too_long': 0,
    'untranslated': 0,
  }
  assert record['settings'].items() > SETTINGS.items()
  assert contents(corpus) == before and sorted(os.listdir(corpus.parent)) == ['corpus', 'out']


def test_plain_files_of_several_pairs_become_a_folder_for_each(tmp_path):
  for language in ('de', 'fr', 'en'):
    write(tmp_path / 'corpus' / f'train.{language}', [f'{language} 1', f'{language} 2'])
    write(tmp_path / 'corpus' / f'val.{language}', [f'{language} 3'])
  pairs = parallel.find_pairs(str(tmp_path / 'corpus'), 'de-en,en-fr')
  distillation.distill(str(tmp_path / 'out'), pairs, SETTINGS, Teacher())
  found = {name: data.decode() for name, data in contents(tmp_path / 'out').items() if 'json' not in name}
  assert found == {
    'de-en/train.de': 'de 1\nde 2\n',
    'de-en/train.en': 'DE 1\nDE 2\n',
    'de-en/val.de': 'de 3\n',
    'de-en/val.en': 'en 3\n',
    'en-fr/train.en': 'en 1\nen 2\n',
    'en-fr/train.fr': 'EN 1\nEN 2\n',
    'en-fr/val.en': 'en 3\n',
    'en-fr/val.fr': 'fr 3\n',
  }


def test_shards_of_a_corpus_are_joined_in_their_order(tmp_path):
  for number, lines in enumerate((LINES[:13], LINES[13:])):
    write(tmp_path / 'corpus' / 'de-en' / f'train-{number}.de', lines)
    write(tmp_path / 'corpus' / 'de-en' / f'train-{number}.en', lines)
  distill(tmp_path / 'corpus', Teacher())
  assert sorted(os.listdir(tmp_path / 'out' / 'de-en')) == ['train.de', 'train.en']
  assert lines_of(tmp_path / 'out' / 'de-en' / 'train.de') == LINES
  assert lines_of(tmp_path / 'out' / 'de-en' / 'train.en') == [line.upper() for line in LINES]


def test_a_line_comes_with_each_of_its_distinct_translations_and_not_without_any(corpus):
  texts = {'Satz 0': ['b', 'a', 'b'], 'Satz 1': ['', ' '], 'Satz 2': ['c', '', 'd'], 'Satz 3': ['cut']}

  def translate(pair, lines, progress):
    best = [[Hypothesis(t, -i, -i) for i, t in enumerate(texts.get(line, ['x']))] for line in lines]
    return Answers(best, [i for i, line in enumerate(lines) if line == 'Satz 3'])

  record = distill(corpus, translate, n_best=3)
  folder = corpus.parent / 'out' / 'de-en'
  both = list(zip(lines_of(folder / 'train.de'), lines_of(folder / 'train.en'), strict=True))
  assert both[:5] == [('Satz 0', 'b'), ('Satz 0', 'a'), ('Satz 2', 'c'), ('Satz 2', 'd'), ('Satz 4', 'x')]
  assert (record['lines'], record['pairs'], record['too_long'], record['untranslated']) == (25, 25, 1, 1)


def test_a_teacher_that_translates_no_line_makes_no_corpus(corpus):
  silent = lambda pair, lines, progress: Answers([[Hypothesis('', 0.0, 0.0)] for _ in lines], [0])
  with pytest.raises(UserError, match='all were left out, 3 of 25 too long, 22 without a translation'):
    distill(corpus, silent)
  assert not (corpus.parent / 'out').exists()


def test_a_finished_corpus_is_not_made_again(corpus, capsys):
  record = distill(corpus, Teacher())
  before = contents(corpus.parent / 'out')
  assert distill(corpus, None) == record and 'out is finished already' in capsys.readouterr().err
  assert contents(corpus.parent / 'out') == before


def interrupt(corpus, after):
  """Distils until so many lines are translated, of 25."""
  teacher = Teacher()

  def translate(pair, lines, progress):
    if len(teacher.asked) == after:
      raise KeyboardInterrupt
    return teacher(pair, lines, progress)

  with pytest.raises(KeyboardInterrupt):
    distill(corpus, translate)


def test_an_interrupted_call_goes_on_with_the_lines_that_are_left(corpus, capsys):
  distill(corpus, Teacher(), out='unbroken')
  interrupt(corpus, after=20)
  assert sorted(os.listdir(corpus.parent)) == ['.unfinished_out', 'corpus', 'unbroken']
  rest = Teacher()
  capsys.readouterr()
  distill(corpus, rest)
  assert rest.asked == LINES[20:] and 'line 21 of 25' in capsys.readouterr().err
  assert contents(corpus.parent / 'out') == contents(corpus.parent / 'unbroken')
  assert sorted(os.listdir(corpus.parent)) == ['corpus', 'out', 'unbroken']


def test_a_damaged_shard_is_made_again(corpus):
  interrupt(corpus, after=20)
  shard = corpus.parent / '.unfinished_out' / 'de-en.00001.json'
  shard.write_text(shard.read_text().replace('SATZ 12', 'SATZ 13'))
  rest = Teacher()
  distill(corpus, rest)
  assert rest.asked == LINES[10:]
  assert lines_of(corpus.parent / 'out' / 'de-en' / 'train.en') == [line.upper() for line in LINES]


@pytest.mark.parametrize('finished', [True, False])
def test_other_settings_or_lines_than_before_are_refused(corpus, finished):
  distill(corpus, Teacher()) if finished else interrupt(corpus, after=10)
  before = contents(corpus.parent)
  where = 'out' if finished else '.unfinished_out'
  with pytest.raises(UserError, match=rf'/{where} was made with beam_size=4, now 2: give the options as'):
    distill(corpus, Teacher(), beam_size=2)
  assert contents(corpus.parent) == before
  assert len(LINES[0]) == len('Wort 0')
  for first in ('Ein Satz', 'Wort 0'):  # one as long as before
    write(corpus / 'de-en' / 'train.de', [first, *LINES[1:]])
    with pytest.raises(UserError, match='made with de-en/train.de='):
      distill(corpus, Teacher())


@pytest.mark.parametrize('finished', [True, False])
def test_the_teacher_may_have_moved_since(corpus, finished):
  distill(corpus, Teacher(), teacher='runs/a') if finished else interrupt(corpus, after=10)
  rest = Teacher()
  distill(corpus, rest, teacher='elsewhere/b')
  assert rest.asked == ([] if finished else LINES[10:])


def test_a_claim_is_renewed_as_lines_are_translated(corpus, monkeypatch):
  renewed, teacher = [], Teacher()
  monkeypatch.setattr(claims.Claims, 'renew', lambda claims: renewed.append(len(teacher.asked)))
  distill(corpus, teacher)
  assert {*range(1, 26)} <= {*renewed}


def test_a_folder_that_is_there_is_refused_and_stays_as_it_is(corpus):
  write(corpus.parent / 'out' / 'mine', ['text'])
  before = contents(corpus.parent)
  with pytest.raises(UserError, match='out exists: a corpus goes to a new directory'):
    distill(corpus, Teacher())
  assert contents(corpus.parent) == before and sorted(os.listdir(corpus.parent)) == ['corpus', 'out']


def test_a_folder_of_what_is_unfinished_is_no_corpus(corpus):
  interrupt(corpus, after=10)
  before = contents(corpus.parent)
  with pytest.raises(UserError, match=r"distillation.json is not what was written there \('lines' must be an integer"):
    distill(corpus, Teacher(), out='.unfinished_out')
  assert contents(corpus.parent) == before


@pytest.mark.parametrize(
  ('data', 'message'),
  [(b'Satz\n' * 24, 'both need as many lines; saw 24 in'), (b'Satz\n' * 24 + b'\xff\n', 'text must be UTF-8; line 25')],
)
def test_a_corpus_that_cannot_be_read_is_refused_before_anything_is_made(corpus, data, message):
  (corpus / 'de-en' / 'train.de').write_bytes(data)
  with pytest.raises(UserError, match=message):
    distill(corpus, Teacher())
  assert os.listdir(corpus.parent) == ['corpus']


@pytest.mark.parametrize('place', ['shard', 'corpus'])
def test_after_a_full_disk_the_same_call_goes_on(corpus, monkeypatch, place):
  full = OSError(errno.ENOSPC, 'No space left on device')
  if place == 'shard':
    real = os.fsync
    counts = itertools.count()
    monkeypatch.setattr(files.os, 'fsync', lambda fd: real(fd) if next(counts) < 2 else (_ for _ in ()).throw(full))
    message = r'de-en.00001.json cannot be written \(No space left on device\): make room, and the same command goes on'
  else:
    monkeypatch.setattr(new_folder, '_sync', lambda folder: (_ for _ in ()).throw(full))
    message = r'out could not be written \(No space left on device\)'
  with pytest.raises(UserError, match=message):
    distill(corpus, Teacher())
  monkeypatch.undo()
  monkeypatch.setattr(distillation, '_SHARD_LINES', 10)
  rest = Teacher()
  distill(corpus, rest)
  assert rest.asked == (LINES[10:] if place == 'shard' else [])
  assert lines_of(corpus.parent / 'out' / 'de-en' / 'train.en') == [line.upper() for line in LINES]


def test_after_a_kill_at_any_moment_the_same_call_goes_on_to_the_same_bytes(corpus, monkeypatch):
  monkeypatch.setattr(distillation, '_SHARD_LINES', 13)
  distill(corpus, Teacher(), out='unbroken')
  expected, out = contents(corpus.parent / 'unbroken'), corpus.parent / 'out'
  unfinished = corpus.parent / '.unfinished_out'

  def then(number):
    made = sum(len(json.loads(path.read_text())['texts']) for path in unfinished.glob('de-en.*.json'))
    rest = Teacher()
    finished = out.exists()
    distill(corpus, rest)
    assert len(rest.asked) == (0 if finished else 25 - made), number
    assert contents(out) == expected, number
    assert sorted(os.listdir(corpus.parent)) == ['corpus', 'out', 'unbroken'], number
    shutil.rmtree(out)

  assert killed.at_every_point(lambda: distill(corpus, Teacher()), then) > 20


def test_processes_share_the_shards_and_translate_no_line_twice(corpus):
  log = corpus.parent / 'log'
  fork = multiprocessing.get_context('fork')
  meet = functools.partial(fork.Barrier(3).wait, 60)  # each holds one of the three shards then
  processes = [fork.Process(target=distill, args=(corpus, Teacher(log, meet))) for _ in range(3)]
  for process in processes:
    process.start()
  for process in processes:
    process.join()
  assert [process.exitcode for process in processes] == [0, 0, 0]
  by_process = [line.split(' ', 1) for line in lines_of(log)]
  assert sorted(line for _, line in by_process) == sorted(LINES)
  assert len({pid for pid, _ in by_process}) == 3
  assert lines_of(corpus.parent / 'out' / 'de-en' / 'train.en') == [line.upper() for line in LINES]
  assert sorted(os.listdir(corpus.parent)) == ['corpus', 'log', 'out']
