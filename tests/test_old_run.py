"""Runs of earlier versions: their checkpoints load, train to the same losses and translate to the same text.

The README.md of each folder of tests/data says how its run was made.
"""

import io
import json
import os
import pathlib
import shutil
import tarfile

import forks
import pytest
from text_lines import records

from lingvo_moe import translate
from lingvo_moe.storage import log_directory

DATA = pathlib.Path(__file__).resolve().parent / 'data'
GIVEN_VOCABS = 'run_of_3fe42dc'
# One run of the oldest version in CI: version 1.0 reads none of them any more.
RUNS = (
  'run_of_3fe42dc_own_vocabs',
  *(pytest.param(name, marks=pytest.mark.slow) for name in (GIVEN_VOCABS, 'run_of_6495e00')),
)


@pytest.fixture(params=RUNS)
def name(request):
  return request.param


@pytest.fixture
def expected(name):
  return json.loads((DATA / name / 'expected.json').read_text(encoding='utf-8'))


@pytest.fixture
def logdir(name, tmp_path):
  """A copy of the run to work on."""
  if name == GIVEN_VOCABS:
    shutil.copytree(DATA / name / 'log', tmp_path / 'log')
  else:
    with tarfile.open(DATA / name / 'log.tar.xz') as archive:
      archive.extractall(tmp_path, filter='data')
  return tmp_path / 'log'


@pytest.fixture
def corpus(tmp_path):
  """The text that all of them were trained on; a run of a direction takes xx-en."""
  for pair in ('xx-en', 'en-xx'):
    shutil.copytree(DATA / GIVEN_VOCABS / 'corpus' / 'xx-en', tmp_path / 'corpus' / pair)
  return tmp_path / 'corpus'


@pytest.mark.compiled
def test_an_old_run_goes_on_to_the_same_losses(name, logdir, corpus, expected):
  flags = [*expected['flags'], f'--logdir={logdir}', f'--data_dir={corpus}', '--max_steps=8']
  env = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'}
  done = forks.run(['-m', 'lingvo_moe.trainer', *flags], env=env)
  assert done.returncode == 0, done.stderr
  assert 'going on from step 4' in done.stderr
  lines = records(logdir / 'train.jsonl')
  losses = {str(line['step']): line['objective'] for line in lines if 'objective' in line}
  losses['dev'] = lines[-1]['dev_loss']
  named = [line for line in log_directory.LogDirectory.read(str(logdir)).train_log() if 'objective' in line]
  assert all(0 < line['loss'] != line['objective'] and 'xent' not in line for line in named) and len(named) >= 4
  # Rounding decides the second expert of a token in step 7 of run_of_3fe42dc; --backend=reference has the other one.
  recorded = [{**r['losses'], 'dev': r['dev_loss']} for r in (expected, expected.get('other_rounding')) if r]
  assert losses in [pytest.approx(r, rel=1e-5) for r in recorded]
  values = json.loads((logdir / 'config.json').read_text(encoding='utf-8'))['values']
  assert values['target_normalization'] == ('identity' if name == GIVEN_VOCABS else 'nmt_nfkc')  # of its vocabulary


def test_an_old_run_translates_to_the_same_text(logdir, expected):
  output = io.StringIO()
  options = translate.Options(str(logdir), n_best=2, target=expected['target'])
  translate.translate(options, io.BytesIO(expected['source'].encode() + b'\n'), output)
  found = [line.split('\t') for line in output.getvalue().splitlines()][: len(expected['translations'])]
  assert [text for _, _, _, text in found] == [text for _, text in expected['translations']]
  log_probs = [float(log_prob) for _, _, log_prob, _ in found]
  assert log_probs == pytest.approx([log_prob for log_prob, _ in expected['translations']], abs=1e-3)
