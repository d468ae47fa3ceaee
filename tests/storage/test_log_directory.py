"""Names of what a run leaves: what is written under a name is read by it."""

import json
import os
import subprocess
import sys

from lingvo_moe.storage import log_directory
from lingvo_moe.storage.log_directory import LogDirectory


def test_statistics_of_layers_are_read_by_the_names_they_are_written_under():
  statistics = {log_directory.dropped(0): 0.1, log_directory.dropped(8): 0.2, 'entropy': 1.5}
  layers = ('encoder/layer_01', 'decoder')
  line = {log_directory.moe_metric(layer, name): x for layer in layers for name, x in statistics.items()}
  assert line['moe/encoder/layer_01/first_dropped'] == 0.1 and line['moe/decoder/choice_9_dropped'] == 0.2
  assert log_directory.moe_metrics({'loss': 1.0, **line, 'moe/alone': 1.0}) == dict.fromkeys(layers, statistics)
  assert [name for name in statistics if log_directory.is_dropped(name)] == ['first_dropped', 'choice_9_dropped']


def test_the_loss_of_a_line_of_an_earlier_version_is_what_it_called_xent(tmp_path):
  old, new = {'step': 1, 'loss': 3.0, 'xent': 2.5}, {'step': 2, 'objective': 2.0, 'loss': 1.5}
  own = {'step': 3, 'loss': 1.0}  # of a task that logs no more
  (tmp_path / 'train.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in (old, new, own)))
  read = list(LogDirectory(str(tmp_path), 'm', {}).train_log())
  assert read == [{'step': 1, 'objective': 3.0, 'loss': 2.5}, new, own]


def test_dev_losses_of_any_parts_and_tokens_of_both_sides_are_found():
  line = {log_directory.dev_loss_by('file'): {'a': 1.0}, 'seconds_so_far': 5.0, 'dev_loss': 2.0}
  assert log_directory.dev_losses(line) == {'a': 1.0} and log_directory.dev_losses({'dev_loss_by_pair': None}) == {}
  line |= {log_directory.so_far('source_tokens'): 3.0, 'target_tokens_so_far': 4, 'z_tokens_so_far': 'x'}
  assert log_directory.tokens_so_far(line) == 7.0


def test_steps_count_once_their_summary_is_there(tmp_path):
  run = LogDirectory(str(tmp_path), 'm', {})
  assert run.decoded_steps('test') == []
  for name in ('step_10', 'step_9', 'step_8', 'step_x'):
    os.makedirs(tmp_path / 'decode' / 'test' / name)
  for step, name in ((10, 'scores.json'), (9, 'scores.json'), (8, 'perplexity.json')):
    (tmp_path / 'decode' / 'test' / f'step_{step}' / name).write_text('{"files": {}}')
  assert run.decoded_steps('test') == [9, 10] and run.decoded_steps('test', log_directory.PERPLEXITY) == [8]
  assert run.perplexities('test') == (8, {'files': {}}) and run.perplexities('dev') is None


def test_what_a_run_leaves_is_read_without_tensorflow():
  code = (
    'import sys, lingvo_moe.addons.report.page, lingvo_moe.addons.analysis.compare; print("tensorflow" in sys.modules)'
  )
  assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == 'False\n'
