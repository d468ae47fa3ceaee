"""lingvo-moe checkpoint, as typed; and checkpoints in slices, as several processes write them."""

import dataclasses
import json
import os
import pathlib
import threading

import forks
import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.core.errors import UserError
from lingvo_moe.run import checkpoint
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.runtime.slices import Slice

COMMAND = ['-m', 'lingvo_moe.cli.commands.main', 'checkpoint']
WI = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
SHAPES = {'step': (), 'moe/wi': (2, 3, 4), 'norm': (4,), 'slots/moe/wi/row': (2, 3)}


@dataclasses.dataclass
class HalfOfTwo:
  """One of two processes: each holds an expert, and the first also the tensors that are not split."""

  process_index: int
  meeting: threading.Barrier
  flags: list
  step: int = 5
  process_count: int = 2
  fails: bool = False

  def slices(self):
    i = self.process_index
    if self.fails:
      yield Slice('moe/wi', (2, 3, 4), (7, 0, 0), WI[:1])  # beyond the tensor: cannot be written
      return
    if i == 0:
      yield Slice('step', (), (), np.int64(self.step))
      yield Slice('norm', (4,), (0,), np.ones(4, np.float32))
    yield Slice('moe/wi', (2, 3, 4), (i, 0, 0), WI[i : i + 1])
    yield Slice('slots/moe/wi/row', (2, 3), (i, 0), np.full([1, 3], i, np.float32))

  def agree(self, flag):
    self.meeting.wait(30)
    self.flags[self.process_index] = flag
    self.meeting.wait(30)
    return all(self.flags)


def save_by_two(directory, fails=()):
  """Saves with two processes, as threads; returns what each raised."""
  meeting, flags, raised = threading.Barrier(2), [None, None], [None, None]

  def run(index):
    try:
      Checkpoints(str(directory)).save(HalfOfTwo(index, meeting, flags, fails=index in fails))
    except UserError as e:
      raised[index] = str(e)

  threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
  for t in threads:
    t.start()
  for t in threads:
    t.join(60)
  return raised


def tool(*args):
  return forks.run([*COMMAND, *args], timeout=120)


def test_slices_of_two_processes_make_one_checkpoint(tmp_path):
  assert save_by_two(tmp_path) == [None, None]
  reader = tf.train.load_checkpoint(Checkpoints(str(tmp_path)).path(5))
  np.testing.assert_array_equal(reader.get_tensor('moe/wi'), WI)
  np.testing.assert_array_equal(reader.get_tensor('slots/moe/wi/row'), [[0, 0, 0], [1, 1, 1]])
  assert reader.get_tensor('step') == 5
  assert {n: tuple(s) for n, s in reader.get_variable_to_shape_map().items()} == SHAPES


def test_any_slice_is_read_across_the_borders_of_slices(tmp_path):
  save_by_two(tmp_path)
  stored = Checkpoints(str(tmp_path)).restore(5, SHAPES)['moe/wi']
  np.testing.assert_array_equal(stored[...], WI)
  np.testing.assert_array_equal(stored[1:], WI[1:])
  np.testing.assert_array_equal(stored[0:2, 1:3, 3:4], WI[0:2, 1:3, 3:4])
  np.testing.assert_array_equal(stored[slice(None), slice(0, 1)], WI[:, 0:1])


@pytest.mark.parametrize('who', [0, 1])
def test_where_one_process_cannot_write_all_are_told_and_nothing_is_left(tmp_path, who):
  raised = save_by_two(tmp_path, fails=(who,))
  assert all('could not be written' in message for message in raised)
  assert Checkpoints(str(tmp_path)).steps() == [] and os.listdir(tmp_path) == []


def test_a_checkpoint_is_listed_and_verified(tmp_path):
  save_by_two(tmp_path / 'checkpoints')
  done = tool(f'--path={tmp_path}', f'--json={tmp_path}/out.json')
  assert done.returncode == 0, done.stderr
  lines = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
  rms = np.sqrt(np.mean(WI**2))
  assert lines['moe/wi'][1:] == ['2x3x4', 'float32', 'rms', f'{rms:.3e}', 'max', '2.300e+01']
  assert 'slots/moe/wi/row' not in lines and lines['step'][1] == 'scalar'
  assert '4 tensors, 28 weights, 6 elements of slots\nevery checksum is right' in done.stdout
  written = json.loads((tmp_path / 'out.json').read_text())
  assert set(written['tensors']) == set(SHAPES) and written['damaged'] == []


def test_a_flipped_byte_and_a_missing_step_are_told(tmp_path):
  save_by_two(tmp_path / 'checkpoints')
  prefix = Checkpoints(str(tmp_path / 'checkpoints')).path(5)
  path = next(pathlib.Path(os.path.dirname(prefix)).glob('state.data-00001-*'))
  good = path.read_bytes()
  path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
  done = tool(f'--path={prefix}')
  assert done.returncode == 1 and 'damaged or cut short' in done.stdout and done.stdout.endswith('damaged\n')
  with pytest.raises(UserError, match='damaged or cut short'):
    checkpoint.load(prefix, SHAPES)['moe/wi'][1:]
  done = tool(f'--path={tmp_path}', '--step=9')
  assert done.returncode == 1 and 'has no checkpoint of step 9; there: 5' in done.stderr
