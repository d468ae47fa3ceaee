"""State of a training run: when it ends."""

from __future__ import annotations

import types

import pytest

from lingvo_moe.run.checkpoint import Checkpoints
from lingvo_moe.run.training import Training
from lingvo_moe.tasks.task import Task


@pytest.fixture
def checkpoints(tmp_path):
  """Best at step 1000; step 2000 was evaluated without gain."""
  kept = Checkpoints(str(tmp_path))
  for step, dev_loss in ((1000, 2.0), (2000, 2.5)):
    folder = tmp_path / f'step_{step:08d}'
    folder.mkdir()
    kept.note_dev_loss(step, dev_loss)
  return kept


def reason(checkpoints, step=2000, **values):
  values = {'max_steps': 9000, 'patience': 0, 'eval_every': 1000, **values}
  parts = dict.fromkeys(Training.__dataclass_fields__)
  parts |= {'task': Task(types.SimpleNamespace(**values)), 'runtime': types.SimpleNamespace(step=step)}
  return Training(**{**parts, 'checkpoints': checkpoints}).reason_to_end()


def test_patience_counts_evaluations_whatever_eval_every_was(checkpoints):
  assert reason(checkpoints) == ''
  assert reason(checkpoints, step=9000, patience=1) == 'max_steps'
  assert reason(checkpoints, patience=1) == 'no gain on dev in 1 evaluation'
  assert reason(checkpoints, patience=2) == ''
  assert reason(checkpoints, patience=2, eval_every=100) == ''
  assert reason(checkpoints, step=1500, patience=1) == ''  # the later one is of steps that are made again


def test_a_run_of_an_earlier_version_counts_by_steps(checkpoints, tmp_path):
  (tmp_path / 'step_00001000' / 'dev_loss.json').write_text('{"dev_loss": 2.0}')
  assert reason(checkpoints, patience=1) and not reason(checkpoints, patience=2)
  (tmp_path / 'step_00003000').mkdir()
  checkpoints.note_dev_loss(3000, 2.5)
  assert reason(checkpoints, step=3000, patience=2) and not reason(checkpoints, step=3000, patience=3)
