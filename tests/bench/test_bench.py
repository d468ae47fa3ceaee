"""Parts of lingvo-moe bench: the clock, comparisons of figures, both forms of beam attention, profiles, two commits."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import threading

import numpy as np
import pytest
import tensorflow as tf

from lingvo_moe.bench import against, beam, clock, inputs, moe_layer, peak, profile, steps, versus
from lingvo_moe.bench.clock import Clock
from lingvo_moe.core import registry
from lingvo_moe.core import weights as weights_lib
from lingvo_moe.core.errors import UserError
from lingvo_moe.corpora.cldr import corpus as cldr_corpus
from lingvo_moe.runtime.local import LocalRuntime

TINY = registry.get('mt.bench_s.Tiny')()
ONCE = Clock(warmup=1, calls=1)


def ticking(monkeypatch, *seconds):
  """The clock's time goes on by each of these amounts in turn, at every second look."""
  times = np.cumsum([0.0, *(x for s in seconds for x in (s, 0.0))]).tolist()
  monkeypatch.setattr(clock.time, 'perf_counter', lambda: times.pop(0))
  monkeypatch.setattr(clock, '_cpu', lambda: (next(busy), next(own), next(wall)))
  busy, own, wall = iter([100.0, 118.0]), iter([7.0, 22.0]), iter([0.0, 10.0])


def test_the_median_is_of_the_calls_after_warming_up(monkeypatch):
  ticking(monkeypatch, 9.0, 5.0, 2.0, 1.0, 4.0)
  found = Clock(warmup=2, calls=3).time(lambda: None)
  assert (found['median_s'], found['min_s'], found['max_s'], found['first_call_s']) == (2.0, 1.0, 4.0, 9.0)
  # In 10 seconds the machine was busy for 18, of which this process for 15.
  assert (found['own_cores'], found['other_cores']) == (1.5, 0.3)


def test_functions_take_turns():
  calls = []
  found = Clock(warmup=1, calls=2).time_in_turn({name: lambda name=name: calls.append(name) for name in 'ab'})
  assert calls == ['a', 'b'] * 3 and set(found) == {'a', 'b'}


def test_the_peak_of_matrix_products_is_counted_in_multiplications_and_additions(monkeypatch):
  times = iter([0.0, 0.0, 0.5, 0.6, 0.7, 0.95, 3.0])  # two products, of 0.5 and 0.25 seconds
  monkeypatch.setattr(peak.time, 'perf_counter', lambda: next(times))
  assert peak.measure(size=100, seconds=1.0) == pytest.approx(2 * 100**3 / 0.25 / 1e9)


def record(**values):
  return {'model': 'mt.bench_s.Moe16', 'what': 'train', 'tokens_per_s': 3000.0, 'other_cores': 0.0} | values


def read_lines(tmp_path, *lines):
  (tmp_path / 'results').write_text('some log\n' + ''.join(json.dumps(line) + '\n' for line in lines))
  return against.read(str(tmp_path / 'results'))


def test_a_figure_is_compared_with_the_median_of_earlier_runs_that_were_not_disturbed(tmp_path):
  speeds = {1000.0: 0.0, 2000.0: 0.1, 9000.0: 0.9}  # tokens a second, other cores
  runs = [record(tokens_per_s=speed, other_cores=load) for speed, load in speeds.items()]
  others = read_lines(tmp_path, *runs, record(model='mt.bench_s.Dense'), record(what='decode'), {'error': 'rc 1'})
  assert against.earlier(record(), others) == (1500.0, False)
  assert against.earlier(record(), others[2:]) == (9000.0, True)
  assert against.earlier(record(what='latency'), others) is None


def test_kinds_of_dispatch_are_compared_with_their_own(tmp_path):
  ours = [record(what='moe_layer', dispatch=kind, tokens_per_s=speed) for kind, speed in (('gather', 1), ('einsum', 2))]
  found = against.earlier(record(what='moe_layer', dispatch='einsum'), read_lines(tmp_path, *ours))
  assert found.tokens_per_s == 2
  ours = read_lines(tmp_path, record(dispatch='gather'))
  assert against.earlier(record(dispatch='auto'), ours)  # of a train step


