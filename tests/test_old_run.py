"""A run of an earlier version: its checkpoint loads unchanged, trains to the same losses and translates to the same text.

tests/data/run_of_3fe42dc/README.md says how it was made.
"""

from __future__ import annotations

import io
import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from lingvo_moe import translate

DATA = pathlib.Path(__file__).resolve().parent / 'data' / 'run_of_3fe42dc'
EXPECTED = json.loads((DATA / 'expected.json').read_text(encoding='utf-8'))


@pytest.fixture
def logdir(tmp_path):
  """A copy of the run to work on."""
  shutil.copytree(DATA / 'log', tmp_path / 'log')
  return tmp_path / 'log'


def test_an_old_run_goes_on_to_the_same_losses(logdir):
  values = json.loads((logdir / 'config.json').read_text(encoding='utf-8'))['values']
  changed = {'data_dir', 'source_vocab', 'target_vocab', 'max_steps'}  # given by flags, or the run's own
  bindings = [
    f'--gin_bindings=Tiny.{n} = {tuple(v) if isinstance(v, list) else v!r}'
    for n, v in values.items()
    if n not in changed
  ]
  command = [sys.executable, '-m', 'lingvo_moe.trainer', '--model=mt.cldr.Tiny', f'--logdir={logdir}']
  env = {**os.environ, 'TF_CPP_MIN_LOG_LEVEL': '3'}
  done = subprocess.run(
    [*command, f'--data_dir={DATA / "corpus"}', '--max_steps=8', *bindings], env=env, capture_output=True, text=True
  )
  assert done.returncode == 0, done.stderr
  assert 'going on from step 4' in done.stderr
  lines = [json.loads(line) for line in (logdir / 'train.jsonl').read_text().splitlines()]
  losses = {str(line['step']): line['loss'] for line in lines if 'loss' in line}
  assert losses == pytest.approx(EXPECTED['losses'], rel=1e-5)
  assert lines[-1]['dev_loss'] == pytest.approx(EXPECTED['dev_loss'], rel=1e-5)


def test_an_old_run_translates_to_the_same_text(logdir):
  output = io.StringIO()
  options = translate.Options(str(logdir), n_best=2)
  translate.translate(options, io.BytesIO(EXPECTED['source'].encode() + b'\n'), output)
  _, _, log_prob, text = output.getvalue().splitlines()[0].split('\t')
  assert text == EXPECTED['translation']
  assert float(log_prob) == pytest.approx(EXPECTED['log_prob'], abs=1e-3)
