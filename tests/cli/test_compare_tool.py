"""lingvo-moe compare, as typed: two runs by their translations, sacreBLEU's own test, and answers to mistakes."""

import json
import os
import random
import re
import subprocess
import sys

import forks
import pytest
import sacrebleu
from sacrebleu.metrics import BLEU, CHRF
from text_lines import records, write

from lingvo_moe.addons.analysis import external_metric
from lingvo_moe.core.errors import UserError

MYANMAR = ['သူ', 'သည်', 'အိမ်', 'သို့', 'သွား', 'စာ', 'ဖတ်']
WORDS = ['der', 'hund', 'schläft', 'auf', 'einer', 'bank', 'unter', 'grünen', 'bäumen', '.']
PAIRS = ('deu-en', 'fra-en', 'mya-en')
LINES = {'deu-en': 40, 'fra-en': 40, 'mya-en': 30}


def sentences(seed, count=40, words=WORDS):
  rng = random.Random(seed)
  return [' '.join(rng.choices(words, k=rng.randint(3, 9))) + f' {i}' for i in range(count)]


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  """Three languages, whose English side is the same; one has fewer lines."""
  root = tmp_path_factory.mktemp('corpus')
  for number, pair in enumerate(PAIRS, 1):
    write(root / pair / 'test.en', sentences(0)[: LINES[pair]])
    words = MYANMAR if pair == 'mya-en' else WORDS
    write(root / pair / f'test.{pair[:3]}', sentences(number, words=words)[: LINES[pair]])
  return root


def make_run(path, corpus, part, step=100, pairs=PAIRS, reverse=False, seed=0, **values):
  """A run whose translations lack a part of the words."""
  rng, scores, folder = random.Random(seed), {}, path / 'decode' / 'test' / f'step_{step}'
  for pair in pairs:
    code = pair.partition('-')[0]
    references = (corpus / pair / f'test.{code if reverse else "en"}').read_text(encoding='utf-8').splitlines()
    name = f'en-{code}' if reverse else pair
    translations = [' '.join(w for w in line.split() if rng.random() >= part) for line in references]
    write(folder / f'{name}.hyp', translations)
    chrf = sacrebleu.corpus_chrf(translations, [references]).score
    scores[name] = {'sentences': len(translations), 'bleu': 0.0, 'chrf': chrf}
  settings = {'beam_size': 4, 'text': path.name, 'checkpoint': path.name}
  (folder / 'scores.json').write_text(json.dumps({'step': step, 'settings': settings, 'pairs': scores}))
  values = {'data_dir': str(corpus), 'pairs': '', 'split_files': [], 'num_experts': 0, **values}
  (path / 'config.json').write_text(json.dumps({'model': f'mt.x.{path.name.title()}', 'values': values}))
  return path


@pytest.fixture(scope='module')
def runs(corpus, tmp_path_factory):
  root = tmp_path_factory.mktemp('runs')
  return make_run(root / 'dense', corpus, 0.3), make_run(root / 'moe', corpus, 0.2, seed=1, num_experts=8)


def tool(*args):
  return forks.run(['-m', 'lingvo_moe.cli.commands.main', 'compare', *map(str, args)], timeout=120)


def lines_of(run, name, step=100):
  return (run / 'decode' / 'test' / f'step_{step}' / f'{name}.hyp').read_text(encoding='utf-8').split('\n')[:-1]