@pytest.mark.parametrize('text, message', [('hello\n{"a": 1}\n', 'has none'), (None, 'cannot be read')])
def test_a_file_without_figures_is_told(tmp_path, text, message):
  if text:
    (tmp_path / 'f').write_text(text)
  with pytest.raises(UserError, match=message):
    against.read(str(tmp_path / 'f'))


@pytest.mark.parametrize(
  'damage',
  [{'model': ['bench-S']}, {'what': {}}, {'other_cores': 'none'}, {'tokens_per_s': 0}, {'tokens_per_s': 'inf'}],
)
def test_a_line_with_a_value_of_a_wrong_type_is_skipped(tmp_path, damage):
  assert len(read_lines(tmp_path, record(**damage), record(other_cores=None))) == 1


@pytest.mark.parametrize('rows, width, length', [(3, 4, 9), (1, 1, 5), (2, 3, 1)])
def test_both_forms_of_a_beam_answer_the_same(rows, width, length):
  config = dataclasses.replace(TINY, beam_size=width)
  attention, thetas = beam.decoder_attention(config)
  x_TBWM, parents_TBW = beam.random_beams(length, rows, width, config.model_dim)
  flat, reordering = (beam.traced(f, attention, thetas, config) for f in (beam.flat, beam.reordering))
  expected = flat(x_TBWM, parents_TBW)
  assert expected.shape == x_TBWM.shape
  np.testing.assert_allclose(reordering(x_TBWM, parents_TBW), expected, atol=1e-5)
  if length > 1 and width > 1:  # parents matter
    own_TBW = tf.zeros_like(parents_TBW) + tf.range(width)
    assert np.abs(flat(x_TBWM, own_TBW) - expected).max() > 0.1


def test_beams_are_timed_at_every_length():
  found = beam.measure(TINY, ONCE, lengths=(4, 8))
  assert [(f['length'], f['sentences'], f['layers']) for f in found] == [(4, 32, 2), (8, 16, 2)]
  for f in found:
    assert f['flat_over_reordering'] == pytest.approx(f['median_s'] / f['reordering_s'], rel=1e-2, abs=6e-4)
    assert f['tokens_per_s'] == pytest.approx(128 / f['median_s'], rel=1e-3)


def test_time_within_is_not_counted_twice():
  spans = [(0, 100, 'run'), (10, 20, 'a'), (12, 5, 'inner'), (40, 10, 'b'), (200, 7, 'c')]
  assert dict(profile.own_times(spans)) == {'run': 70, 'a': 15, 'inner': 5, 'b': 10, 'c': 7}


def test_a_profile_tells_parts_by_name_scopes():
  @tf.function(autograph=False)
  def step(x):
    with tf.name_scope('layer_00/attention'):
      x = tf.matmul(x, x)
    with tf.name_scope('update'):
      return tf.sin(x)

  x = tf.ones([1000, 1000])
  step(x)
  found = profile.by_part(lambda: step(x), times=2)
  assert found['attention'] > found['optimiser'] > 0 and found['gating'] == found['softmax'] == 0


def test_a_profile_of_nothing_is_told():
  with pytest.raises(UserError, match='of which none ran'):
    profile.by_part(lambda: None)


def test_a_profile_is_of_the_cpu(monkeypatch):
  monkeypatch.setattr(profile.tf.config, 'list_physical_devices', lambda kind: ['gpu'])
  with pytest.raises(UserError, match='saw a GPU: hide it'):
    profile.by_part(lambda: None)


def test_a_layer_is_timed_by_every_kind_of_dispatch():
  einsum, gather, grouped = moe_layer.measure(TINY, ONCE)
  assert [found['dispatch'] for found in (einsum, gather, grouped)] == ['einsum', 'gather', 'grouped']
  assert einsum['flops'] - gather['flops'] == 5 * 2 * 128 * 64 * 32
  for found in einsum, gather, grouped:
    assert found['tokens_per_s'] == pytest.approx(128 / found['median_s'], rel=1e-3)
    assert 0 < found['first_dropped'] < 1 and 0 < found['second_skipped'] < 1
  assert einsum['second_dropped'] == gather['second_dropped'] == grouped['second_dropped']  # of the same routing


