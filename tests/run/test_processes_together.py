"""Checkpoints and signals of several processes, each played by a thread: they wait for each other at the same steps."""

import os
import signal
import threading
import time
import types
from concurrent import futures

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.run import checkpoint
from lingvo_moe.run import signals as signals_lib
from lingvo_moe.run.checkpoints import Checkpoints, Saver
from lingvo_moe.run.evaluation import EvaluationHook
from lingvo_moe.run.process_group import ProcessGroup
from lingvo_moe.run.reporting import DevLoss, NoLog
from lingvo_moe.run.training import Step
from lingvo_moe.runtime.slices import Slice

COUNT = 2


class Runtime:
  """One of COUNT processes; its part of the weight w is a row, with the number of the step."""

  process_count = COUNT

  def __init__(self, index, group):
    self.process_index = index
    self.step = 0
    self.calls = []
    self._group = group
    self._row = np.zeros((1, 3), np.float32)

  def train(self):
    self.step += 1
    self._row[:] = self.step

  def slices(self):
    if self.process_index == 0:
      yield Slice('step', (), (), np.int64(self.step))
    yield Slice('w', (COUNT, 3), (self.process_index, 0), self._row)

  def gather(self, value):
    self.calls.append(self.step)
    self._group['values'][self.process_index] = value
    self._group['all'].wait(timeout=30)
    found = list(self._group['values'])
    self._group['all'].wait(timeout=30)
    return found

  def agree(self, flag):
    return all(self.gather(flag))


def in_processes(play):
  """Calls play(runtime) in COUNT threads; returns their results, or raises the first error once all have ended."""
  group = {'values': [None] * COUNT, 'all': threading.Barrier(COUNT)}
  with futures.ThreadPoolExecutor(COUNT) as threads:
    return [f.result() for f in [threads.submit(play, Runtime(index, group)) for index in range(COUNT)]]


def test_processes_write_beside_training_and_commit_together(tmp_path, monkeypatch):
  written = threading.Event()
  write = checkpoint.write
  monkeypatch.setattr(checkpoint, 'write', lambda prefix, pieces: [written.wait(30), write(prefix, pieces)][1])

  def play(runtime):
    saver = Saver(Checkpoints(str(tmp_path)), runtime)
    runtime.train()
    saver.save()
    runtime.train()  # the state that is written is that of step 1
    saver.commit_if_written()
    assert saver.checkpoints.latest() is None
    runtime.agree(True)
    written.set()
    deadline = time.monotonic() + 30
    while not runtime.agree(saver.checkpoints.latest() == 1):
      assert time.monotonic() < deadline
      saver.commit_if_written()

  in_processes(play)
  w = Checkpoints(str(tmp_path)).restore(1, {'w': (COUNT, 3)})['w']
  np.testing.assert_array_equal(w[...], np.ones((COUNT, 3)))
  assert os.listdir(tmp_path) == ['step_00000001']


def test_a_part_that_cannot_be_written_ends_all(tmp_path, monkeypatch):
  def no_space():
    raise tf.errors.ResourceExhaustedError(None, None, 'no space')

  write = checkpoint.write
  fail = lambda prefix, pieces: no_space() if prefix.endswith('part_00001') else write(prefix, pieces)
  monkeypatch.setattr(checkpoint, 'write', fail)

  def play(runtime):
    saver = Saver(Checkpoints(str(tmp_path)), runtime)
    saver.save()
    with pytest.raises(UserError) as raised:
      saver.wait()
    return str(raised.value)

  said = in_processes(play)
  assert '(by another process)' in said[0] and '(no space)' in said[1] and os.listdir(tmp_path) == []


@pytest.mark.parametrize('logged', [2.5, None])
def test_a_dev_loss_that_the_leader_has_logged_is_measured_by_no_process(tmp_path, logged):
  def play(runtime):
    saver, measured = Saver(Checkpoints(str(tmp_path)), runtime), []
    saver.save()
    saver.wait()
    group = ProcessGroup(COUNT, runtime.process_index)
    log = types.SimpleNamespace(measured=lambda step, text: logged and (logged, None)) if group.is_leader else NoLog()
    dev_input = types.SimpleNamespace(content_hash='text')
    task, config = types.SimpleNamespace(dev_metric=None), types.SimpleNamespace(eval_every=1)
    kept = {'runtime': runtime, 'checkpoints': saver.checkpoints, 'log': log, 'group': group}
    training = types.SimpleNamespace(**kept, dev_input=dev_input, task=task, config=config)
    EvaluationHook(training, signals_lib.Signals())._note(0, lambda: measured.append(runtime) or DevLoss(3.5, {}))
    return saver.checkpoints.best().dev_loss, len(measured)

  assert in_processes(play) == [(3.5, 1) if logged is None else (logged, 0)] * COUNT


def test_processes_exchange_signals_rarely_and_stop_at_one_step(tmp_path, monkeypatch):
  monkeypatch.setattr(signals_lib, '_EXCHANGE_SECONDS', 0.1)

  def play(runtime):
    saver = Saver(Checkpoints(str(tmp_path)), runtime)
    save = lambda wait: (saver.save(), saver.wait())
    training, signals = types.SimpleNamespace(runtime=runtime, saver=saver, save=save), signals_lib.Signals()
    stop = signals_lib.StopOnSignal(training, signals)
    with pytest.raises(signals_lib.StoppedBySignal, match='SIGTERM: saved step') as stopped:
      while runtime.step < 5000:
        time.sleep(0.001)
        runtime.train()
        if runtime.process_index == 1 and runtime.step == 300:
          signals.received = signal.SIGTERM
        stop(Step(runtime.step, {}, ends_call=True))
    told = len([step for step in runtime.calls if step < 300])
    return runtime.step, stopped.value.exit_status, told

  (step, status, told), other = in_processes(play)
  assert other == (step, status, told) and status == 143 and 300 <= step < 1000
  assert told < 30 and Checkpoints(str(tmp_path)).steps() == [step]