def test_every_pair_the_mean_and_the_configurations_are_shown(runs, tmp_path):
  done = tool(*runs, f'--json={tmp_path}/out.jsonl')
  assert done.returncode == 0 and not done.stderr, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].endswith('/dense step 100 (mt.x.Dense)') and lines[1].endswith('/moe step 100 (mt.x.Moe)')
  assert [line.split()[0] for line in lines[5:8]] == list(PAIRS) and lines[8].startswith('mean of 3 ')
  assert lines[9] == "mean: resampled jointly, by the text in 'en'"
  assert lines[10].startswith('BLEU: 3 of 3 pairs gain (') and lines[13] == 'BLEU splits words by 13a'
  assert lines[-3:] == [
    'what differs in the configurations',
    "  model: 'mt.x.Dense' | 'mt.x.Moe'",
    '  num_experts: 0 | 8',
  ]
  *pairs, mean = records(tmp_path / 'out.jsonl')
  assert [(r['pair'], r['lines'], r['direction'], r['tokenizer']) for r in pairs] == [
    (pair, LINES[pair], 'into_english', '13a') for pair in PAIRS
  ]
  assert (
    pairs[0]['system'] == {'run': 'moe', 'model': 'mt.x.Moe', 'step': 100} and mean['baseline'][0]['run'] == 'dense'
  )
  for metric in ('BLEU', 'chrF2', 'chrF++'):
    scores = [r['scores'][metric] for r in pairs]
    for side in ('baseline', 'system', 'difference'):
      assert mean['scores'][metric][side] == pytest.approx(sum(s[side] for s in scores) / 3)
    low, high = mean['scores'][metric]['interval']
    assert 0 < low < mean['scores'][metric]['difference'] < high and mean['scores'][metric]['better'] == 3
    shown = lines[5].split()
    assert f'{scores[0]["difference"]:+.2f}' in shown and f'{scores[0]["p"]:.4f}' in shown


def test_one_pair_is_sacrebleus_paired_bootstrap_to_the_printed_digit(runs, corpus, tmp_path):
  """Beside sacreBLEU's own command."""
  files = [run / 'decode' / 'test' / 'step_100' / 'deu-en.hyp' for run in runs]
  command = [sys.executable, '-m', 'sacrebleu', corpus / 'deu-en' / 'test.en', '-i', *files, '-m', 'bleu', 'chrf']
  options = ['--paired-bs', '--paired-bs-n', '200', '-w', '4', '-f', 'text']  # its JSON fails with chrF
  utf8 = {**os.environ, 'PYTHONIOENCODING': 'utf-8'}
  done = subprocess.run([*command, *options], capture_output=True, encoding='utf-8', env=utf8, timeout=120)
  scores = re.findall(r'([\d.]+) \([\d.]+ ± [\d.]+\)', done.stdout)  # BLEU, chrF2 of either system
  p_values = re.findall(r'\(p = ([\d.]+)\)', done.stdout)
  assert tool(*runs, '--samples=200', f'--json={tmp_path}/out').returncode == 0
  found = records(tmp_path / 'out')[0]['scores']
  printed = [[f'{found[metric][what]:.4f}' for metric in ('BLEU', 'chrF2')] for what in ('baseline', 'system', 'p')]
  assert printed == [scores[:2], scores[2:], p_values]


def test_a_run_beside_itself_has_no_difference_and_p_1(runs, tmp_path):
  done = tool(runs[0], runs[0], f'--json={tmp_path}/out')
  assert 'BLEU: 0 of 3 pairs gain (0 with an interval above 0), 0 lose (0 with one below)' in done.stdout
  assert done.stdout.endswith('no value differs\n')
  for record in records(tmp_path / 'out'):
    for scores in record['scores'].values():
      assert (scores['difference'], scores['interval'], scores['p']) == (0, [0, 0], 1)


def test_out_of_english_scripts_without_spaces_go_by_characters(corpus, tmp_path):
  run = make_run(tmp_path / 'run', corpus, 0.2, reverse=True)
  done = tool(run, run, '--metric=BLEU', f'--json={tmp_path}/out')
  assert 'BLEU splits words by 13a; char for en-mya\n' in done.stdout and 'chrF' not in done.stdout
  *pairs, mean = records(tmp_path / 'out')
  assert {r['direction'] for r in records(tmp_path / 'out')} == {'from_english'}
  references = (corpus / 'mya-en' / 'test.mya').read_text(encoding='utf-8').splitlines()
  expected = BLEU(tokenize='char').corpus_score(lines_of(run, 'en-mya'), [references]).score
  assert pairs[2]['scores']['BLEU']['system'] == pytest.approx(expected) and mean['scores'].keys() == {'BLEU'}