def test_loads_are_as_they_say():
  layer = next(layer.ffn for layer in TINY.model().encoder.layers.values() if layer.is_moe)
  load = lambda kind: layer(theta_of(kind), tokens[kind][0], tf.zeros([8, 16]))[1].stats.tokens_E.numpy()
  tokens = {kind: moe_layer.routed(layer, layer.num_groups, (8, 16, layer.model_dim), kind) for kind in moe_layer.LOADS}
  theta_of = lambda kind: {**weights_lib.initialize(layer.weights(), 0), 'gate': tokens[kind][1]}
  np.testing.assert_array_equal(load('balanced'), np.full(layer.num_experts, 2 * 128 / layer.num_experts))
  assert np.all(np.diff(load('skewed')[[0, 1, 3]]) < 0) and np.sum(load('skewed')) == 2 * 128


@pytest.mark.slow
def test_a_dropless_layer_is_timed_in_rounds_and_with_room_for_all():
  found = {(f['mode'], f['serving'], f['load']): f for f in moe_layer.measure_rounds(TINY, ONCE)}
  assert len(found) == 2 * 5
  for mode in ('training', 'inference'):
    even, skewed, roomy = (
      found[mode, *of] for of in (('rounds', 'balanced'), ('rounds', 'skewed'), ('room for all', 'skewed'))
    )
    assert even['rounds'] == roomy['rounds'] == 1 < skewed['rounds']
    assert even['bytes'] == skewed['bytes'] < roomy['bytes']
    assert even['dropped'] == skewed['dropped'] == roomy['dropped'] == 0
  assert found['training', 'dropping', 'skewed']['dropped'] > 0 == found['training', 'dropping', 'balanced']['dropped']


def test_no_gradient_of_a_layer_is_left_out():
  tokens = np.random.default_rng(0).normal(size=[8, 16, TINY.model_dim])
  step = moe_layer.Step(TINY, {'dispatch': 'gather'}, tokens, jit=False)
  step.run()
  assert len(step.sums) == 1 + 1 + 3 and np.all(step.sums != 0)  # loss; tokens; gate, wi, wo


def test_decoding_that_cannot_reach_max_length_is_told():
  config = dataclasses.replace(TINY, decode_ratio=0.5)
  with pytest.raises(UserError, match='must make 16 steps to be timed; it made 8: bind decode_ratio = 1.0'):
    steps.decode(config, ONCE, LocalRuntime, rows=1)


def test_one_sentence_cannot_be_shared_by_devices():
  class Shared(LocalRuntime):
    row_multiple = 2

  with pytest.raises(UserError, match='multiple of the 2 parts .* there is 1: take another mesh'):
    steps.decode(TINY, ONCE, Shared, rows=1)


def test_the_input_pipeline_is_timed_on_the_default_corpus(monkeypatch):
  make = cldr_corpus.make_corpus
  few = lambda folder, _: make(folder, ['fo', 'eo'], progress=False)
  monkeypatch.setattr(inputs.cldr_corpus, 'make_corpus', few)
  config = dataclasses.replace(TINY, source_vocab_size=600, target_vocab_size=500, window=64, max_length=32)
  (found,) = inputs.measure(config, ONCE)
  assert found['pairs'] == 2 and found['temperature'] == 5.0 and 0 < found['padding'] < 1
  assert 0 < found['tokens_per_s'] < 2 * 128 * found['batches_per_s']


def test_all_threads_share_one_core_meanwhile():
  before, seen = os.sched_getaffinity(0), []
  begin, end = threading.Event(), threading.Event()
  waiting = threading.Thread(target=lambda: (begin.wait(), seen.append(os.sched_getaffinity(0)), end.set()))
  waiting.start()
  with inputs.one_core():
    seen.append(os.sched_getaffinity(0))
    begin.set()
    end.wait()
  waiting.join()
  assert seen == [{min(before)}] * 2 and os.sched_getaffinity(0) == before


