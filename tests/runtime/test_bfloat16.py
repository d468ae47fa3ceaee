"""The local runtime in bfloat16: copies of weights, losses near those of float32, and processors without the units."""

import functools

import numpy as np
import pytest
import reversed_corpus
import shared_traces
import tensorflow as tf
import tiny_config

from lingvo_moe import trainer
from lingvo_moe.cli import machine
from lingvo_moe.config import registry
from lingvo_moe.ops import backend, cpu
from lingvo_moe.ops.cpu import grouped_ffn
from lingvo_moe.optim.cpu import in_place
from lingvo_moe.optim.cpu.matrix_updates import MatrixByMatrix
from lingvo_moe.runtime.local import LocalRuntime
from lingvo_moe.tasks.task import task_of

STEPS = 4


SIZES = {'vocab_size': 50, 'num_layers': 1, 'num_experts': 3, 'num_groups': 2, 'batch_tokens': 64}
SIZES |= {'norm': 'layer', 'expert': 'relu'}


def config_of(dtype, **changes):
  return registry.get('lm.shakespeare.Tiny')(**SIZES, activation_dtype=dtype, **changes)


def trained(config, steps=STEPS):
  runtime = LocalRuntime(config.program())
  runtime.init()
  batch = task_of(config).random_batch()
  return runtime, [float(runtime.train_step(batch)['loss']) for _ in range(steps)]


@functools.cache
def losses_in_float32(**changes):
  return trained(config_of('float32', **changes))[1]


@pytest.fixture(autouse=True)
def units(monkeypatch):
  monkeypatch.setattr(cpu, 'has_bfloat16', lambda: True)


@pytest.fixture(scope='module')
def run():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(cpu, 'has_bfloat16', lambda: True)
    return trained(config_of('bfloat16'))


def copies(runtime):
  return {name: value for name, value in runtime._used().items() if value.dtype == tf.bfloat16}


def test_every_update_writes_the_copies_and_gates_norms_and_tables_have_none(run):
  runtime, _ = run
  assert copies(runtime).keys() == {n for n, s in runtime.program.weight_specs.items() if not s.float32}
  kinds = {name.rpartition('/')[2] for name in runtime.state()['weights'].keys() - copies(runtime).keys()}
  assert kinds == {'gate', 'scale', 'bias', 'table'}
  for name, copy in copies(runtime).items():
    np.testing.assert_array_equal(copy, tf.cast(runtime.state()['weights'][name], tf.bfloat16), err_msg=name)


def test_a_copy_changes_no_number_of_the_model(run):
  runtime, _ = run
  batch = {n: tf.constant(x) for n, x in task_of(config_of('bfloat16')).random_batch().items()}
  weights = runtime.state()['weights']
  loss = lambda weights: runtime.program.eval_step(weights, batch)['loss']
  assert float(loss(weights)) == float(loss(runtime._used()))


def test_a_trace_that_runtimes_share_writes_the_copies_of_the_one_that_calls_it():
  with shared_traces.shared():
    first, losses = trained(config_of('bfloat16'))
    before = copies(first)
    assert trained(config_of('bfloat16'))[1] == losses
  for name, copy in copies(first).items():
    np.testing.assert_array_equal(copy, before[name], err_msg=name)


def test_checkpoints_are_float32_and_a_resumed_run_continues_bit_for_bit(run):
  runtime, _ = run
  state = runtime.state()
  assert {w.dtype for w in state['weights'].values()} == {tf.float32}
  arrays = {'step': state['step'].numpy()}
  arrays |= {kind: {n: x.numpy() for n, x in state[kind].items()} for kind in ('weights', 'slots')}
  other, _ = trained(config_of('bfloat16'), steps=1)  # with weights, and copies, of its own
  other.load(arrays)
  batch = task_of(config_of('bfloat16')).random_batch()
  assert other.eval_step(batch)['loss'] == runtime.eval_step(batch)['loss']
  got, want = other._used(), runtime._used()
  for name, value in want.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)


@pytest.mark.parametrize('changes', [{}, {'micro_batches': 2}, {'clip_norm': 0.1}])
def test_losses_of_training_are_within_one_per_cent_of_float32(changes, run):
  losses = trained(config_of('bfloat16', **changes))[1] if changes else run[1]
  want = losses_in_float32(**changes)
  assert losses != want
  np.testing.assert_allclose(losses, want, rtol=0.01)