def test_a_script_that_is_not_that_of_the_code_and_tokenised_text_are_told(tmp_path):
  lines = {'de': [f'{i} Hunde schlafen .' for i in range(9)], 'th': ['khao pai ban'], 'zhs': ['我们今天去公园散步。']}
  for code, text in lines.items():
    write(tmp_path / 'corpus' / f'{code}-en' / 'test.en', ['x'] * len(text))
    write(tmp_path / 'corpus' / f'{code}-en' / f'test.{code}', text)
  pairs = [f'{code}-en' for code in lines]
  run = make_run(tmp_path / 'run', tmp_path / 'corpus', 0.2, pairs=pairs, reverse=True)
  done = tool(run, run, '--metric=BLEU')
  assert done.returncode == 0, done.stderr
  shown = done.stdout.splitlines()
  at = shown.index('BLEU splits words by 13a; zh for en-zhs')
  assert 'script' in shown[at + 1] and shown[at + 1].endswith('BLEU splits their words by 13a in en-th')
  assert 'tokenised text' in shown[at + 2] and shown[at + 2].endswith('; en-de')


def test_a_step_can_be_chosen_and_the_newest_is_the_default(corpus, tmp_path):
  run = make_run(tmp_path / 'run', corpus, 0.3, step=1000)
  make_run(run, corpus, 0.1, step=2000)
  done = tool(f'{run}@1000', run, f'--json={tmp_path}/out')
  assert 'run step 1000 (mt.x.Run)' in done.stdout and 'run step 2000 (mt.x.Run)' in done.stdout
  scores = records(tmp_path / 'out')[0]['scores']['chrF++']
  references = (corpus / 'deu-en' / 'test.en').read_text(encoding='utf-8').splitlines()
  for side, step in (('baseline', 1000), ('system', 2000)):
    expected = CHRF(word_order=2).corpus_score(lines_of(run, 'deu-en', step), [references]).score
    assert scores[side] == pytest.approx(expected)


def test_bilingual_runs_together_are_one_system(runs, corpus, tmp_path):
  one = make_run(tmp_path / 'deu', corpus, 0.4, pairs=('deu-en',), dropout=0.1)
  two = make_run(tmp_path / 'fra', corpus, 0.4, pairs=('fra-en',), dropout=0.3)
  done = tool(f'{one},{two}', runs[0], f'--json={tmp_path}/out')
  assert done.returncode == 0, done.stderr
  assert 'translated by one of them only, and left out: mya-en' in done.stdout
  assert "  model: 'mt.x.Deu' or 'mt.x.Fra' | 'mt.x.Dense'" in done.stdout
  assert '  dropout: 0.1 or 0.3 | (none)' in done.stdout
  first, second, mean = records(tmp_path / 'out')
  assert (first['baseline']['run'], second['baseline']['run']) == ('deu', 'fra') and mean['pairs'] == 2
  done = tool(f'{one},{one}', runs[0])
  assert done.returncode == 1 and 'runs of one system translate different pairs; deu-en is in several' in done.stderr


def test_only_the_first_lines_may_have_been_decoded(runs, corpus, tmp_path):
  run = make_run(tmp_path / 'run', corpus, 0.4)
  folder = run / 'decode' / 'test' / 'step_100'
  for pair in PAIRS:
    write(folder / f'{pair}.hyp', lines_of(run, pair)[:20])
  summary = json.loads((folder / 'scores.json').read_text())
  for pair, scores in summary['pairs'].items():
    references = (corpus / pair / 'test.en').read_text(encoding='utf-8').splitlines()[:20]
    scores.update(sentences=20, chrf=sacrebleu.corpus_chrf(lines_of(run, pair), [references]).score)
  (folder / 'scores.json').write_text(json.dumps(summary))
  assert tool(run, run).returncode == 0
  done = tool(run, runs[0])
  assert done.returncode == 1 and 'the same lines; deu-en has 20 and 40' in done.stderr


def other_corpus(corpus, tmp_path):
  for pair in PAIRS:
    write(tmp_path / 'other' / pair / 'test.en', sentences(9)[: LINES[pair]])
    write(tmp_path / 'other' / pair / f'test.{pair[:3]}', sentences(8)[: LINES[pair]])
  return [f'--data_dir={tmp_path}/other'], 'give the corpus that was decoded, --data_dir=...'


