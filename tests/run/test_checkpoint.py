"""Checkpoints: read back, kept or dropped, committed whole, and plain about what is wrong with them."""

import dataclasses
import os
import shutil
import threading

import killed
import numpy as np
import pytest
import tensorflow as tf
from whole_state import WholeState

from lingvo_moe.core.errors import UserError
from lingvo_moe.run import checkpoint
from lingvo_moe.run.checkpoints import CheckpointEvaluation, Checkpoints, Saver
from lingvo_moe.runtime.slices import Slice
from lingvo_moe.storage import json_files

SHAPES = {'step': (), 'decoder/layer_01/moe/wi': (2, 3, 4), 'slots/decoder/layer_01/moe/wi/row': (2, 3)}


def state_at(step, value=1.0):
  return WholeState(
    {
      'step': tf.constant(step, tf.int64),
      'weights': {'decoder/layer_01/moe/wi': tf.fill([2, 3, 4], value + step)},
      'slots': {'decoder/layer_01/moe/wi/row': tf.fill([2, 3], value)},
    }
  )


@dataclasses.dataclass(frozen=True)
class Half(WholeState):
  """Part of a state that one of two processes holds."""

  own: tuple = ()

  def slices(self):
    return self.own


def save(kept, state, dev_loss):
  kept.save(state)
  if dev_loss is not None:
    kept.note_dev_loss(state.step, dev_loss)


def read_all(tensors):
  return {name: stored[...] for name, stored in tensors.items()}


def the_data_file(prefix):
  return prefix + '.data-00000-of-00001'


def test_what_was_saved_is_read_back(tmp_path):
  kept = Checkpoints(str(tmp_path))
  prefix = kept.save(state_at(7))
  assert prefix == str(tmp_path / 'step_00000007' / 'state')
  read = read_all(kept.restore(7, SHAPES))
  assert read['step'] == 7 and read['step'].dtype == np.int64
  np.testing.assert_array_equal(read['decoder/layer_01/moe/wi'], np.full([2, 3, 4], 8.0))
  np.testing.assert_array_equal(read['slots/decoder/layer_01/moe/wi/row'], np.ones([2, 3]))


def test_tensorflow_reads_every_weight_by_its_name(tmp_path):
  reader = tf.train.load_checkpoint(Checkpoints(str(tmp_path)).save(state_at(7)))
  assert {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()} == SHAPES
  np.testing.assert_array_equal(reader.get_tensor('decoder/layer_01/moe/wi'), np.full([2, 3, 4], 8.0))
  assert checkpoint.shapes(str(tmp_path / 'step_00000007' / 'state')) == SHAPES


def test_stacked_layers_are_saved_one_by_one_and_read_either_way(tmp_path):
  stacked = np.arange(24, dtype=np.float32).reshape([2, 3, 4])
  row = stacked[..., 0]
  weights, slots = {'encoder/layers_1of2/wi': stacked}, {'encoder/layers_1of2/wi/row': row}
  kept = Checkpoints(str(tmp_path))
  kept.save(WholeState({'step': tf.constant(7, tf.int64), 'weights': weights, 'slots': slots}))
  alone = {'encoder/layer_01/wi': (3, 4), 'encoder/layer_03/wi': (3, 4)}
  there = {'step': (), **alone, 'slots/encoder/layer_01/wi/row': (3,), 'slots/encoder/layer_03/wi/row': (3,)}
  assert checkpoint.shapes(kept.path(7)) == there
  for name, layer in zip(alone, stacked, strict=True):
    np.testing.assert_array_equal(kept.restore(7, alone)[name][...], layer)
  asked = {'encoder/layers_1of2/wi': (2, 3, 4), 'slots/encoder/layers_1of2/wi/row': (2, 3)}
  whole, rows = kept.restore(7, asked).values()
  assert whole.shape == (2, 3, 4) and rows.shape == (2, 3)
  np.testing.assert_array_equal(whole[...], stacked)
  np.testing.assert_array_equal(whole[0:1, 1:3, 2:4], stacked[0:1, 1:3, 2:4])
  np.testing.assert_array_equal(rows[1:2], row[1:2])
  split = [
    Slice('step', (), (), np.int64(8)),
    *(Slice('encoder/layers_1of2/wi', (2, 3, 4), (i, 0, 0), stacked[i : i + 1]) for i in (0, 1)),
  ]
  kept.save(Half({'step': 8}, own=tuple(split)))
  np.testing.assert_array_equal(
    kept.restore(8, {'encoder/layers_1of2/wi': (2, 3, 4)})['encoder/layers_1of2/wi'][...], stacked
  )
  with pytest.raises(UserError, match="no tensor 'encoder/layer_05/wi'"):
    kept.restore(7, {'encoder/layers_1of2/wi': (3, 3, 4)})


