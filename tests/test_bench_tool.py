"""tools/bench.py, as typed."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

TOOL = pathlib.Path(__file__).resolve().parent.parent / 'tools' / 'bench.py'


def tool(*args):
  return subprocess.run([sys.executable, TOOL, *args], capture_output=True, text=True, timeout=300)


def test_train_step_and_decoding_are_timed(tmp_path):
  path = tmp_path / 'out.jsonl'
  done = tool('--model=mt.bench_s.Tiny', '--calls=2', '--warmup=1', f'--json={path}')
  assert done.returncode == 0, done.stderr
  train, decode = (json.loads(line) for line in path.read_text().splitlines())
  assert (train['what'], decode['what']) == ('train', 'decode')
  assert train['tokens_per_s'] == round(2 * 128 / train['median_s'], 1)
  assert train['num_groups'] == 4 and len(train['dropped_share']) == 2
  assert 0 < decode['median_s'] and decode['beam_size'] == 4 and decode['peak_rss_mib'] > 100


def test_an_unknown_measurement_is_told():
  done = tool('--what=trian')
  assert done.returncode == 1 and "--what must be of train, decode; saw 'trian'" in done.stderr
