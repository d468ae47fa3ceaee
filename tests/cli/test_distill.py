"""Command lingvo-moe distill: what it writes is what lingvo-moe translate prints for the same lines."""

import io
import os
import random
import shutil

import forks
import pytest
import reversed_corpus
import untrained_run
from text_lines import write

import lingvo_moe
from lingvo_moe import translate

TRAIN = 'corpus/de-en/train.de'


def distill(cwd, *words):
  return forks.run(['-m', 'lingvo_moe.cli.commands.distill', *words], cwd=cwd)


def lines_of(path):
  return path.read_text(encoding='utf-8').split('\n')[:-1]


def printed(teacher, lines, **options):
  """What lingvo-moe translate prints for lines."""
  output = io.StringIO()
  source = io.BytesIO(''.join(line + '\n' for line in lines).encode())
  translate.translate(translate.Options(str(teacher), batch_lines=1000, **options), source, output)
  return output.getvalue().splitlines()


@pytest.fixture(scope='module')
def teachers(toy_run, toy_export, tmp_path_factory):
  """A folder with the run's corpus, and a line that is too long; the run; and an export of it."""
  folder = tmp_path_factory.mktemp('teachers')
  shutil.copytree(toy_run.load()[1].data_dir, folder / 'corpus')
  write(folder / TRAIN, [*lines_of(folder / TRAIN)[:40], 'Ein Hund {{name}} läuft.', '', 'Hund ' * 60])
  write(folder / 'corpus/de-en/train.en', ['A reference.'] * 43)
  os.symlink(toy_run.path, folder / 'run')
  os.symlink(toy_export('int8'), folder / 'int8')
  return folder


@pytest.mark.parametrize('teacher', ['run', 'int8'])
def test_the_target_side_is_what_translate_prints(teachers, tmp_path, teacher):
  words = [str(teachers / teacher), 'out', f'--data_dir={teachers}/corpus', '--split_sentences=never']
  done = distill(tmp_path, *words)
  assert done.returncode == 0, done.stderr
  sources = lines_of(teachers / TRAIN)
  assert lines_of(tmp_path / 'out/de-en/train.de') == sources[:-2]
  assert lines_of(tmp_path / 'out/de-en/train.en') == printed(teachers / teacher, sources[:-2], split_sentences='never')
  assert 'out: 43 lines, 41 pairs; left out: 1 over max_length=32 tokens, 1 without a translation; next:' in done.stdout
  assert '\n  lingvo-moe train --model=mt.cldr.Tiny --data_dir=out --logdir=runs/student --set decod' in done.stdout
  again = distill(tmp_path, *words)
  assert again.returncode == 0 and again.stderr == 'out is finished already\n' and again.stdout == done.stdout
  other = distill(tmp_path, *words, '--length_norm_alpha=0.1')
  assert other.returncode == 1
  assert other.stderr.startswith('error: out was made with --length_norm_alpha=None, now 0.1: give')


def test_n_best_lines_are_the_distinct_translations_of_each_in_order_of_their_scores(teachers, tmp_path):
  done = distill(tmp_path, 'out', f'--logdir={teachers}/int8', f'--data_dir={teachers}/corpus', '--n_best=3')
  assert done.returncode == 0, done.stderr
  sources = lines_of(teachers / TRAIN)[:41]
  rows = [line.split('\t') for line in printed(teachers / 'int8', sources, n_best=3)]
  scores = [(int(number), -float(score)) for number, score, _, _ in rows]
  assert len(rows) == 3 * 41 and scores == sorted(scores)
  expected = dict.fromkeys((sources[int(number) - 1], number, text) for number, _, _, text in rows if text.strip())
  both = zip(*(lines_of(tmp_path / f'out/de-en/train.{side}') for side in ('de', 'en')), strict=True)
  of_first = [(source, text) for source, text in both if not source.startswith('Hund ')]
  assert of_first == [(source, text) for source, _, text in expected]


def test_each_pair_is_translated_into_its_own_language(tmp_path):
  for pair in ('en-xx', 'en-yy'):
    reversed_corpus.write_lines(tmp_path / 'corpus' / pair, 'train', reversed_corpus.draw(random.Random(0), 100))
  sizes = {'source_vocab_size': 286, 'length_norm_alpha': 2.0}
  run = untrained_run.begin(tmp_path, tmp_path / 'corpus', {1: 2.0}, pairs='', **sizes)
  done = distill(tmp_path, 'log', 'out')
  assert done.returncode == 0, done.stderr
  sources = lines_of(tmp_path / 'corpus/en-xx/train.en')
  model = lingvo_moe.load(run.path)
  texts = {target: model.translate(sources, target) for target in ('xx', 'yy')}
  assert texts['xx'] != texts['yy']
  for target, of_target in texts.items():
    written = lines_of(tmp_path / f'out/en-{target}/train.{target}')
    assert written == [text for text in of_target if text.strip()] and len(written) > 50


@pytest.mark.parametrize(
  ('words', 'message'),
  [
    (['int8'], 'an export has no corpus'),
    (['int8', '--data_dir=none'], "data_dir must be an existing folder; saw 'none'"),
    (['int8', '--data_dir=corpus', '--pairs=fr-en'], "no pair of corpus matches 'fr-en'"),
    (['int8', '--data_dir=corpus', '--pairs=en-de'], 'de is not a target language of this model; it has en'),
    (['int8', '--data_dir=other', '--pairs='], 'fr is not a source language of this model; it has de'),
    (['int8', '--data_dir=corpus', '--split=bt'], 'no file bt.de[.gz] and bt.en[.gz]'),
    (['int8', '--data_dir=corpus', '--n_best=9'], 'a beam of 4 has no 9 hypotheses'),
    (['int8', '--data_dir=corpus', '--step=7'], 'an export has the values that it was made with'),
    (['run', '--num_processes=2', '--coordinator=a:1', '--runtime=spmd', '--mesh=data:2'], 'type the command in each'),
    (['nowhere'], 'nowhere: there is no such directory'),
    (['nowhere', '--out=corpus'], '--out=corpus exists: a corpus goes to a new directory'),
    (['nowhere', '--out=a_file'], '--out=a_file exists: a corpus goes to a new directory'),
    (['nowhere', '--out=gs://a/b'], '--out is a path of a file system that is mounted on this machine'),
    (['int8', '--out=', ''], 'a run and a new folder are given'),
    ([], 'a run and a new folder are given: lingvo-moe distill runs/mine distilled'),
  ],
)
def test_a_teacher_that_cannot_read_the_corpus_is_refused_in_one_line(teachers, words, message):
  write(teachers / 'other/fr-en/train.fr', ['Un chien.'])
  write(teachers / 'other/fr-en/train.en', ['A dog.'])
  (teachers / 'a_file').touch()
  before = sorted(os.listdir(teachers))
  refused = distill(teachers, '--out=out', *words)
  assert refused.returncode == 1 and message in refused.stderr, refused.stderr
  assert refused.stderr.count('\n') == 1 and sorted(os.listdir(teachers)) == before
