"""State of a training run: when it ends, and what a run that diverged is told."""

import math
import types

import numpy as np
import pytest

from lingvo_moe.core.errors import UserError
from lingvo_moe.run.checkpoints import Checkpoints, Saver
from lingvo_moe.run.rundir import RunDir
from lingvo_moe.run.training import Diverged, Step, Training, check_finite
from lingvo_moe.storage import json_files
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


def training(checkpoints, **parts):
  saver = Saver(checkpoints, None)
  return Training(**{**dict.fromkeys(Training.__dataclass_fields__), 'saver': saver, **parts})


def reason(checkpoints, step=2000, **values):
  values = {'max_steps': 9000, 'patience': 0, 'eval_every': 1000, **values}
  task, runtime = Task(types.SimpleNamespace(**values)), types.SimpleNamespace(step=step)
  return training(checkpoints, task=task, runtime=runtime).reason_to_end()


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


def test_a_run_that_diverged_ends_for_decoders_too_and_names_its_last_checkpoint(checkpoints, tmp_path):
  error = training(checkpoints, run=RunDir(str(tmp_path))).end(Diverged(7, 'objective=nan'))
  assert isinstance(error, UserError)
  assert str(error).startswith(
    'the loss must stay finite; at step 7 objective=nan (the checkpoint of step 2000 is kept)'
  )
  assert json_files.parse((tmp_path / 'finished.json').read_text()) == {'step': 7, 'reason': 'the loss was not finite'}


@pytest.mark.parametrize('objective, grad_norm', [(1.0, math.inf), (1.0, math.nan), (math.nan, 1.0), (-math.inf, 1.0)])
def test_an_objective_or_a_gradient_that_is_not_finite_stops_the_run(objective, grad_norm):
  check_finite(Step(6, {'objective': 1.0, 'grad_norm': 1e30}, True))
  with pytest.raises(Diverged, match=f'at step 7 objective={objective}, grad_norm={grad_norm}'):
    check_finite(Step(7, {'objective': objective, 'grad_norm': grad_norm}, True))


EVERY = 2  # steps between evaluations


def ends_at(folder, losses, pieces, patience):
  """Step at which a run ends that is begun again after each piece, given the loss of every step."""
  kept, step = Checkpoints(str(folder), keep=99), 0
  for max_steps in pieces:
    why = lambda at, end=max_steps: reason(kept, step=at, max_steps=end, patience=patience, eval_every=EVERY)
    while not why(step):
      step += 1
      if step % EVERY == 0 or step == max_steps:
        (folder / f'step_{step:08d}').mkdir(exist_ok=True)
        if kept.evaluation(step) is None:
          kept.note_dev_loss(step, losses[step], counts=step % EVERY == 0)
  return step


def test_a_run_in_pieces_runs_out_of_patience_where_the_whole_does(tmp_path):
  """The kind: an evaluation that is made only because a piece ends, and that counts as if the whole had made it."""
  flat = [1.0] * 25
  (tmp_path / 'whole').mkdir()
  assert ends_at(tmp_path / 'whole', flat, [24], patience=3) == 8  # best at 2, without gain at 4, 6 and 8
  random = np.random.default_rng(1)
  for case in range(60):
    losses = flat if case == 0 else random.integers(1, 7, 25).astype(float)
    pieces = [3, 5, 24] if case == 0 else [*sorted(random.choice(np.arange(1, 24), 5, replace=False).tolist()), 24]
    ends = []
    for name, of in (('whole', [24]), ('pieces', pieces)):
      folder = tmp_path / f'{name}_{case}'
      folder.mkdir()
      ends.append(ends_at(folder, losses, of, patience=1 + case % 3))
    assert ends[0] == ends[1], (list(losses), pieces)