# Tells what was imported: the speed of the package, and of its params where they are the checkout's own.
FAKE_TOOL = """import json, os, sys
import lingvo_moe, lingvo_moe.params
own = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
with open(os.environ['LOG'], 'a') as f:
  f.write(f'{lingvo_moe.SPEED} {os.path.realpath(lingvo_moe.params.__file__).startswith(os.path.realpath(own))}\\n')
if '--what=bad' in sys.argv:
  sys.exit('error: it cannot')
path = sys.argv[-1].removeprefix('--json=')
with open(path, 'w') as f:
  json.dump({'model': 'm', 'what': 'train', 'dispatch': f'{lingvo_moe.SPEED}', 'tokens_per_s': lingvo_moe.SPEED}, f)
"""


def git(root, *args):
  identity = ['-c', 'user.name=a', '-c', 'user.email=a@b', '-c', 'commit.gpgsign=false']
  return subprocess.run(['git', '-C', root, *identity, *args], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def checkout(tmp_path, monkeypatch):
  """A checkout whose commits, named empty, slow and fast, have 0, 100 and 150 tokens a second; it has 300."""
  root = tmp_path / 'checkout'
  for folder in ('lingvo_moe', 'params', 'tools'):
    (root / folder).mkdir(parents=True)
  git(root, 'init', '--quiet')
  (root / 'lingvo_moe' / '__init__.py').write_text('SPEED = 0.0\n')
  (root / 'params' / '__init__.py').write_text('')
  for name, speed in (('empty', 0.0), ('slow', 100.0), ('fast', 150.0)):
    (root / 'lingvo_moe' / '__init__.py').write_text(f'SPEED = {speed}\n')
    git(root, 'add', '-A')
    git(root, 'commit', '--quiet', '-m', name)
    git(root, 'tag', name)
    (root / 'tools' / 'bench.py').write_text(FAKE_TOOL)
  (root / 'lingvo_moe' / '__init__.py').write_text('SPEED = 300.0\n')
  monkeypatch.setenv('LOG', str(tmp_path / 'log'))
  monkeypatch.setenv('PYTHONDONTWRITEBYTECODE', '1')  # what Python writes is no remnant of a comparison
  return str(root)


def assert_clean(root):
  assert len(git(root, 'worktree', 'list').splitlines()) == 1
  assert git(root, 'status', '--porcelain').strip() == 'M lingvo_moe/__init__.py'


def test_two_commits_run_in_turn_and_nothing_is_left(checkout, tmp_path):
  (found,) = versus.compare(checkout, 'slow', ['--what=train'], rounds=2)
  assert found == ({'model': 'm', 'what': 'train'}, [300.0, 300.0], [100.0, 100.0], 3.0)
  ran = [line.split() for line in (tmp_path / 'log').read_text().splitlines()]
  assert [speed for speed, _ in ran] == ['300.0', '100.0'] * 2
  assert [own for _, own in ran[1::2]] == ['True', 'True']  # the other commit's params, too
  assert_clean(checkout)


@pytest.mark.parametrize(
  'commit, flags, message',
  [
    ('nonsense', [], "saw 'nonsense', which git does not know"),
    ('--help', [], "saw '--help', which git does not know"),
    ('empty', [], '--versus=empty has no lingvo-moe bench: give a later commit'),
    ('fast', ['--what=bad'], 'this checkout: its lingvo-moe bench ended with exit status 1: error: it cannot'),
  ],
)
def test_mistakes_of_versus_are_told_and_nothing_is_left(checkout, commit, flags, message):
  with pytest.raises(UserError) as error:
    versus.compare(checkout, commit, flags, rounds=1)
  assert message in str(error.value)
  assert_clean(checkout)


def test_versus_outside_of_a_checkout_is_told(tmp_path):
  with pytest.raises(UserError, match='is none: run lingvo-moe bench of a clone'):
    versus.compare(str(tmp_path), 'HEAD', [], rounds=1)
