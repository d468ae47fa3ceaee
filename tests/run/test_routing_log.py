"""The logs of routing and of the environment: what is written, how often, and when a run goes on."""

import subprocess

import numpy as np

from lingvo_moe.config import configuration
from lingvo_moe.run import environment
from lingvo_moe.run.reporting import DevLoss, RoutingLog, TrainLog
from lingvo_moe.storage import json_files
from lingvo_moe.tasks.task import task_of


def lines_of(path):
  return [json_files.parse(line) for line in path.read_text().splitlines()]


def train_log(path):
  return TrainLog(str(path), task_of(configuration.resolve('mt.cldr.Tiny')), 0)


def loads_at(step):
  return {'encoder/layer_01': np.array([step, 0, 10 * step], np.float32)}


def test_a_line_sums_the_loads_since_the_one_before(tmp_path):
  log = RoutingLog(str(tmp_path), max_steps=101, first_step=0)  # in fiftieths: every 3 steps, and at the end
  for step in range(1, 102):
    log.step(step, loads_at(step))
  lines = lines_of(tmp_path / 'routing.jsonl')
  assert [line['step'] for line in lines] == [*range(3, 102, 3), 101]
  assert lines[0] == {'step': 3, 'steps': 3, 'choices': {'encoder/layer_01': [6, 0, 60]}}
  assert lines[-1] == {'step': 101, 'steps': 2, 'choices': {'encoder/layer_01': [201, 0, 2010]}}


def test_there_are_some_fifty_lines_of_any_run(tmp_path):
  log = RoutingLog(str(tmp_path), max_steps=1_000_000, first_step=0)
  for step in range(0, 1_000_000, 1000):
    log.step(step + 1000, loads_at(1))
  assert len(lines_of(tmp_path / 'routing.jsonl')) == 50


def test_a_run_that_goes_on_makes_later_lines_again(tmp_path):
  first = RoutingLog(str(tmp_path), max_steps=100, first_step=0)
  for step in range(1, 9):
    first.step(step, loads_at(step))
  again = RoutingLog(str(tmp_path), max_steps=100, first_step=5)
  for step in range(6, 9):
    again.step(step, loads_at(step))
  found = [
    (line['step'], line['steps'], line['choices']['encoder/layer_01'][0])
    for line in lines_of(tmp_path / 'routing.jsonl')
  ]
  assert found == [(2, 2, 3), (4, 2, 7), (6, 1, 6), (8, 2, 15)]  # of step 5 no loads are left


def test_a_dense_model_leaves_no_file(tmp_path):
  log = RoutingLog(str(tmp_path), max_steps=10, first_step=0)
  log.step(10, {})
  assert not list(tmp_path.iterdir())
  train_log(tmp_path).evaluation(10, DevLoss(1.0, {'a-b': 1.0}))
  assert not (tmp_path / 'dev_routing.json').exists()


def test_routing_on_dev_is_that_of_the_last_evaluation(tmp_path):
  log = train_log(tmp_path)
  for step in (1, 2):
    choices = {'layer': np.array([[1.0, 2.0], [0.0, step]])}
    log.evaluation(step, DevLoss(1.0, {'a-b': 1.0, 'c-d': 1.0}, choices=choices))
  expected = {'step': 2, 'subsets': ['a-b', 'c-d'], 'choices': {'layer': [[1, 2], [0, 2]]}}
  assert json_files.parse((tmp_path / 'dev_routing.json').read_text()) == expected


def test_the_environment_is_recorded_when_it_is_new(tmp_path):
  record = lambda step, mesh: environment.record(str(tmp_path), step, runtime={'name': 'spmd', 'mesh': mesh})
  record(0, 'expert:2')
  record(10, 'expert:2')
  record(20, 'expert:4')
  lines = lines_of(tmp_path / 'environment.jsonl')
  assert [(line['step'], line['runtime']['mesh']) for line in lines] == [(0, 'expert:2'), (20, 'expert:4')]
  assert lines[0]['software']['numpy'] == np.__version__ and lines[0]['machine']['cores'] >= 1
  record(15, 'expert:8')  # from an earlier checkpoint: the start at step 20 is undone
  assert [line['step'] for line in lines_of(tmp_path / 'environment.jsonl')] == [0, 15]


def test_the_commit_is_that_of_a_checkout_and_of_no_folder_above(tmp_path):
  git = lambda *arguments: subprocess.run(
    ['git', '-C', tmp_path, '-c', 'user.name=a', '-c', 'user.email=a@b.c', *arguments], check=True, capture_output=True
  )
  assert environment.commit(str(tmp_path)) == {}
  git('init', '-q')
  (tmp_path / 'file').write_text('one')
  git('add', 'file')
  git('commit', '-q', '-m', 'one')
  found = environment.commit(str(tmp_path))
  assert len(found['commit']) == 40 and found['changed'] is False
  (tmp_path / 'file').write_text('two')
  assert environment.commit(str(tmp_path)) == {**found, 'changed': True}
  (tmp_path / 'site-packages').mkdir()
  assert environment.commit(str(tmp_path / 'site-packages')) == {}
