"""The table of gates: means over the last logged steps, by hand, and the tool as typed."""

import json
import pathlib

import forks
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.storage.log_directory import LogDirectory
from paper import gates

TOOL = pathlib.Path(__file__).resolve().parents[3] / 'tools' / 'compare_gates.py'


@pytest.fixture
def run(tmp_path):
  """A run that logs every 50 steps, decoded at step 200."""
  (tmp_path / 'config.json').write_text(json.dumps({'model': 'm.Gate', 'values': {'num_experts': 4, 'gate': 'switch'}}))
  line = lambda step, **values: json.dumps({'step': step, **values})
  layers = lambda dropped, load: {
    'moe/encoder/layer_01/first_dropped': dropped,
    'moe/encoder/layer_01/second_dropped': 0.1,
    'moe/encoder/layer_01/largest_load': load,
    'moe/decoder/layer_01/first_dropped': 0.0,
    'moe/decoder/layer_01/entropy': 1.0,
  }
  lines = [
    line(1, loss=9.0, seconds_so_far=40.0, **layers(0.0, 1.0)),
    line(50, loss=5.0, seconds_so_far=60.0, **layers(0.3, 2.0)),
    line(100, loss=4.0, seconds_so_far=160.0, **layers(0.3, 3.0)),
    line(100, dev_loss=4.5, seconds_so_far=170.0),
    line(150, loss=3.0, seconds_so_far=260.0, **layers(0.6, 2.0)),
    line(200, dev_loss=4.25, seconds_so_far=300.0),
    line(250, loss=2.0, seconds_so_far=900.0, **layers(9.0, 9.0)),  # after the step that was decoded
  ]
  (tmp_path / 'train.jsonl').write_text('\n'.join(lines) + '\n')
  folder = tmp_path / 'decode' / 'test' / 'step_200'
  folder.mkdir(parents=True)
  scores = {pair: {'sentences': 2, 'bleu': bleu, 'chrf': 0.0} for pair, bleu in (('a-b', 10.0), ('c-b', 20.0))}
  (folder / 'scores.json').write_text(json.dumps({'pairs': scores}))
  return tmp_path


def test_a_row_by_hand(run):
  found = gates.row(LogDirectory.read(str(run)), 'test')
  assert found.pop('dropped') == pytest.approx((0.1 + 0.4 + 0.4 + 0.7 + 4 * 0.0) / 8)  # a layer's are summed
  # The median of 20 / 49, 100 / 50 and 100 / 50: seconds between two lines, by the steps between them.
  assert found == {
    'model': 'm.Gate',
    'gate': 'switch',
    'step': 200,
    'bleu': 15.0,
    'dev_loss': 4.25,
    'seconds': 2.0,
    'largest_load': 2.0,
    'entropy': 1.0,
  }
  with pytest.raises(UserError, match='has no translations of dev: lingvo-moe decode .* --split=dev'):
    gates.row(LogDirectory.read(str(run)), 'dev')


def test_an_average_has_no_dev_loss(run, tmp_path):
  average = tmp_path / 'average'
  average.mkdir()
  (run / 'decode').rename(average / 'decode')
  (average / 'config.json').write_text((run / 'config.json').read_text())
  (average / 'averaged.json').write_text(json.dumps({'steps': [100, 200], 'of': '..'}))
  found = gates.row(LogDirectory.read(str(average)), 'test')
  assert found['dev_loss'] is None and found['seconds'] == 2.0


def test_the_tool_prints_a_table(run):
  done = forks.run([TOOL, str(run), str(run)])
  assert done.returncode == 0, done.stderr
  head, rule, one, two = done.stdout.splitlines()
  assert rule == '| --- | --- |' + ' --: |' * 7
  assert head == '| model | gate | step | BLEU | dev loss | dropped | largest load | entropy | s/step |'
  assert one == two == '| m.Gate | switch | 200 | 15.0 | 4.25 | 0.2 | 2 | 1 | 2 |'
  done = forks.run([TOOL])
  assert done.returncode == 1 and done.stderr.count('\n') == 1 and 'saw none' in done.stderr