def test_gradients_of_experts_stay_factored_in_bfloat16(monkeypatch):
  config = config_of('bfloat16', optimizer='adafactor', clip_norm=0.0)
  want = trained(config)[1]
  of_experts = [s.size for s in config.program().weight_specs.values() if 'E' in s.dims]
  monkeypatch.setattr(in_place, '_SMALL', 0)
  monkeypatch.setattr(in_place, '_LARGE', min(of_experts))
  monkeypatch.setattr(grouped_ffn, '_MAX_MULTIPLIED', 2)
  taken = []
  of_factors = MatrixByMatrix.update_factored

  def update(self, grad, *args):
    taken.append(grad.dtype)
    return of_factors(self, grad, *args)

  monkeypatch.setattr(MatrixByMatrix, 'update_factored', update)
  runtime, losses = trained(config)
  assert set(taken) == {tf.bfloat16}
  np.testing.assert_allclose(losses, want, rtol=0.005)
  for name, copy in copies(runtime).items():
    np.testing.assert_array_equal(copy, tf.cast(runtime.state()['weights'][name], tf.bfloat16), err_msg=name)


def test_without_units_activations_are_float32_and_a_job_says_so(run, monkeypatch, capfd):
  monkeypatch.setattr(cpu, 'has_bfloat16', lambda: False)
  config = config_of('bfloat16')
  runtime = machine.connect(machine.LOCAL).make_runtime(config.program())
  assert "activation_dtype='bfloat16' is computed in float32: this processor has no units" in capfd.readouterr().err
  runtime.init()
  batch = task_of(config).random_batch()
  losses = [float(runtime.train_step(batch)['loss']) for _ in range(STEPS)]
  assert not copies(runtime)
  assert losses == losses_in_float32()
  other = LocalRuntime(config.program(), backend='reference')
  assert other.note is None


def test_a_training_job_without_units_begins_with_the_sentence(tmp_path, monkeypatch, capfd):
  monkeypatch.setattr(cpu, 'has_bfloat16', lambda: False)
  folder = reversed_corpus.write(tmp_path, held_out=20)
  changes = ('activation_dtype=bfloat16', 'source_vocab_size=282', 'target_vocab_size=280')
  options = trainer.Options(logdir=str(tmp_path / 'log'), model='mt.cldr.Tiny', data_dir=str(folder), set=changes)
  training = trainer.set_up(options, machine.connect(machine.LOCAL))
  training.log.close()
  training.lock.close()
  first, *_ = capfd.readouterr().err.splitlines()
  assert first.startswith("activation_dtype='bfloat16' is computed in float32: this processor has no units")
  assert not copies(training.runtime)


@pytest.mark.parametrize('has', [True, False])
def test_a_saved_function_has_the_type_of_the_processor_that_saves_it(has, monkeypatch):
  monkeypatch.setattr(cpu, 'has_bfloat16', lambda: has)
  config = tiny_config.make(activation_dtype='bfloat16')
  program, batch = config.program(), task_of(config).random_batch()
  with backend.use(cpu.saved()):
    memory_BUM = program.model.encode(program.theta(program.init()['weights']), batch)[0]
  assert memory_BUM.dtype == (tf.bfloat16 if has else tf.float32)


def test_nothing_is_said_where_there_are_units_or_activations_are_float32(monkeypatch):
  assert LocalRuntime(config_of('bfloat16').program()).note is None
  monkeypatch.setattr(cpu, 'has_bfloat16', lambda: False)
  assert LocalRuntime(config_of('float32').program()).note is None


@pytest.mark.parametrize(
  'text, has',
  [
    ('processor: 0\nflags\t\t: fpu avx512_bf16 sse\n', True),
    ('flags : fpu amx_bf16\n', True),
    ('Features\t: fp asimd bf16\n', True),
    ('flags : fpu avx512f avx512_vnni\nmodel name : avx512_bf16\n', False),
    ('', False),
  ],
)
def test_units_are_those_that_the_system_lists(text, has, tmp_path, monkeypatch):
  monkeypatch.undo()
  path = tmp_path / 'cpuinfo'
  path.write_text(text)
  assert cpu.has_bfloat16(str(path)) is has


def test_a_processor_that_nothing_is_known_of_has_no_units(tmp_path, monkeypatch):
  monkeypatch.undo()
  assert cpu.has_bfloat16(str(tmp_path / 'none')) is False