def no_corpus(corpus, tmp_path):
  return [f'--data_dir={tmp_path}/gone'], 'is not there: --data_dir=...'


def metric(corpus, tmp_path):
  return ['--metric=TER'], "--metric must be of BLEU, chrF2, chrF++; saw 'TER'"


def split(corpus, tmp_path):
  return ['--split=dev'], 'has no translations of dev: make them with lingvo-moe decode '


def third(corpus, tmp_path):
  return ['more'], 'two runs are compared: lingvo-moe compare BASELINE RUN; saw'


@pytest.mark.parametrize('mistake', [other_corpus, no_corpus, metric, split, third])
def test_a_mistake_gets_one_line_and_status_1(runs, corpus, tmp_path, mistake):
  flags, answer = mistake(corpus, tmp_path)
  done = tool(*runs, *flags)
  assert done.returncode == 1 and answer in done.stderr
  assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith('error: ')


@pytest.mark.parametrize(
  ('edit', 'answer'),
  [
    (lambda run: os.remove(run / 'config.json'), 'there is no run in'),
    (lambda run: (run / 'config.json').write_text('{'), 'config.json is not JSON'),
    (lambda run: (run / 'config.json').write_text('[]'), 'is not a configuration written by the trainer'),
    (lambda run: os.remove(run / 'decode/test/step_100/fra-en.hyp'), 'fra-en.hyp; decode the step again'),
    (lambda run: (run / 'decode/test/step_100/scores.json').write_text('{}'), 'is not what the decoder writes'),
    (lambda run: write(run / 'decode/test/step_100/fra-en.hyp', ['a']), 'has 1 line, of 40 that were decoded'),
  ],
)
def test_a_run_that_is_not_whole_is_told_in_one_line(runs, corpus, tmp_path, edit, answer):
  run = make_run(tmp_path / 'run', corpus, 0.2)
  edit(run)
  done = tool(runs[0], run)
  assert done.returncode == 1 and answer in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_log_directory_may_end_like_a_step(runs, corpus, tmp_path):
  run = make_run(tmp_path / 'run@2024', corpus, 0.2)
  done = tool(run, f'{run}@100')
  assert done.returncode == 0 and 'no value differs' in done.stdout, done.stderr


def test_a_step_that_was_not_decoded_is_told_with_those_that_were(runs):
  done = tool(f'{runs[0]}@7', runs[1])
  assert done.returncode == 1 and 'no translations of test by step 7; decoded there: 100' in done.stderr


SHARE_OF_WORDS = 'awk -F\'\\t\' \'{ print split($2, a, " ") / split($3, b, " ") }\''


def test_another_metric_is_that_of_a_command(runs, tmp_path):
  done = tool(*runs, f'--metric_command={SHARE_OF_WORDS}', '--metric=BLEU', f'--json={tmp_path}/out.jsonl')
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  shown = lines[lines.index(SHARE_OF_WORDS) + 1 :][:3]
  assert [line.split(':')[0] for line in shown] == list(PAIRS)
  dense, moe, gain = map(float, shown[0].split()[1:4])
  share = [
    sum(len(a.split()) / len(b.split()) for a, b in zip(lines_of(run, PAIRS[0]), sentences(0))) / LINES[PAIRS[0]]
    for run in runs
  ]
  assert [dense, moe] == pytest.approx(share, abs=1e-3) and gain == pytest.approx(moe - dense, abs=2e-4)
  scores = records(tmp_path / 'out.jsonl')[0]['scores']
  low, high = scores[SHARE_OF_WORDS]['interval']
  assert 0 < low < gain < high and scores.keys() == {'BLEU', SHARE_OF_WORDS}


@pytest.mark.parametrize(
  'command, message',
  [
    ('echo no license >&2; exit 3', 'ended with status 3: no license'),
    ('cat', 'must print a number a line; could not convert string to float'),
    ('echo 1', 'must print a finite number for each line; saw 1 for 2'),
  ],
)
def test_a_command_that_prints_no_scores_is_refused(command, message):
  with pytest.raises(UserError, match=message):
    external_metric.scores(command, ['a', 'b'], ['c', 'd'], ['e\tf', 'g'])