def test_a_directory_that_is_not_there_holds_no_checkpoint(tmp_path):
  none = Checkpoints(str(tmp_path / 'nowhere'))
  assert none.steps() == [] and none.latest() is None and none.best() is None


def test_the_newest_are_kept_and_the_best(tmp_path):
  kept = Checkpoints(str(tmp_path), keep=2)
  for step, dev_loss in ((1, 5.0), (2, 3.0), (3, None), (4, 4.0), (5, 3.5)):
    save(kept, state_at(step), dev_loss)
  assert kept.steps() == [2, 4, 5] and kept.latest() == 5 and kept.best()[:2] == (2, 3.0)
  save(kept, state_at(6), 2.0)
  assert kept.steps() == [5, 6] and kept.best()[:2] == (6, 2.0)


def test_of_equal_dev_losses_the_earliest_is_best_and_stays(tmp_path):
  # As a training curve that no longer improves: later checkpoints do not replace the best.
  kept = Checkpoints(str(tmp_path), keep=1)
  for step in range(8, 12):
    save(kept, state_at(step), 3.0 if step > 8 else 4.0)
  assert kept.best()[:2] == (9, 3.0)
  assert kept.steps() == [9, 11]


def test_each_dev_loss_is_read_a_few_times_however_many_are_kept(tmp_path, monkeypatch):
  def reads(count):
    kept, seen = Checkpoints(str(tmp_path / str(count)), keep=count), []
    read = json_files.read_if_any
    with monkeypatch.context() as m:
      m.setattr(json_files, 'read_if_any', lambda path, *args, **kinds: seen.append(path) or read(path, *args, **kinds))
      for step in range(1, count + 1):
        os.makedirs(os.path.dirname(kept.path(step)))
        kept.note_dev_loss(step, float(abs(step - count // 2)))  # falls, then rises
    assert kept.best()[:2] == (count // 2, 0.0) and len(kept.best().evaluated_after) == count - count // 2
    return len(seen)

  assert reads(40) < 2.5 * reads(20)


def test_a_best_that_is_of_another_text_or_removed_is_seen(tmp_path):
  kept, other = Checkpoints(str(tmp_path), keep=9), Checkpoints(str(tmp_path), keep=9)
  for step, dev_loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
    save(kept, state_at(step), dev_loss)
    assert other.best() == kept.best()
  kept.note_dev_loss(2, 9.0, 'other text')
  assert other.best()[:4] == (2, 9.0, 'other text', 1) == kept.best()[:4]
  kept.save(state_at(4))
  kept.note_dev_loss(4, 8.0, 'other text')
  assert other.best().step == kept.best().step == 4
  shutil.rmtree(tmp_path / 'step_00000004')
  assert other.best().step == kept.best().step == 2


def test_saving_a_step_again_marks_it_best_without_writing_it_again(tmp_path):
  kept = Checkpoints(str(tmp_path))
  kept.save(state_at(3))
  save(kept, state_at(3, value=50.0), 1.0)
  assert kept.best()[:2] == (3, 1.0)
  assert read_all(kept.restore(3, SHAPES))['decoder/layer_01/moe/wi'].max() == 4


def test_checkpoints_of_round_steps_are_kept_for_good(tmp_path):
  kept = Checkpoints(str(tmp_path), keep=1, keep_every=4)
  for step in range(1, 11):
    save(kept, state_at(step), {3: 1.0}.get(step, 2.0))
  assert kept.steps() == [3, 4, 8, 10]  # the best, those kept for good, the newest


def test_evaluations_after_the_best_are_counted_though_their_checkpoints_are_dropped(tmp_path):
  kept = Checkpoints(str(tmp_path), keep=1)
  assert kept.best() is None
  for step, dev_loss in enumerate((3.0, 2.0, None, 2.5, None, 2.0), start=1):
    kept.save(state_at(step))
    if dev_loss:
      kept.note_dev_loss(step, dev_loss)
      kept.note_dev_loss(step, dev_loss)  # once more, as after a crash
  assert kept.steps() == [2, 6] and kept.best()[:2] == (2, 2.0) and kept.best().evaluated_after == [4, 6]
  kept.save(state_at(7))
  kept.note_dev_loss(7, 1.0)
  assert kept.best()[:2] == (7, 1.0) and kept.best().evaluated_after == []
  (tmp_path / 'step_00000007' / 'dev_loss.json').write_text('{"dev_loss": 1.0}')  # of an earlier version
  assert kept.best().evaluated_after is None


@pytest.mark.parametrize('loss, left', [(1.0, [3]), (3.0, [1, 3])])
def test_a_kill_while_a_dev_loss_is_noted_and_old_checkpoints_are_dropped_is_made_good(tmp_path, loss, left):
  kept = Checkpoints(str(tmp_path), keep=1)

  def evaluate_two_of_three():
    for step in (1, 2, 3):
      (tmp_path / f'step_{step:08d}').mkdir(exist_ok=True)
      (tmp_path / f'step_{step:08d}' / 'dev_loss.json').unlink(missing_ok=True)
    for step, dev_loss in ((1, 2.0), (2, 2.5)):
      Checkpoints(str(tmp_path)).note_dev_loss(step, dev_loss, 'all')

  def look(number):
    assert kept.best()[:2] in ((1, 2.0), (3, loss))
    kept.sweep()
    kept.note_dev_loss(3, loss, 'all')
    assert sorted(os.listdir(tmp_path)) == [f'step_{step:08d}' for step in left]
    assert {path.name for path in tmp_path.glob('*/*')} == {'dev_loss.json'}
    assert kept.best()[:2] == ((1, 2.0) if loss > 2 else (3, loss))
    assert kept.best().evaluated_after == ([2, 3] if loss > 2 else [])
    evaluate_two_of_three()

  evaluate_two_of_three()
  assert killed.at_every_point(lambda: kept.note_dev_loss(3, loss, 'all'), look) >= 4


def test_a_score_ranks_checkpoints_in_place_of_the_loss(tmp_path):
  kept = Checkpoints(str(tmp_path), keep=1)
  for step, dev_loss, bleu in ((1, 1.0, 10.0), (2, 2.0, 12.0), (3, 0.5, 11.0)):
    kept.save(state_at(step))
    kept.note_dev_loss(step, dev_loss, 'all', 'BLEU', bleu)
  assert (kept.best().step, kept.best().evaluated_after, kept.steps()) == (2, [3], [2, 3])
  assert kept.describe(2) == 'step 2, the best by dev BLEU (12); the newest is of step 3'


def test_losses_of_another_dev_text_are_not_compared(tmp_path):
  kept = Checkpoints(str(tmp_path), keep=1)
  for step, dev_loss in ((1, 3.0), (2, 3.5), (3, 3.6)):
    kept.save(state_at(step))
    kept.note_dev_loss(step, dev_loss, 'all')
  assert kept.steps() == [1, 3] and kept.best().evaluated_after == [2, 3]

  kept.note_dev_loss(1, 5.0, 'few')  # the best again, on text of a higher loss
  assert kept.best()[:2] == (1, 5.0) and kept.best().evaluated_after == []
  kept.save(state_at(4))
  assert kept.steps() == [1, 4]
  kept.note_dev_loss(4, 5.1, 'few')
  assert kept.best()[:2] == (1, 5.0) and kept.best().evaluated_after == [4]
  kept.note_dev_loss(1, 3.0, 'all')  # the first text once more
  kept.save(state_at(5))
  kept.note_dev_loss(5, 2.9, 'all')
  assert kept.best()[:2] == (5, 2.9) and kept.steps() == [5]


def test_a_loss_of_an_earlier_version_is_measured_again_and_patience_counts_on(tmp_path):
  kept = Checkpoints(str(tmp_path))
  kept.save(state_at(1))
  (tmp_path / 'step_00000001' / 'dev_loss.json').write_text('{"dev_loss": 2.0, "evaluated_after": [2, 3]}')
  assert kept.best() == CheckpointEvaluation(1, 2.0, '', 0, [2, 3])
  kept.note_dev_loss(1, 2.0, 'all')
  assert kept.best() == CheckpointEvaluation(1, 2.0, 'all', 1, [2, 3])


@pytest.mark.parametrize('bad', [float('nan'), float('inf')])
def test_a_dev_loss_that_is_not_finite_is_never_best(tmp_path, bad):
  kept = Checkpoints(str(tmp_path))
  save(kept, state_at(1), bad)
  assert kept.best() is None
  save(kept, state_at(2), 4.0)
  save(kept, state_at(3), bad)
  assert kept.best()[:2] == (2, 4.0)
  assert kept.best().evaluated_after == [3]  # patience counts it


def test_a_write_that_did_not_finish_is_ignored_and_replaced(tmp_path):
  kept = Checkpoints(str(tmp_path))
  kept.save(state_at(1))
  partial = tmp_path / '.partial_00000002'
  partial.mkdir()
  (partial / 'state.index').write_bytes(b'half a')
  (partial / 'left_over').write_bytes(b'')
  assert kept.steps() == [1] and kept.latest() == 1
  kept.save(state_at(2))
  assert not partial.exists()
  assert sorted(os.listdir(tmp_path / 'step_00000002')) == ['state.data-00000-of-00001', 'state.index']
  assert read_all(kept.restore(2, SHAPES))['step'] == 2


def test_a_crash_while_writing_leaves_the_checkpoint_before(tmp_path, monkeypatch):
  kept = Checkpoints(str(tmp_path))
  kept.save(state_at(1))
  monkeypatch.setattr(os, 'rename', lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
  with pytest.raises(KeyboardInterrupt):
    kept.save(state_at(2))
  monkeypatch.undo()
  assert kept.steps() == [1]
  kept.save(state_at(2))
  assert kept.steps() == [1, 2]


@pytest.mark.parametrize('count', [1, 2])
def test_every_file_of_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch, count):
  synced, rename, fsync = {}, os.rename, os.fsync

  def renamed(partial, folder):
    there = [os.path.join(partial, name) for name in os.listdir(partial)]
    stats = {name: os.stat(name) for name in there}
    assert there and all(synced.get(stat.st_ino) == (stat.st_size, stat.st_mtime_ns) for stat in stats.values())
    synced.clear()
    rename(partial, folder)

  def noted(fd):
    fsync(fd)
    stat = os.fstat(fd)
    synced[stat.st_ino] = stat.st_size, stat.st_mtime_ns

  kept = Checkpoints(str(tmp_path))
  parts = [dataclasses.replace(state_at(3), process_index=i, process_count=count) for i in range(count)]
  if count == 2:  # each holds a tensor of its own
    pieces = list(parts[0].slices())
    parts = [Half(part.state, part.process_index, 2, pieces[part.process_index :: 2]) for part in parts]
  monkeypatch.setattr(os, 'fsync', noted)
  monkeypatch.setattr(os, 'rename', renamed)
  kept.make_folder(parts[0], 3)
  reasons = [kept.write(part, 3, part.slices()) for part in parts]
  kept.commit(parts[0], 3, reasons[0])
  assert kept.latest() == 3 and os.stat(tmp_path).st_ino in synced


def test_a_step_that_is_not_there_is_refused_with_those_that_are(tmp_path):
  kept = Checkpoints(str(tmp_path))
  with pytest.raises(UserError, match='has no checkpoint of step 9; there: none'):
    read_all(kept.restore(9, SHAPES))
  kept.save(state_at(1))
  kept.save(state_at(4))
  with pytest.raises(UserError, match='has no checkpoint of step 9; there: 1, 4'):
    read_all(kept.restore(9, SHAPES))


def test_another_models_checkpoint_is_refused_by_the_name_it_lacks(tmp_path):
  kept = Checkpoints(str(tmp_path))
  kept.save(state_at(1))
  with pytest.raises(UserError, match="has no tensor 'encoder/norm/scale': it is a checkpoint of another model"):
    kept.restore(1, {**SHAPES, 'encoder/norm/scale': (4,)})


def test_another_shape_is_refused_with_both(tmp_path):
  kept = Checkpoints(str(tmp_path))
  kept.save(state_at(1))
  message = (
    r"'decoder/layer_01/moe/wi' has shape \(2, 3, 4\), but this model has \(8, 3, 4\); "
    r'use the --model, bindings and vocabulary'
  )
  with pytest.raises(UserError, match=message):
    kept.restore(1, {**SHAPES, 'decoder/layer_01/moe/wi': (8, 3, 4)})


def test_a_missing_index_is_named(tmp_path):
  prefix = Checkpoints(str(tmp_path)).save(state_at(1))
  os.remove(prefix + '.index')
  with pytest.raises(UserError, match=r'there is no checkpoint .*state \(no file .*state\.index\)'):
    read_all(checkpoint.load(prefix, SHAPES))


@pytest.mark.parametrize('harm', ['truncate', 'empty', 'flip', 'remove', 'index_truncate', 'index_empty', 'index_flip'])
def test_a_damaged_file_is_told_from_a_good_one(tmp_path, harm):
  prefix = Checkpoints(str(tmp_path)).save(state_at(1))
  path = prefix + '.index' if harm.startswith('index') else the_data_file(prefix)
  with open(path, 'rb') as f:
    good = f.read()
  bad = {'truncate': good[:-20], 'empty': b'', 'flip': bytes([good[0] ^ 1]) + good[1:], 'remove': b''}
  os.remove(path)
  if harm != 'remove':
    with open(path, 'wb') as f:
      f.write(bad[harm.removeprefix('index_')])
  message = 'is damaged or cut short .*: restore it from a copy, or move .*step_00000001 away'
  with pytest.raises(UserError, match=message):
    read_all(checkpoint.load(prefix, SHAPES))


def test_a_checkpoint_copied_elsewhere_is_whole(tmp_path):
  prefix = Checkpoints(str(tmp_path / 'run')).save(state_at(1))
  shutil.copytree(os.path.dirname(prefix), tmp_path / 'copy')
  assert read_all(checkpoint.load(str(tmp_path / 'copy' / 'state'), SHAPES))['step'] == 1


def test_saving_beside_training_keeps_what_was_then(tmp_path, monkeypatch):
  trained, write = threading.Event(), checkpoint.write
  monkeypatch.setattr(checkpoint, 'write', lambda *args: [trained.wait(30), write(*args)][1])

  class Trained(WholeState):
    def slices(self):
      yield Slice('step', (), (), np.int64(self.step))
      yield Slice('w', (3,), (0,), weight)  # a view that the next step overwrites

  weight = np.ones(3, np.float32)
  saver = Saver(Checkpoints(str(tmp_path)), Trained({'step': 4}))
  saver.save()
  weight[:] = 7
  trained.set()
  saver.wait()
  np.testing.assert_array_equal(saver.checkpoints.restore(4, {'w': (3,)})['w'][...], np.ones(3))


def test_what_goes_wrong_beside_training_is_told_when_it_is_waited_for(tmp_path):
  (tmp_path / 'file').write_text('')
  saver = Saver(Checkpoints(str(tmp_path / 'file')), state_at(1))
  saver.save()
  with pytest.raises(UserError, match='checkpoints are in .*file, which is no folder: move it away'):
    saver.wait()
  saver.wait()  # told once


def test_a_full_disk_is_told_with_the_file_and_what_is_left(tmp_path, monkeypatch):
  def full(prefix, **_):
    node = '{{function_node __wrapped__SaveV2_device_/job:localhost}}'
    message = f'{node} {prefix}.data; No space left on device [Op:SaveV2]'
    raise tf.errors.ResourceExhaustedError(None, None, message)

  kept = Checkpoints(str(tmp_path))
  with monkeypatch.context() as patch:
    patch.setattr(tf.raw_ops, 'SaveV2', full)
    with pytest.raises(UserError) as first:
      kept.save(state_at(3))
  kept.save(state_at(4))
  monkeypatch.setattr(tf.raw_ops, 'SaveV2', full)
  with pytest.raises(UserError) as second:
    kept.save(state_at(5))

  partial = f'{tmp_path}/.partial_00000003'
  assert str(first.value) == (
    f'the checkpoint of step 3 could not be written to {partial} ({partial}/state.data; No space left on device): make '
    'room there; there is no checkpoint before it, and the same command begins anew'
  )
  assert str(second.value).endswith('that of step 4 is kept, and the same command goes on from it')
  assert os.listdir(tmp_path) == ['step_00000004']
