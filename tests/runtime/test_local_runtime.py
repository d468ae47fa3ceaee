"""The local runtime: the same numbers as the pure program, and the same again after a restart."""

import dataclasses

import numpy as np
import pytest
import shared_traces
import tensorflow as tf

from lingvo_moe.core import prng
from lingvo_moe.core.errors import UserError
from lingvo_moe.layers.moe import MoE
from lingvo_moe.ops.cpu import grouped_ffn
from lingvo_moe.optim import schedule
from lingvo_moe.optim.adafactor import Adafactor
from lingvo_moe.optim.cpu import in_place
from lingvo_moe.optim.cpu.matrix_updates import MatrixByMatrix
from lingvo_moe.program import Program
from lingvo_moe.run.checkpoints import Checkpoints
from lingvo_moe.runtime import local
from lingvo_moe.runtime.local import LocalRuntime


@dataclasses.dataclass(frozen=True)
class Copier:
  """Experts that learn to give back their input, with dropout and noise as in a real model."""

  moe: MoE

  def weights(self):
    return {'layer_00': {'moe': self.moe.weights()}}

  def loss(self, theta, batch, key=None):
    x_BTM = tf.ensure_shape(batch['x'], [None, None, 6])
    dropped = x_BTM if key is None else prng.dropout(x_BTM, 0.1, prng.fold(key, 'input'))
    y_BTM, routing = self.moe(theta['layer_00']['moe'], dropped, tf.zeros_like(x_BTM[..., 0]), key)
    loss = tf.reduce_mean(tf.square(y_BTM - x_BTM)) + 0.01 * routing.stats.aux_loss
    return loss, {'loss': loss, 'rows': tf.shape(x_BTM)[0], 'routing': {'layer_00': routing.stats}}


TASK = Copier(MoE(model_dim=6, hidden_dim=8, num_experts=4, num_groups=2))
PROGRAM = Program(TASK, Adafactor(), schedule.InverseSquareRoot(1.0, 100), clip_norm=1.0, seed=3)


def batch_at(step):
  """Random rows whose sizes change from step to step."""
  rng = np.random.default_rng(step)
  return {'x': rng.normal(size=[2 * (1 + step % 2), 4 + step % 3, 6]).astype(np.float32)}


def state_arrays(runtime):
  state = runtime.state()
  return {
    'step': state['step'].numpy(),
    **{n: w.numpy() for n, w in state['weights'].items()},
    **{f'slots/{n}': s.numpy() for n, s in state['slots'].items()},
  }


def in_one_go(program=PROGRAM):
  """Four steps: the losses, and the final state."""
  runtime = LocalRuntime(program)
  runtime.init()
  losses = [float(runtime.train_step(batch_at(step))['loss']) for step in range(4)]
  return losses, state_arrays(runtime)


@pytest.fixture(scope='module')
def run():
  return in_one_go()


def by_factors(monkeypatch):
  """From now on every weight is large, and experts are updated by gradients kept as factors."""
  monkeypatch.setattr(in_place, '_LARGE', 0)
  monkeypatch.setattr(grouped_ffn, '_MAX_UNROLLED', 3)
  monkeypatch.setattr(grouped_ffn, '_MAX_MULTIPLIED', 3)


def test_steps_are_those_of_the_pure_program(run):
  losses, final = run
  state = PROGRAM.init()
  for step in range(2):
    tensors = {name: tf.constant(value) for name, value in batch_at(step).items()}
    state, metrics = PROGRAM.train_step(state, tensors)
    np.testing.assert_allclose(metrics['loss'], losses[step], rtol=1e-5)
  assert final['step'] == 4


def test_large_weights_are_updated_in_place_to_the_same_numbers(run, monkeypatch):
  losses, final = run
  monkeypatch.setattr(in_place, '_LARGE', 0)
  runtime = LocalRuntime(PROGRAM)
  runtime.init()
  read = []
  for step, loss in enumerate(losses):
    read.append((runtime.state(), state_arrays(runtime)))
    assert float(runtime.train_step(batch_at(step))['loss']) == pytest.approx(loss, rel=1e-5)
  for name, value in state_arrays(runtime).items():
    np.testing.assert_allclose(value, final[name], rtol=2e-5, atol=1e-6, err_msg=name)
  for state, arrays in read:  # as a saver beside training holds them
    for name, value in state['weights'].items():
      np.testing.assert_array_equal(value, arrays[name], err_msg=name)


@pytest.mark.parametrize('clip_norm', [0.0, 1.0])
def test_factored_gradients_make_the_same_numbers(clip_norm, monkeypatch):
  program = dataclasses.replace(PROGRAM, clip_norm=clip_norm)

  def trained():
    runtime = LocalRuntime(program)
    runtime.init()
    metrics = [runtime.train_step(batch_at(step)) for step in range(4)]
    return [(m['loss'], m['grad_norm']) for m in metrics], state_arrays(runtime)

  numbers, state = trained()
  by_factors(monkeypatch)
  taken = []
  monkeypatch.setattr(MatrixByMatrix, 'update_factored', spy(MatrixByMatrix.update_factored, taken))
  same_numbers, same_state = trained()
  assert {spec.dims for spec in taken} == {'EMH', 'EHM'}
  np.testing.assert_allclose(same_numbers, numbers, rtol=1e-5)
  for name, value in state.items():
    np.testing.assert_allclose(same_state[name], value, rtol=1e-4, atol=1e-6)


def spy(update, taken):
  def run(self, grad, slots, weight, spec, step, rate):
    taken.append(spec)
    return update(self, grad, slots, weight, spec, step, rate)

  return run


@pytest.mark.parametrize('large', [False, True])
def test_a_run_interrupted_and_restored_continues_bit_for_bit(large, tmp_path, monkeypatch):
  if large:
    by_factors(monkeypatch)
  with shared_traces.shared():
    losses, final = in_one_go()
    first = LocalRuntime(PROGRAM)
    first.init()
    before = [float(first.train_step(batch_at(step))['loss']) for step in range(2)]
  checkpoints = Checkpoints(str(tmp_path))
  checkpoints.save(first)
  names = {name: value.shape for name, value in state_arrays(first).items()}
  read = checkpoints.restore(2, names)
  assert any(name.startswith('slots/layer_00/moe/wi/') for name in read)

  second = LocalRuntime(PROGRAM)  # with a trace of its own, as in a process that resumes
  slots = {name.removeprefix('slots/'): read.pop(name) for name in list(read) if name.startswith('slots/')}
  second.load({'step': read.pop('step'), 'weights': read, 'slots': slots})
  after = [float(second.train_step(batch_at(step))['loss']) for step in range(2, 4)]
  assert before + after == losses
  for name, value in state_arrays(second).items():
    np.testing.assert_array_equal(value, final[name], err_msg=name)


def test_batches_of_all_shapes_cost_one_trace():
  traces = []

  class Counted(LocalRuntime):
    def _eval_step(self, batch):
      traces.append(batch)
      return super()._eval_step(batch)

  runtime = Counted(PROGRAM)
  runtime.init()
  assert [int(runtime.eval_step(batch_at(step))['rows']) for step in range(4)] == [2, 4, 2, 4]
  assert len(traces) == 1


def test_evaluation_changes_nothing_and_metrics_are_numpy(run):
  runtime = LocalRuntime(PROGRAM)
  runtime.init()
  before = state_arrays(runtime)
  metrics = runtime.eval_step(batch_at(0))
  assert isinstance(metrics['routing']['layer_00'].tokens_E, np.ndarray)
  assert runtime.eval_step(batch_at(0))['loss'] == metrics['loss']
  for name, value in state_arrays(runtime).items():
    np.testing.assert_array_equal(value, before[name])


def test_a_second_state_replaces_the_first():
  runtime = LocalRuntime(PROGRAM)
  runtime.init()
  variables = runtime._weights
  state = runtime.state()
  runtime.load({**state, 'step': np.int64(9), 'weights': {n: w + 1 for n, w in state['weights'].items()}})
  assert runtime.step == 9 and runtime._weights is variables
  np.testing.assert_array_equal(variables['layer_00/moe/wi'], state['weights']['layer_00/moe/wi'] + 1)


def test_the_reference_backend_trains_and_evaluates_to_the_same_numbers(run):
  losses, final = run
  runtime = LocalRuntime(PROGRAM, backend='reference')
  runtime.init()
  for step, loss in enumerate(losses):
    assert float(runtime.train_step(batch_at(step))['loss']) == pytest.approx(loss, rel=1e-5)
  for name, value in state_arrays(runtime).items():
    np.testing.assert_allclose(value, final[name], rtol=1e-4, atol=1e-6, err_msg=name)
  assert np.isfinite(runtime.eval_step(batch_at(0))['loss'])


def test_a_program_larger_than_the_memory_is_refused():
  local.check_fits(PROGRAM)

  huge = dataclasses.replace(PROGRAM, model=Copier(dataclasses.replace(TASK.moe, num_experts=10**9)))
  with pytest.raises(
    UserError, match=r'must fit into memory; saw 102,000,000,000 weights, which take .* GiB with .*: make'
  ):
    local.check_fits(huge)
